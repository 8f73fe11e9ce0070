"""Signals while a fit runs inside another program: that program's, not the fit's."""

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

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
