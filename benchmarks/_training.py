"""The LightningModule and the Trainer of the benchmarks, as plain as any project's."""

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

Batch = dict[str, Tensor]


class LanguageModel(LightningModule):
    """A masked language model and AdamW.

    Args:
        model: Gives the loss itself, from ``labels``.
        lr: Learning rate.
        weight_decay: Of all parameters.
    """

    def __init__(self, model: nn.Module, *, lr: float = 1e-4, weight_decay: float = 0.01) -> None:
        super().__init__()
        self.model = model
        self.lr = lr
        self.weight_decay = weight_decay

    def training_step(self, batch: Batch) -> Tensor:
        """Give the loss of a batch."""
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Give AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)


class Batches(IterableDataset[Batch]):
    """Batches that are made already.

    Args:
        batches: In their order.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def fit(
    module: LightningModule,
    batches: Iterable[Batch] | DataLoader[Any],
    callbacks: Sequence[Callback],
    *,
    accelerator: str = "cpu",
    **settings: Any,
) -> None:
    """Train through the batches once, without log files, checkpoints and progress bar.

    Args:
        module: What to train.
        batches: Its batches, or a DataLoader.
        callbacks: The Trainer's callbacks.
        accelerator: ``"cpu"`` or ``"cuda"``.
        settings: More arguments of the Trainer.
    """
    for package in (
        "lightning.pytorch",
        "lightning.fabric",
        "pytorch_lightning",
        "lightning_fabric",
    ):
        logging.getLogger(package).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec.*", FutureWarning)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    if not isinstance(batches, DataLoader):
        batches = DataLoader(Batches(batches), batch_size=None)
    trainer.fit(module, batches)
