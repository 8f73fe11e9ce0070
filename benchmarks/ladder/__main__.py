"""Train the ladder and compare: `python -m benchmarks.ladder`.

Each row trains in a fresh process, once through Lightning with `MemSaveCallback` and once through
Hugging Face's Trainer with its own flags. On a GPU the 84M RoBERTa; on a CPU the 7M one, whose
times are taken in one more process for each row, in turns.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks._common import RESULTS, device_name, run_in_process, write_results
from benchmarks.ladder._rows import ROWS, WORKLOADS
from benchmarks.ladder._run import TRAINERS
from benchmarks.ladder._table import check_claims, make_text

LIMIT_S = 900
ROUNDS_OF_ALL = 20
"""Of the row whose time is claimed; the others have ``--rounds``."""


def measure(rows: Sequence[str], workload: str, num_rounds: int) -> dict[str, dict[str, Any]]:
    """Measure rows.

    Args:
        rows: Their names.
        workload: Name of what is trained.
        num_rounds: Steps of each fit that are timed in turns, on a CPU.

    Returns:
        For each row what each trainer needed, and the ratios of their times.
    """
    on_gpu = torch.cuda.is_available()

    def measure_memory(which: tuple[str, str]) -> dict[str, Any]:
        row, trainer = which
        found = _run("_run", trainer, row, workload)
        if not on_gpu and workload != "dry" and "error" not in found:
            found |= _run("_run", trainer, row, workload, "--allocations")
        print(f"{row}, {trainer}: {found.get('error', 'measured')}", flush=True)
        return found

    found: dict[str, dict[str, Any]] = {row: {} for row in rows}
    # Bytes are the same whatever else the machine does; on a GPU each needs it for itself.
    with ThreadPoolExecutor(1 if on_gpu else 2) as pool:
        every = list(product(rows, TRAINERS))
        for (row, trainer), measured in zip(every, pool.map(measure_memory, every), strict=True):
            found[row][trainer] = measured
    if not on_gpu:
        for row in rows:
            rounds = ROUNDS_OF_ALL if row == "all" and workload != "dry" else num_rounds
            found[row]["time"] = _run("_timing", row, workload, "--rounds", str(rounds))
            print(f"{row}: {found[row]['time'].get('error', 'timed')}", flush=True)
    return found


def _run(module: str, *arguments: str) -> dict[str, Any]:
    return run_in_process(f"benchmarks.ladder.{module}", *arguments, limit_s=LIMIT_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the results, the plot among them.

    Args:
        arguments: Of the command line.

    Returns:
        1 if a run failed or what is claimed is not so; the results are written all the same.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ladder", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="a tiny model and a few steps")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--rounds", type=int, default=8, help="timed steps of each fit, on a CPU")
    parser.add_argument("--results", type=Path, help="folder of the result files")
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    workload = "dry" if options.dry else "84m" if on_gpu else "7m"
    rows = measure(options.rows, workload, 3 if options.dry else options.rounds)
    text = make_text(rows, {name: ROWS[name].call(WORKLOADS[workload]) for name in rows})
    print(f"\n{text}")
    claims = check_claims(rows, is_timed=not options.dry)
    for claim, holds in claims.items():
        print(f"{'holds' if holds else 'FAILS'}: {claim}")
    device = re.sub(r"[^a-z0-9]+", "_", device_name().lower()).strip("_") if on_gpu else "cpu"
    path = write_results(
        "ladder_dry" if options.dry else f"ladder_{device}",
        {"workload": workload, "rows": rows, "claims": claims},
        text,
        # A dry run proves nothing that should stand among the results.
        folder=options.results or (Path(tempfile.mkdtemp()) if options.dry else RESULTS),
    )
    print(f"\nWritten to {path}")
    runs = [found for row in rows.values() for found in row.values()]
    if any("error" in found for found in runs):
        return 1
    from benchmarks.ladder._plot import plot  # noqa: PLC0415 - matplotlib is an extra

    plot(rows, path.with_suffix(".svg"))
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
