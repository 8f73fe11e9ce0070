"""Find tensors in nested structures, and the storages and devices behind them."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_memsave.core.nested import attributes_of, items_of

if TYPE_CHECKING:
    import weakref


class LiveStorage:
    __slots__ = ("born", "category", "node", "num_bytes", "origin", "ref")

    def __init__(self, category: str, born: int) -> None:
        self.ref: weakref.ref[torch.UntypedStorage] | None = None
        self.category = category
        self.born = born
        self.num_bytes = 0
        self.node = -1
        """The autograd node that ran when it was allocated; see ``current_node``."""
        self.origin: Any = None
        """Information of subclasses on the allocation."""


def tensors_in_batch(batch: object) -> Iterator[Tensor]:
    """Find the tensors of a batch, also in attributes of the user's own classes."""
    if isinstance(batch, Tensor):
        yield batch
        return
    items = items_of(batch)
    for _, item in items:
        yield from tensors_in_batch(item)
    for _, item in attributes_of(batch) if not items else ():
        yield from tensors_in(item)


def tensors_in(value: object) -> Iterator[Tensor]:
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
    """Iterate over the tensors in arguments or results of an operator; fast, for hot paths."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from operands(value)


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # a DTensor names its mesh too
                yield from storages_of(inner)
        return
    if is_lazy(tensor):  # it gets its size in the first forward pass
        return
    layout = tensor.layout
    if layout is torch.strided:
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:  # the wrappers of torch.func have none
            return
        yield storage
    elif layout is torch.sparse_coo:
        yield from storages_of(tensor._indices())
        yield from storages_of(tensor._values())


def device_of(module: nn.Module | None) -> torch.device:
    parameter = None if module is None else next(module.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def with_index(device: torch.device) -> torch.device:
    """Return a device with its index, as in ``tensor.device``: "cuda:0" for "cuda"."""
    return torch.empty(0, device=device).device


def on_storage_resize(resized: Callable[[torch.UntypedStorage], None]) -> Callable[[], None]:
    """Observe ``UntypedStorage.resize_``, no operator, with which FSDP frees parameters."""
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


# Of all threads, as the method is process-wide: it is restored when the last listener stops.
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
