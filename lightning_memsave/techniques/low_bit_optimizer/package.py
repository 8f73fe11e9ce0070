"""Import bitsandbytes on first use, say why it cannot be, and wait for its kernels."""

import contextlib
import importlib.metadata
import importlib.util
import logging
import re
from collections.abc import Iterator
from typing import Any

import torch

from lightning_memsave.errors import MissingDependencyError

# Older versions read other settings, and have no CPU kernels.
_LOWEST = (0, 50)
INSTALL = f"Run `pip install -U 'bitsandbytes>={'.'.join(map(str, _LOWEST))}'`"


def unusable(setting: str, why: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"`{setting}` is not possible: {why}. {INSTALL}, or set `optimizer=None`."
    )


def find_wrong_version() -> str | None:
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed"
    version = importlib.metadata.version("bitsandbytes")
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) >= _LOWEST:
        return None
    return f"bitsandbytes {version} is older than {'.'.join(map(str, _LOWEST))}"


def import_bitsandbytes(setting: str) -> Any:
    """Import bitsandbytes on first use; `setting` is the one that needs it, for the error."""
    why = find_wrong_version()
    if why is not None:
        raise unusable(setting, why)
    # Without the package `kernels` it warns about a 4-bit CPU kernel that no optimizer uses.
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import bitsandbytes  # noqa: PLC0415
    except (ImportError, OSError, RuntimeError) as error:
        raise unusable(setting, f"bitsandbytes cannot be imported ({error})") from error
    finally:
        logger.setLevel(level)
    return bitsandbytes


@contextlib.contextmanager
def in_order(device: torch.device) -> Iterator[None]:
    """Order kernels on CUDA's default stream with the work on the current one."""
    if device.type != "cuda":
        yield
        return
    default, current = torch.cuda.default_stream(device), torch.cuda.current_stream(device)
    if current == default:
        yield
        return
    default.wait_stream(current)
    yield
    current.wait_stream(default)
