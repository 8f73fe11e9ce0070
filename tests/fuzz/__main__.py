"""Command line of the fuzzer: `python -m tests.fuzz --help`."""

import argparse
import contextlib
import functools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tests.fuzz.campaign import Tally, examine, examine_all
from tests.fuzz.grammar import generate
from tests.fuzz.settings import LEAST_SHARE, SETTINGS

PER_TASK = 20
"""Seeds that one process examines at a time."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.show is not None:
        print(generate(options.show).source(), end="")
        return 0
    if options.shrink is not None:
        faults = examine(options.shrink, Tally(), options.settings or [*SETTINGS])
        fault = next(faults, None)
        print("no disagreement" if fault is None else fault.report(), end="\n" * (fault is None))
        return fault is not None
    return _search(options)


def _search(options: argparse.Namespace) -> int:
    starts = range(options.seed, options.seed + options.count, PER_TASK)
    tasks = [range(n, min(n + PER_TASK, options.seed + options.count)) for n in starts]
    work = functools.partial(examine_all, settings=options.settings)
    tally, begun, count = Tally(), time.perf_counter(), 0
    with _pool(options.processes) as each:
        for found, faults in each(work, tasks):
            tally.add(found)
            count += len(faults)
            print(*faults, sep="\n", end="\n" * bool(faults), flush=True)
    print(f"{tally}\n{time.perf_counter() - begun:.0f} s, {count} disagreements")
    rare = [s for s in options.settings or SETTINGS if tally.share_on(s) < LEAST_SHARE]
    for setting in rare:
        print(f"{setting}: on in {tally.share_on(setting):.0%} of its runs: it tests too little")
    return bool(count or rare)


@contextlib.contextmanager
def _pool(processes: int) -> Iterator[Callable[..., Iterable[Any]]]:
    if processes == 1:
        yield map
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, max_tasks_per_child=20) as pool:
        yield pool.map


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description="Train small random programs plain and with settings, and compare.",
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=200, help="the number of seeds")
    parser.add_argument("--processes", type=int, default=1, help="how many work at once")
    parser.add_argument("--settings", nargs="*", help=f"of {' '.join(SETTINGS)}; else by chance")
    parser.add_argument("--show", type=int, metavar="SEED", help="print a program as a script")
    parser.add_argument(
        "--shrink", type=int, metavar="SEED", help="print the smallest program that still disagrees"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
