"""Lightning modules of either package around the models of `tests.cases`, and how to fit them."""

import copy
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytorch_lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_memsave import MemSaveCallback, MicroBatching
from tests.cases import WIDTH, make_model
from tests.helpers import seed_torch

PACKAGES = {"lightning": lightning.pytorch, "pytorch_lightning": pytorch_lightning}
LIGHTNING = PACKAGES["lightning"]


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


class WithLoss(nn.Module):
    """A model, and a function of it and a batch: the loss, by default of squares."""

    def __init__(self, model: nn.Module, loss_of: Any = None) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def forward(self, x: Tensor) -> Tensor:
        if self.loss_of is not None:
            return self.loss_of(self.model, x)
        loss: Tensor = self.model(x).square().mean()
        return loss


def loader_of(batches: Any) -> DataLoader[Any]:
    """Give the elements of a list as they are."""
    return DataLoader(batches, batch_size=None)


def make_lit(
    package: Any = lightning.pytorch, model: Any = "dropout", *mixins: type, **methods: Any
) -> Any:
    """A LightningModule such as any project has, or with other methods; no reference to us."""

    class Lit(*mixins, package.LightningModule):  # type: ignore[misc]
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

    for name, method in methods.items():
        setattr(Lit, name, method)
    seed_torch(1)
    return Lit()


def model_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
    """A step that logs nothing, so that its memory is that of the model."""
    return self.model(batch)


def no_step(self: Any, batch: Any, batch_idx: int) -> None:
    """A validation that does nothing."""


def late(lit: Any) -> Any:
    """Let a module make its model in ``configure_model``."""
    model, lit.model = lit.model, None
    type(lit).configure_model = lambda self: setattr(self, "model", self.model or model)
    return lit


def without_dropout(module: Any) -> Any:
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or name == "p"):
                setattr(part, name, 0.0)
    return module


def callback_with(package: Any = lightning.pytorch, name: Any = "Own", **hooks: Any) -> Any:
    """A callback of a project, with functions of the callback as its hooks."""
    return type(name, (package.Callback,), hooks)()


class SmallerFrom(lightning.pytorch.Callback):
    """Sets the size of micro-batches from some batch on, as if memory had run out before."""

    def __init__(self, callback: MemSaveCallback, batch_idx: int | None, size: int = 2) -> None:
        self.callback, self.batch_idx, self.size = callback, batch_idx, size

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.batch_idx:
            setting: Any = self.callback._micro_batches
            setting.runner = setting.runner or setting._make_runner(trainer)
            setting.size = setting.runner.size = self.size


def quiet(*arguments: Any, **settings: Any) -> MemSaveCallback:
    """The callback without prediction and report."""
    return MemSaveCallback(*arguments, **({"predict": False, "report": False} | settings))


def only(size: Any = None, **settings: Any) -> MemSaveCallback:
    """Nothing but micro-batches of this size, and what is named; no prediction and no report."""
    details = {n: settings.pop(n) for n in ("loss_weight", "split_batch") if n in settings}
    if details:
        size = MicroBatching("halve" if size == "auto" else size, **details)
    off = dict.fromkeys(("activation_checkpointing", "optimizer", "precision"))
    return quiet(**(off | {"micro_batch_size": size} | settings))


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
    lit: Any, *callbacks: Any, package: Any = lightning.pytorch, **settings: Any
) -> tuple[list[float], dict[str, Tensor], Any]:
    """Fit a copy; give its losses, its final state and the Trainer."""
    lit = copy.deepcopy(lit)
    trace = Trace(package)
    trainer = make_trainer(package, *callbacks, trace.callback, **settings)
    seed_torch(2)
    trainer.fit(lit)
    return trace.losses, {k: v.clone() for k, v in lit.state_dict().items()}, trainer


def gradients_of(
    model: nn.Module, batches: list[Any], loss_of: Any, *callbacks: Any, logs: bool, **settings: Any
) -> tuple[list[list[Tensor]], Any]:
    """Fit a float64 module that never changes; give the gradient of each step, and the result."""
    seen: list[list[Tensor]] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = loss_of(self.model, batch)
        if logs:
            self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def note(self: Any, optimizer: Any) -> None:
        grads = ((p, p.grad) for p in self.parameters())
        seen.append([torch.zeros_like(p) if grad is None else grad.clone() for p, grad in grads])

    lit = make_lit(
        settings.get("package", lightning.pytorch),
        model,
        training_step=training_step,
        validation_step=no_step,
        on_before_optimizer_step=note,
        configure_optimizers=lambda self: torch.optim.SGD(self.parameters(), lr=0.0),
        train_dataloader=lambda self: loader_of(batches),
    )
    result = fit(lit.double(), *callbacks, limit_val_batches=0, **settings)
    return seen, result


def scaling(package: Any) -> Any:
    """A plugin whose gradient scaler works in float64, which nothing casts."""

    class Scaled(package.plugins.MixedPrecision):  # type: ignore[misc]
        def forward_context(self):
            return torch.autocast("cpu", enabled=False)

    return Scaled("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))


def rows_of(callback: Any) -> dict[str, Any]:
    return {row.name: row for row in callback.rows}


def summary_of(callback: Any) -> Any:
    """What the monitor of a callback has measured, which it has."""
    assert callback.monitor is not None
    assert callback.monitor.summary is not None
    return callback.monitor.summary


def peak_of(callback: Any) -> int:
    peak_bytes: int | None = summary_of(callback).peak_bytes
    assert peak_bytes is not None
    return peak_bytes


def assert_same(first: Any, second: Any) -> None:
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    assert [k for k in first[1] if not torch.equal(first[1][k], second[1][k])] == []
