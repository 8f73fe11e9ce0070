"""Frozen weights of 4 and 8 bits, as in bitsandbytes' `Linear4bit` and `Linear8bitLt`."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def has_4_bits(param: Any) -> bool:
    """Return whether a parameter is a quantized one of 4 bits."""
    return type(param).__name__ == "Params4bit" and param.quant_state is not None


def has_8_bits(param: Any) -> bool:
    """Return whether a parameter is one of LLM.int8, or a copy: products read another tensor."""
    return "SCB" in vars(param)


def move_scales(params: Iterable[nn.Parameter], device: torch.device) -> None:
    """Move what quantized weights need beside their 4 bits; it does not wait on the host."""
    for param in filter(has_4_bits, params):
        param.quant_state.to(device)  # type: ignore[attr-defined]
