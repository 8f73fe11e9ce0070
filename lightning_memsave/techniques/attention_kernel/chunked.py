"""Attention of Hugging Face models a few samples at a time, for where no kernel does it whole."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNKED = "chunked_sdpa"
"""Its name among the attention functions of transformers."""

_SCORE_BYTES = 16 * 2**20


def register() -> None:
    """Make it known to transformers; again does nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415
    from transformers.masking_utils import sdpa_mask  # noqa: PLC0415

    AttentionInterface.register(CHUNKED, attend)
    AttentionMaskInterface.register(CHUNKED, sdpa_mask)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' ``"sdpa"`` does; scores are there for some samples at a time.

    Args:
        module: The attention layer.
        query: (samples, heads, tokens, features), as transformers passes it.
        key: The same for the keys.
        value: The same for the values.
        attention_mask: Broadcast to (samples, heads, queries, keys), or ``None``.
        settings: What else transformers passes, such as ``dropout``.

    Returns:
        (samples, tokens, heads, features), and no attention weights.
    """
    from transformers.integrations.sdpa_attention import (  # noqa: PLC0415 - on first use
        sdpa_attention_forward,
    )

    num_samples, num_heads, num_queries = query.shape[:3]
    size = max(1, _SCORE_BYTES // (num_heads * num_queries * key.shape[2] * 4))
    run = functools.partial(sdpa_attention_forward, module)
    if not torch.is_grad_enabled() or num_samples <= size:
        output: tuple[Tensor, None] = run(query, key, value, attention_mask, **settings)
        return output

    def of_samples(given: Any, start: int) -> Any:
        has_samples = isinstance(given, Tensor) and given.ndim == 4 and len(given) == num_samples
        return given[start : start + size] if has_samples else given

    outputs = []
    for start in range(0, num_samples, size):
        some = [of_samples(t, start) for t in (query, key, value, attention_mask)]
        own = {name: of_samples(given, start) for name, given in settings.items()}
        outputs.append(checkpoint(run, *some, use_reentrant=False, **own)[0])
    return torch.cat(outputs), None
