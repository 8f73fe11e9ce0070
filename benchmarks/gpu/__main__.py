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

from benchmarks._common import RESULTS, device_name, provenance
from benchmarks.gpu._lines import WAITS, write_line
from benchmarks.gpu._steps import STEPS, Step
from benchmarks.gpu._tables import write_tables

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
        path = self._folder / step.file_name
        process = self._waiting.pop(step, None) or start_step(step, path, is_dry=self._is_dry)
        place = self._steps.index(step)
        # The first one finds out what the driver has given to all processes.
        for later in self._steps[place + 1 : place + 1 + self._num_ahead] if place else ():
            if later not in self._waiting and _waits(later):
                later_path = self._folder / later.file_name
                self._waiting[later] = start_step(
                    later, later_path, is_dry=self._is_dry, waits=True
                )
        return finish_step(step, process, path, limit_s)


def _waits(step: Step) -> bool:
    is_ours = step.command[0].startswith(("benchmarks.gpu.", "benchmarks.ladder."))
    return is_ours and not step.is_parallel


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read what a step has written."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def describe(step: Step) -> str:
    """Say in a line what a step is."""
    missing = missing_packages(step)
    note = f"LEFT OUT: {', '.join(missing)} is not installed" if missing else step.expected
    return f"{1 + STEPS.index(step):2d}  {step.name:32} {step.limit_s:4d} s  {note}".rstrip()


def make_folder(given: Path | None, *, is_dry: bool) -> Path:
    """Make the folder of the results, and add to its notes where they come from."""
    slug = re.sub(r"[^a-z0-9]+", "_", device_name().lower()).strip("_")
    # A dry run proves nothing that should stand among the results.
    folder = given or (Path(tempfile.mkdtemp()) if is_dry else RESULTS / f"gpu_{slug}")
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / "provenance.json"
    runs = json.loads(note.read_text("utf-8")) if note.exists() else []
    note.write_text(json.dumps([*runs, provenance()], indent=2) + "\n", "utf-8")
    return folder


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
    folder = make_folder(options.results, is_dry=options.dry)
    until_s = options.until or (float("inf") if options.dry else TIME_LIMIT_S)
    end_s = time.monotonic() + until_s
    possible = [step for step in chosen if not missing_packages(step)]
    for step in chosen:
        (folder / step.file_name).unlink(missing_ok=True)
        if step not in possible:
            print(describe(step), flush=True)
    # The limits are those of a machine with a GPU, not of a busy laptop.
    slower = options.slower or (10 if options.dry else 1)
    failed, table = [], ""
    with Line(possible, folder, options.ahead, is_dry=options.dry) as line:
        for step in possible:
            left_s = end_s - time.monotonic()
            if left_s < min(20, step.limit_s):
                print(f"no time is left for: {step.name}", flush=True)
                failed.append(step.name)
                continue
            end = line.run(step, min(step.limit_s * slower, left_s))
            failed += [step.name] if "error" in end else []
            table = write_tables(folder)
    print(f"\n{table}\n\nWritten to {folder}")
    if failed:
        print(f"Not done: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
