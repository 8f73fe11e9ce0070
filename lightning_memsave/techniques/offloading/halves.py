"""Split float32 weights into a bfloat16 and the 16 bits that it lacks, and join them."""

import math

import torch
from torch import Tensor

from lightning_memsave.core.memory import is_fake, is_host, mark_as_host

_HALF_A_UNIT = 0x8000  # of the last bit of bfloat16
_TILE_NUMEL = 2**18


def split_weight(values: Tensor, upper: Tensor, lower: Tensor) -> None:
    """Split numbers into two halves, from which `join_weight` makes the same bits.

    A NaN becomes the usual one.
    """
    # Rounding could make another one a number.
    bits = values.nan_to_num_(math.nan, math.inf, -math.inf).view(torch.int32)
    lower.copy_(bits)
    bits.add_(_HALF_A_UNIT).bitwise_right_shift_(16)
    upper.view(torch.int16).copy_(bits)


def join_weight(upper: Tensor, lower: Tensor, into: Tensor | None = None) -> Tensor:
    if into is None:
        into = torch.empty_like(upper, dtype=torch.float32)
        if is_host(upper.untyped_storage()):
            mark_as_host(into)
    # As a signed number, the lower half is negative where the upper one was rounded up.
    tensors = upper, lower, into
    if into.device.type != "cpu" or is_fake(into) or not all(t.is_contiguous() for t in tensors):
        into.copy_(upper).view(torch.int32).add_(lower)
        return into
    # A sum of two types makes a copy: malloc would keep the copies of all weights of a model.
    bits = torch.empty(min(_TILE_NUMEL, into.numel()), dtype=torch.int32)
    for high, low, whole in zip(*(t.view(-1).split(_TILE_NUMEL) for t in tensors), strict=True):
        whole.copy_(high).view(torch.int32).add_(bits[: len(low)].copy_(low))
    return into
