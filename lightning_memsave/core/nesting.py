"""Look into batches and outputs, whatever they are made of, and make others of the same form."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """List what a container holds.

    Args:
        value: Anything.

    Returns:
        Pairs of name and item for mappings, lists, tuples, named tuples and dataclasses; nothing
        for all else.

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
    """Make a container of the same form with other items.

    Args:
        value: A container of ``items_of``; it is not changed.
        items: An item for each name of ``items_of``.

    Returns:
        A container of the same type.

    Example:
        >>> with_items((1, 2), {0: 3, 1: 4})
        (3, 4)
    """
    # Hugging Face's ModelOutput is a mapping and a dataclass; absent fields are no items of it.
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if isinstance(value, Mapping) and is_record:
        return type(value)(**items)
    if isinstance(value, MutableMapping):
        twin: Any = copy.copy(value)  # with what else it has: a default, encodings of a tokenizer
        twin.update(items)
        return twin
    if is_record:
        return _with_fields(value, items)
    if hasattr(value, "_fields"):
        return type(value)(*items.values())
    return type(value)(items if isinstance(value, Mapping) else items.values())


def attributes_of(value: Any) -> list[tuple[str, Any]]:
    """List what an object of a user's class holds, such as a batch that is no container.

    Args:
        value: Anything.

    Returns:
        Pairs of name and attribute; nothing for containers, modules, functions and classes.

    Example:
        >>> from types import SimpleNamespace
        >>> attributes_of(SimpleNamespace(x=1)), attributes_of([1])
        ([('x', 1)], [])
    """
    if isinstance(value, Tensor | nn.Module | type | ModuleType) or callable(value):
        return []
    return [] if items_of(value) else list(getattr(value, "__dict__", {}).items())


def map_tensors(value: Any, function: Callable[[Tensor], Any], *, in_objects: bool = False) -> Any:
    """Apply a function to all tensors in any nesting.

    Args:
        value: Anything; it is not changed.
        function: Of a tensor.
        in_objects: Whether to look into the attributes of objects that are no containers, too;
            not into objects that these have.

    Returns:
        The same form with what the function gave.
    """
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
    """Make an object like another one with other attributes.

    Args:
        value: It is not changed.
        attributes: By name.

    Returns:
        The object itself if nothing is different, else a copy.
    """
    different = {n: v for n, v in attributes.items() if v is not value.__dict__[n]}
    return _with_fields(value, different) if different else value


# Not `replace`, which would call `__post_init__` and leaves out fields that are no arguments.
def _with_fields(value: Any, items: Mapping[Any, Any]) -> Any:
    twin = copy.copy(value)
    for name, item in items.items():
        object.__setattr__(twin, name, item)  # it may be frozen
    return twin
