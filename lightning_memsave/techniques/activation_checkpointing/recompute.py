"""Recompute activations in backward, bit for bit and without repeating side effects."""

import contextlib
import copy
import functools
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import (
    _StopRecomputationError,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from lightning_memsave.core.nested import attributes_of, items_of
from lightning_memsave.errors import IncompatibleError, NoEffectWarning, Problem
from lightning_memsave.techniques.activation_checkpointing.block_state import begin_pass
from lightning_memsave.techniques.activation_checkpointing.selective import (
    Contexts,
    keep_expensive_ops,
    save_through_hooks,
    selective_contexts,
)
from lightning_memsave.techniques.deferred import computed


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # raised if `fp32_precision` of one backend was set
        return None


def _set_matmul_precision(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


def _set_deterministic(mode: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def _set_cudnn(is_enabled: bool) -> None:
    torch.backends.cudnn.enabled = is_enabled


# Process-wide settings that change the result of operators. `checkpoint` itself restores autocast,
# the default device and the random state.
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
    """Call a function that runs modules, drop its activations and recompute them in backward."""
    if torch.compiler.is_compiling():
        # The compiler replays operations, not side effects, so buffers and arguments are safe. It
        # supports our own context function, but not the default one when passed explicitly. Each
        # random operator gets a state of its own.
        bound = functools.partial(run, **kwargs)
        if is_selective:
            contexts = functools.partial(create_selective_checkpoint_contexts, keep_expensive_ops)
            return checkpoint(bound, *args, use_reentrant=False, context_fn=contexts)
        return checkpoint(bound, *args, use_reentrant=False)
    if _is_functional(modules):
        warnings.warn(
            f"activation_checkpointing has no effect on `{type(modules[0]).__name__}` here: "
            "`torch.func` runs it with tensors that no longer exist in backward. Set "
            "`activation_checkpointing=None` to train without this warning.",
            NoEffectWarning,
            stacklevel=3,
        )
        return run(*args, **kwargs)
    state = begin_pass(modules)
    if state is None:
        return run(*args, **kwargs)
    # Outside of the block: tensors that this saves for backward do not belong to the block.
    args, kwargs = computed((args, kwargs))
    call = _Call(run, modules, args, kwargs)
    kept: list[dict[Any, dict[int, Any]]] = []
    context_fn: Callable[[], Contexts] = noop_context_fn
    if is_selective:
        context_fn = functools.partial(selective_contexts, kept)
    try:
        output = checkpoint(
            call,
            *call.tensors,
            use_reentrant=False,
            context_fn=lambda: state.contexts(context_fn()),
        )
    except _StopRecomputationError:  # of the block around it, which has all that it needs
        raise
    except BaseException as error:
        _leave_checkpoint(error)
        raise
    call.end_first()
    for results in kept:
        save_through_hooks(results)
    state.leave()
    return output


_CHECKPOINT = inspect.unwrap(checkpoint).__code__


# Before torch 2.13 the hooks of `checkpoint` stay in the thread, for all that it saves from then
# on, until the frame is gone; and a notebook keeps the last error.
def _leave_checkpoint(error: BaseException) -> None:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is _CHECKPOINT:
            generator = frame.f_locals.get("gen")
            if generator is not None:
                generator.close()


# `functional_call` replaces parameters by tensors; transforms wrap the arguments of a block.
def _is_functional(modules: Sequence[nn.Module]) -> bool:
    return torch._C._are_functorch_transforms_active() or any(
        not isinstance(p, nn.Parameter) for module in modules for p in module.parameters()
    )


class _Call:
    """A call that can be repeated with the same arguments and process-wide settings."""

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
        # A tensor passed twice is passed twice again: torch's attention checks `query is key`.
        unique = {id(leaf): leaf for leaf in leaves if _is_saved(leaf)}
        places = {key: _Place(index) for index, key in enumerate(unique)}
        # `checkpoint` holds the tensors, not this object, so that saved-tensor hooks may move them.
        self._leaves = [places.get(id(leaf)) or _shallow_copy(leaf) for leaf in leaves]
        self.tensors: list[Tensor] = [*unique.values()]
        device = next((p.device for module in modules for p in module.parameters()), None)
        if device is not None and all(tensor.device != device for tensor in self.tensors):
            # torch saves the random state of the devices of these arguments.
            self.tensors.append(torch.empty(0, device=device))
        self._versions = [tensor._version for tensor in self.tensors]
        self._held = [*self._find_held()]

    def __call__(self, *tensors: Tensor) -> Any:
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
            return self._run(*args, **kwargs)
        # Copy objects again, as backward may run twice through a graph.
        leaves = [
            tensors[leaf.index] if isinstance(leaf, _Place) else _shallow_copy(leaf)
            for leaf in self._leaves
        ]
        args, kwargs = tree_unflatten(leaves, self._structure)
        self._refuse_changes(is_changed=False)
        with _settings(self._settings):
            return self._run(*args, **kwargs)

    def end_first(self) -> None:
        """Raise if the first run changed its arguments, which torch would only find in backward."""
        self._refuse_changes([tensor._version for tensor in self.tensors] != self._versions)
        self.tensors = []

    def _refuse_changes(self, is_changed: bool) -> None:
        held = [*self._find_held()]
        pairs = zip(held, self._held, strict=False)
        is_changed |= len(held) != len(self._held)
        if is_changed or any(a is not b or m != n for (a, m), (b, n) in pairs):
            problem = Problem(
                f"a block of class `{self._name}`",
                "it changes its arguments in place, so it cannot be recomputed",
                "Write `x = x + y` instead of `x += y` there, exclude these blocks with "
                "`blocks=`, or set `activation_checkpointing=None`.",
            )
            raise IncompatibleError("activation_checkpointing", [problem])

    def _find_held(self) -> Iterator[tuple[Any, int]]:
        for leaf in self._leaves:
            if not isinstance(leaf, _Place):
                yield from _held_by(leaf)


@dataclass(frozen=True, slots=True)
class _Place:
    """Index of a tensor in the arguments of ``checkpoint``."""

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


# Inference tensors cannot be saved for backward.
def _is_saved(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference()


def _shallow_copy(value: Any) -> Any:
    if isinstance(value, Tensor) or callable(value):
        return value
    try:
        return copy.copy(value)
    except TypeError:  # such as a lock or a process group, which a forward pass does not change
        return value


# Objects inside a value, up to three levels deep, which a shallow copy shares.
def _held_by(value: Any, levels: int = 3) -> Iterator[tuple[Any, int]]:
    for _, item in (items_of(value) or attributes_of(value)) if levels else ():
        yield item, item._version if _is_saved(item) else 0
        yield from _held_by(item, levels - 1)
