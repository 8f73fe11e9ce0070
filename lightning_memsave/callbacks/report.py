"""What a run did, as a table for people and as JSON for programs."""

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_memsave.core.files import write_file
from lightning_memsave.core.plain_text import print_to
from lightning_memsave.core.technique import Row
from lightning_memsave.core.versions import versions
from lightning_memsave.errors import MemsaveWarning

REPORT_NAME = "memsave_report.json"


def print_table(rows: Sequence[Row], console: Console | None = None) -> None:
    lines = ["MemSaveCallback:"]  # for a log file
    table = Table(title="MemSaveCallback", title_justify="left", show_lines=False)
    for column in ("setting", "value", "", "exactness", "what and why"):
        table.add_column(column, overflow="fold")
    colors = {"on": "green", "off": "yellow", "unchanged": "dim"}
    for row in rows:
        exactness = f" ({row.exactness})" if row.exactness else ""
        line = f"  {row.name}={row.value}: {row.status}{exactness}. {'; '.join(row.details)}"
        lines.append(line.rstrip(" ."))
        # As `Text`: rich would read brackets, which regular expressions have, as its markup.
        cells = [Text(cell) for cell in (row.name, row.value, row.status, row.exactness)]
        cells[2].stylize(colors[row.status])
        table.add_row(*cells, Text("\n".join(row.details)))
    print_to(console or Console(file=sys.stdout), "\n".join(lines), table)


def plain(value: Any) -> Any:
    """Give a value as JSON has it; what JSON does not know as its ``repr``."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return repr(value)


def write_report(
    directory: str,
    settings: Mapping[str, Any],
    rows: Sequence[Row],
    *,
    measured: dict[str, Any] | None,
    predicted: dict[str, Any] | None,
    device: torch.device,
    error: BaseException | None = None,
    plan: dict[str, Any] | None = None,
) -> None:
    """Write ``memsave_report.json``, or warn that it cannot be written."""
    try:
        is_cuda = device.type == "cuda"
        report = {
            "status": "finished" if error is None else f"{type(error).__name__}: {error}",
            "settings": settings,
            "changes": [asdict(row) for row in rows if row.status == "on"],
            "refusals": [asdict(row) for row in rows if row.status != "on"],
            "measured": measured,
            # Not of a GPU that the run has not used: asking for its name makes a context there.
            "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
            "versions": versions(),
            "predicted": predicted,
            "plan": plan,
        }
        write_file(directory, REPORT_NAME, json.dumps(report, indent=2) + "\n")
    # Remote file systems raise their own classes. A run that is over must not fail for this, and
    # what ended it must be seen.
    except Exception as failure:
        warnings.warn(
            f"`{directory}/{REPORT_NAME}` cannot be written ({type(failure).__name__}: {failure}). "
            "Use `Trainer(default_root_dir=...)` with a folder that can be written, or "
            "`MemSaveCallback(report=False)`.",
            MemsaveWarning,
            stacklevel=3,
        )
