"""Run code of users, and explain what fails in it."""

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from lightning_memsave.core.files import is_installed
from lightning_memsave.errors import ConfigurationError, MemsaveError
from lightning_memsave.prediction.fake.tensors import (
    allow_construction,
    fake_tensors,
    remedy_for,
)

_MAX_LENGTH = 300
_HOW_CALLED = (
    "It is called without arguments, on fake tensors: do not require arguments or read values of "
    "tensors in it, or pass the module itself."
)


@contextlib.contextmanager
def explained(what: str, fix: str) -> Iterator[None]:
    try:
        yield
    except MemsaveError:
        raise
    except (Exception, SystemExit) as error:
        said = _in_brief(f"{type(error).__name__}: {error}")
        fix, frame = remedy_for(error) or fix, own_frame(error)
        where = "" if frame is None else f" in {frame.filename}, line {frame.lineno}"
        raise ConfigurationError(f"{what} failed{where} ({said}). {fix}") from error


def build_module(make: Any, name: str = "", fix: str = _HOW_CALLED) -> nn.Module:
    if not callable(make):
        raise ConfigurationError(
            f"`{make!r}` is {type(make).__name__}, neither a module nor a function that returns "
            "one. Pass the module, or for example `lambda: Model(config)`."
        )
    name = name or f"{getattr(make, '__name__', type(make).__name__)}()"
    with explained(f"`{name}`", fix), allow_construction():
        module = make()
    if not isinstance(module, nn.Module):
        raise ConfigurationError(
            f"`{name}` returned {type(module).__name__}, not a module. Return the module only."
        )
    return module


def build_without_data(make: Any) -> nn.Module:
    with fake_tensors():
        module = build_module(make)
        # A LightningModule may create its layers here; a second call must do nothing.
        if callable(configure := getattr(module, "configure_model", None)):
            with explained(f"`{type(module).__name__}.configure_model`", _HOW_CALLED):
                configure()
        return module


# torch lists all backends if it has no kernel for one of them.
def _in_brief(text: str) -> str:
    text = " ".join(text.split()).rstrip(".")
    if len(text) <= _MAX_LENGTH:
        return text
    first = re.split(r"(?<=[.!?])\s+(?=[A-Z'`\"])", text, maxsplit=1)[0].rstrip(".")
    return first if len(first) <= _MAX_LENGTH else f"{first[:_MAX_LENGTH]} ..."


_PACKAGE, _STANDARD_LIBRARY = str(Path(__file__).parents[1]), str(Path(traceback.__file__).parent)


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Find the innermost line of the user's own code."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not is_installed(frame.filename)
        and not frame.filename.startswith(("<frozen", _STANDARD_LIBRARY, _PACKAGE))
    ]
    return frames[-1] if frames else None
