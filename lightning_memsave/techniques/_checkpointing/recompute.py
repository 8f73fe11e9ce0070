"""Run a part of a model again in backward, with the same result and no second side effect."""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from lightning_memsave.core.nesting import attributes_of, items_of
from lightning_memsave.errors import IncompatibleError, NoEffectWarning, Problem
from lightning_memsave.techniques._checkpointing.changed_buffers import ChangedBuffers, Contexts
from lightning_memsave.techniques._logits.deferred import computed

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


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to tell once `fp32_precision` of one backend was set
        return None


def _set_matmul_precision(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


def _set_deterministic(mode: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def _set_cudnn(is_enabled: bool) -> None:
    torch.backends.cudnn.enabled = is_enabled


# Settings of the process that decide what an operator computes. `checkpoint` itself restores
# autocast, the default device and the random state.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    # Lightning sets it around `training_step`, not around backward: "64-true", "bf16-true" ...
    (torch.get_default_dtype, torch.set_default_dtype),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (_matmul_precision, _set_matmul_precision),
    (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
    ),
    (lambda: torch.backends.cudnn.enabled, _set_cudnn),
)


def recompute(
    run: Callable[..., Any],
    modules: Sequence[nn.Module],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    is_selective: bool = False,
) -> Any:
    """Call a function whose activations are dropped and computed again in backward.

    Args:
        run: The function.
        modules: The modules that it runs; their buffers change once, as without recomputation.
        args: Positional arguments of ``run``.
        kwargs: Keyword arguments of ``run``.
        is_selective: Keep the outputs of matrix products, convolutions and attention.

    Returns:
        What ``run`` returns.
    """
    context_fn = _selective_contexts if is_selective else noop_context_fn
    if torch.compiler.is_compiling():
        # The compiler replays operations, not side effects, so neither buffers nor arguments need
        # care; and it knows our context function, but not the default one when it is passed.
        bound = functools.partial(run, **kwargs)
        if is_selective:
            return checkpoint(bound, *args, use_reentrant=False, context_fn=context_fn)
        return checkpoint(bound, *args, use_reentrant=False)
    if _is_functional(modules):
        warnings.warn(
            f"activation_checkpointing does nothing for `{type(modules[0]).__name__}` here: "
            "`torch.func` runs it with tensors that are gone in backward. Set "
            "`activation_checkpointing=None` to train without this warning.",
            NoEffectWarning,
            stacklevel=3,
        )
        return run(*args, **kwargs)
    # Not in the block, where what computing them keeps would count as the block's.
    args, kwargs = computed((args, kwargs))
    call = _Call(run, modules, args, kwargs)
    buffers = ChangedBuffers(modules)
    if buffers.can_change:
        context_fn = functools.partial(buffers.contexts, context_fn)
    output = checkpoint(call, *call.tensors, use_reentrant=False, context_fn=context_fn)
    call.end_first()
    buffers.learn()
    return output


# `functional_call` replaces parameters by tensors; transforms wrap what a block is given.
def _is_functional(modules: Sequence[nn.Module]) -> bool:
    return torch._C._are_functorch_transforms_active() or any(
        not isinstance(p, nn.Parameter) for module in modules for p in module.parameters()
    )


class _Call:
    """A call that can be repeated with the arguments and the settings of the first time."""

    def __init__(
        self,
        run: Callable[..., Any],
        modules: Sequence[nn.Module],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._run, self._name = run, type(modules[0]).__name__
        self._settings = [get() for get, _ in _SETTINGS]
        self._first: tuple[Any, Any] | None = (tuple(args), dict(kwargs))
        leaves, self._structure = tree_flatten(self._first)
        # One that comes twice comes twice again: torch's attention asks whether query is key.
        unique = {id(leaf): leaf for leaf in leaves if _is_saved(leaf)}
        places = {key: _Place(index) for index, key in enumerate(unique)}
        # Tensors are not kept here: `checkpoint` keeps them, and hooks may move them elsewhere.
        self._leaves = [places.get(id(leaf)) or _shallow_copy(leaf) for leaf in leaves]
        self.tensors: list[Tensor] = [*unique.values()]
        device = next((p.device for module in modules for p in module.parameters()), None)
        if device is not None and all(tensor.device != device for tensor in self.tensors):
            # From its arguments, torch learns of which device to save the random state.
            self.tensors.append(torch.empty(0, device=device))
        self._versions = [tensor._version for tensor in self.tensors]
        self._held = [*self._find_held()]

    def __call__(self, *tensors: Tensor) -> Any:
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
            return self._run(*args, **kwargs)
        # Objects are copied again because a graph can be gone through twice.
        leaves = [
            tensors[leaf.index] if isinstance(leaf, _Place) else _shallow_copy(leaf)
            for leaf in self._leaves
        ]
        args, kwargs = tree_unflatten(leaves, self._structure)
        self._refuse_changes(is_changed=False)
        with _settings(self._settings):
            return self._run(*args, **kwargs)

    def end_first(self) -> None:
        """Refuse changes that the first run made, which torch would find in backward."""
        self._refuse_changes([tensor._version for tensor in self.tensors] != self._versions)
        self.tensors = []

    def _refuse_changes(self, is_changed: bool) -> None:
        held = [*self._find_held()]
        pairs = zip(held, self._held, strict=False)
        is_changed |= len(held) != len(self._held)
        if is_changed or any(a is not b or m != n for (a, m), (b, n) in pairs):
            problem = Problem(
                f"a block of class `{self._name}`",
                "what it is given is changed in place, so that it cannot be computed again",
                "Write `x = x + y` in place of `x += y` there, leave these blocks out with "
                "`blocks=`, or set `activation_checkpointing=None`.",
            )
            raise IncompatibleError("activation_checkpointing", [problem])

    def _find_held(self) -> Iterator[tuple[Any, int]]:
        for leaf in self._leaves:
            if not isinstance(leaf, _Place):
                yield from _held_by(leaf)


@dataclass(frozen=True, slots=True)
class _Place:
    """Of a tensor among those that are passed to ``checkpoint``."""

    index: int


@contextlib.contextmanager
def _settings(values: Sequence[Any]) -> Iterator[None]:
    changed = [
        (put, now, value)
        for (get, put), value in zip(_SETTINGS, values, strict=True)
        if (now := get()) != value
    ]
    for put, _, value in changed:
        put(value)
    try:
        yield
    finally:
        for put, now, _ in changed:
            put(now)


# Those of inference mode cannot change, and cannot be saved for backward.
def _is_saved(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference()


def _shallow_copy(value: Any) -> Any:
    if isinstance(value, Tensor) or callable(value):
        return value
    try:
        return copy.copy(value)
    except TypeError:  # a lock, a process group: nothing that a forward pass would change
        return value


# What an object holds, to three levels: items that are not copied with it.
def _held_by(value: Any, levels: int = 3) -> Iterator[tuple[Any, int]]:
    for _, item in (items_of(value) or attributes_of(value)) if levels else ():
        yield item, item._version if _is_saved(item) else 0
        yield from _held_by(item, levels - 1)


def _keep_expensive_ops(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    packet = getattr(op, "overloadpacket", op)
    is_kept = getattr(packet, "__name__", "") in _KEPT_OPS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Contexts:
    contexts: Contexts = create_selective_checkpoint_contexts(_keep_expensive_ops)
    return contexts
