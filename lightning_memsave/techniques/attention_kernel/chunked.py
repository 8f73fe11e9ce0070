"""Attention of Hugging Face models for a few samples at a time, if no fused kernel is available."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNKED = "chunked_sdpa"
"""Its name in the registry of attention functions of transformers."""

_SCORE_BYTES = 16 * 2**20


def register() -> None:
    """Register it in transformers; idempotent."""
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
    """Compute attention as transformers' ``"sdpa"`` does, for a few samples at a time."""
    from transformers.integrations.sdpa_attention import (  # noqa: PLC0415 - on first use
        sdpa_attention_forward,
    )

    num_samples, num_heads, num_queries = query.shape[:3]
    size = max(1, _SCORE_BYTES // (num_heads * num_queries * key.shape[2] * 4))
    run = functools.partial(sdpa_attention_forward, module)
    if not torch.is_grad_enabled() or num_samples <= size:
        output: tuple[Tensor, None] = run(query, key, value, attention_mask, **settings)
        return output

    def pick(value: Any, start: int) -> Any:
        has_samples = isinstance(value, Tensor) and value.ndim == 4 and len(value) == num_samples
        return value[start : start + size] if has_samples else value

    outputs = []
    for start in range(0, num_samples, size):
        tensors = [pick(t, start) for t in (query, key, value, attention_mask)]
        own_settings = {name: pick(setting, start) for name, setting in settings.items()}
        outputs.append(checkpoint(run, *tensors, use_reentrant=False, **own_settings)[0])
    return torch.cat(outputs), None
