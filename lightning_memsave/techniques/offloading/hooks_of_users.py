"""Hooks of a Trainer's user between two steps, which work with weights that wait on the host."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_memsave.core.checkpoints import is_streaming
from lightning_memsave.core.memory import category_in_context, is_host
from lightning_memsave.core.patching import named, patch_method, previous_method
from lightning_memsave.techniques.residences import residence_of

_ATTRIBUTES = (
    *("dtype", "device", "layout", "shape", "ndim", "is_cuda", "is_cpu", "is_meta", "is_sparse"),
    *("grad", "grad_fn", "is_leaf", "requires_grad"),
)
_grad: Any = Tensor.grad
_requires_grad: Any = Tensor.requires_grad
SAY_NO_VALUES = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(_grad.__set__, _grad.__delete__, _requires_grad.__set__, Tensor.requires_grad_),
    *(Tensor.size, Tensor.numel, Tensor.nelement, Tensor.dim, Tensor.element_size),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.register_hook),
    *(Tensor.__hash__, Tensor.__len__),
}
_GIVE_MEMORY = {
    *(Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.share_memory_),
    *(Tensor.untyped_storage, Tensor.storage, Tensor.__dlpack__),
}
"""What they return is memory whose use torch does not see."""


class Settled(TorchFunctionMode):
    """Lets updates in the background end before a hook works with what they change.

    All that Python asks of a tensor comes by here, its attribute ``data`` as well. Who was given
    the memory of a weight in a form that torch does not see may use it in any later step: updates
    end in ``optimizer.step()`` from then on.
    """

    def __init__(self, residence: Any) -> None:
        super().__init__()
        self._residence = residence
        self._parts: dict[int, Any] = {}  # by the memory of their weights

    # A step may call a block within a mode of its own, and a hook may leave a mode that another one
    # has entered, which takes the top one away, whose ever it is.
    def __exit__(self, *_: object) -> None:
        modes = torch.overrides._get_current_function_mode_stack()
        place = modes.index(self) if self in modes else len(modes) - 1
        for _each in modes[place:]:
            torch.overrides._pop_mode()
        for mode in modes[place + 1 :]:
            torch.overrides._push_mode(mode)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A hook may run a whole step, and what is done for it here is not what the hook uses.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return self.call(caller, func, args, kwargs or {})

    def call(self, caller: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function of torch for a module of this name, with weights that it may read."""
        is_own = caller.startswith("lightning_memsave.") or is_streaming()
        if func not in SAY_NO_VALUES and not is_own:
            # Deferred logits would be computed.
            with torch._C._DisableFuncTorch(), torch._C.DisableTorchFunctionSubclass():
                shown = [self._show(tensor) for tensor in _tensors_in((*args, *kwargs.values()))]
            if any(shown) and func in _GIVE_MEMORY:
                self._residence.is_watched = True
        return func(*args, **kwargs)

    def _show(self, tensor: Tensor) -> bool:
        """Let a tensor be as without offloading; return whether it is a weight on the host."""
        while is_functorch_wrapped_tensor(tensor):
            tensor = get_unwrapped(tensor)
        if tensor.layout is not torch.strided or not is_host(tensor.untyped_storage()):
            return False
        part = self._residence.part_of(tensor) or self._part_at(tensor)
        if part is None:  # of a gradient or a state of the optimizer
            for each in self._residence.all_parts:
                if each.is_updating:
                    each.wait()
        elif not part.is_on_device:
            self._residence.copies.synchronize()  # the device may still read it
            part.settle()
            if self._parts:
                self._note_memory(part)  # which may be another one now
        return part is not None

    def _part_at(self, tensor: Tensor) -> Any:
        if not self._parts:
            for part in self._residence.all_parts:
                self._note_memory(part)
        return self._parts.get(tensor.untyped_storage()._cdata)

    def _note_memory(self, part: Any) -> None:
        self._parts |= {param.untyped_storage()._cdata: part for param in part.params}


# Most arguments are tensors themselves, and a hook may generate text.
def _tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for value in arguments:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


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


# In others the user computes nothing, or with what is on the host anyway. In the first of them many
# make copies that they compute with later, such as averages of weights.
_COMPUTING_HOOKS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start"),
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad"),
    *("on_before_optimizer_step", "on_after_backward", "on_train_epoch_end"),
)
HOOKS = (
    *(*_COMPUTING_HOOKS, "optimizer_zero_grad", "lr_scheduler_step", "on_validation_model_eval"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)


def work_with_hook(owner: Any, hook: str) -> Callable[[], None]:
    """Let a hook of a module or callback find what waits on the host as it is without offloading.

    On CUDA it computes on the device.
    """
    return patch_method(owner, _REPLACEMENTS[hook])


def _call(owner: Any, hook: str, *args: Any) -> Any:
    module = owner if isinstance(owner, nn.Module) else args[1]
    residence, method = residence_of(module), previous_method(owner, hook)
    if residence is None:
        return method(*args)
    with contextlib.ExitStack() as stack:
        if residence.device.type == "cuda" and hook in _COMPUTING_HOOKS:
            mode = OnDevice(residence.device)
            mode.__enter__()  # type: ignore[no-untyped-call]
            stack.callback(_leave, mode)
        stack.enter_context(Settled(residence))
        return method(*args)


def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let a step find weights settled before it calls a block; replaces that of a strategy."""
    residence, method = residence_of(self.lightning_module), previous_method(self, "training_step")
    with contextlib.ExitStack() as residence.before_blocks:
        residence.before_blocks.enter_context(Settled(residence))
        return method(*args, **kwargs)


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
