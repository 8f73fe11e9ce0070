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
    """Suppress output, logging, warnings and collectives of this thread.

    Writes of this thread to standard output and error, and to any logger, are dropped; other
    threads are unaffected. Caches of warnings that Lightning and torch show once are restored, so
    that the next fit shows them. Ctrl-C takes effect in `raise_if_interrupted` or at the end, a
    second one at once. ``torch.distributed`` appears uninitialized, so that no code waits for other
    processes. One thread at a time.
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
    """Raise a Ctrl-C that was deferred since `quiet` began; call it where raising is safe."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Interruption) and handler.has_come:
        raise KeyboardInterrupt


def leave_signals(trainer: Any) -> None:
    """Prevent a Trainer from handling signals: SIGTERM would end its fit only after a batch."""
    trainer._signal_connector.register_signal_handlers = lambda: None


def silent_logger(package: ModuleType) -> Any:
    """Make a logger of either package that discards everything, for modules that require one."""
    return importlib.import_module(f"{package.__name__}.loggers.logger").DummyLogger()


def forget_metric_names(pl_module: Any) -> None:
    """Clear the cache of metric names, by id, in a copy of a LightningModule."""
    pl_module._metric_attributes = None


# Python raises `KeyboardInterrupt` in any line, also in callbacks from C++ that must not raise and
# would end the process.
class _Interruption:
    has_come = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.has_come:
            signal.default_int_handler(number, frame)
        self.has_come = True


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread runs and sets handlers
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    interruption = _Interruption()
    if handlers[signal.SIGINT] is signal.default_int_handler:
        signal.signal(signal.SIGINT, interruption)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: not set from Python, and cannot be restored
                signal.signal(number, handler)
        if interruption.has_come:  # even if another exception is being raised
            raise KeyboardInterrupt


class _Muted:
    """A stream that drops writes of one thread; programs without a console have no stream."""

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


# Otherwise warnings that are shown once would not be shown in the real fit.
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
        # Earlier messages may be shown again.
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
