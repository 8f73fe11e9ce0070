"""Find tensors in nested structures, and the storages and devices behind them."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_memsave.core.nested import attributes_of, items_of

if TYPE_CHECKING:
    import weakref


class LiveStorage:
    """One live storage.

    Args:
        category: As in `MemoryBreakdown`.
        born: How many storages there were when it was made.
    """

    __slots__ = ("born", "category", "node", "num_bytes", "origin", "ref")

    def __init__(self, category: str, born: int) -> None:
        self.ref: weakref.ref[torch.UntypedStorage] | None = None
        self.category = category
        self.born = born
        self.num_bytes = 0
        self.node = -1
        """Which node of the graph ran when it was made; see ``current_node``."""
        self.origin: Any = None
        """What a subclass notes of where it comes from."""


def tensors_in_batch(batch: object) -> Iterator[Tensor]:
    """Find the tensors of a batch, which may be an object of a user's class.

    Args:
        batch: As for `tensors_in`; of objects also the attributes.

    Yields:
        Each tensor, in order.

    Example:
        >>> from types import SimpleNamespace
        >>> [tensor.item() for tensor in tensors_in_batch(SimpleNamespace(x=torch.tensor(1)))]
        [1]
    """
    if isinstance(batch, Tensor):
        yield batch
        return
    items = items_of(batch)
    for _, item in items:
        yield from tensors_in_batch(item)
    for _, item in attributes_of(batch) if not items else ():
        yield from tensors_in(item)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Find the tensors of a nested structure.

    Args:
        value: Tensors in any nesting of sequences, mappings and dataclasses; all else is ignored.

    Yields:
        Each tensor, in order; one that stands there twice comes twice.

    Example:
        >>> [tensor.item() for tensor in tensors_in({"a": torch.tensor(1), "b": [torch.tensor(2)]})]
        [1, 2]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def operands(values: Iterable[object]) -> Iterator[Tensor]:
    """Find the tensors among what an operator takes or gives.

    Args:
        values: Operators take and give tensors and lists of them; this walk is on a hot path.

    Yields:
        Each tensor, in order.
    """
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from operands(value)


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Find the storages that hold a tensor's numbers.

    Args:
        tensor: Also a sparse one, or a subclass that wraps others, such as a DTensor.

    Yields:
        One storage for an ordinary tensor; none for what has no memory of its own.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # a DTensor names its mesh too
                yield from storages_of(inner)
    elif tensor.layout is torch.sparse_coo:
        yield from storages_of(tensor._indices())
        yield from storages_of(tensor._values())
    elif tensor.layout is torch.strided:
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:  # the wrappers of torch.func have none
            return
        yield storage


def device_of(module: nn.Module | None) -> torch.device:
    """Find where a module is.

    Args:
        module: Any module, or none.

    Returns:
        The device of its first parameter, and the CPU if there is none.
    """
    parameter = None if module is None else next(module.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def with_index(device: torch.device) -> torch.device:
    """Write a device as tensors do: "cuda:0" where people write "cuda".

    Args:
        device: With or without an index.

    Returns:
        The device that a tensor made there says.
    """
    return torch.empty(0, device=device).device


def on_storage_resize(resized: Callable[[torch.UntypedStorage], None]) -> Callable[[], None]:
    """Hear of ``UntypedStorage.resize_``, with which FSDP frees parameters: no operator shows it.

    Args:
        resized: Called with each storage after it was resized.

    Returns:
        A function that stops it.
    """
    with _CHANGING:
        if not _LISTENERS:
            _UNINSTALL.append(_install())
        _LISTENERS.append(resized)

    def undo() -> None:
        with _CHANGING:
            _LISTENERS.remove(resized)
            if not _LISTENERS:
                _UNINSTALL.pop()()

    return undo


# Of all threads, as the method is one for the process: it is put back when the last one stops.
_LISTENERS: list[Callable[[torch.UntypedStorage], None]] = []
_UNINSTALL: list[Callable[[], None]] = []
_CHANGING = threading.Lock()


def _install() -> Callable[[], None]:
    own = vars(torch.UntypedStorage).get("resize_")
    previous = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result: torch.UntypedStorage = previous(storage, size)
        for resized in _LISTENERS:
            resized(storage)
        return result

    def undo() -> None:
        if own is None:
            del torch.UntypedStorage.resize_
        else:
            torch.UntypedStorage.resize_ = own  # type: ignore[method-assign]

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    return undo
