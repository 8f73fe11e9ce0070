"""End all processes of a fit where one has fewer batches, or is told to end by the system."""

import contextlib
import datetime
import functools
import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_memsave.core.patching import own, patch_method, previous_method, set_own
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.trainer.distributed import all_reduce_min, has_others
from lightning_memsave.trainer.failures import attempted

_SURE_S, _LONGEST_PAUSE_S, _STORE_S = 3.0, 0.1, 30.0
_UNKNOWN_NUMBER = 2**62
_EPOCH_ENDS = "_memsave_epoch_ends"
_INTERRUPTED = "interrupted"


def end_together(trainer: Any) -> list[Callable[[], None]]:
    """Refuse epochs of different length, now or when the first one ends; all must call this."""
    handlers = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", None)
    if handlers:  # the first one is Lightning's
        handlers[0] = functools.partial(_end_after_batch, trainer)
    _refuse_known_numbers(trainer)
    if (ends := _watch_epochs(trainer)) is None:
        return []
    return [
        ends.close,
        set_own(trainer.fit_loop, _EPOCH_ENDS, ends),
        patch_method(trainer.fit_loop, on_advance_end),
        patch_method(trainer.fit_loop.epoch_loop, on_advance_end),
    ]


def _refuse_known_numbers(trainer: Any) -> None:
    number = trainer.num_training_batches
    number = _UNKNOWN_NUMBER if math.isinf(number) else int(number)
    least, most = all_reduce_min(trainer, number), -all_reduce_min(trainer, -number)
    num_passed = trainer.max_steps * trainer.accumulate_grad_batches
    if most in {least, _UNKNOWN_NUMBER} or 0 <= num_passed <= least:
        return
    what = f"the training data has {least} batches in one process, and {most} in another"
    fix = f"Use Lightning's sampler, or `Trainer(limit_train_batches={least})`."
    raise _refusal(what, fix)


def _end_after_batch(trainer: Any, number: int, frame: object) -> None:
    """Handle SIGTERM; Lightning's handler broadcasts amid other collectives, and all hang."""
    connector, launcher = trainer._signal_connector, trainer.strategy.launcher
    if not connector.received_sigterm and launcher is not None:
        launcher.kill(number)
    connector.received_sigterm = True


def on_advance_end(self: Any, *fetcher: Any) -> None:
    """Compare after a batch, before validation, and after an epoch of any number of batches."""
    ends = own(self.trainer.fit_loop, _EPOCH_ENDS)
    # Without lookahead it is not known whether a batch follows.
    if not fetcher or (hasattr(fetcher[0], "prefetch_batches") and not ends.end_batch()):
        ends.end_epoch()
    previous_method(self, "on_advance_end")(*fetcher)


class _EpochEnds:
    """Numbers of batches of all processes, in a store of their own.

    A process that waits in a collective cannot say so: each one writes after a batch whether
    another one follows (2 us, as no answer is awaited), and a process whose epoch has ended reads
    this before it communicates again.
    """

    def __init__(self, trainer: Any, store: Any) -> None:
        self._trainer, self._store = trainer, store
        self._own, self._ended = str(trainer.global_rank), -1
        self._write(0)

    def end_batch(self) -> bool:
        """Write how many batches this process needs: one more, if one follows."""
        loop = self._trainer.fit_loop.epoch_loop
        progress = loop.batch_progress
        # Lightning communicates before it fetches the next batch.
        if follows := not (progress.is_last_batch or loop.done):
            self._write(progress.current.ready + 1)
        return follows

    def end_epoch(self) -> None:
        """Wait until the epoch of all processes has ended; refuse a fit where one trains on."""
        epoch = self._trainer.current_epoch
        if self._ended == epoch:
            return
        self._ended, number = epoch, self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self._write(number)
        others = [str(rank) for rank in range(self._trainer.world_size)]
        others.remove(self._own)
        with contextlib.suppress(dist.DistError):  # where the process of the store has ended
            for other in others:
                self._wait(other, epoch, number)

    def close(self) -> None:
        """Leave; rank zero, which has the store, waits until the others need it no longer."""
        if self._trainer.state.status == _INTERRUPTED:
            return
        with contextlib.suppress(dist.DistError):
            self._store.set(f"left {self._own}", "")
            left = [f"left {rank}" for rank in range(self._trainer.world_size)]
            end_s = time.monotonic() + _SURE_S
            while self._own == "0" and not self._store.check(left) and time.monotonic() < end_s:
                time.sleep(0.001)

    def _write(self, number: int) -> None:
        with contextlib.suppress(dist.DistError):
            text = f"{self._trainer.current_epoch} {number} {self._ended}"
            self._store.set(self._own, text)

    def _wait(self, other: str, epoch: int, number: int) -> None:
        pause_s, since_s = 0.001, time.monotonic()
        while True:
            other_epoch, needed, ended = map(int, self._store.get(other).split())
            if max(other_epoch, ended + 1) > epoch:
                return
            if other_epoch < epoch or needed <= number:
                since_s = time.monotonic()
            elif time.monotonic() - since_s > _SURE_S:
                raise _different_ends(self._own, number, other)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _different_ends(rank: str, number: int, other: str) -> IncompatibleError:
    ended = f"the epoch of rank {rank} has ended after {number} batches"
    fix = f"Give all the same number of batches, or use `Trainer(limit_train_batches={number})`."
    return _refusal(f"{ended}, that of rank {other} goes on", fix)


def _refusal(what: str, fix: str) -> IncompatibleError:
    why = "Lightning would wait for the shorter one in its next batch"
    return IncompatibleError("MemSaveCallback", [Problem(what, why, fix)])


def _watch_epochs(trainer: Any) -> _EpochEnds | None:
    if not has_others():
        return None
    store: Any = None
    where = None
    failed = "A process with fewer batches than the others will wait"
    with attempted(trainer, failed):
        if trainer.global_rank == 0:
            host = "127.0.0.1" if trainer.num_nodes == 1 else os.environ["MASTER_ADDR"]
            store = _open_store(host, 0, is_first=True)
            where = host, store.port
    where = trainer.strategy.broadcast(where)
    with attempted(trainer, failed):
        if where is not None:
            return _EpochEnds(trainer, store or _open_store(*where, is_first=False))
    return None


def _open_store(host: str, port: int, *, is_first: bool) -> Any:
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    timeout = datetime.timedelta(seconds=_STORE_S)
    return make(host, port, is_master=is_first, timeout=timeout, wait_for_workers=False)
