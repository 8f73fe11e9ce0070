"""Run fits side by side, one step of each in turn, and compare the steps of each round."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

BatchT = TypeVar("BatchT")


class Turns:
    """Lets one of several threads work at a time, of two in the order 0 1 1 0 0 1 1 0 ...

    So none is always the one that comes first.

    Args:
        num_threads: How many take turns.
    """

    def __init__(self, num_threads: int = 2) -> None:
        self._condition = threading.Condition()
        self._num_threads = num_threads
        self._present = set(range(num_threads))
        self._num_turns = -num_threads  # the first ones are for what comes before the first step

    def wait(self, me: int) -> None:
        """Sleep until it is this thread's turn.

        Args:
            me: Its number, from 0.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._owner() == me)

    def end(self) -> None:
        """Let the next one work; the caller's turn is over."""
        with self._condition:
            self._advance()

    def leave(self, me: int) -> None:
        """Take no more turns.

        Args:
            me: Its number, from 0.
        """
        with self._condition:
            self._present.discard(me)
            if self._owner() == me and self._present:
                self._advance()

    def _advance(self) -> None:
        self._num_turns += 1
        while self._owner() not in self._present:  # those that have left
            self._num_turns += 1
        self._condition.notify_all()

    def _owner(self) -> int:
        n = self._num_threads
        if self._num_turns < 0:
            return self._num_turns + n
        round_index, place = divmod(self._num_turns, n)
        return place if round_index % 2 == 0 else n - 1 - place


class StepClock:
    """Times the steps of a fit that takes turns with others.

    Args:
        turns: Shared with the fits that run beside.
        me: Number of this fit, from 0.
    """

    def __init__(self, turns: Turns, me: int) -> None:
        self.turns = turns
        self.me = me
        self.wall_times_s: list[float] = []
        self.cpu_times_s: list[float] = []

    def begin(self) -> None:
        """Let the others make their step, wait for the next turn, and start the clock."""
        self.turns.end()
        self.turns.wait(self.me)
        self._wall_s, self._cpu_s = time.perf_counter(), time.thread_time()

    def end(self) -> None:
        """Stop the clock."""
        self.cpu_times_s.append(time.thread_time() - self._cpu_s)
        self.wall_times_s.append(time.perf_counter() - self._wall_s)


class TimedBatches(StepClock, Generic[BatchT]):
    """Batches that time what is done between one and the next: a whole step with all its hooks.

    Args:
        batches: In their order.
        turns: Shared with the fit that runs beside.
        me: 0 or 1.
    """

    def __init__(self, batches: list[BatchT], turns: Turns, me: int) -> None:
        super().__init__(turns, me)
        self.batches = batches

    def __iter__(self) -> Iterator[BatchT]:
        for batch in self.batches:
            self.begin()
            yield batch
            self.end()


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
    take_turns([partial(first, timed[0]), partial(second, timed[1])], timed, num_warmup=num_warmup)
    return timed


def take_turns(
    fits: Sequence[Callable[[], None]], clocks: Sequence[StepClock], *, num_warmup: int
) -> None:
    """Run fits beside each other, each in a thread of its own, but only one at a time.

    Args:
        fits: Each begins and ends its clock around each step.
        clocks: One for each fit, with the same turns.
        num_warmup: Steps at the start that are struck from the clocks.
    """

    def run(clock: StepClock, fit: Callable[[], None]) -> None:
        clock.turns.wait(clock.me)
        try:
            fit()
        finally:
            clock.turns.leave(clock.me)

    with ThreadPoolExecutor(len(fits)) as pool:
        futures = [pool.submit(run, *one) for one in zip(clocks, fits, strict=True)]
        for future in futures:
            future.result()
    for clock in clocks:
        del clock.cpu_times_s[:num_warmup], clock.wall_times_s[:num_warmup]
