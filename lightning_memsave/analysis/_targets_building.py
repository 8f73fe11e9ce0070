"""Run code of the user: say clearly what is wrong with it, and let it run without memory."""

import contextlib
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_memsave.errors import ConfigurationError, MemsaveError
from lightning_memsave.planning.known_values import KnownValues

_ABOUT_GPU = re.compile(
    r"\bcuda\b|\bnvidia\b|\bhip\b|\bcudnn\b|no gpus? |accelerator device", re.IGNORECASE
)


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
        said = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        if _ABOUT_GPU.search(str(error)):
            raise ConfigurationError(
                f"{what} asks for a GPU{_place(error)}, and none is used here ({said}). Make the "
                "device an argument, guard it with `torch.cuda.is_available()`, or leave it to the "
                "Trainer."
            ) from error
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


@contextlib.contextmanager
def buildable() -> Iterator[None]:
    """Let modules be made under a ``FakeTensorMode``, if there is one.

    Yields:
        Nothing.
    """
    modes = _get_current_dispatch_mode_stack()
    fake = next((mode for mode in modes if isinstance(mode, FakeTensorMode)), None)
    if fake is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        # A module that copies its layers would copy the mode with them, and two modes do not mix.
        stack.enter_context(_replaced(FakeTensorMode, "__deepcopy__", lambda mode, memo: mode))
        stack.enter_context(_replaced(Tensor, "__deepcopy__", _deepcopy_without_data))
        # Draws until no number lies outside, which never ends where there are no numbers.
        stack.enter_context(
            _replaced(nn.init, "_no_grad_trunc_normal_", lambda tensor, *args, **kwargs: tensor)
        )
        if not any(isinstance(mode, KnownValues) for mode in modes):
            # Rates of dropout that are read from `torch.linspace`, for example.
            stack.enter_context(KnownValues(fake))
        yield


_PACKAGE = str(Path(__file__).parents[1])
_MISSING: Any = object()
_deepcopy_tensor: Any = Tensor.__deepcopy__


# torch's own asks where the data lies, and warns.
def _deepcopy_without_data(tensor: Any, memo: dict[int, Any]) -> Any:
    if not hasattr(tensor, "fake_mode") or not tensor.is_leaf:
        return _deepcopy_tensor(tensor, memo)
    if id(tensor) not in memo:
        copy = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, tensor.requires_grad)
        memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


# The innermost line that is not of a package: the user's own.
def _place(error: BaseException) -> str:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
        and not frame.filename.startswith(("<frozen", sys.base_prefix, _PACKAGE))
    ]
    return f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
