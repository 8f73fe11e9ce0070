"""The first ten minutes on a GPU: `python -m benchmarks.gpu`.

Steps run in the order of their worth, each in a process of its own with its own time limit. Each
writes its own file of JSON lines, a line as soon as it is known, so that a run that is cut off
loses one line. `--dry` runs every step on the CPU, in small.
"""

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, device_name, markdown_table, provenance
from benchmarks.gpu._lines import WAITS, write_line
from benchmarks.gpu._steps import STEPS, Step

ROOT = Path(__file__).parents[2]
TIME_LIMIT_S = 9 * 60
Process = subprocess.Popen[str]


def missing_packages(step: Step) -> list[str]:
    """Name what must be installed for a step and is not."""
    return [name for name in step.needs if importlib.util.find_spec(name) is None]


def start_step(step: Step, path: Path, *, is_dry: bool, waits: bool = False) -> Process:
    """Start the process of a step, which may wait for its turn before it uses the GPU."""
    command = [sys.executable, "-m", *step.command]
    if step.command[0] == "pytest":
        command += ["--collect-only"] if is_dry else []
    elif step.command[0] == "benchmarks.ladder._run":
        command[-1:] = ["dry"] if is_dry else ["84m"]
    else:
        command += ["--device", "cpu" if is_dry else "cuda", "--out", str(path)]
    environment = os.environ | ({WAITS: "1"} if waits else {})
    if step.is_parallel:
        environment |= {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,  # so that its own processes end with it
    )


def stop(process: Process) -> None:
    """Kill a process with those that it has started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def finish_step(step: Step, process: Process, path: Path, limit_s: float) -> dict[str, Any]:
    """Give a process its turn, wait for its end, and close its file with it."""
    start_s = time.monotonic()
    end: dict[str, Any] = {"step": step.name}
    try:
        output, errors = process.communicate("go\n", limit_s)
    except subprocess.TimeoutExpired:
        stop(process)
        end["error"] = f"stopped after {limit_s:.0f} s"
    else:
        end["returncode"] = process.returncode
        if step.command[0].startswith("benchmarks.ladder"):
            end |= json.loads(output.splitlines()[-1]) if process.returncode == 0 else {}
        elif step.command[0] == "pytest":
            end["output"] = output.strip().splitlines()[-25:]
            path.with_suffix(".log").write_text(output, "utf-8")
        if process.returncode != 0:
            end["error"] = (errors or output).strip().splitlines()[-12:]
    end["seconds"] = round(time.monotonic() - start_s, 1)
    write_line(path, end)
    return end


def run_step(step: Step, path: Path, limit_s: float, *, is_dry: bool) -> dict[str, Any]:
    """Run a step in a fresh process, which appends to its file; close the file with its end."""
    return finish_step(step, start_step(step, path, is_dry=is_dry), path, limit_s)


class Line:
    """Steps in their order: the next ones import and get ready while one uses the GPU.

    Args:
        steps: All of them.
        folder: Of their files.
        num_ahead: How many get ready meanwhile.
        is_dry: Whether they run on the CPU.
    """

    def __init__(
        self, steps: Sequence[Step], folder: Path, num_ahead: int, *, is_dry: bool
    ) -> None:
        self._steps, self._folder, self._num_ahead, self._is_dry = steps, folder, num_ahead, is_dry
        self._waiting: dict[Step, Process] = {}

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._waiting.values():
            stop(process)

    def run(self, step: Step, limit_s: float) -> dict[str, Any]:
        """Run a step whose turn it is, and return the end of its file."""
        path = path_of(step, self._folder)
        process = self._waiting.pop(step, None) or start_step(step, path, is_dry=self._is_dry)
        place = self._steps.index(step)
        # The first one finds out what the driver has given to all processes.
        for later in self._steps[place + 1 : place + 1 + self._num_ahead] if place else ():
            if later not in self._waiting and _waits(later):
                later_path = path_of(later, self._folder)
                self._waiting[later] = start_step(
                    later, later_path, is_dry=self._is_dry, waits=True
                )
        return finish_step(step, process, path, limit_s)


def _waits(step: Step) -> bool:
    return step.command[0].startswith("benchmarks.gpu.") and not step.is_parallel


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
    parser.add_argument(
        "--ahead", type=int, default=0, help="how many of the next steps import meanwhile: 0"
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
    possible = [step for step in chosen if not missing_packages(step)]
    for step in chosen:
        path_of(step, folder).unlink(missing_ok=True)
        if step not in possible:
            print(describe(step), flush=True)
    # The limits are those of a machine with a GPU, not of a busy laptop.
    slower = options.slower or (10 if options.dry else 1)
    failed = []
    with Line(possible, folder, options.ahead, is_dry=options.dry) as line:
        for step in possible:
            left_s = end_s - time.monotonic()
            if left_s < min(20, step.limit_s):
                print(f"no time is left for: {step.name}", flush=True)
                failed.append(step.name)
                continue
            end = line.run(step, min(step.limit_s * slower, left_s))
            failed += [step.name] if "error" in end else []
            (folder / "fits.md").write_text(make_table(folder) + "\n", "utf-8")
    print(f"\n{make_table(folder)}\n\nWritten to {folder}")
    if failed:
        print(f"Not done: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
