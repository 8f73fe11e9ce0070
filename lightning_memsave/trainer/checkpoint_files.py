"""Save and load the checkpoints of a Trainer without a copy of the file in memory."""

import glob
import inspect
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_memsave.core.checkpoints import PIECE_BYTES, load_mapped, write
from lightning_memsave.core.files import replacing
from lightning_memsave.core.patching import own, patch_method, previous_method, set_own
from lightning_memsave.core.technique import undo_all

_UNDO = "_memsave_undo_streaming"


def stream_checkpoints(trainer: Any) -> None:
    """Let checkpoints be written through to their file, until the Trainer tears down.

    Lightning's own way holds the whole file in memory. Other plugins stay as they are.
    """
    plugin = trainer.strategy.checkpoint_io
    is_plain = type(plugin).__module__.endswith("fabric.plugins.io.torch_io")
    if not is_plain or any(each.__name__ in vars(plugin) for each in _METHODS):
        return
    undo: list[Callable[[], None]] = []
    undo += [set_own(plugin, _UNDO, undo), *(patch_method(plugin, each) for each in _METHODS)]


def streams_checkpoints(strategy: Any) -> bool:
    """Return whether the checkpoints of a strategy are written through to their file."""
    return own(strategy.checkpoint_io, _UNDO) is not None


def teardown(self: Any) -> None:
    """End streaming; replaces the method of ``TorchCheckpointIO``."""
    method = previous_method(self, "teardown")
    undo_all(own(self, _UNDO) or [])
    method()


def save_checkpoint(self: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
    """Write a checkpoint through; replaces the method of ``TorchCheckpointIO``.

    Local files are written beside their place, so that the last one stays whole until the new one
    is complete; others as their file system completes them.
    """
    if storage_options is not None:  # it says why not
        previous_method(self, "save_checkpoint")(checkpoint, path, storage_options)
        return
    filesystem, place, is_local = _place_of(path)
    filesystem.makedirs(place.rpartition("/")[0], exist_ok=True)
    if is_local:
        folder, name = Path(place).parent, glob.escape(Path(place).name)
        for left in folder.glob(f".{name}.*.tmp"):  # of a killed process
            left.unlink(missing_ok=True)
        with replacing(place, is_link_kept=False) as file:
            write(checkpoint, file)
        return
    with filesystem.transaction, filesystem.open(place, "wb", block_size=PIECE_BYTES) as file:
        write(checkpoint, file)


def load_checkpoint(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
    """Load a checkpoint from its mapped file; replaces the method of ``TorchCheckpointIO``."""
    method = previous_method(self, "load_checkpoint")
    _, place, is_local = _place_of(path)
    # In another system, a mapped file cannot be replaced.
    if not (is_local and os.name == "posix" and _is_archive(Path(place))):
        return method(path, *args, **kwargs)
    bound = inspect.signature(type(self).load_checkpoint).bind(self, path, *args, **kwargs)
    bound.apply_defaults()
    options = {"weights_only": False, **bound.arguments}  # Lightning 2.5 has no argument for it
    del options["self"], options["path"]
    try:
        return load_mapped(place, **options)
    except Exception:  # it says why; or some object of the project cannot be copied
        return method(path, *args, **kwargs)


_METHODS = (save_checkpoint, load_checkpoint, teardown)


def _place_of(path: Any) -> tuple[Any, str, bool]:
    from fsspec.core import url_to_fs  # type: ignore[import-untyped] # noqa: PLC0415
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped] # noqa: PLC0415

    filesystem, place = url_to_fs(str(path))
    return filesystem, place, isinstance(filesystem, LocalFileSystem)


def _is_archive(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(2) == b"PK" and zipfile.is_zipfile(path)
