"""What a fit needed, at its end."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from lightning_memsave.core.plain_text import print_to
from lightning_memsave.units import MIB, format_bytes

if TYPE_CHECKING:  # loaded by fits that predict
    from lightning_memsave.prediction.result import MemoryPrediction

MAX_LINES = 3
_TITLE = "Memory of this fit"
_WHERE_WHY = "why is in the log, at the start of fit"


@dataclass(frozen=True, slots=True, repr=False)
class MemorySummary(JupyterMixin):
    """Memory and speed of one fit; the figures of memory are maxima over its steps and ranks."""

    device: str
    peak_bytes: int | None
    by_category: Mapping[str, int] = field(default_factory=dict)
    peak_reserved_bytes: int | None = None
    nvml_peak_bytes: int | None = None
    is_nvml_of_gpu: bool = False
    host_bytes: int = 0
    num_steps: int = 0
    num_samples: int = 0
    seconds: float = 0.0
    num_counted_steps: int | None = None
    had_larger_batches: bool = False
    notes: tuple[str, ...] = ()
    prediction: "MemoryPrediction | None" = None
    no_prediction: str = ""

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks per second."""
        return self.num_samples / self.seconds if self.seconds else 0.0

    @property
    def steps_per_second(self) -> float:
        return self.num_steps / self.seconds if self.seconds else 0.0

    @property
    def prediction_error(self) -> float | None:
        """Predicted peak over measured peak, less 1; ``None`` if there is nothing to compare.

        The optimizer makes its state at the end of the first step, so that a run of one step has
        not the peak that is predicted for all others.
        """
        if self.prediction is None or not self.peak_bytes or self._ended_before_state:
            return None
        return self.prediction.measurable_bytes / self.peak_bytes - 1

    @property
    def _ended_before_state(self) -> bool:
        predicted = self.prediction
        has_state = predicted is not None and predicted.peak.optimizer_state_bytes > 0
        return has_state and self.num_steps < 2

    def to_dict(self) -> dict[str, Any]:
        predicted = ("prediction", "no_prediction")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in predicted}
        return values | {
            "by_category": dict(self.by_category),
            "notes": list(self.notes),
            "samples_per_second": self.samples_per_second,
            "steps_per_second": self.steps_per_second,
        }

    def rows(self) -> list[tuple[str, str]]:
        reserved_bytes = None if self.prediction is None else self.prediction.reserved_bytes
        nvml = "peak seen by NVML" + (" on the whole GPU" if self.is_nvml_of_gpu else "")
        sizes = {
            "peak reserved": self._beside(self.peak_reserved_bytes, reserved_bytes),
            nvml: self._beside(self.nvml_peak_bytes, None),
        }
        return [
            ("device", self.device),
            *self._peak_rows(),
            *self._limits(),
            *((name, size) for name, size in sizes.items() if size),
            *([("not predicted", _WHERE_WHY)] if self.no_prediction else []),
            ("time", f"{self.seconds:.1f} s"),
            ("steps", f"{self.num_steps} ({self.steps_per_second:.2f} per second)"),
            ("samples", f"{self.num_samples} ({self.samples_per_second:.1f} per second)"),
            *self._speed(),
            *(("note", note) for note in self.notes),
        ]

    def _peak_rows(self) -> list[tuple[str, str]]:
        predicted, error = self.prediction, self.prediction_error
        peak = [] if self.peak_bytes is None else [format_bytes(self.peak_bytes)]
        if predicted is not None:
            of_measured = "" if error is None else f" ({100 * error:+.2f} %)"
            first = " for the first batch" if self.had_larger_batches else ""
            size = format_bytes(predicted.measurable_bytes)
            peak.append(f"predicted {size}{first}{of_measured}")
        rows = [("peak memory", ", ".join(peak))] if peak else []
        foreseen = {} if predicted is None else predicted.peak.by_category()
        for name in foreseen or self.by_category:
            # On CUDA nothing tells one category from another.
            measured = self.by_category.get(name, 0) if self.by_category else None
            if measured or foreseen.get(name):
                size = self._beside(measured, foreseen.get(name))
                rows.append((f"  {name.replace('_', ' ')}", size))
        foreseen_bytes = 0 if predicted is None else predicted.peak.host_bytes
        # Else it is what a repeated batch needs, such as buffers: no figure of the user's.
        is_offloaded = predicted is not None and "offload" in predicted.settings
        if self.host_bytes or (foreseen_bytes and (is_offloaded or foreseen_bytes >= MIB)):
            size = self._beside(self.host_bytes or None, foreseen_bytes or None)
            rows.append(("on the host", size))
        return rows

    def _speed(self) -> list[tuple[str, str]]:
        if self.prediction is None or not self.num_steps or self.had_larger_batches:
            return []
        work, seconds = self.prediction.work, [self.seconds / self.num_steps]
        speed = work.speed(seconds, work.throughput, in_samples=False)
        return [("each device", speed)] if speed else []

    # What must be known to compare the two.
    def _limits(self) -> list[tuple[str, str]]:
        rows = []
        if self.num_counted_steps is not None and self.num_counted_steps < self.num_steps:
            rows.append(("counted in", f"{self.num_counted_steps} of {self.num_steps} steps"))
        if self.prediction is not None and self.had_larger_batches:
            rows.append(("not comparable", "later batches were larger than the first"))
        if self._ended_before_state:
            rows.append(("not comparable", "optimizer state comes with the second step"))
        guesses = () if self.prediction is None else self.prediction.guesses
        return rows + [("guessed", guess) for guess in shortened(guesses)]

    def __rich__(self) -> Table:
        table = Table("", "", title=_TITLE, title_justify="left", show_header=False)
        for row in self.rows():
            table.add_row(*map(Text, row))
        return table

    def __str__(self) -> str:
        return "\n".join([_TITLE, *(f"  {name}: {value}" for name, value in self.rows())])

    def __repr__(self) -> str:
        size = "unknown" if self.peak_bytes is None else format_bytes(self.peak_bytes)
        return f"<MemorySummary of {self.num_steps} steps: peak {size} on {self.device}>"

    # Where both are the same there is one figure.
    @staticmethod
    def _beside(measured: int | None, predicted: int | None) -> str:
        sizes = [] if measured is None else [format_bytes(measured)]
        if predicted is not None and format_bytes(predicted) not in sizes:
            sizes.append(f"predicted {format_bytes(predicted)}")
        return ", ".join(sizes)


def shortened(lines: Sequence[str]) -> list[str]:
    more = len(lines) - MAX_LINES
    return [*lines[:MAX_LINES], *([f"and {more} more"] if more > 0 else [])]


def print_summary(summary: MemorySummary, console: Console | None = None) -> None:
    print_to(console or Console(file=sys.stdout), str(summary), summary)
