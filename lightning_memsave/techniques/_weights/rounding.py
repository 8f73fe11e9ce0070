"""From float32 to bfloat16: at random without bias, with the rest kept, or to the nearest."""

import math

import torch
from torch import Tensor

_LOW_BITS = 0xFFFF  # what bfloat16 lacks of float32


def round_stochastically(param: Tensor, values: Tensor, generator: torch.Generator) -> None:
    """Round each number up or down, up with the probability that makes the mean right.

    What bfloat16 can hold already stays as it is, infinities and NaN too.

    Args:
        param: Where the numbers go, in bfloat16.
        values: In float32, contiguous or strided like ``param``; overwritten.
        generator: Of the same device.
    """
    # To a GPU's NaN, which has all bits set, the noise would carry into the sign.
    is_nan = values.isnan()
    bits = values.view(torch.int32)
    bits.add_(_noise(values, generator)).add_(_LOW_BITS // 2 + 1).bitwise_and_(~_LOW_BITS)
    param.copy_(values.masked_fill_(is_nan, math.nan))


def round_with_rest(param: Tensor, values: Tensor, rest: Tensor) -> None:
    """Round to the nearest and keep what was lost, to be added before the next update.

    Args:
        param: Where the numbers go, in bfloat16.
        values: In float32; overwritten.
        rest: Where the rest goes, in bfloat16.
    """
    param.copy_(values)
    rest.copy_(values.sub_(param))


def round_to_nearest(param: Tensor, values: Tensor) -> None:
    """Round to the nearest, ties to even; updates of less than half a distance are lost.

    Args:
        param: Where the numbers go, in bfloat16.
        values: In float32.
    """
    param.copy_(values)


def next_seed(seed: int) -> int:
    """Step to the seed of a parameter's next update.

    Args:
        seed: A number of 32 bits, as many as the generator of a CPU takes.

    Returns:
        Another one; all 2**32 come before one comes again.
    """
    return (seed * 1664525 + 1013904223) % 2**32


def first_seed(index: int) -> int:
    """Choose the seed of a parameter's first update.

    Args:
        index: Position of the parameter in its optimizer.

    Returns:
        A number of 32 bits.
    """
    return (index + 1) * 2654435761 % 2**32


# Four numbers of 16 bits from each draw of 64, from -2**15 to 2**15 - 1.
def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    numel = like.numel()
    drawn = torch.empty(-(-numel // 4), dtype=torch.int64, device=like.device)
    drawn.random_(-(2**63), None, generator=generator)
    return drawn.view(torch.int16)[:numel].view(like.shape)
