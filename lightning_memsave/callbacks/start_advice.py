"""What may be the reason where a run does not start, or would not go on as it was."""

import itertools
import traceback
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_memsave.core.technique import Row
from lightning_memsave.errors import MemsaveError
from lightning_memsave.techniques.registry import entries
from lightning_memsave.units import format_bytes

_ARCHIVE = b"PK"

# Where modules, their hooks and gradients are called: an error elsewhere, such as of a dataset, has
# nothing to do with settings.
_PLACES = (
    *("torch/nn/modules/", "torch/autograd/", "torch/utils/checkpoint"),
    "lightning_memsave/techniques/",
)
_LIGHTNING = ("/lightning/pytorch/", "/pytorch_lightning/")


def add_start_advice(
    exception: BaseException, checkpoint: object, rows: Sequence[Row], *, has_trained: bool
) -> None:
    if not has_trained:
        _add_advice_on_checkpoint(exception, checkpoint)
        _add_advice_on_settings(exception, rows)
    _add_advice_on_device(exception, rows)
    _add_advice_on_fake(exception)


def _add_advice_on_fake(exception: BaseException) -> None:
    if "Please convert all Tensors to FakeTensors" in str(exception):
        exception.add_note(
            "A prediction runs your code on fake tensors, and one of them is in a global variable "
            "or an attribute of a class now. Keep such a tensor in the module, by "
            "`register_buffer`, or let a function return it that has `functools.lru_cache`; or "
            "predict nothing, by `predict=False, micro_batch_size=None`."
        )


# By code outside of hooks between steps, in the first batch or later.
def _add_advice_on_device(exception: BaseException, rows: Sequence[Row]) -> None:
    moved = [row.value for row in rows if row.name == "offload" and row.status == "on"]
    if moved and moved != ["'activations'"] and "on the same device" in str(exception):
        exception.add_note(
            f"With `offload={moved[0]}` weights wait on the host between steps, and while none of "
            "their modules computes. Code that reads them then, such as your own `optimizer_step` "
            "or a loss with weights in it, brings them to the device with `.to(...)` under "
            '`torch.no_grad()`; or set `offload="activations"` or `None`.'
        )


def _add_advice_on_settings(exception: BaseException, rows: Sequence[Row]) -> None:
    def is_in(path: str, places: Sequence[str]) -> bool:
        return any(place in path for place in places)

    arguments = {entry.argument for entry in entries()}
    on = [row for row in rows if row.status == "on" and row.name in arguments]
    frames = traceback.extract_tb(exception.__traceback__)
    paths = [Path(frame.filename).as_posix() for frame in frames]
    # Lightning runs the whole batch within the step of the optimizer, which may be ours.
    inner = itertools.takewhile(lambda path: not is_in(path, _LIGHTNING), paths[::-1])
    is_of_modules = any(is_in(path, _PLACES) for path in inner)
    if not on or not is_of_modules or isinstance(exception, MemsaveError | KeyboardInterrupt):
        return
    settings = ", ".join(f"`{row.name}={row.value}`" for row in on)
    exception.add_note(
        f"This happened before the first batch was done. `MemSaveCallback` changes what modules do "
        f'there, by {settings}. Does it happen with `MemSaveCallback(preset="off")` too? If not, '
        f"set them to None one by one, such as `{on[0].name}=None`, and keep the others."
    )


def _add_advice_on_checkpoint(exception: BaseException, checkpoint: object) -> None:
    # Lightning reads a checkpoint before it writes anything, and raises what torch says of the
    # content: neither the file nor another one to resume from.
    path = Path(str(checkpoint))
    if not path.is_file() or is_whole(path):
        return
    whole = [other for other in path.parent.glob("*.ckpt") if other.is_file() and is_whole(other)]
    remedy = "No other `*.ckpt` in its folder is whole: start without `ckpt_path`."
    if whole:
        newest = str(max(whole, key=lambda other: other.stat().st_mtime))
        remedy = f"Resume from the newest one in its folder that is whole: `ckpt_path={newest!r}`."
    exception.add_note(
        f"The checkpoint `{path}` ({format_bytes(path.stat().st_size)}) is not whole, as after a "
        f"full disk or a kill while it was saved. No file was changed. {remedy}"
    )


def describe_open_window(trainer: Any) -> str:
    """Say what a checkpoint lacks that is saved between two batches of an optimizer step."""
    window = trainer.accumulate_grad_batches
    return (
        f"A checkpoint is saved in the middle of an accumulation window of {window} batches. "
        "Checkpoints of Lightning hold no gradients, so a run that resumes from it loses those "
        "of the batches since the last optimizer step. Save after optimizer steps instead: "
        "`ModelCheckpoint(every_n_train_steps=...)` does, and so does a `val_check_interval` "
        f"that is a multiple of {window}."
    )


def is_whole(path: Path) -> bool:
    """Say whether a file ends as ``torch.save`` ends it: with the directory of a zip archive."""
    with path.open("rb") as file:
        begin = file.read(len(_ARCHIVE))
    return zipfile.is_zipfile(path) if _ARCHIVE.startswith(begin) else True
