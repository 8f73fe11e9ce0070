"""Output of the demo: a table, its claims, and a result file."""

import io
import json
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_memsave.units import format_bytes

MAX_PEAK_RATIO = 0.5
MAX_ACCURACY_DIFFERENCE = 0.02
console = Console()


@dataclass
class Run:
    """Memory, time and accuracy of one training."""

    name: str
    peak_bytes: int
    by_category: dict[str, int]
    time_ratio: float | None = None
    accuracy: float | None = None
    predictions: Tensor | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the predictions."""
        return {key: value for key, value in vars(self).items() if key != "predictions"}


def make_table(runs: list[Run]) -> Table:
    """Make the table."""
    plain, saving, *alone = runs
    table = Table(title="Peak memory of a training step", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("")
    for run in runs:
        table.add_column(run.name.replace(" ", "\n"), justify="right")
    for category in plain.by_category:
        sizes = [run.by_category[category] for run in runs]
        if any(sizes):
            table.add_row(category.replace("_", " "), *map(format_bytes, sizes))
    table.add_section()
    table.add_row("peak", *(format_bytes(run.peak_bytes) for run in runs), style="bold")
    saved = [f"{1 - run.peak_bytes / plain.peak_bytes:.0%}" for run in (saving, *alone)]
    table.add_row("saved", "", *saved)
    table.add_section()
    ratios = [f"{run.time_ratio:.2f}" for run in (plain, saving)]
    table.add_row("time of a step", *ratios, *[""] * len(alone))
    accuracies = [f"{run.accuracy:.1%}" for run in (plain, saving)]
    table.add_row("validation accuracy", *accuracies, *[""] * len(alone))
    return table


def judge(runs: list[Run], is_same: bool) -> bool:
    """Print whether each claim of the demo holds."""
    plain, saving, *_ = runs
    assert plain.accuracy is not None
    assert saving.accuracy is not None
    ratio = saving.peak_bytes / plain.peak_bytes
    difference = abs(saving.accuracy - plain.accuracy)
    claims = {
        f"the peak is {ratio:.0%} of what it was; at most {MAX_PEAK_RATIO:.0%} is claimed": (
            ratio <= MAX_PEAK_RATIO
        ),
        f"accuracy differs by {100 * difference:.1f} points; at most "
        f"{100 * MAX_ACCURACY_DIFFERENCE:.0f} are claimed": difference <= MAX_ACCURACY_DIFFERENCE,
        "the checkpoint, loaded without the callback, gives the same predictions": is_same,
    }
    for claim, holds in claims.items():
        console.print("[green]holds:[/] " if holds else "[red]FAILS:[/] ", claim, highlight=False)
    return all(claims.values())


def write_results(path: Path, runs: list[Run], folder: Path) -> None:
    """Write the table as JSON and as Markdown."""
    report = json.loads((folder / "memsave_report.json").read_text(encoding="utf-8"))
    path.parent.mkdir(parents=True, exist_ok=True)
    versions = ", ".join(f"{name} {v}" for name, v in report["versions"].items() if v)
    results = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": report["measured"]["device"],
        "versions": report["versions"],
        "runs": [run.to_dict() for run in runs],
    }
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    text = io.StringIO()
    Console(file=text, width=100).print(make_table(runs))
    lines = "\n".join(line.rstrip() for line in text.getvalue().splitlines()).strip("\n")
    device = f"{results['device']} ({torch.get_num_threads()} threads)"
    source = f"`{results['command']}`, {results['date']}, {device},\n{versions}."
    path.with_suffix(".md").write_text(f"{source}\n\n```\n{lines}\n```\n", encoding="utf-8")
