"""What all benchmarks share: provenance, result files, models, tables."""

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "lightning", "transformers", "bitsandbytes", "lightning-memsave")


def provenance(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Say where figures come from.

    Args:
        command: What was typed; taken from this process if not given.

    Returns:
        Command, date, device, versions and commit.
    """
    return {
        "command": " ".join(command or ["python", "-m", _module_name(), *_typed_options()]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device_name(),
        "num_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "commit": _commit(),
    }


# Without folders of one machine: of the result files, and of packages that are kept.
def _typed_options() -> list[str]:
    typed = sys.argv[1:]
    for option in ("--results", "--transformers"):
        if option in typed:
            place = typed.index(option)
            typed = typed[:place] + typed[place + 2 :]
    return typed


def device_name() -> str:
    """Name the GPU, or the processor where there is none.

    Returns:
        For example ``"NVIDIA H100 80GB HBM3"``.
    """
    if torch.cuda.is_available():
        is_virtual = "libvgpu" in os.environ.get("LD_PRELOAD", "")
        return ("virtual " if is_virtual else "") + str(torch.cuda.get_device_name())
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_results(
    name: str,
    results: Mapping[str, Any],
    table: str,
    *,
    folder: Path = RESULTS,
    put_together: Mapping[str, Any] | None = None,
) -> Path:
    """Write a result file for programs and one for people, both with their provenance.

    Args:
        name: Name of the files, without suffix.
        results: What was measured; must be serialisable as JSON.
        table: The same in Markdown.
        folder: Where to.
        put_together: What to say of several runs instead of this one's command and device.

    Returns:
        Path of the JSON file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = provenance() | dict(put_together or {})
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"provenance": source, **results}, indent=2) + "\n", "utf-8")
    versions = ", ".join(f"{package} {v}" for package, v in source["versions"].items() if v)
    lines = [
        f"{_quoted(source['command'])}, {source['date']}, {source['device']}",
        f"({source['num_threads']} threads), Python {source['python']}, {versions}.",
        "",
        table,
    ]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", "utf-8")
    return path


def several_runs(command: str, kind: str, found: Iterable[Mapping[str, Any]]) -> str:
    """Say at which commits the parts of a result ran that are not of one run.

    Args:
        command: What was typed.
        kind: Plural of what ran, such as ``"fits"``.
        found: Each with its ``"commit"``.

    Returns:
        The command, and how many ran at which commit.
    """
    commits = Counter(one["commit"] for one in found)
    listed = ", ".join(f"{number} {kind} at {commit}" for commit, number in commits.items())
    return f"{command} (several runs: {listed})"


def _quoted(command: str) -> str:
    """Mark a command as code, but for what is said of it in parentheses."""
    typed, parenthesis, said = command.partition(" (")
    return f"`{typed}`{parenthesis}{said}"


def run_in_process(
    module: str, *arguments: str, limit_s: float, packages: Path | None = None
) -> dict[str, Any]:
    """Run a part of a benchmark in a fresh process.

    Args:
        module: Its name; it prints what it measured as JSON in its last line.
        arguments: Of its command line.
        limit_s: Time after which it is stopped.
        packages: A folder of packages that it imports in place of installed ones.

    Returns:
        What it measured, or ``error``.
    """
    paths = [str(packages or ""), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", module, *arguments]
    root = RESULTS.parents[1]
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {limit_s:.0f} s"}
    if done.returncode != 0:
        return {"error": "\n".join(done.stderr.strip().splitlines()[-12:])}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table that reads well as plain text too.

    Args:
        header: Names of the columns.
        rows: Cells, as many in each row as there are columns.

    Returns:
        The table in Markdown; all columns but the first are flushed right.
    """
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join([first, *others])} |"

    rule = f"| {' | '.join(['-' * widths[0], *('-' * (w - 1) + ':' for w in widths[1:])])} |"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def _module_name() -> str:
    spec = sys.modules["__main__"].__spec__
    return "benchmarks" if spec is None else spec.name.removesuffix(".__main__")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    git = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # a copy of the tree without git
        return None
    return done.stdout.strip()
