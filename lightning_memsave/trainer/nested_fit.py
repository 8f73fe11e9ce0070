"""Run a fit inside another one without output, logging or collectives."""

import contextlib
import importlib
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from lightning_memsave.core.patching import PROCESS_WIDE

_ROOTS = ("lightning", "pytorch_lightning", "lightning_fabric")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let a fit leave no trace: nothing is printed, logged or warned, and no collective is run.

    What this thread writes to standard output and error, and to any logger, is dropped; other
    threads write on. What Lightning and torch remember of the warnings that they have given is what
    they remembered before, so that the next fit says what it has to say. Ctrl-C waits for
    `raise_if_interrupted` or for the end; a second one does not. ``torch.distributed`` seems not to
    be initialised, so that code which asks for it does not wait for processes that do not take
    part. One thread at a time.
    """
    thread = threading.get_ident()
    with (
        PROCESS_WIDE,
        _signals_kept(),
        contextlib.redirect_stdout(_Muted(sys.stdout, thread)),
        contextlib.redirect_stderr(_Muted(sys.stderr, thread)),
        _loggers_muted(thread),
        _without_process_group(),
        _warnings_forgotten(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def raise_if_interrupted() -> None:
    """Raise what Ctrl-C was to raise since `quiet` began; to be called where that is safe.

    Raises:
        KeyboardInterrupt: If it was pressed.
    """
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Interruption) and handler.has_come:
        raise KeyboardInterrupt


def leave_signals(trainer: Any) -> None:
    """Keep a Trainer from handling signals: SIGTERM would end its fit only after a batch.

    Args:
        trainer: Before its fit.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None


def silent_logger(package: ModuleType) -> Any:
    """Make a logger that takes everything and keeps nothing, for modules that expect to have one.

    Args:
        package: ``lightning.pytorch`` or ``pytorch_lightning``.

    Returns:
        A logger of that package.
    """
    return importlib.import_module(f"{package.__name__}.loggers.logger").DummyLogger()


def forget_metric_names(pl_module: Any) -> None:
    """Let Lightning look for the metrics of a copy, and not for those of the original.

    Args:
        pl_module: A copy of a LightningModule, which remembers metrics by their ids.
    """
    pl_module._metric_attributes = None


# Python raises `KeyboardInterrupt` in any line, also in one that torch calls, where no exception
# may leave, which ends the process.
class _Interruption:
    has_come = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.has_come:
            signal.default_int_handler(number, frame)
        self.has_come = True


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # where Python neither runs handlers nor sets them
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    interruption = _Interruption()
    if handlers[signal.SIGINT] is signal.default_int_handler:
        signal.signal(signal.SIGINT, interruption)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # Python did not set it and cannot set it
                signal.signal(number, handler)
        if interruption.has_come:  # whatever else was raised meanwhile
            raise KeyboardInterrupt


class _Muted:
    """A stream that drops what one thread writes; in programs without a console there is none."""

    def __init__(self, stream: Any, thread: int) -> None:
        self._stream = stream
        self._thread = thread

    def write(self, text: str) -> int:
        if self._stream is None or threading.get_ident() == self._thread:
            return len(text)
        return int(self._stream.write(text))

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# Not `logging.disable`, which would silence other threads as well.
@contextlib.contextmanager
def _loggers_muted(thread: int) -> Iterator[None]:
    def is_heard(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [h for logger in loggers for h in getattr(logger, "handlers", ())]
    handlers += [logging.lastResort] if logging.lastResort else []
    for handler in handlers:
        handler.addFilter(is_heard)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_heard)


@contextlib.contextmanager
def _without_process_group() -> Iterator[None]:
    if not dist.is_available():
        yield
        return
    member: Any = dist.GroupMember
    world, member.WORLD = member.WORLD, None
    try:
        yield
    finally:
        member.WORLD = world


# Else what is warned of once would be used up.
@contextlib.contextmanager
def _warnings_forgotten() -> Iterator[None]:
    caches = [(cache, set(cache)) for cache in _warning_caches()]
    warns_always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(warns_always)
        for cache, said in caches:
            cache.intersection_update(said)
        # Its messages of before may be said once more.
        transformers: Any = sys.modules.get("transformers.utils.logging")
        for name in ("warning_once", "info_once"):
            if hasattr(transformers, name):
                getattr(transformers, name).cache_clear()


def _warning_caches() -> Iterator[set[str]]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _ROOTS:
            holders = [module, *(v for v in list(vars(module).values()) if isinstance(v, type))]
            for cache in (vars(holder).get("warning_cache") for holder in holders):
                if isinstance(cache, set):
                    yield cache
