"""Matrix products of low precision whose results are wide, and sums of them."""

import math

import torch
from torch import Tensor

# So many rows or columns at a time are converted from one type to another.
_NUM_TILES = 16
_MIN_TILE = 512


def compute_logits(
    logits: Tensor, parts: list[Tensor], weights: list[Tensor], bias: Tensor | None
) -> None:
    """Compute ``sum(parts[i] @ weights[i].T) + bias``.

    Args:
        logits: Where to, of a wide type.
        parts: Each (R, D).
        weights: Each (V, D), in the type of its part.
        bias: (V,), or none.
    """
    for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        if part.dtype != logits.dtype:
            _add_low_precision_product(logits, part, weight.t(), is_first=i == 0)
        elif i == 0 and bias is not None:
            torch.addmm(bias.to(logits.dtype), part, weight.t(), out=logits)
            bias = None
        else:
            logits.addmm_(part, weight.t(), beta=min(i, 1))
    if bias is not None:
        logits += bias


def scale_and_shift(logits: Tensor, scale: float, shift: Tensor | None) -> None:
    """Multiply logits and add to them.

    Args:
        logits: (R, V), overwritten.
        scale: A number.
        shift: (V,), or none.
    """
    if scale != 1.0:
        logits *= scale
    if shift is not None:
        logits += shift


def add_product(
    total: Tensor, factors: tuple[Tensor, Tensor], other: Tensor, *, is_first: bool
) -> None:
    """Add ``factor @ other`` to a sum of a wide type.

    Args:
        total: The sum.
        factors: The factor in the wide type, and in the type of the other, which is used where it
            makes the product fast.
        other: The other factor.
        is_first: Nothing has been added yet; ``total`` may hold anything.
    """
    wide, narrow = factors
    if total.device.type == "cuda" and other.dtype != total.dtype:  # pragma: no cover (gpu)
        _add_low_precision_product(total, narrow, other, is_first=is_first)
    else:
        total.addmm_(wide, other.to(total.dtype), beta=0 if is_first else 1)


def scaled(value: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply in the type of the factor, which is wide, and round once.

    Args:
        value: Is overwritten where that is possible.
        factor: One number.
        dtype: Type of the result.

    Returns:
        The product.
    """
    if value.dtype == dtype == factor.dtype:
        return value.mul_(factor)
    result = value if value.dtype == dtype else torch.empty_like(value, dtype=dtype)
    size = max(1, math.ceil(len(value) / _NUM_TILES))
    for old, new in zip(value.split(size), result.split(size), strict=True):
        new.copy_(old.mul_(factor) if old.dtype == factor.dtype else old.to(factor.dtype) * factor)
    return result


# Nothing is rounded in between: GPUs multiply low precision into 32 bits.
def _add_low_precision_product(total: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    beta = 0 if is_first else 1
    if total.device.type == "cuda":  # pragma: no cover (gpu)
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
        return
    a = a.to(total.dtype)
    size = max(_MIN_TILE, math.ceil(b.shape[1] / _NUM_TILES))
    for columns, part in zip(total.split(size, 1), b.split(size, 1), strict=True):
        columns.addmm_(a, part.to(total.dtype), beta=beta)
