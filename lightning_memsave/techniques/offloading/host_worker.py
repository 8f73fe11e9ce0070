"""A thread that works on the host beside the computation of the device."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from lightning_memsave.core.memory import host_copies


class HostWorker:
    """Runs functions in the order in which they were given, in a thread or at once.

    The thread stays until `close`, and with it the threads that OpenMP keeps for it: to start them
    anew for each block takes milliseconds.
    """

    def __init__(self, *, in_background: bool, num_threads: int | None = None) -> None:
        self.device: torch.device | None = None
        """The current CUDA device of the thread; ``None`` to leave it."""
        self._in_background = in_background
        self.num_processes = 1
        """Of how many processes of the machine each has such a worker."""
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._process = 0

    def submit(self, work: Callable[[], None]) -> "Future[None]":
        if not self._in_background:
            done: Future[None] = Future()
            try:
                self._run(work)
            except BaseException as error:  # who waits for it raises it
                done.set_exception(error)
            else:
                done.set_result(None)
            return done
        with self._lock:
            if self._thread is None or self._process != os.getpid():  # forks have no threads
                self._thread = ThreadPoolExecutor(1, "memsave-host")
                self._process = os.getpid()
            return self._thread.submit(self._run, work)

    def close(self) -> None:
        """Do what was given, and end the thread; later work starts another one."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None and self._process == os.getpid():
            thread.shutdown()

    def use_all_cores(self) -> None:
        """Use all cores but one where torch was told to use one, unless a number was given.

        Launchers set ``OMP_NUM_THREADS=1`` for processes whose work is done by GPUs.
        """
        if self._num_threads is None and torch.get_num_threads() == 1:
            has_affinity = hasattr(os, "sched_getaffinity")
            num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
            self._num_threads = max(1, (num_cores - 1) // self.num_processes)

    def _run(self, work: Callable[[], None]) -> None:
        if self._in_background:
            self._set_up_thread()
        with torch.no_grad(), host_copies():
            work()

    def _set_up_thread(self) -> None:
        if self.device is not None:
            torch.cuda.set_device(self.device)
        before = torch.get_num_threads()
        if self._num_threads in (None, before):
            return
        torch.set_num_threads(self._num_threads)
        # torch has a number for this thread, and one for threads that are yet to start.
        other = threading.Thread(target=torch.set_num_threads, args=(before,))
        other.start()
        other.join()


def wait_for(work: list["Future[None]"]) -> None:
    """Wait for what workers do, and raise what the first one that failed has raised."""
    failed: list[BaseException] = []
    while work:
        first = work[0]
        try:
            first.result()
        except BaseException as error:
            if not first.done():
                raise
            failed.append(error)
        if first in work:
            work.remove(first)
    if failed:
        raise failed[0]
