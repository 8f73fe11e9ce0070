"""Write what a step finds, line by line, so that a step that is cut off keeps what it had."""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Found = dict[str, Any]
"""What one check found: JSON, with the name of the case under ``"case"``."""


def write_line(path: Path | None, found: Mapping[str, Any]) -> None:
    """Print a line of JSON and append it to a file at once."""
    line = json.dumps(found, default=str)
    print(line, flush=True)
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


WAITS = "BENCHMARKS_GPU_WAITS"
"""Environment variable of a process that was started before its turn."""


def import_slow_packages() -> None:
    """Import now what the checks import in time that counts, if there is time before the turn."""
    if WAITS in os.environ:
        for package in ("lightning.pytorch", "transformers.models.auto", "lightning_memsave"):
            importlib.import_module(package)


def wait_for_turn() -> None:
    """Wait for a line from whoever started this process before its turn."""
    if os.environ.pop(WAITS, None):
        sys.stdin.readline()


def attempt(case: str, check: Callable[[], Found]) -> Found:
    """Run one case; its failure is a finding, and the next case runs."""
    start_s = time.perf_counter()
    try:
        found = check()
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"[:600]}
    return {"case": case, **found, "seconds": round(time.perf_counter() - start_s, 2)}


def run_checks(checks: Mapping[str, Callable[[str], Iterable[Found]]]) -> None:
    """Run the check that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("check", choices=checks)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="file to append the lines to")
    options = parser.parse_args()
    import_slow_packages()
    wait_for_turn()
    for found in checks[options.check](options.device):
        write_line(options.out, {"check": options.check, **found})
