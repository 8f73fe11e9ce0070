"""Results whose shape depends on numbers that are not there: as large as they can be."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def largest_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the result of an operator that chooses among its input, as if it chose everything.

    Args:
        func: The operator.
        args: Its arguments, tensors without data.
        kwargs: More of them.

    Returns:
        Tensors without data, or ``NotImplemented`` for an operator that is not known here.
    """
    make = _LARGEST.get(func)
    return NotImplemented if make is None else make(*args, **kwargs)


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
