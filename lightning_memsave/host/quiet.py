"""A fit that nobody sees or hears of, inside one that goes on."""

import contextlib
import importlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from lightning_memsave.core.patching import PROCESS_WIDE
from lightning_memsave.host.signals import signals_kept

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
