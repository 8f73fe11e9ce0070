"""Train awkward Lightning modules with every preset on the virtual GPU, beside plain training."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks._common import RESULTS, write_results
from benchmarks.faults import _modules
from benchmarks.virtual_gpu._setup import allow_forks
from tests.awkward_projects import all_projects


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print and write what became of the fits.

    Args:
        arguments: Of the command line.

    Returns:
        1 if a fit crashed or was wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.virtual_gpu modules", description=__doc__
    )
    projects, settings = [*all_projects()], [*_modules.SETTINGS]
    parser.add_argument("--projects", nargs="*", choices=projects, default=projects, help="only")
    parser.add_argument("--settings", nargs="*", choices=settings, default=settings, help="only")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    options = parser.parse_args(arguments)
    allow_forks()
    cells = _modules.attack(options.projects, options.settings, [*_modules.CONDITIONS])
    table = _modules.make_table(cells)
    path = write_results("virtual_gpu_modules", {"cells": cells}, table, folder=options.results)
    print(f"{table}\n\nWritten to {path}")
    return int(any(one["outcome"] in _modules.BAD for one in cells))
