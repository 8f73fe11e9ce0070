"""Put how exact training stays into one table: `python -m benchmarks.evidence`.

It writes `benchmarks/results/evidence.md` and puts its first table into `docs/evidence.md`.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import readme
from benchmarks._common import RESULTS, markdown_table

PAGE = readme.ROOT / "docs" / "evidence.md"
_INTRODUCTION = """\
`python -m benchmarks.evidence` counts fits of the result files. Bitwise: with the weights of
unmodified training, of a fit that was told the smaller size from that batch on, or of one that was
not killed.
"""
_MATRIX = """\

The rows up to "resumed" are of `faults_modules_cpu`, two of `faults_cpu`, the others of
`faults_plans_cpu`, `faults_ranks_cpu` and `faults_environment_cpu`.

The same by technique, with its number of fits: `=` bitwise, `~` as declared, `r` refused before
training, `a` ended with advice, `!` wrong or lost. The first four columns are of
`faults_modules_cpu`, the other two of `faults_cpu`.
"""
_ALL_MARKS = _BITWISE, _DECLARED, _REFUSED, _ADVICE, _BAD = "=", "~", "r", "a", "!"
COLUMNS = ("bitwise", "as declared", "refused", "ended with advice", "wrong or lost")
# What the benchmarks call the outcomes; all others are bad.
_MARKS = {
    "equal": _BITWISE,
    "right": _BITWISE,
    "went on": _BITWISE,
    "as declared": _DECLARED,
    "refused": _REFUSED,
    "ended with advice": _ADVICE,
    "lost with advice": _ADVICE,
    "clear error": _ADVICE,
    "ended and named": _ADVICE,
}
_Found = dict[str, Any]
_Row = tuple[str, str, Callable[[_Found], bool]]


def _with_settings(*names: str) -> Callable[[_Found], bool]:
    return lambda one: one["settings"] in names


def _under(condition: str) -> Callable[[_Found], bool]:
    return lambda one: one["condition"] == condition


ROWS: tuple[_Row, ...] = (
    ("the bare callback", "faults_modules_cpu", _with_settings("bare", "bare in float32")),
    (
        "presets",
        "faults_modules_cpu",
        _with_settings(
            *("bitwise", "single_gpu", "single_gpu in float32", "offload", "offload in float32")
        ),
    ),
    ("checkpointing", "faults_modules_cpu", _with_settings("checkpointed")),
    (
        "offloading",
        "faults_modules_cpu",
        _with_settings(
            "offload optimizer",
            "offload parameters",
            "offload parameters, checkpointed, in backward",
            "offload activations",
            "offload embeddings",
        ),
    ),
    ("updates in backward", "faults_modules_cpu", _with_settings("in backward")),
    ("chunked cross-entropy", "faults_modules_cpu", _with_settings("chunked")),
    ("8-bit state", "faults_modules_cpu", _with_settings("8-bit")),
    (
        "micro-batches",
        "faults_modules_cpu",
        _with_settings("micro-batches", "block micro-batches"),
    ),
    ("accumulation", "faults_modules_cpu", _under("3 batches")),
    ("clipping", "faults_modules_cpu", _under("clipped")),
    ("resumed", "faults_modules_cpu", _under("resumed")),
    ("out of memory", "faults_cpu", lambda one: one["kind"] == "injection"),
    ("killed, resumed", "faults_cpu", lambda one: one["kind"] == "kill"),
    ("both, with a budget", "faults_plans_cpu", lambda one: True),
    ("one rank killed", "faults_ranks_cpu", lambda one: one["with_us"]),
    ("environment fails", "faults_environment_cpu", lambda one: True),
)


def make_text(folder: Path = RESULTS) -> str:
    """Make the text of `evidence.md` from the result files in a folder."""
    files = {name: _read(folder / f"{name}.json") for name in dict.fromkeys(r[1] for r in ROWS)}
    rows = []
    for name, file, belongs in ROWS:
        if not (marks := _marks(filter(belongs, files[file]))):
            continue
        counts = [str(marks.count(mark)) for mark in _ALL_MARKS]
        rows.append([name, str(len(marks)), *counts])
    table = markdown_table(["over", "fits", *COLUMNS], rows)
    matrix = _make_matrix(files["faults_modules_cpu"], files["faults_cpu"])
    return f"{_INTRODUCTION}\n{table}\n{_MATRIX}\n{matrix}\n"


def _make_matrix(cells: Sequence[_Found], attacks: Sequence[_Found]) -> str:
    places: dict[tuple[str, str], list[_Found]] = defaultdict(list)
    for cell in cells:
        places[cell["settings"], cell["condition"]].append(cell)
    for attack in attacks:
        column = "out of memory" if attack["kind"] == "injection" else "killed, resumed"
        places[attack["preset"], column].append(attack)
    techniques, columns = (dict.fromkeys(keys) for keys in zip(*places, strict=True))
    rows = [[name, *(_cell(places[name, column]) for column in columns)] for name in techniques]
    return markdown_table(["technique", *columns], rows)


def _read(path: Path) -> list[_Found]:
    found = json.loads(path.read_text(encoding="utf-8"))
    listed: list[_Found] = found["cells"] if "cells" in found else found["attacks"]
    return listed


def _marks(found: Iterable[_Found]) -> str:
    return "".join(_MARKS.get(one["outcome"], _BAD) for one in found)


def _cell(found: Iterable[_Found]) -> str:
    marks = _marks(found)
    return " ".join(f"{marks.count(mark)}{mark}" for mark in _ALL_MARKS if mark in marks) or "-"


def main() -> None:
    """Write the file and the page."""
    (RESULTS / "evidence.md").write_text(make_text(), encoding="utf-8")
    PAGE.write_text(readme.fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
