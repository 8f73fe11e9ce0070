"""Keep the results of expensive operators, so that recomputation runs the others only."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
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
    # In forward below torch's mode, which counts operators and must not see copies; above it in
    # recomputation, where torch's mode does not run what is kept.
    return (
        _FirstTime(_AsInForward(states, kept[-1]), forward),
        _FirstTime(recomputation, _AsInForward(states)),
    )


class _FirstTime(contextlib.AbstractContextManager[None]):
    """Enters contexts the first time only.

    The first backward pass uses up what is kept, and a second one recomputes that, too.
    """

    def __init__(self, *contexts: contextlib.AbstractContextManager[Any]) -> None:
        self._next, self._entered = iter(contexts), contextlib.ExitStack()

    def __enter__(self) -> None:
        for context in self._next:
            self._entered.enter_context(context)

    def __exit__(self, *exc: Any) -> bool | None:
        return self._entered.__exit__(*exc)


class _AsInForward(TorchDispatchMode):
    """Lets recomputation find kept results and random states as forward had them.

    Attention with dropout is a kept operator on CUDA. What it draws in forward is not drawn in
    recomputation, and every later dropout would draw another mask. A kept result that the block
    writes into is copied before, as torch raises in backward, or does not notice it: the result of
    `matmul` is a view of what is kept, with a version of its own.
    """

    supports_higher_order_operators = True  # flex attention is one

    def __init__(self, states: list[RandomState | None], kept: Any = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The kept results in forward; after each kept random operator its state, `None` if it drew
        # nothing, as without dropout.
        self._kept, self._states, self._next = kept, states, iter(states)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Run in compiled code as torch's own modes of selective checkpointing do."""
        return True

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._kept is not None:
            _copy_kept(self._kept, _written(op, args, kwargs or {}))
        tensors = [leaf for leaf in args if isinstance(leaf, Tensor)]
        is_random = _is_kept(op) and torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
        if not is_random or any(map(is_fake, tensors)):
            return op(*args, **(kwargs or {}))
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        before = RandomState(devices, of_torch_only=True)
        result = op(*args, **(kwargs or {}))
        with _disable_current_modes():  # comparing states is not a part of the block
            if self._kept is not None:
                has_drawn = before.has_changed()
                after = RandomState(devices, of_torch_only=True) if has_drawn else None
                self._states.append(after)
            elif (after := next(self._next)) is not None:
                after.restore()
        return result


def _written(op: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    schema = getattr(op, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    named = [*zip((a.name for a in schema.arguments), args, strict=False), *kwargs.items()]
    written = {a.name for a in schema.arguments if a.is_write}
    leaves = tree_leaves([value for name, value in named if name in written])
    return [t for t in leaves if isinstance(t, Tensor) and t.layout is torch.strided]


def _copy_kept(kept: dict[Any, Any], written: Sequence[Tensor]) -> None:
    storages = {tensor.untyped_storage()._cdata for tensor in written}
    for each in tree_leaves([*kept.values()]) if storages else ():
        tensor = getattr(each, "val", None)
        if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in storages:
            each.val = tensor.clone()
            each.version = each.val._version


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
