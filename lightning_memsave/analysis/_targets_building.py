"""Run code of the user: say clearly what is wrong with it, and let it run without memory."""

import contextlib
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from lightning_memsave.errors import ConfigurationError, MemsaveError

_ABOUT_GPU = re.compile(
    r"\bcuda\b|\bnvidia\b|\bhip\b|\bcudnn\b|no gpus? |accelerator device", re.IGNORECASE
)
_ABOUT_DATA = re.compile(r"\.numpy\(\)|data pointer|data_ptr")
_MAX_LENGTH = 300


def remedy_for(error: BaseException) -> str:
    """Say what to do about an error that comes from where the code runs, not from what it does.

    Args:
        error: Whatever code of the user raised on tensors without data.

    Returns:
        Two sentences; empty for any other error.
    """
    if _ABOUT_GPU.search(str(error)):
        return (
            "It asks for a GPU, and none is used here. Make the device an argument, guard it with "
            "`torch.cuda.is_available()`, or leave it to the Trainer."
        )
    if _ABOUT_DATA.search(str(error)):
        return (
            "It asks for the data of a tensor, and tensors have none here. Compute with torch "
            "instead of numpy or a kernel of its own."
        )
    return ""


@contextlib.contextmanager
def explained(what: str, fix: str) -> Iterator[None]:
    """Turn whatever code of the user raises into one error that says what to do.

    Args:
        what: What is done, as the subject of a sentence.
        fix: What to type instead.

    Yields:
        Nothing.

    Raises:
        ConfigurationError: If the code raises, or ends the process.
        MemsaveError: If the code raises one; it says what to do itself.
    """
    try:
        yield
    except MemsaveError:
        raise
    except (Exception, SystemExit) as error:
        said = _in_brief(f"{type(error).__name__}: {error}")
        fix = remedy_for(error) or fix
        raise ConfigurationError(f"{what} failed{_place(error)} ({said}). {fix}") from error


@contextlib.contextmanager
def importable(folder: str | None = None) -> Iterator[None]:
    """Let imports find what lies in a folder, as ``python file.py`` does.

    Args:
        folder: ``None`` is the current one, as for ``python -m``.

    Yields:
        Nothing.
    """
    path = str((Path(folder) if folder else Path.cwd()).resolve())
    sys.path.insert(0, path)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(path)


# Torch lists all its backends where it has no kernel for one of them.
def _in_brief(text: str) -> str:
    text = " ".join(text.split()).rstrip(".")
    if len(text) <= _MAX_LENGTH:
        return text
    first = re.split(r"(?<=[.!?])\s+(?=[A-Z'`\"])", text, maxsplit=1)[0].rstrip(".")
    return first if len(first) <= _MAX_LENGTH else f"{first[:_MAX_LENGTH]} ..."


_PACKAGE = str(Path(__file__).parents[1])


# The innermost line that is not of a package: the user's own.
def _place(error: BaseException) -> str:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
        and not frame.filename.startswith(("<frozen", sys.base_prefix, _PACKAGE))
    ]
    return f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
