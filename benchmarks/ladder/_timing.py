"""Time a row through both trainers and training without anything, one step of each in turn."""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks._paired import StepClock, Turns, summarise, take_turns
from benchmarks.ladder._observers import Timer
from benchmarks.ladder._rows import ROWS, WORKLOADS, Row, Workload
from benchmarks.ladder._run import TRAINERS, train_with


def time_row(name: str, workload: Workload, num_rounds: int) -> dict[str, Any]:
    """Time the steps of a row.

    All fits are in this process, each in a thread of its own, and only one of them works at a time:
    what disturbs the machine disturbs all of them.

    Args:
        name: Of the row.
        workload: What is trained.
        num_rounds: Steps of each that count.

    Returns:
        Ratios of step times over the rounds, by processor time and by wall time, and the median of
        the seconds of the steps.
    """
    workload = replace(workload, num_timed=num_rounds, num_counted=0)
    runs = {trainer: (train_with(trainer), ROWS[name]) for trainer in TRAINERS}
    if name != "nothing":
        runs["nothing"] = (train_with("lightning"), ROWS["nothing"])
    turns = Turns(len(runs))
    clocks = {key: StepClock(turns, me) for me, key in enumerate(runs)}
    fits = [partial(_fit, *run, workload, clocks[key]) for key, run in runs.items()]
    take_turns(fits, list(clocks.values()), num_warmup=workload.num_warmup)
    nothing = clocks.get("nothing", clocks["lightning"])
    pairs = {
        "lightning / nothing": (clocks["lightning"], nothing),
        "hugging_face / nothing": (clocks["hugging_face"], nothing),
        "lightning / hugging_face": (clocks["lightning"], clocks["hugging_face"]),
    }
    return {
        "num_rounds": num_rounds,
        "median_step_s": {key: _median(clock.wall_times_s) for key, clock in clocks.items()},
        "cpu": {key: _ratio(a.cpu_times_s, b.cpu_times_s) for key, (a, b) in pairs.items()},
        "wall": {key: _ratio(a.wall_times_s, b.wall_times_s) for key, (a, b) in pairs.items()},
    }


def _fit(
    train: Callable[[Row, Workload, Timer], None], row: Row, workload: Workload, clock: StepClock
) -> None:
    torch.set_num_threads(1)  # the threads of one fit would spin while another one works
    train(row, workload, Timer(clock, workload.num_steps))


def _ratio(times_s: list[float], reference_s: list[float]) -> dict[str, float]:
    return summarise([a / b for a, b in zip(times_s, reference_s, strict=True)])


def _median(times_s: list[float]) -> float:
    return sorted(times_s)[len(times_s) // 2]


def main() -> None:
    """Time the row named on the command line and print JSON in the last line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ladder._timing", description=__doc__
    )
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(time_row(options.row, WORKLOADS[options.workload], options.rounds)))


if __name__ == "__main__":
    main()
