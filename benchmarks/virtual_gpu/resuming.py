"""What a fit needs when it resumes, beside the same fit from the start.

`python -m benchmarks.virtual_gpu resuming`: three steps of the 7M RoBERTa, then three more from the
checkpoint of the first three, each in a process of its own.
"""

import argparse
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks._common import RESULTS, markdown_table, write_results
from benchmarks._models import SMALL, masked_batch
from benchmarks._training import Batches, LanguageModel
from benchmarks.faults._attack import in_process
from benchmarks.presets._run import SETTINGS
from benchmarks.virtual_gpu._setup import allow_forks, be_quiet, taken_to_work
from lightning_memsave import MemSaveCallback
from lightning_memsave.units import GIB, MIB
from tests.virtual_gpu import counters

NUM_STEPS = 3
ROWS: dict[str, dict[str, Any] | None] = {
    "without the callback": None,
    **{f'`preset="{name}"`': SETTINGS[name] for name in SETTINGS if name != "nothing"},
    '`preset="off"`': {"preset": "off"},
}
SQUEEZED = ("without the callback", '`preset="off"`')
"""Rows whose smallest GPU is searched."""
LIMITS = (1 * GIB, 4 * GIB)


class _Peaks(pl.Callback):
    """The largest tensors and segments of a fit."""

    @override
    def on_train_start(self, *_: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    @override
    def on_train_end(self, *_: Any) -> None:
        stats = torch.cuda.memory_stats()
        self.found = [stats[f"{kind}_bytes.all.peak"] for kind in ("requested", "reserved")]


def run(
    settings: dict[str, Any] | None,
    *,
    resumes: Path | None = None,
    saves: Path | None = None,
    memory: int | None = None,
) -> list[int] | None:
    """Train.

    Args:
        settings: Of the callback; ``None`` for none.
        resumes: The checkpoint.
        saves: Where to write one in the end.
        memory: Bytes of the GPU.

    Returns:
        Bytes of tensors and segments at the peak; ``None`` if memory ran out.
    """
    if memory is not None:
        counters.set_memory(memory)
    peaks = _Peaks()
    callbacks: list[pl.Callback] = [peaks]
    if settings is not None:
        callbacks.append(MemSaveCallback(**settings, report=False))
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=1,
        max_epochs=2 if resumes is not None else 1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = [masked_batch(SMALL.vocab_size, 64, 128)] * NUM_STEPS
    try:
        trainer.fit(
            LanguageModel(SMALL.build()),
            DataLoader(Batches(batches), batch_size=None),
            ckpt_path=resumes,
        )
    except torch.OutOfMemoryError:
        return None
    if saves is not None:
        trainer.save_checkpoint(saves)
    return peaks.found


def find_smallest(job: Callable[..., Any]) -> int:
    """Search for the memory from which on a fit ends, to 2 MiB."""
    too_small, enough = LIMITS
    while enough - too_small > 2 * MIB:
        size = (too_small + enough) // 2
        if in_process(functools.partial(job, memory=size)) is None:
            too_small = size
        else:
            enough = size
    return enough


def measure(row: str) -> dict[str, list[int]]:
    """Measure a row: tensors, segments and, if it is searched, the smallest GPU."""
    settings, found = ROWS[row], {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "half.ckpt"
        jobs: dict[str, Callable[..., Any]] = {
            "start": functools.partial(run, settings, saves=path),
            "resumed": functools.partial(run, settings, resumes=path),
        }
        for name, job in jobs.items():
            found[name] = [*in_process(job)]
            if row in SQUEEZED:
                found[name].append(find_smallest(job))
    print(row, found, flush=True)
    return found


def make_table(found: dict[str, dict[str, list[int]]]) -> str:
    """Write the rows, in MiB."""
    rows = []
    for row, both in found.items():
        figures = [f"{number / MIB:,.2f}" for one in both.values() for number in one[:2]]
        sizes = [f"{one[2] / MIB:,.0f}" if len(one) > 2 else "" for one in both.values()]
        rows.append([row, *figures, *sizes])
    header = (
        *("fit", "tensors", "segments", "tensors, resumed", "segments, resumed"),
        *("smallest GPU", "smallest GPU, resumed"),
    )
    return markdown_table(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write all rows.

    Args:
        arguments: Of the command line.

    Returns:
        1 if a resumed fit with the callback needed more than one from the start.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.virtual_gpu resuming", description=__doc__
    )
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=[*ROWS], help="only these")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    options = parser.parse_args(arguments)
    allow_forks()
    be_quiet()
    with taken_to_work():
        found = {row: measure(row) for row in options.rows}
    table = make_table(found)
    path = write_results("virtual_gpu_resuming", {"rows": found}, table, folder=options.results)
    print(f"{table}\n\nWritten to {path}")
    ours = [both for row, both in found.items() if ROWS[row] is not None]
    pairs = (pair for both in ours for pair in zip(both["resumed"], both["start"], strict=True))
    return int(any(resumed > start for resumed, start in pairs))
