"""Hooks of a Trainer's user between two steps, which compute with weights that wait on the host."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_memsave.core.memory import category_in_context, is_host
from lightning_memsave.core.patching import named, patch_method, previous_method
from lightning_memsave.techniques.residences import residence_of


class OnDevice(TorchDispatchMode):
    """Computes on the device with what waits on the host, as if it were there.

    An operator gets copies on the device, and what it writes into them goes back. Views stay views
    of host memory.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        copies = func is torch.ops.aten.copy_.default or kwargs.get("device") is not None
        is_view = getattr(func, "is_view", True)  # operators of higher order have none
        # Techniques name the memory that they fill themselves.
        if copies or is_view or category_in_context():
            return func(*args, **kwargs)
        moved: dict[Tensor, Tensor] = {}

        def bring(tensor: Tensor) -> Tensor:
            if tensor.is_cuda or not is_host(tensor.untyped_storage()):
                return tensor
            return moved.setdefault(tensor, tensor.to(self.device))

        result = func(*tree_map_only(Tensor, bring, args), **tree_map_only(Tensor, bring, kwargs))
        if moved and func._schema.is_mutable:
            named = [*zip((a.name for a in func._schema.arguments), args, strict=False)]
            written = {a.name for a in func._schema.arguments if a.is_write}
            values = [value for name, value in [*named, *kwargs.items()] if name in written]
            for tensor in tree_leaves(values):
                if tensor in moved:
                    tensor.copy_(moved[tensor])
            own = {id(copy): tensor for tensor, copy in moved.items()}
            return tree_map_only(Tensor, lambda tensor: own.get(id(tensor), tensor), result)
        return result


HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad"),
    *("on_before_optimizer_step", "on_after_backward", "on_train_epoch_end"),
)


def compute_on_device(owner: Any, hook: str) -> Callable[[], None]:
    return patch_method(owner, _REPLACEMENTS[hook])


def _call(owner: Any, hook: str, *args: Any) -> Any:
    module = owner if isinstance(owner, nn.Module) else args[1]
    residence, method = residence_of(module), previous_method(owner, hook)
    if residence is None:
        return method(*args)
    mode = OnDevice(residence.device)
    mode.__enter__()  # type: ignore[no-untyped-call]
    try:
        return method(*args)
    finally:
        _leave(mode)


# A hook may enter a mode that another hook leaves, as those that count do.
def _leave(mode: OnDevice) -> None:
    above: list[Any] = []
    if mode in _get_current_dispatch_mode_stack():
        while _get_current_dispatch_mode_stack()[-1] is not mode:
            above.append(_pop_mode())
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    for each in reversed(above):
        _push_mode(each)


_REPLACEMENTS = {hook: named(hook, _call) for hook in HOOKS}
