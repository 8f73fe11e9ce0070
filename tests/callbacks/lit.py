"""Lightning modules of either package around the models of `tests.cases`, and how to fit them."""

import copy
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytorch_lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.cases import WIDTH, make_model
from tests.helpers import seed_torch

PACKAGES = {"lightning": lightning.pytorch, "pytorch_lightning": pytorch_lightning}


class Vectors(Dataset[Tensor]):
    """Random vectors, the same in every run."""

    def __init__(self, length: int = 24) -> None:
        self.data = torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


def loader(length: int = 24, batch_size: int = 4) -> DataLoader[Tensor]:
    return DataLoader(Vectors(length), batch_size=batch_size)


def make_lit(package: ModuleType = lightning.pytorch, model: str | nn.Module = "dropout") -> Any:
    """A LightningModule such as any project has; no reference to this package."""

    class Lit(package.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(model) if isinstance(model, str) else model
            self.lr = 1e-3
            self.batch_size = 4

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.model(batch)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("val_loss", self.model(batch))

        test_step = validation_step

        def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.model(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

        def train_dataloader(self) -> Any:
            return loader(batch_size=self.batch_size)

        def val_dataloader(self) -> Any:
            return loader(8)

        test_dataloader = predict_dataloader = val_dataloader

    seed_torch(1)
    return Lit()


def make_trainer(package: ModuleType = lightning.pytorch, *callbacks: Any, **settings: Any) -> Any:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return package.Trainer(callbacks=list(callbacks), **(defaults | settings))


class Trace:
    """Losses and learning rates of each step, through a callback of either package."""

    def __init__(self, package: ModuleType) -> None:
        trace = self
        self.losses: list[float] = []
        self.names: list[str] = []

        class Tracer(package.Callback):  # type: ignore[name-defined, misc]
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                trace.losses.append(outputs["loss"].item())

            def on_train_start(self, trainer, pl_module):
                trace.names = [type(o).__name__ for o in trainer.optimizers]

        self.callback = Tracer()


def fit(
    lit: Any, *callbacks: Any, package: ModuleType = lightning.pytorch, **settings: Any
) -> tuple[list[float], dict[str, Tensor], Any]:
    """Fit a copy; give its losses, its final state and the Trainer."""
    lit = copy.deepcopy(lit)
    trace = Trace(package)
    trainer = make_trainer(package, *callbacks, trace.callback, **settings)
    seed_torch(2)
    trainer.fit(lit)
    return trace.losses, {k: v.clone() for k, v in lit.state_dict().items()}, trainer


def rows_of(callback: Any) -> dict[str, Any]:
    return {row.name: row for row in callback.rows}


def assert_same(first: Any, second: Any) -> None:
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    assert [k for k in first[1] if not torch.equal(first[1][k], second[1][k])] == []
