"""Memory of a training step by category, marks for host memory, and what runs as on CUDA."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from rich.table import Table
from torch import Tensor, UntypedStorage

from lightning_memsave.units import format_bytes


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """Bytes by category, named as in torch's ``MemTracker``.

    Args:
        parameter_bytes: Parameters.
        weight_copy_bytes: Copies of parameters in another precision, as made by autocast.
        buffer_bytes: Buffers of modules.
        gradient_bytes: Gradients in ``Parameter.grad``.
        optimizer_state_bytes: State of optimizers.
        activation_bytes: Allocated in forward, or in its recomputation during backward.
        input_bytes: The batch.
        temporary_bytes: Temporaries of backward and of the optimizer step.
        other_bytes: Everything else.
        host_bytes: Moved to the host by a technique; not part of the total, which is for the
            device.

    Breakdowns can be added, and scaled by a factor; ``str`` gives one line, ``rich.print`` a table,
    and ``to_dict`` plain values for ``json.dumps``.

    Example:
        >>> a = MemoryBreakdown(parameter_bytes=400, gradient_bytes=100)
        >>> (a + a).total_bytes, a.by_category()["parameter"], (a * 0.5).gradient_bytes
        (1000, 400, 50)
    """

    parameter_bytes: int = 0
    weight_copy_bytes: int = 0
    buffer_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_state_bytes: int = 0
    activation_bytes: int = 0
    input_bytes: int = 0
    temporary_bytes: int = 0
    other_bytes: int = 0
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum over all categories of the device, in bytes."""
        return sum(self.by_category().values())

    def by_category(self) -> dict[str, int]:
        """Return the bytes by category, such as ``{"parameter": 400, "buffer": 0, ...}``."""
        return {
            f.name.removesuffix("_bytes"): getattr(self, f.name)
            for f in fields(self)
            if f.name != "host_bytes"
        }

    @classmethod
    def from_categories(cls, by_category: Mapping[str, int]) -> Self:
        """Make a breakdown from the result of ``by_category``; missing categories are 0."""
        return cls(**{f"{name}_bytes": num_bytes for name, num_bytes in by_category.items()})

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON: ``total_bytes``, ``by_category``, ``host_bytes``."""
        return {
            "total_bytes": self.total_bytes,
            "by_category": self.by_category(),
            "host_bytes": self.host_bytes,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """Restore a breakdown from the result of ``to_dict``, such as from a JSON file."""
        breakdown = cls.from_categories(found["by_category"])
        return replace(breakdown, host_bytes=found.get("host_bytes", 0))

    def __add__(self, other: "MemoryBreakdown") -> "MemoryBreakdown":
        return MemoryBreakdown(
            *(getattr(self, f.name) + getattr(other, f.name) for f in fields(self))
        )

    def __mul__(self, factor: float) -> "MemoryBreakdown":
        return MemoryBreakdown(*(round(getattr(self, f.name) * factor) for f in fields(self)))

    def __rich__(self) -> Table:
        table = Table("category", box=None, pad_edge=False)
        for name in ("bytes", "share"):
            table.add_column(name, justify="right")
        total = self.total_bytes
        for category, num_bytes in self.by_category().items():
            if num_bytes:
                name = category.replace("_", " ")
                table.add_row(name, format_bytes(num_bytes), f"{num_bytes / total:.1%}")
        table.add_row("total", format_bytes(total), "", style="bold")
        if self.host_bytes:
            table.add_row("on the host", format_bytes(self.host_bytes), "")
        return table

    def __str__(self) -> str:
        parts = [f"{k} {format_bytes(v)}" for k, v in self.by_category().items() if v]
        return f"{format_bytes(self.total_bytes)} ({', '.join(parts)})"


HOST = "host"
"""Kept on the host by a technique; counted apart from the categories of `MemoryBreakdown`."""


class _Context(threading.local):
    category = ""
    repeats = 1


_context = _Context()


@contextlib.contextmanager
def counted_as(category: str) -> Iterator[None]:
    """Let tensors that this thread makes inside count under a category, such as ``"parameter"``."""
    before, _context.category = _context.category, category
    try:
        yield
    finally:
        _context.category = before


def category_in_context() -> str:
    return _context.category


@contextlib.contextmanager
def repeated(number: int) -> Iterator[None]:
    """Let what this thread computes inside stand for as many equal computations."""
    before, _context.repeats = _context.repeats, _context.repeats * number
    try:
        yield
    finally:
        _context.repeats = before


def repeats_in_context() -> int:
    """Return how many computations one stands for inside `repeated`; 1 outside."""
    return _context.repeats


def each_part(
    of: Tensor, num: int, size: int, use: Callable[[slice], None], *, is_first_apart: bool = False
) -> None:
    """Call a function with each part of so many rows or elements.

    Of fake tensors, which have no values, parts of the full size are equal, but for the first one
    where ``is_first_apart``: one of them stands for all.
    """
    parts = [slice(start, min(start + size, num)) for start in range(0, num, size)]
    repeats = [1] * len(parts)
    first, end = int(is_first_apart), num // size
    if is_fake(of) and first < end:
        parts[first:end], repeats[first:end] = [parts[first]], [end - first]
    for part, number in zip(parts, repeats, strict=True):
        with repeated(number):
            use(part)


def host_copies() -> contextlib.AbstractContextManager[None]:
    """Mark tensors that this thread makes inside as host memory, also if the device is the CPU.

    Memory counted on a CPU represents that of a GPU, so host copies must not count.
    """
    return counted_as(HOST)


_CATEGORY = "_memsave_category"


def mark_as_host(tensor: Tensor) -> None:
    """Mark the storage of a tensor as host memory for as long as it lives."""
    mark_as(HOST, tensor)


def mark_as(category: str, tensor: Tensor) -> None:
    """Let the storage of a tensor count under a category for as long as it lives."""
    setattr(tensor.untyped_storage(), _CATEGORY, category)


def mark_of(storage: UntypedStorage) -> str | None:
    """Return the category that `mark_as` has given a storage."""
    return getattr(storage, _CATEGORY, None)


def is_host(storage: UntypedStorage) -> bool:
    return mark_of(storage) == HOST


def is_fake(tensor: Tensor) -> bool:
    # Without an import there is no instance.
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


_num_emulations = 0


@contextlib.contextmanager
def emulating_cuda() -> Iterator[None]:
    """Let fake tensors count as CUDA tensors, so that techniques choose what they do on a GPU."""
    global _num_emulations  # noqa: PLW0603 - as for host copies
    _num_emulations += 1
    try:
        yield
    finally:
        _num_emulations -= 1


def on_cuda(tensor: Tensor) -> bool:
    """Return whether a tensor is on a CUDA GPU, or a fake one inside `emulating_cuda`."""
    return tensor.is_cuda or (_num_emulations > 0 and is_fake(tensor))
