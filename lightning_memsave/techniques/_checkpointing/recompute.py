"""Run a part of a model again in backward, with the same result and no second side effect."""

import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from lightning_memsave.errors import IncompatibleError, NoEffectWarning, Problem
from lightning_memsave.techniques._checkpointing.changed_buffers import ChangedBuffers, Contexts
from lightning_memsave.techniques._checkpointing.changed_inputs import Call

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

# The blocks that a key-value cache was kept from.
_KEPT_FROM: WeakKeyDictionary[Any, WeakSet[nn.Module]] = WeakKeyDictionary()


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
        call = functools.partial(run, **kwargs)
        if is_selective:
            return checkpoint(call, *args, use_reentrant=False, context_fn=context_fn)
        return checkpoint(call, *args, use_reentrant=False)
    again = Call(run, modules[0], args, kwargs)
    buffers = ChangedBuffers(modules)
    if buffers.can_change:
        context_fn = functools.partial(buffers.contexts, context_fn)
    # Positional tensors tell torch of which devices to save the random state; keyword ones do not.
    output = checkpoint(again, *again.tensors, use_reentrant=False, context_fn=context_fn)
    again.learn()
    buffers.learn()
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

    Raises:
        IncompatibleError: If the cache was kept from this block before and comes again, so that
            what it should hold is missing.
    """
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches or not module.training:
        return bool(caches)
    name = type(module).__name__
    if any(module in _KEPT_FROM.get(cache, ()) for cache in caches):
        problem = Problem(
            f"a key-value cache in a second training step of `{name}`",
            "blocks that are recomputed leave caches empty, and this one should not be",
            "Set `activation_checkpointing=None` to train with a cache over several steps.",
        )
        raise IncompatibleError("activation_checkpointing", [problem])
    index = next((m.layer_idx for m in module.modules() if hasattr(m, "layer_idx")), 0)
    is_filled = any(cache.get_seq_length(index) > 0 for cache in caches)
    if is_filled:
        warnings.warn(
            f"activation_checkpointing does nothing for `{name}`: it is given a key-value cache "
            "that is not empty, such as a learned prefix. Train without one, or set "
            "`activation_checkpointing=None`.",
            NoEffectWarning,
            stacklevel=3,
        )
    return is_filled


def without_caches(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace key-value caches by ``None``: recomputing would append to them a second time.

    Args:
        module: The block that is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        Both without Hugging Face ``Cache`` objects.
    """
    for value in (*args, *kwargs.values()):
        if _is_cache(value):
            _KEPT_FROM.setdefault(value, WeakSet()).add(module)
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


def _selective_contexts() -> Contexts:
    contexts: Contexts = create_selective_checkpoint_contexts(_keep_expensive_ops)
    return contexts
