"""Train one row in this process and print what it needed, as JSON in the last line."""

import argparse
import importlib
import json
from collections.abc import Callable
from dataclasses import replace

from benchmarks._profiler import AllocationPeak
from benchmarks.ladder._observers import Allocations, Meter, Observer
from benchmarks.ladder._rows import ROWS, WORKLOADS, Row, Workload

TRAINERS = ("lightning", "hugging_face")


def train_with(trainer: str) -> Callable[[Row, Workload, Observer], None]:
    """Give the function that trains with one of the two, and import no more than it needs.

    Args:
        trainer: One of ``TRAINERS``.

    Returns:
        A function of row, workload and observer.
    """
    train: Callable[[Row, Workload, Observer], None] = importlib.import_module(
        f"benchmarks.ladder._{trainer}"
    ).train
    return train


def main() -> None:
    """Train the row named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ladder._run", description=__doc__)
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--allocations", action="store_true", help="ask the CPU allocator instead")
    options = parser.parse_args()
    train, row = train_with(options.trainer), ROWS[options.row]
    workload = WORKLOADS[options.workload]
    if options.allocations:
        workload = replace(workload, num_warmup=1, num_timed=0)
        with AllocationPeak() as peak:
            train(row, workload, Allocations(peak, workload))
        print(json.dumps({"peak_allocator_bytes": peak.peak_bytes}))
    else:
        meter = Meter(workload)
        train(row, workload, meter)
        print(json.dumps(meter.results()))


if __name__ == "__main__":
    main()
