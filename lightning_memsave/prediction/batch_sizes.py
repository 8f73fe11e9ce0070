"""Change the number of samples or the sequence length of a batch."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.core.nested import (
    attributes_of,
    items_of,
    with_attributes,
    with_items,
)
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.measure.storages import tensors_in, tensors_in_batch
from lightning_memsave.prediction.fake.values import MAX_KNOWN_NUMEL

_IDS_NDIM = 2  # token ids: (samples, tokens)


@dataclass(frozen=True, slots=True)
class SequenceAxis:
    axis: int
    length: int


def sample_count(batch: Any) -> int | None:
    """Return the batch size shared by all tensors; other objects are ignored."""
    sizes = {tensor.shape[0] for tensor in tensors_in_batch(batch) if tensor.ndim}
    return sizes.pop() if len(sizes) == 1 else None


def with_samples(batch: Any, num_samples: int) -> Any:
    """Return the batch with another number of samples, repeating them as needed.

    Tensors whose values a prediction does not read (over 2**20 elements) are on the meta device.
    """
    now = sample_count(batch)
    assert now, "the caller checked `sample_count`"

    def change(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        return _resized_axis(tensor, 0, num_samples)

    return _mapped(batch, _once(change), lambda of_list: _resized(of_list, now, num_samples))


def find_sequence(batch: Any, axis: int | None = None) -> SequenceAxis | None:
    """Find the sequence axis."""
    tensors = list(tensors_in_batch(batch))
    if axis is not None:
        if type(axis) is not int or axis < 1 or all(tensor.ndim <= axis for tensor in tensors):
            raise ConfigurationError(
                f"`sequence_axis={axis!r}` is not a sequence axis of this batch: it must be from "
                f"1 to {max([t.ndim for t in tensors], default=1) - 1}. For tensors of shape "
                "(samples, tokens, features) it is 1."
            )
        return SequenceAxis(axis, next(t.shape[axis] for t in tensors if t.ndim > axis))
    ids = [t for t in tensors if t.ndim == _IDS_NDIM and not t.is_floating_point()]
    lengths = {tensor.shape[1] for tensor in ids}
    return SequenceAxis(1, lengths.pop()) if len(lengths) == 1 else None


def find_axis(batch: Any, lengths: Iterable[int]) -> SequenceAxis | None:
    """Find the axis whose length is one that the model attends to."""
    tensors = list(tensors_in_batch(batch))
    for length in lengths:
        for tensor in tensors:
            if length in tensor.shape[1:]:
                return SequenceAxis(tensor.shape[1:].index(length) + 1, length)
    return None


def with_length(batch: Any, sequence: SequenceAxis, length: int) -> Any:
    """Return the batch with another sequence length, repeating tokens as needed.

    Tensors whose values a prediction does not read (over 2**20 elements) are on the meta device.
    """

    def change(tensor: Tensor) -> Tensor:
        axes = [a for a in range(sequence.axis, tensor.ndim) if tensor.shape[a] == sequence.length]
        for axis in axes:
            tensor = _resized_axis(tensor, axis, length)
        return tensor

    return _mapped(batch, _once(change), lambda of_list: of_list)


def _resized_axis(tensor: Tensor, axis: int, size: int) -> Tensor:
    shape = (*tensor.shape[:axis], size, *tensor.shape[axis + 1 :])
    if math.prod(shape) > MAX_KNOWN_NUMEL:
        return torch.empty(shape, dtype=tensor.dtype, device="meta")
    chosen = torch.arange(size, device=tensor.device) % tensor.shape[axis]
    return tensor.detach().index_select(axis, chosen)


# A tensor that occurs twice in the batch must stay one tensor.
def _once(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    changed: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
        return changed[id(tensor)]

    return once


def _mapped(
    value: Any, of_tensor: Callable[[Tensor], Tensor], of_list: Callable[[Any], Any]
) -> Any:
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, list) and value and next(tensors_in(value), None) is None:
        return of_list(value)
    items = {name: _mapped(item, of_tensor, of_list) for name, item in items_of(value)}
    if items:
        return with_items(value, items)
    held = {name: _mapped(item, of_tensor, of_list) for name, item in attributes_of(value)}
    return with_attributes(value, held)


def _resized(values: list[Any], now: int, num_samples: int) -> list[Any]:
    if len(values) != now:
        return values
    return [values[i % now] for i in range(num_samples)]
