"""The first ten minutes on a GPU: `python -m benchmarks.gpu`.

Steps run in the order of their worth, each in a process of its own with its own time limit. Each
writes its own file of JSON lines, a line as soon as it is known, so that a run that is cut off
loses one line. `--dry` runs every step on the CPU, in small.
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, device_name, markdown_table, provenance
from benchmarks.gpu._lines import write_line
from benchmarks.gpu._steps import STEPS, Step

ROOT = Path(__file__).parents[2]
TIME_LIMIT_S = 9 * 60


def missing_packages(step: Step) -> list[str]:
    """Name what must be installed for a step and is not."""
    return [name for name in step.needs if importlib.util.find_spec(name) is None]


def run_step(step: Step, path: Path, limit_s: float, *, is_dry: bool) -> dict[str, Any]:
    """Run a step in a fresh process, which appends to its file; close the file with its end."""
    command = [sys.executable, "-m", *step.command]
    if step.command[0] == "pytest":
        command[-1:] = ["tests/measure", "--collect-only"] if is_dry else ["tests"]
    else:
        command += ["--device", "cpu" if is_dry else "cuda", "--out", str(path)]
    start_s = time.monotonic()
    end: dict[str, Any] = {"step": step.name}
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        end["error"] = f"stopped after {limit_s:.0f} s"
    else:
        end["returncode"] = done.returncode
        if step.command[0] == "pytest":
            end["output"] = done.stdout.strip().splitlines()[-25:]
        if done.returncode != 0:
            end["error"] = (done.stderr or done.stdout).strip().splitlines()[-12:]
    end["seconds"] = round(time.monotonic() - start_s, 1)
    write_line(path, end)
    return end


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read what a step has written."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def make_table(folder: Path) -> str:
    """Lay out the fits that are in the files of a folder."""
    rows = []
    for step in STEPS:
        path = path_of(step, folder)
        for line in read_lines(path) if path.exists() else []:
            if line.get("check") == "fit":
                cells = [_cell(line, name) for name in ("step_ms", "host_ms", "allocated_mib")]
                cells += [_percent(line, "allocated_error"), _cell(line, "reserved_mib")]
                cells += [_percent(line, "reserved_error"), _cell(line, "driver_mib")]
                cells += [_percent(line, "driver_error"), f"{line['losses'][-1]:.4f}"]
                rows.append([line["case"], *cells])
    header = ["fit", "step (ms)", "host (ms)", "allocated (MiB)", "predicted", "reserved"]
    header += ["predicted", "driver", "predicted", "last loss"]
    return markdown_table(header, rows)


def _cell(line: dict[str, Any], name: str) -> str:
    return f"{line[name]:,.1f}" if line.get(name) is not None else "-"


def _percent(line: dict[str, Any], name: str) -> str:
    return f"{100 * line[name]:+.1f} %" if name in line else "-"


def path_of(step: Step, folder: Path) -> Path:
    """Name the file of a step."""
    number = 1 + STEPS.index(step)
    return folder / f"{number:02d}_{re.sub('[^a-z0-9]+', '_', step.name.lower())}.jsonl"


def describe(step: Step) -> str:
    """Say in a line what a step is."""
    missing = missing_packages(step)
    note = f"LEFT OUT: {', '.join(missing)} is not installed" if missing else step.expected
    return f"{1 + STEPS.index(step):2d}  {step.name:32} {step.limit_s:4d} s  {note}".rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; 1 if one failed, was stopped, or had no time left."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [step.name for step in STEPS]
    parser.add_argument("--list", action="store_true", help="show the steps, and run none")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STEP")
    parser.add_argument("--dry", action="store_true", help="in small, on the CPU")
    parser.add_argument("--until", type=float, help=f"seconds for all steps: {TIME_LIMIT_S}")
    parser.add_argument(
        "--slower", type=float, help="how many times as long a step may take: 10 with --dry, else 1"
    )
    parser.add_argument("--results", type=Path, help="folder of the result files")
    options = parser.parse_args(arguments)
    chosen = [step for step in STEPS if step.name in options.only]
    if options.list:
        print("\n".join(map(describe, chosen)))
        return 0
    slug = re.sub(r"[^a-z0-9]+", "_", device_name().lower()).strip("_")
    # A dry run proves nothing that should stand among the results.
    folder = options.results or (
        Path(tempfile.mkdtemp()) if options.dry else RESULTS / f"gpu_{slug}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "provenance.json").write_text(json.dumps(provenance(), indent=2) + "\n", "utf-8")
    until_s = options.until or (float("inf") if options.dry else TIME_LIMIT_S)
    end_s = time.monotonic() + until_s
    failed = []
    for step in chosen:
        path = path_of(step, folder)
        path.unlink(missing_ok=True)
        if missing_packages(step):
            print(describe(step), flush=True)
            continue
        left_s = end_s - time.monotonic()
        if left_s < min(20, step.limit_s):
            print(f"no time is left for: {step.name}", flush=True)
            failed.append(step.name)
            continue
        # The limits are those of a machine with a GPU, not of a busy laptop.
        limit_s = step.limit_s * (options.slower or (10 if options.dry else 1))
        end = run_step(step, path, min(limit_s, left_s), is_dry=options.dry)
        failed += [step.name] if "error" in end else []
        (folder / "fits.md").write_text(make_table(folder) + "\n", "utf-8")
    print(f"\n{make_table(folder)}\n\nWritten to {folder}")
    if failed:
        print(f"Not done: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
