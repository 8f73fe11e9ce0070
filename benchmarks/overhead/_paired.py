"""Run two fits side by side, one step of each in turn, and compare each pair of steps."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

BatchT = TypeVar("BatchT")


class Turns:
    """Lets one of two threads work at a time, in the order 0 1 1 0 0 1 1 0 ...

    So neither is always the one that comes first.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._present = {0, 1}
        self._num_turns = -2  # the first two are for what comes before the first step

    def wait(self, me: int) -> None:
        """Sleep until it is this thread's turn.

        Args:
            me: 0 or 1.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._present == {me} or self._owner() == me)

    def end(self) -> None:
        """Let the next one work; the caller's turn is over."""
        with self._condition:
            self._num_turns += 1
            self._condition.notify_all()

    def leave(self, me: int) -> None:
        """Take no more turns.

        Args:
            me: 0 or 1.
        """
        with self._condition:
            self._present.discard(me)
            self._condition.notify_all()

    def _owner(self) -> int:
        return (0, 1, 1, 0)[self._num_turns % 4] if self._num_turns >= 0 else self._num_turns + 2


class TimedBatches(Generic[BatchT]):
    """Batches that time what is done between one and the next: a whole step with all its hooks.

    Args:
        batches: In their order.
        turns: Shared with the fit that runs beside.
        me: 0 or 1.
    """

    def __init__(self, batches: list[BatchT], turns: Turns, me: int) -> None:
        self.batches = batches
        self.turns = turns
        self.me = me
        self.wall_times_s: list[float] = []
        self.cpu_times_s: list[float] = []

    def __iter__(self) -> Iterator[BatchT]:
        for batch in self.batches:
            self.turns.end()
            self.turns.wait(self.me)
            wall, cpu = time.perf_counter(), time.thread_time()
            yield batch
            self.cpu_times_s.append(time.thread_time() - cpu)
            self.wall_times_s.append(time.perf_counter() - wall)


def summarise(ratios: list[float]) -> dict[str, float]:
    """Give the median of ratios and how far it can be trusted.

    Args:
        ratios: At least two.

    Returns:
        Median, quartiles, and the 95 % confidence interval of the median by order statistics.
    """
    ordered = sorted(ratios)
    n = len(ordered)
    # Ranks between which the median lies with 95 % probability, whatever the distribution.
    half_width = 0.98 * n**0.5
    low, high = max(0, int(n / 2 - half_width)), min(n - 1, int(n / 2 + half_width))
    quartiles = statistics.quantiles(ordered, n=4)
    return {
        "median": statistics.median(ordered),
        "confidence_low": ordered[low],
        "confidence_high": ordered[high],
        "quartile_low": quartiles[0],
        "quartile_high": quartiles[2],
    }


def time_pairs(
    first: Callable[[TimedBatches[BatchT]], None],
    second: Callable[[TimedBatches[BatchT]], None],
    batches: list[BatchT],
    *,
    num_warmup: int,
) -> tuple[TimedBatches[BatchT], TimedBatches[BatchT]]:
    """Time two fits beside each other.

    Each runs in a thread of its own, but only one at a time, for one step: what disturbs the
    machine for longer than that disturbs both.

    Args:
        first: Trains on the batches that it is given.
        second: The same.
        batches: For both.
        num_warmup: Steps at the start that do not count.

    Returns:
        The times of the steps that count.
    """
    turns = Turns()
    timed = (TimedBatches(batches, turns, 0), TimedBatches(batches, turns, 1))

    def run(me: int, fit: Callable[[TimedBatches[BatchT]], None]) -> None:
        turns.wait(me)
        try:
            fit(timed[me])
        finally:
            turns.leave(me)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(run, me, fit) for me, fit in enumerate((first, second))]:
            future.result()
    for one in timed:
        del one.cpu_times_s[:num_warmup], one.wall_times_s[:num_warmup]
    return timed
