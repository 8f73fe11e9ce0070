"""A thread that works on the host beside the computation of the device."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from lightning_memsave.core.memory import host_copies


class HostWorker:
    """Runs functions in the order in which they were given, in one thread or at once.

    Args:
        in_background: Run them in a thread; otherwise `submit` runs them itself.
        num_threads: Threads that each operator uses there; ``None`` for torch's number, and for all
            cores but one where that is 1 and the device is a GPU: launchers set
            ``OMP_NUM_THREADS=1`` for processes whose work is done by GPUs.
    """

    def __init__(self, *, in_background: bool, num_threads: int | None = None) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._num_threads = num_threads
        if in_background:
            self._executor = ThreadPoolExecutor(1, "memsave-host", self._set_threads)

    def submit(self, work: Callable[[], None]) -> "Future[None]":
        """Run a function after those before it.

        Args:
            work: Its tensors count as host memory.

        Returns:
            Whose ``result()`` waits for it, and raises what it has raised.
        """
        if self._executor is not None:
            return self._executor.submit(_run, work)
        done: Future[None] = Future()
        _run(work)
        done.set_result(None)
        return done

    def close(self) -> None:
        """Finish all work and end the thread; a second call does nothing."""
        if self._executor is not None:
            self._executor.shutdown()
            # New threads start with the number that was set last, in whichever thread.
            torch.set_num_threads(torch.get_num_threads())

    def _set_threads(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)


def threads_for_host_steps() -> int | None:
    """Return how many threads to use beside a GPU; ``None`` for torch's own choice."""
    if torch.get_num_threads() > 1:
        return None
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (num_cores or 1) - 1)


def _run(work: Callable[[], None]) -> None:
    with torch.no_grad(), host_copies():
        work()
