"""A fit that nobody sees or hears of, inside one that goes on."""

import _thread
import contextlib
import importlib
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from lightning_memsave.core.patching import PROCESS_WIDE

_RETRY_S = 0.001
_CALLED_BY_TORCH = ("torch", "lightning_memsave")


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Let Ctrl-C end what runs inside, and all handlers be as before afterwards.

    Python may raise ``KeyboardInterrupt`` in any line, also in one that torch calls from where no
    exception may leave, which ends the process. Inside, it waits for a line of somebody else.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # where Python neither runs handlers nor sets them
        return
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    if handlers[signal.SIGINT] is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            # None stands for a handler that Python did not set and cannot set.
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def leave_signals(trainer: Any) -> None:
    """Keep a Trainer from handling signals: SIGTERM would end its fit only after a batch.

    Args:
        trainer: Before its fit.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None


def _interrupt(number: int, frame: FrameType | None) -> None:
    inner = frame
    while inner is not None and _package_of(inner) in sys.stdlib_module_names:
        inner = inner.f_back
    is_torchs = inner is not None and _package_of(inner) in _CALLED_BY_TORCH
    if not is_torchs and not _is_finalizing(frame):
        signal.default_int_handler(number, frame)
    again = threading.Timer(_RETRY_S, _thread.interrupt_main)
    again.daemon = True
    again.start()


# Python throws away what is raised there.
def _is_finalizing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


_ROOTS = ("lightning", "pytorch_lightning", "lightning_fabric")
# `warning_once` is what transformers adds: it remembers its messages for good.
_LOG_METHODS = ("handle", "warning_once", "info_once")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let a fit leave no trace: nothing is printed, logged or warned, and no other process meets.

    What this thread writes to standard output and error, and to any logger, is dropped; other
    threads write on. What Lightning and torch remember of the warnings that they have given is what
    they remembered before, so that the next fit says what it has to say. Handlers of signals are
    as before, and Ctrl-C ends it. ``torch.distributed`` seems not to be initialised, so that code
    which asks for it does not wait for processes that do not take part. One thread at a time.
    """
    with PROCESS_WIDE, _quiet():
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    thread = threading.get_ident()
    caches = [(cache, set(cache)) for cache in _warning_caches()]
    warns_always = torch.is_warn_always_enabled()
    try:
        # Else what torch warns of once would be used up.
        torch.set_warn_always(True)
        with (
            contextlib.redirect_stdout(_Muted(sys.stdout, thread)),
            contextlib.redirect_stderr(_Muted(sys.stderr, thread)),
            _loggers_muted(thread),
            signals_kept(),
            _alone_in_the_world(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_warn_always(warns_always)
        for cache, said in caches:
            cache.intersection_update(said)


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


class _Muted:
    """A stream that drops what one thread writes.

    Args:
        stream: Where other threads write to; ``None`` in programs without a console.
        thread: The one that is not heard.
    """

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
    def muted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(logger: logging.Logger, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return method(logger, *args, **kwargs)
            return None

        return call

    methods = {n: vars(logging.Logger)[n] for n in _LOG_METHODS if n in vars(logging.Logger)}
    for name, method in methods.items():
        setattr(logging.Logger, name, muted(method))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(logging.Logger, name, method)


@contextlib.contextmanager
def _alone_in_the_world() -> Iterator[None]:
    if not dist.is_available():
        yield
        return
    member: Any = dist.GroupMember
    world, member.WORLD = member.WORLD, None
    try:
        yield
    finally:
        member.WORLD = world


def _warning_caches() -> list[set[str]]:
    caches: dict[int, set[str]] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _ROOTS:
            continue
        for value in [*vars(module).values()]:
            holders = [value, vars(value).get("warning_cache") if isinstance(value, type) else None]
            for holder in holders:
                if type(holder).__name__ == "WarningCache":
                    caches[id(holder)] = holder
    return list(caches.values())
