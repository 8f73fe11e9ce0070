"""Keep the results of expensive operators, so that recomputation runs the others only."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lightning_memsave.core.memory import is_fake
from lightning_memsave.core.saved_state import RandomState

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]

_KEPT_OPS = frozenset(
    {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_mm",
        "linear",
        "flex_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math",
    }
)


def _is_kept(op: Any) -> bool:
    return getattr(getattr(op, "overloadpacket", op), "__name__", "") in _KEPT_OPS


def keep_expensive_ops(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(op) else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts(kept: list[dict[Any, dict[int, Any]]]) -> Contexts:
    """Return contexts for forward and recomputation; add what they keep to a list."""
    forward: Any
    forward, recomputation = create_selective_checkpoint_contexts(keep_expensive_ops)
    # From torch 2.14 on it could save what is kept through the hooks around a checkpoint, and warns
    # that it will. As that is done here for all versions, it must not do so, too.
    forward.respect_saved_tensors_hooks = False
    kept.append(getattr(forward, "storage", {}))
    states: list[RandomState | None] = []
    return (
        _KeepRandomStates(forward, states, is_recomputation=False),
        _FirstTime(_KeepRandomStates(recomputation, states, is_recomputation=True)),
    )


class _FirstTime(contextlib.AbstractContextManager[None]):
    """Enters a context the first time only.

    The first backward pass uses up what is kept, and a second one recomputes that, too.
    """

    def __init__(self, inner: contextlib.AbstractContextManager[Any]) -> None:
        self._not_entered, self._entered = [inner], contextlib.ExitStack()

    def __enter__(self) -> None:
        while self._not_entered:
            self._entered.enter_context(self._not_entered.pop())

    def __exit__(self, *exc: Any) -> bool | None:
        return self._entered.__exit__(*exc)


class _KeepRandomStates(TorchDispatchMode):
    """Draw the same random numbers after kept operators that do not run in recomputation.

    Attention with dropout is such an operator on CUDA. What it draws in forward is not drawn in
    recomputation, and every later dropout would draw another mask.
    """

    supports_higher_order_operators = True  # flex attention is one

    def __init__(
        self,
        inner: contextlib.AbstractContextManager[Any],
        states: list[RandomState | None],
        *,
        is_recomputation: bool,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inner, self._states, self._is_recomputation = inner, states, is_recomputation
        # After each kept random operator; `None` if it drew nothing, as without dropout.
        self._next = iter(states)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Run in compiled code as torch's own modes of selective checkpointing do."""
        return True

    def __enter__(self) -> Any:
        self._next = iter(self._states)
        self._inner.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._inner.__exit__(*exc)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [leaf for leaf in args if isinstance(leaf, Tensor)]
        is_random = _is_kept(op) and torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
        if not is_random or any(map(is_fake, tensors)):
            return op(*args, **(kwargs or {}))
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        before = RandomState(devices, of_torch_only=True)
        result = op(*args, **(kwargs or {}))
        with _disable_current_modes():  # comparing states is not a part of the block
            if not self._is_recomputation:
                has_drawn = before.has_changed()
                after = RandomState(devices, of_torch_only=True) if has_drawn else None
                self._states.append(after)
            elif (after := next(self._next)) is not None:
                after.restore()
        return result


def save_through_hooks(storage: dict[Any, Any]) -> None:
    """Save the kept results through the hooks around the block, if there are any."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return
    for results in storage.values():
        # By number of the call; in torch 2.10 a list.
        numbered = results.items() if isinstance(results, dict) else enumerate(results)
        for index, result in [*numbered]:
            results[index] = tree_map(functools.partial(_packed, hooks), result)


def _packed(hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]], kept: Any) -> Any:
    is_tensor = hasattr(kept, "get_val") and isinstance(getattr(kept, "val", None), Tensor)
    pack, unpack = hooks
    return _Packed(pack(kept.get_val(False)), unpack) if is_tensor else kept


class _Packed:
    """Stands in for torch's own class around a result."""

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self._packed, self._unpack = packed, unpack

    def get_val(self, allow_cache_entry_mutation: bool) -> Tensor:
        return self._unpack(self._packed)
