"""A thread that works on the host beside the computation of the device."""

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch

from lightning_memsave.core.memory import host_copies


class HostWorker:
    """Runs functions in the order in which they were given, in a thread or at once.

    The thread exists while there is work.

    Args:
        in_background: Run them in a thread; otherwise `submit` runs them itself.
        num_threads: Threads that each operator uses there; ``None`` for torch's number.
    """

    def __init__(self, *, in_background: bool, num_threads: int | None = None) -> None:
        self._in_background = in_background
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._is_running = False

    def submit(self, work: Callable[[], None]) -> "Future[None]":
        """Run a function after those before it.

        Args:
            work: Its tensors count as host memory.

        Returns:
            Whose ``result()`` waits for it, and raises what it has raised.
        """
        done: Future[None] = Future()
        with self._lock:
            self._waiting.append((work, done))
            is_first, self._is_running = not self._is_running, True
        if is_first and self._in_background:
            threading.Thread(target=self._run_in_thread, name="memsave-host").start()
        elif is_first:
            self._run()
        return done

    def use_all_cores(self) -> None:
        """Use all cores but one where torch was told to use one, unless a number was given.

        Launchers set ``OMP_NUM_THREADS=1`` for processes whose work is done by GPUs.
        """
        if self._num_threads is None and torch.get_num_threads() == 1:
            has_affinity = hasattr(os, "sched_getaffinity")
            num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
            self._num_threads = max(1, num_cores - 1)

    def _run_in_thread(self) -> None:
        before = torch.get_num_threads()
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        try:
            self._run()
        finally:
            torch.set_num_threads(before)  # new threads start with what was set last

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                work, done = self._waiting.popleft()
            try:
                with torch.no_grad(), host_copies():
                    work()
            except BaseException as error:  # who waits for it raises it
                done.set_exception(error)
            else:
                done.set_result(None)
