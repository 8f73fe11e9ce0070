"""Run a part of a model again in backward, with the same result and no second side effect."""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from lightning_memsave.errors import NoEffectWarning

_Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]

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

# Names of the buffers that a module's forward changes in place, found at its first run.
_CHANGED_BUFFERS: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


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
    run_and_drop = functools.partial(checkpoint, run, *args, use_reentrant=False, **kwargs)
    if torch.compiler.is_compiling():
        # The compiler replays operations, not side effects, so buffers need no care there; and it
        # knows this context function but not the default one when it is passed.
        return run_and_drop(context_fn=_selective_contexts) if is_selective else run_and_drop()
    context_fn = _selective_contexts if is_selective else noop_context_fn
    buffers = _Buffers(modules)
    if buffers.can_change:
        context_fn = functools.partial(buffers.contexts, context_fn)
    output = run_and_drop(context_fn=context_fn)
    buffers.forget_unchanged()
    return output


def holds_cache_in_use(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Say whether a key-value cache among the arguments is needed and so cannot be dropped.

    Args:
        module: The block that is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        True outside of training, and if the cache holds something for this block already (a learned
        prefix, for example). Writing to a cache twice would be wrong, so such a call runs plainly.
    """
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches or not module.training:
        return bool(caches)
    index = next((m.layer_idx for m in module.modules() if hasattr(m, "layer_idx")), 0)
    is_filled = any(cache.get_seq_length(index) > 0 for cache in caches)
    if is_filled:
        warnings.warn(
            f"activation_checkpointing does nothing for `{type(module).__name__}`: it is given a "
            "key-value cache that is not empty, such as a learned prefix. Train without one, or "
            "set `activation_checkpointing=None`.",
            NoEffectWarning,
            stacklevel=3,
        )
    return is_filled


def without_caches(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace key-value caches by ``None``: recomputing would append to them a second time.

    Args:
        args: Positional arguments of a block.
        kwargs: Its keyword arguments.

    Returns:
        Both without Hugging Face ``Cache`` objects.
    """
    return (
        tuple(None if _is_cache(value) else value for value in args),
        {name: None if _is_cache(value) else value for name, value in kwargs.items()},
    )


def _is_cache(value: object) -> bool:
    # Where transformers was never imported there can be no instance of its classes.
    cache_utils = sys.modules.get("transformers.cache_utils")
    return cache_utils is not None and isinstance(value, cache_utils.Cache)


def _keep_expensive_ops(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    packet = getattr(op, "overloadpacket", op)
    is_kept = getattr(packet, "__name__", "") in _KEPT_OPS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> _Contexts:
    contexts: _Contexts = create_selective_checkpoint_contexts(_keep_expensive_ops)
    return contexts


class _Buffers:
    # Buffers as they were before the forward pass, put back while it is recomputed. Batch
    # normalisation updates its running statistics in forward: the second run must not update them
    # again, and a module that reads what it updates (spectral normalisation) must read the values
    # of the first run.

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._unknown = [m for m in modules if m not in _CHANGED_BUFFERS]
        self._before = [
            (module, name, buffer, buffer._version, buffer.clone())
            for module in modules
            for name, buffer in _buffers_to_watch(module)
        ]

    @property
    def can_change(self) -> bool:
        return bool(self._before)

    def forget_unchanged(self) -> None:
        # Called after the forward pass: learns which buffers change and frees the other copies.
        # Kernels of normalisation layers change statistics without counting up `_version`.
        statistics = {module: _statistics(module) for module in self._unknown}
        self._before = [
            (module, name, buffer, version, before)
            for module, name, buffer, version, before in self._before
            if name in statistics.get(module, ())
            or _buffer(module, name) is not buffer
            or buffer._version != version
            or module not in statistics
        ]
        for module in self._unknown:
            if module.training:
                changed = frozenset(name for owner, name, *_ in self._before if owner is module)
                _CHANGED_BUFFERS[module] = changed | statistics[module]

    def contexts(self, inner: Callable[[], _Contexts]) -> _Contexts:
        in_forward, in_recomputation = inner()
        return in_forward, _PutBack(self, in_recomputation)

    def put_back(self) -> list[tuple[nn.Module, str, Tensor | None]]:
        now = [(module, name, _buffer(module, name)) for module, name, *_ in self._before]
        for module, name, _, _, before in self._before:
            _set_buffer(module, name, before.clone())
        return now


class _PutBack(contextlib.AbstractContextManager[None]):
    # Not a generator: with `retain_graph=True` it is entered once per backward pass.
    def __init__(self, buffers: _Buffers, inner: contextlib.AbstractContextManager[Any]) -> None:
        self._buffers, self._inner = buffers, inner
        self._now: list[tuple[nn.Module, str, Tensor | None]] = []

    def __enter__(self) -> None:
        self._now = self._buffers.put_back()
        self._inner.__enter__()

    def __exit__(self, *exc: Any) -> bool | None:
        try:
            return self._inner.__exit__(*exc)
        finally:
            for module, name, buffer in self._now:
                _set_buffer(module, name, buffer)


def _buffers_to_watch(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    names = _CHANGED_BUFFERS.get(module)
    if names is None:
        yield from module.named_buffers()
        return
    for name in names:
        buffer = _buffer(module, name)
        if buffer is not None:
            yield name, buffer


# Statistics of normalisation layers, which change or not as the layer is in training mode or not.
def _statistics(module: nn.Module) -> frozenset[str]:
    return frozenset(
        f"{path}.{name}".lstrip(".")
        for path, child in module.named_modules()
        if isinstance(child, nn.modules.batchnorm._NormBase)
        for name, _ in child.named_buffers()
    )


def _buffer(module: nn.Module, name: str) -> Tensor | None:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path)._buffers.get(leaf)


def _set_buffer(module: nn.Module, name: str, buffer: Tensor | None) -> None:
    path, _, leaf = name.rpartition(".")
    module.get_submodule(path)._buffers[leaf] = buffer
