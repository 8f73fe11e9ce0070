"""What a fit needed, at its end."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_memsave.units import format_bytes


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """Memory and speed of one fit; the figures of memory are maxima over its steps and ranks.

    Args:
        device: Name of the device.
        peak_bytes: Peak of allocated memory on CUDA, of live tensors elsewhere; ``None`` if nothing
            could be counted.
        by_category: The peak by category, of rank zero; empty on CUDA.
        peak_reserved_bytes: Peak of what torch's CUDA allocator reserved; ``None`` elsewhere.
        nvml_peak_bytes: Largest value that the driver told for this process, or, where it does not
            tell that, for the whole GPU; seen at the logged steps only. ``None`` if unknown.
        num_steps: Optimizer steps.
        num_samples: Samples in all training batches of all ranks.
        seconds: From the start of training to the end of the last batch, without validation.
        notes: What was not measured and why, one line each.
    """

    device: str
    peak_bytes: int | None
    by_category: Mapping[str, int] = field(default_factory=dict)
    peak_reserved_bytes: int | None = None
    nvml_peak_bytes: int | None = None
    num_steps: int = 0
    num_samples: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks per second."""
        return self.num_samples / self.seconds if self.seconds else 0.0

    @property
    def steps_per_second(self) -> float:
        """Optimizer steps per second."""
        return self.num_steps / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain values, for JSON.

        Returns:
            The fields under their names, with the two rates.
        """
        return asdict(self) | {
            "by_category": dict(self.by_category),
            "notes": list(self.notes),
            "samples_per_second": self.samples_per_second,
            "steps_per_second": self.steps_per_second,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Write what is known as pairs of name and value.

        Returns:
            For example ``("peak memory", "1.50 GiB")``.
        """
        sizes = {
            "peak memory": self.peak_bytes,
            **{f"  {name.replace('_', ' ')}": n for name, n in self.by_category.items() if n},
            "peak reserved": self.peak_reserved_bytes,
            "peak seen by NVML": self.nvml_peak_bytes,
        }
        return [
            ("device", self.device),
            *((name, format_bytes(n)) for name, n in sizes.items() if n is not None),
            ("time", f"{self.seconds:.1f} s"),
            ("steps", f"{self.num_steps} ({self.steps_per_second:.2f} per second)"),
            ("samples", f"{self.num_samples} ({self.samples_per_second:.1f} per second)"),
            *(("note", note) for note in self.notes),
        ]


def print_summary(summary: MemorySummary, console: Console | None = None) -> None:
    """Show a summary.

    Args:
        summary: What to show.
        console: Where to; without one, standard output: a table on a terminal, plain lines if not.
    """
    console = console or Console(file=sys.stdout)
    title = "Memory of this fit"
    if console.is_terminal:
        table = Table("", "", title=title, title_justify="left", show_header=False)
        for name, value in summary.rows():
            table.add_row(name, value)
        console.print(table, markup=False)
        return
    # Not through rich, which would wrap long lines.
    console.file.write(f"{title}\n")
    console.file.writelines(f"  {name}: {value}\n" for name, value in summary.rows())
    console.file.flush()
