"""Upper bounds for data-dependent output shapes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten


def largest_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the largest possible result of an operator that selects elements."""
    make = _LARGEST.get(func)
    return NotImplemented if make is None else make(*args, **kwargs)


def packed_sequence(tensor: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    sizes = [sum(length > step for length in lengths) for step in range(max(lengths))]
    packed = tensor.new_empty((sum(sizes), *tensor.shape[2:]))
    with _disable_current_modes():
        return packed, torch.tensor(sizes)


def padded_sequence(
    data: Tensor,
    batch_sizes: Tensor,
    is_batch_first: bool,
    padding: float,
    total_length: int,
) -> tuple[Tensor, Tensor]:
    """Pad sequences as ``_pad_packed_sequence`` does, without reading the input's memory."""
    sizes = batch_sizes.tolist()
    shape = (max(total_length, len(sizes)), sizes[0], *data.shape[1:])
    padded = data.new_full(shape, padding)
    start = offset = 0
    for end in range(1, len(sizes) + 1):
        size = sizes[start]
        if end == len(sizes) or sizes[end] != size:
            part = data.narrow(0, offset, size * (end - start))
            rows = part.view(end - start, size, *data.shape[1:])
            padded.narrow(0, start, end - start).narrow(1, 0, size).copy_(rows)
            offset, start = offset + size * (end - start), end
    lengths = torch.tensor([sum(size > i for size in sizes) for i in range(sizes[0])])
    return padded.transpose(0, 1) if is_batch_first else padded, lengths


def _nonzero(tensor: Tensor) -> Tensor:
    return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64)


def _masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    return tensor.new_empty(torch.broadcast_shapes(tensor.shape, mask.shape).numel())


def _bincount(tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    dtype = torch.int64 if weights is None else weights.dtype
    return tensor.new_empty(max(minlength, 1), dtype=dtype)


def _unique(tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    def indices() -> Tensor:
        return tensor.new_empty(tensor.numel(), dtype=torch.int64)

    return tensor.new_empty(tensor.numel()), indices().view(tensor.shape), indices()


def _unique_dim(
    tensor: Tensor, dim: int, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    def indices() -> Tensor:
        return tensor.new_empty(tensor.shape[dim], dtype=torch.int64)

    return tensor.new_empty(tensor.shape), indices(), indices()


_LARGEST: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.bincount.default: _bincount,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.unique_dim.default: _unique_dim,
}
