"""How the memory of a training step divides into categories."""

from dataclasses import dataclass, fields
from typing import Self

from lightning_memsave.units import format_bytes


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """Bytes by category, in the words of torch's ``MemTracker``.

    Args:
        parameter_bytes: Parameters.
        buffer_bytes: Buffers of modules.
        gradient_bytes: Gradients held in ``Parameter.grad``.
        optimizer_state_bytes: What the optimizer keeps per parameter.
        activation_bytes: Made by the forward pass, or by recomputing it during backward.
        input_bytes: The batch.
        temporary_bytes: Made during backward or the optimizer step and gone after it.
        other_bytes: Everything else.

    Example:
        >>> a = MemoryBreakdown(parameter_bytes=400, gradient_bytes=100)
        >>> (a + a).total_bytes, a.by_category()["parameter"]
        (1000, 400)
    """

    parameter_bytes: int = 0
    buffer_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_state_bytes: int = 0
    activation_bytes: int = 0
    input_bytes: int = 0
    temporary_bytes: int = 0
    other_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum over all categories, in bytes."""
        return sum(self.by_category().values())

    def by_category(self) -> dict[str, int]:
        """Give the bytes of each category under its name without the unit.

        Returns:
            For example ``{"parameter": 400, "buffer": 0, ...}``, in the order of the fields.
        """
        return {f.name.removesuffix("_bytes"): getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_categories(cls, by_category: dict[str, int]) -> Self:
        """Make a breakdown from what ``by_category`` gave.

        Args:
            by_category: Bytes under category names; missing ones are 0.

        Returns:
            The breakdown.
        """
        return cls(**{f"{name}_bytes": num_bytes for name, num_bytes in by_category.items()})

    def __add__(self, other: "MemoryBreakdown") -> "MemoryBreakdown":
        mine, theirs = self.by_category(), other.by_category()
        return MemoryBreakdown.from_categories({k: mine[k] + theirs[k] for k in mine})

    def __str__(self) -> str:
        parts = [f"{k} {format_bytes(v)}" for k, v in self.by_category().items() if v]
        return f"{format_bytes(self.total_bytes)} ({', '.join(parts)})"
