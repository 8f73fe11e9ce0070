"""Advice on checkpoints from which a run cannot resume, or not as it would have gone on."""

import zipfile
from pathlib import Path
from typing import Any

from lightning_memsave.units import format_bytes

_ARCHIVE = b"PK"


def add_resume_advice(exception: BaseException, checkpoint: object) -> None:
    """Let an exception name a checkpoint that is not whole, below its traceback.

    Lightning reads a checkpoint before it writes anything, and raises what torch says of the
    content: neither the file nor another one to resume from.

    Args:
        exception: What ended a run before it began.
        checkpoint: Its ``ckpt_path``; nothing is said if it is whole, a folder or elsewhere.
    """
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
    """Say what a checkpoint lacks that is saved between two batches of an optimizer step.

    Args:
        trainer: A Trainer that accumulates gradients.

    Returns:
        What is lost, and what to do.
    """
    window = trainer.accumulate_grad_batches
    return (
        f"A checkpoint is saved in the middle of an accumulation window of {window} batches. "
        "Checkpoints of Lightning hold no gradients, so a run that resumes from it loses those "
        "of the batches since the last optimizer step. Save after optimizer steps instead: "
        "`ModelCheckpoint(every_n_train_steps=...)` does, and so does a `val_check_interval` "
        f"that is a multiple of {window}."
    )


def is_whole(path: Path) -> bool:
    """Say whether a file ends as ``torch.save`` ends it: with the directory of a zip archive.

    Args:
        path: A file. Of one that does not begin as an archive, as before torch 1.6, nothing is
            known but that it is not empty.

    Returns:
        False if something is missing.
    """
    with path.open("rb") as file:
        begin = file.read(len(_ARCHIVE))
    return zipfile.is_zipfile(path) if _ARCHIVE.startswith(begin) else True
