"""A thread that works on the host beside the computation of the device."""

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch

from lightning_memsave.core.memory import host_copies

_IDLE_S = 10.0


class HostWorker:
    """Runs functions in the order in which they were given, in a thread or at once.

    The thread stays while there is work every few seconds, and with it the threads that OpenMP
    keeps for it: to start them anew for each block takes milliseconds.
    """

    def __init__(self, *, in_background: bool, num_threads: int | None = None) -> None:
        self.device: torch.device | None = None
        """The current CUDA device of the thread; ``None`` to leave it."""
        self._in_background = in_background
        self._num_threads = num_threads
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._is_running = False  # here, without a thread
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> "Future[None]":
        done: Future[None] = Future()
        with self._changed:
            self._waiting.append((work, done))
            if self._in_background:
                self._changed.notify()
                self._start_thread()
                return done
            is_first, self._is_running = not self._is_running, True
        if is_first:
            self._run(0.0)
        return done

    def close(self) -> None:
        """Do what was given, and end the thread; later work starts another one."""
        with self._changed:
            thread, self._is_closing = self._thread, True
            self._changed.notify()
        try:
            if thread is not None:
                thread.join()
        finally:
            self._is_closing = False

    def use_all_cores(self) -> None:
        """Use all cores but one where torch was told to use one, unless a number was given.

        Launchers set ``OMP_NUM_THREADS=1`` for processes whose work is done by GPUs.
        """
        if self._num_threads is None and torch.get_num_threads() == 1:
            has_affinity = hasattr(os, "sched_getaffinity")
            num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
            self._num_threads = max(1, num_cores - 1)

    def _start_thread(self) -> None:
        if self._thread is not None and self._thread.is_alive():  # in a forked process, it is not
            return
        # A daemon, as it may wait for work when the process is about to end.
        self._thread = threading.Thread(target=self._run, args=(_IDLE_S,), daemon=True)
        self._thread.name = "memsave-host"
        self._thread.start()
        # Python would stop it in the middle of an update. Called first, before memory is unlocked.
        atexit.register(self.close)

    def _run(self, idle_s: float) -> None:
        while True:
            with self._changed:
                if idle_s:
                    self._changed.wait_for(lambda: self._waiting or self._is_closing, idle_s)
                if not self._waiting:
                    self._is_running, self._thread = False, None
                    if idle_s:
                        atexit.unregister(self.close)
                    return
                work, done = self._waiting.popleft()
            self._complete(work, done)
            del work, done  # or they would live until the next one comes

    def _complete(self, work: Callable[[], None], done: "Future[None]") -> None:
        try:
            if self._in_background:
                self._set_up_thread()
            with torch.no_grad(), host_copies():
                work()
        except BaseException as error:  # who waits for it raises it
            done.set_exception(error)
        else:
            done.set_result(None)

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
