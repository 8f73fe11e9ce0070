"""Traverse, rebuild, split and merge nested batches and outputs."""

import copy
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_memsave.errors import IncompatibleError, Problem


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """List the items of a container.

    Example:
        >>> items_of({"x": 1}), items_of([2]), items_of("text")
        ([('x', 1)], [(0, 2)], [])
    """
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []


def with_items(value: Any, items: Mapping[Any, Any]) -> Any:
    """Rebuild a container with other items.

    Example:
        >>> with_items((1, 2), {0: 3, 1: 4})
        (3, 4)
    """
    # Hugging Face's ModelOutput is a mapping and a dataclass; fields that are None are not items.
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if isinstance(value, Mapping) and is_record:
        return type(value)(**items)
    if isinstance(value, MutableMapping):
        copied: Any = copy.copy(value)  # with other attributes, such as a default factory
        copied.update(items)
        return copied
    if is_record:
        return _with_fields(value, items)
    if hasattr(value, "_fields"):
        return type(value)(*items.values())
    return type(value)(items if isinstance(value, Mapping) else items.values())


def attributes_of(value: Any) -> list[tuple[str, Any]]:
    """List the attributes of an object, such as a batch of the user's own class.

    Example:
        >>> from types import SimpleNamespace
        >>> attributes_of(SimpleNamespace(x=1)), attributes_of([1])
        ([('x', 1)], [])
    """
    if isinstance(value, Tensor | nn.Module | type | ModuleType) or callable(value):
        return []
    return [] if items_of(value) else list(getattr(value, "__dict__", {}).items())


def map_tensors(value: Any, function: Callable[[Tensor], Any], *, in_objects: bool = False) -> Any:
    """Apply a function to all tensors in any nesting."""
    if isinstance(value, Tensor):
        return function(value)
    items = {
        name: map_tensors(item, function, in_objects=in_objects) for name, item in items_of(value)
    }
    if items or not in_objects:
        return with_items(value, items) if items else value
    held = {name: map_tensors(item, function) for name, item in attributes_of(value)}
    return with_attributes(value, held)


def with_attributes(value: Any, attributes: Mapping[str, Any]) -> Any:
    """Return a copy of an object with other attributes; the object itself if none differs."""
    different = {n: v for n, v in attributes.items() if v is not value.__dict__[n]}
    return _with_fields(value, different) if different else value


# Not `replace`, which would call `__post_init__` and does not accept fields with `init=False`.
def _with_fields(value: Any, items: Mapping[Any, Any]) -> Any:
    copied = copy.copy(value)
    for name, item in items.items():
        object.__setattr__(copied, name, item)  # it may be frozen
    return copied


# A list of these has one entry per sample; other lists are traversed.
_PER_SAMPLE = (str, bytes, int, float, bool, type(None))


Path: TypeAlias = tuple[Any, ...]
"""Position in a batch: keys, indices and names of fields."""


def count_samples(batch: Any, whole: frozenset[Path] = frozenset()) -> int:
    """Count the samples of a batch."""
    sizes = {path: size for path, size in _sizes(batch) if path not in whole}
    if len(set(sizes.values())) == 1:
        return next(iter(sizes.values()))
    found = ", ".join(f"{_indices(path)}: {size}" for path, size in sizes.items()) or "none"
    raise IncompatibleError(
        "micro_batching",
        [
            Problem(
                f"batch of type `{type(batch).__name__}`",
                f"its tensors and lists have different numbers of samples ({found})",
                "Pass `split_batch=`, a function of batch and size that returns a list of batches, "
                "or set `micro_batch_size=None`.",
            )
        ],
    )


def first_size(batch: Any) -> int:
    """Count the samples of the first tensor or list of values in a batch.

    Example:
        >>> first_size({"x": torch.zeros(4, 2), "y": torch.zeros(4)}), first_size(["a", "b"])
        (4, 2)
    """
    rows = len(batch) if isinstance(batch, list | tuple) else 1
    return next((size for _, size in _sizes(batch)), max(rows, 1))


def split_samples(batch: Any, size: int, whole: frozenset[Path] = frozenset()) -> list[Any]:
    """Split a batch into batches of at most a number of samples."""
    num_samples = count_samples(batch, whole)
    if size >= num_samples:
        return [batch]
    starts = list(range(0, num_samples, size))
    if size > 2 and num_samples - starts[-1] == 1:
        starts[-1] -= 1
    slices = itertools.starmap(slice, itertools.pairwise([*starts, num_samples]))
    return [_map(batch, operator.itemgetter(part), whole) for part in slices]


def pick_samples(batch: Any, indices: Sequence[int], whole: frozenset[Path] = frozenset()) -> Any:
    """Copy some samples of a batch."""

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf[torch.tensor([*indices], device=leaf.device)]
        if _num_of_own(leaf) is not None:
            return leaf[torch.tensor([*indices])]
        return type(leaf)(leaf[index] for index in indices)

    return _map(batch, pick, whole)


def find_shared_leaves(batch: Any) -> list[frozenset[Path]]:
    leaves = [(path, value) for path, value in leaves_of(batch) if isinstance(value, Tensor)]
    sizes = {leaf.shape[0] for _, leaf in leaves if leaf.ndim}
    single = {path for path, leaf in leaves if leaf.ndim and leaf.shape[0] == 1 and len(sizes) > 1}
    vectors = {path for path, leaf in leaves if leaf.ndim == 1 and leaf.is_floating_point()}
    both = frozenset(single | vectors)
    is_all = len(both) == sum(1 for _ in _sizes(batch))
    return [frozenset(single)] + ([both] if vectors - single and not is_all else [])


def leaves_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Iterate over the tensors and lists of samples in a batch."""
    if isinstance(value, Tensor) or _is_list_of_samples(value):
        yield path, value
    else:
        for name, item in items_of(value):
            yield from leaves_of(item, (*path, name))


def parts_of(batch: Any) -> frozenset[Path]:
    """Return where a batch has tensors and lists of samples: some may be optional."""
    return frozenset(path for path, _ in leaves_of(batch))


def leaf_at(batch: Any, path: Path) -> Any:
    """Return the leaf at a path from `leaves_of`."""
    for name in path:
        batch = dict(items_of(batch))[name]
    return batch


def path_text(path: Path) -> str:
    """Format a path.

    Example:
        >>> path_text(("labels",)), path_text((1,)), path_text(())
        ('`labels`', '`batch[1]`', 'the batch')
    """
    if len(path) == 1 and isinstance(path[0], str):
        return f"`{path[0]}`"
    return f"`batch{_indices(path)}`" if path else "the batch"


def sum_in_order(losses: Sequence[Tensor]) -> Tensor:
    """Sum losses as a loop does, half precision in float32.

    A sum of all at once rounds otherwise on a GPU.
    """
    wide = [loss if loss.dtype == torch.float64 else loss.float() for loss in losses]
    return functools.reduce(torch.add, wide).to(losses[0].dtype)


def merge_outputs(
    outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float], path: str = "output"
) -> Any:
    """Merge the outputs of a function for micro-batches to that of the whole batch."""
    first = outputs[0]
    if all(isinstance(output, Tensor) for output in outputs):
        return _merge_tensors(outputs, sizes, weights, path)
    if _holds_one_per_sample(outputs, sizes):
        return [item for output in outputs for item in output]
    names = [name for name, _ in items_of(first)]
    by_name = [dict(items_of(output)) for output in outputs]
    is_one_form = all(type(output) is type(first) for output in outputs)
    if names and is_one_form and all(list(items) == names for items in by_name):
        merged = {
            name: merge_outputs(
                [items[name] for items in by_name], sizes, weights, f"{path}[{name!r}]"
            )
            for name in names
        }
        return with_items(first, merged)
    if all(isinstance(output, float) for output in outputs):
        return first + sum(w * (output - first) for w, output in zip(weights, outputs, strict=True))
    if not names and is_one_form and all(output == first for output in outputs):
        return first
    raise ValueError(
        f"`{path}` is neither a list with one entry per sample, nor a scalar to average, nor equal "
        f"in all micro-batches (its type is `{type(first).__name__}`)"
    )


def _merge_tensors(
    outputs: Sequence[Tensor], sizes: Sequence[int], weights: Sequence[float], path: str
) -> Tensor:
    if all(o.ndim > 0 and o.shape[0] == size for o, size in zip(outputs, sizes, strict=True)):
        return torch.cat(list(outputs))
    if all(output.ndim == 0 and output.is_floating_point() for output in outputs):
        stacked = torch.stack(list(outputs))
        # By differences, so that equal values are unchanged bit for bit.
        return outputs[0] + ((stacked - outputs[0]) * stacked.new_tensor(weights)).sum()
    if all(torch.equal(output, outputs[0]) for output in outputs):
        return outputs[0]
    shapes = ", ".join(str(tuple(output.shape)) for output in outputs[:3])
    raise ValueError(
        f"`{path}` has neither one entry per sample nor the same value in all micro-batches "
        f"(shapes {shapes})"
    )


# False for a list of tensors that each have one entry per sample: it is traversed.
def _holds_one_per_sample(outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
    if not all(isinstance(o, list) and len(o) == n for o, n in zip(outputs, sizes, strict=True)):
        return False
    return not all(
        isinstance(item, Tensor) and item.ndim > 0 and item.shape[0] == size
        for output, size in zip(outputs, sizes, strict=True)
        for item in output
    )


def _sizes(value: Any, path: Path = ()) -> Iterator[tuple[Path, int]]:
    if (number := _num_of_own(value)) is not None:
        yield path, number
    elif isinstance(value, Tensor):
        if value.ndim:
            yield path, value.shape[0]
    elif _is_list_of_samples(value):
        yield path, len(value)
    else:
        for name, item in items_of(value):
            yield from _sizes(item, (*path, name))


def _indices(path: Path) -> str:
    return "".join(f"[{name!r}]" for name in path) or "batch"


def _is_list_of_samples(value: Any) -> bool:
    is_sequence = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    if not is_sequence or not value:
        return False
    if all(isinstance(item, _PER_SAMPLE) for item in value):
        return True
    # As of detection, where images have more or fewer boxes; a list of whole batches is traversed.
    is_mappings = isinstance(value, list) and all(isinstance(item, Mapping) for item in value)
    return is_mappings and len({size for _, size in _sizes(dict(enumerate(value)))}) > 1


def _num_of_own(value: Any) -> int | None:
    """Return the number of samples of an object that splits itself: `TensorDict`, PyG's `Batch`."""
    size = getattr(value, "batch_size", None)
    if isinstance(size, torch.Size) and size and hasattr(type(value), "__getitem__"):
        return size[0]
    return value.num_graphs if hasattr(type(value), "from_data_list") else None


def _part_of_own(value: Any, function: Callable[[Any], Any]) -> Any:
    part = function(value)
    return type(value).from_data_list(part) if isinstance(part, list) else part


# Rebuilds a batch with a function applied to all leaves with one entry per sample.
def _map(
    value: Any, function: Callable[[Any], Any], whole: frozenset[Path], path: Path = ()
) -> Any:
    if path in whole:
        return value
    if _num_of_own(value) is not None:
        return _part_of_own(value, function)
    if isinstance(value, Tensor):
        return function(value) if value.ndim else value
    if _is_list_of_samples(value):
        return function(value)
    items = {name: _map(item, function, whole, (*path, name)) for name, item in items_of(value)}
    return with_items(value, items) if items else value
