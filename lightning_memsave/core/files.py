"""Write files so that a failure in the middle keeps what was there before; whose code is in one."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lightning_memsave.errors import ConfigurationError


def is_installed(path: str) -> bool:
    """Return whether a file belongs to an installed package, not to the user's project.

    Example:
        >>> [is_installed(f"/usr/{folder}/x.py") for folder in ("dist-packages", "dist-packages_2")]
        [True, False]
    """
    # Debian and Colab install into `dist-packages`.
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], mode_of: Path | None = None, *, is_link_kept: bool = True
) -> Iterator[BinaryIO]:
    """Write a file beside its place, and put it there when it is complete.

    In place of a link, or of the file that it leads to.
    """
    path = Path(path).resolve() if is_link_kept else Path(path)
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        model = mode_of or path
        if model.exists():
            with contextlib.suppress(OSError):  # some network file systems have none
                shutil.copymode(model, temporary)
        temporary.replace(path)
    except BaseException:
        # What was raised matters, not that a folder is gone or read-only.
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_output(path: str | os.PathLike[str], content: bytes, what: str, example: str) -> None:
    """Write a file that the user named."""
    try:
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        raise ConfigurationError(
            f"The {what} cannot be written to {os.fspath(path)!r}: {error.strerror}. Name a file "
            f"in a folder that exists and that you may write to, for example {example!r}."
        ) from error


def write_file(directory: str, name: str, content: str | bytes) -> None:
    # Here, as commands that write no report start faster without it.
    from fsspec.core import url_to_fs  # type: ignore[import-untyped] # noqa: PLC0415
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped] # noqa: PLC0415

    data = content.encode() if isinstance(content, str) else content
    filesystem, folder = url_to_fs(directory)
    filesystem.makedirs(folder, exist_ok=True)
    if isinstance(filesystem, LocalFileSystem):
        with replacing(Path(folder, name)) as file:
            file.write(data)
    else:  # object stores show a file only when it is complete
        filesystem.write_bytes(f"{folder}/{name}", data)
