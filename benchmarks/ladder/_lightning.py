"""A row through Lightning and `MemSaveCallback`."""

from typing import Any

import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from benchmarks._training import LanguageModel, fit
from benchmarks.ladder._data import Collate, Samples
from benchmarks.ladder._observers import Observer
from benchmarks.ladder._rows import Row, Workload


class _Report(Callback):
    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self.observer.begin(pl_module, trainer.optimizers)
        self.observer.track_input(batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.observer.end_step(outputs["loss"].item())


def train(row: Row, workload: Workload, observer: Observer) -> None:
    """Train a row.

    Args:
        row: Which techniques are on.
        workload: What to train.
        observer: Looks on.
    """
    callbacks: list[Callback] = [_Report(observer)]
    arguments = row.callback_arguments(workload)
    if arguments is not None:
        from lightning_memsave import MemSaveCallback  # noqa: PLC0415 - "nothing" is without it

        callbacks.append(MemSaveCallback(**arguments, report=False))
    loader = DataLoader(
        Samples(workload),
        batch_size=workload.batch_size,
        collate_fn=Collate(observer.track_input),
    )
    fit(
        LanguageModel(workload.sizes.build(), weight_decay=0.0),
        loader,
        callbacks,
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        gradient_clip_val=1.0,  # what Hugging Face's Trainer does unless told otherwise
    )
