"""Keep float32 numbers as bfloat16 and the 16 bits that this lacks."""

import torch
from torch import Tensor

_HALF_A_UNIT = 0x8000  # of the last bit of bfloat16
_NAN = 0x7FC00000


def split_weight(values: Tensor, upper: Tensor, lower: Tensor) -> None:
    """Split numbers into two halves, from which `join_weight` makes the same bits.

    A NaN becomes the usual one.
    """
    bits = values.view(torch.int32)
    bits.masked_fill_(values.isnan(), _NAN)  # rounding could make another one a number
    lower.copy_(bits)
    bits.add_(_HALF_A_UNIT).bitwise_right_shift_(16)
    upper.view(torch.int16).copy_(bits)


def join_weight(upper: Tensor, lower: Tensor, into: Tensor | None = None) -> Tensor:
    into = torch.empty_like(upper, dtype=torch.float32) if into is None else into
    # As a signed number, the lower half is negative where the upper one was rounded up.
    into.view(torch.int32).copy_(upper.view(torch.int16)).bitwise_left_shift_(16).add_(lower)
    return into
