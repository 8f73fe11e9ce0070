"""Matrix products of low-precision factors that are summed in a wider type."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import register_flop_formula

from lightning_memsave.core.memory import is_fake, on_cuda

AddProduct = Callable[[Tensor, Tensor, Tensor, int], None]
"""Writes ``beta * total + a @ b`` to ``total``, which is of a wider type than ``a`` and ``b``."""

# Tiles of rows or columns are converted from one type to another.
_NUM_TILES = 16
_MIN_TILE = 512


def compute_logits(
    logits: Tensor, parts: list[Tensor], weights: list[Tensor], bias: Tensor | None
) -> None:
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
    """Scale logits (R, V) and add ``shift`` (V,), in place."""
    if scale != 1.0:
        logits *= scale
    if shift is not None:
        logits += shift


def add_product(
    total: Tensor, factors: tuple[Tensor, Tensor], other: Tensor, *, is_first: bool
) -> None:
    """Add ``factor @ other`` to a sum in a wide type."""
    wide, narrow = factors
    if on_cuda(total) and other.dtype != total.dtype:
        _add_low_precision_product(total, narrow, other, is_first=is_first)
    else:
        total.addmm_(wide, other.to(total.dtype), beta=0 if is_first else 1)


def scaled(value: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply by a scalar in its wide type and round once to ``dtype``; may change ``value``."""
    if value.dtype == dtype == factor.dtype:
        return value.mul_(factor)
    result = value if value.dtype == dtype else torch.empty_like(value, dtype=dtype)
    size = max(1, math.ceil(len(value) / _NUM_TILES))
    for old, new in zip(value.split(size), result.split(size), strict=True):
        new.copy_(old.mul_(factor) if old.dtype == factor.dtype else old.to(factor.dtype) * factor)
    return result


def _add_low_precision_product(total: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    add = _product_for(total, a.dtype) if on_cuda(total) else _add_in_tiles
    add(total, a, b, 0 if is_first else 1)


def _product_for(total: Tensor, narrow: torch.dtype) -> AddProduct:
    if not is_fake(total):
        return find_product(total.device, total.dtype, narrow)
    # A fit predicts what it will use; elsewhere the GPU is taken to have what it needs.
    if torch.cuda.is_initialized():
        with _disable_current_modes():
            device = torch.device("cuda", torch.cuda.current_device())
            if find_product(device, total.dtype, narrow) is _add_in_tiles:
                return _add_in_tiles
    return _add_fake


def describe_missing_product(device: torch.device, narrow: torch.dtype) -> str:
    """Say what is done where no operator sums in the wide type; empty where one does."""
    is_missing = find_product(device, torch.float32, narrow) is _add_in_tiles
    return (
        "factors of products are converted to float32 in tiles, which takes more memory and time: "
        f"this torch has no product of {str(narrow).removeprefix('torch.')} that is summed in it"
        if is_missing
        else ""
    )


@functools.cache
def find_product(device: torch.device, wide: torch.dtype, narrow: torch.dtype) -> AddProduct:
    """Find, by trying a small product, the fastest operator that sums in the wide type."""
    total = torch.ones(8, 8, device=device, dtype=wide)
    ones = torch.ones(8, 8, device=device, dtype=narrow)
    try:
        _add_by_addmm(total, ones, ones, 1)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):
        return _add_in_tiles
    return _add_by_addmm if bool((total == 9).all()) else _add_in_tiles


# Fake tensors have no kernel for `_add_by_addmm`. In its place an operator that allocates nothing
# either, and whose FLOP can be counted.
_LIBRARY = torch.library.Library("lightning_memsave", "FRAGMENT")
_LIBRARY.define("add_product(Tensor(a!) total, Tensor a, Tensor b, int beta) -> ()")
_LIBRARY.impl("add_product", lambda *args: None, "Meta")


@register_flop_formula(torch.ops.lightning_memsave.add_product)
def _flop(_: object, a: torch.Size, b: torch.Size, *others: object, **out: object) -> int:
    return 2 * a[0] * a[1] * b[1]


def _add_fake(total: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    torch.ops.lightning_memsave.add_product(total, a, b, beta)


def _add_by_addmm(total: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)


def _add_in_tiles(total: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    a, size = a.to(total.dtype), max(_MIN_TILE, math.ceil(b.shape[1] / _NUM_TILES))
    for columns, part in zip(total.split(size, 1), b.split(size, 1), strict=True):
        columns.addmm_(a, part.to(total.dtype), beta=beta)
