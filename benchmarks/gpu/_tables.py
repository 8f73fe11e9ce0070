"""Lay out what the steps have written."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks._common import markdown_table
from benchmarks.gpu._steps import STEPS
from benchmarks.virtual_gpu.accuracy import SETTINGS, cell
from lightning_memsave.units import MIB

Line = dict[str, Any]
VIRTUAL = "on_the_virtual_gpu.jsonl"
"""The fits of `_accuracy` there: `python -m benchmarks.virtual_gpu accuracy --forked`."""
VIRTUAL_CHECK = "accuracy on the virtual GPU"


def write_tables(folder: Path) -> str:
    """Write a file for each kind of table, and return all of them.

    Args:
        folder: Of the steps' files and of ``provenance.json``.

    Returns:
        Markdown.
    """
    runs = json.loads((folder / "provenance.json").read_text("utf-8"))
    run = runs[-1]
    versions = ", ".join(f"{package} {v}" for package, v in run["versions"].items() if v)
    commits = " and ".join(dict.fromkeys(str(each["commit"]) for each in runs))
    source = f"`python -m benchmarks.gpu` at {commits}, {run['date']}, {run['device']}\n"
    source += (
        f"({run['num_threads']} threads), CUDA {run['cuda']}, Python {run['python']}, {versions}."
    )
    makers: dict[str, Callable[[list[Line]], str]] = {
        "fits": _fits,
        "ladder": _ladder,
        "accuracy": _accuracy,
        "host_updates": _host_updates,
    }
    lines = list(_read([folder / step.file_name for step in STEPS]))
    lines += _read([folder / VIRTUAL])
    tables = {name: make(lines) for name, make in makers.items()}
    for name, table in tables.items():
        if table:
            (folder / f"{name}.md").write_text(f"{source}\n\n{table}\n", "utf-8")
    return "\n\n".join(filter(None, tables.values()))


def _read(paths: Iterable[Path]) -> Iterator[Line]:
    for path in paths:
        for line in path.read_text("utf-8").splitlines() if path.exists() else ():
            yield {"of": path.stem.replace("_", " ")} | json.loads(line)


def _fits(lines: list[Line]) -> str:
    rows = []
    for line in lines:
        if line.get("check") == "fit" and "error" not in line:
            cells = [_figure(line, name) for name in ("step_ms", "host_ms")]
            for part in ("allocated", "reserved", "driver"):
                cells += [_figure(line, f"{part}_mib"), _percent(line, f"{part}_error")]
            rows.append([line["case"], *cells, f"{line['losses'][-1]:.4f}"])
    header = ["fit", "step (ms)", "host (ms)", "allocated (MiB)", "predicted", "reserved"]
    header += ["predicted", "driver", "predicted", "last loss"]
    return markdown_table(header, rows) if rows else ""


def _ladder(lines: list[Line]) -> str:
    rows = []
    for line in lines:
        if "median_step_s" in line:
            time = f"{1e3 * line['median_step_s']:.1f}"
            memory = [line.get(f"peak_{part}_bytes") for part in ("allocated", "reserved")]
            cells = [f"{num_bytes / MIB:,.0f}" if num_bytes else "-" for num_bytes in memory]
            rows.append([line["of"], time, *cells, f"{line['losses'][-1]:.4f}"])
    header = ["row, trainer", "step (ms)", "allocated (MiB)", "reserved (MiB)", "last loss"]
    return markdown_table(header, rows) if rows else ""


def _host_updates(lines: list[Line]) -> str:
    found = [line for line in lines if line.get("check") == "host_updates"]
    rows = [
        [each["case"], f"{each['numel']:,}" if "numel" in each else "-", f"{seconds:.3f}"]
        for each in found
        if (seconds := each.get("s_per_billion")) is not None
    ]
    notes = [each["note"] for each in found if "note" in each]
    header = ["updates", "parameters at once", "s per billion parameters"]
    return "\n\n".join([markdown_table(header, rows), *notes]) if rows else ""


def _accuracy(lines: list[Line]) -> str:
    found: dict[str, dict[str, Line]] = {}
    virtual = {line["case"]: line for line in lines if line.get("check") == VIRTUAL_CHECK}
    for line in lines:
        if line.get("check") == "accuracy":
            architecture, _, setting = line["case"].partition(":")
            found.setdefault(architecture, {})[setting] = line
    if not found:
        return ""
    header = ["architecture", *SETTINGS]
    beside_prediction, beside_virtual = [], []
    for name, by_setting in found.items():
        measured = [by_setting.get(setting) for setting in SETTINGS]
        beside_prediction.append([name, *map(cell, measured)])
        others = [virtual.get(f"{name}:{setting}") for setting in SETTINGS]
        beside_virtual.append([name, *map(_difference, measured, others)])
    parts = [markdown_table(header, beside_prediction)]
    if virtual:
        parts += [
            "The same fits on the virtual H100, with the same versions: what the GPU reserved and "
            "allocated less what the virtual one did, in MiB.",
            markdown_table(header, beside_virtual),
        ]
    return "\n\n".join(parts)


def _difference(line: Line | None, virtual: Line | None) -> str:
    if line is None or virtual is None or "error" in line or "error" in virtual:
        return "-"
    names = ("reserved", "allocated")
    reserved, allocated = ((line[name] - virtual[name]) / MIB for name in names)
    return f"{reserved:+.0f} / {allocated:+.1f}" if reserved or allocated else "0 / 0"


def _figure(line: Line, name: str) -> str:
    return f"{line[name]:,.1f}" if line.get(name) is not None else "-"


def _percent(line: Line, name: str) -> str:
    return f"{100 * line[name]:+.1f} %" if name in line else "-"
