"""What fails in a callback, and must neither end a run nor hide what ended it."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from lightning_memsave.trainer.trainer import package_of


def describe(failure: BaseException) -> str:
    """Write a failure in one line."""
    return " ".join(f"{type(failure).__name__}: {failure}".split())


def say(trainer: Any, message: str) -> None:
    """Log a warning on the rank where it happened: a Python warning could be made an error."""
    logging.getLogger(f"{package_of(trainer).__name__}.memsave").warning(message)


@contextlib.contextmanager
def attempted(trainer: Any, otherwise: str) -> Iterator[None]:
    try:
        yield
    except Exception as failure:
        say(trainer, f"{otherwise}: {describe(failure)}")
