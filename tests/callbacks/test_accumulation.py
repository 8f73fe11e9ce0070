from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_memsave import MemSaveCallback
from lightning_memsave.errors import ExactnessWarning, IncompatibleError, MemsaveWarning
from tests.callbacks.lit import PACKAGES, Vectors, assert_same, fit, make_lit, make_trainer
from tests.cases import WIDTH


def only_accumulate(num_batches: int) -> MemSaveCallback:
    return MemSaveCallback(
        None,
        optimizer=None,
        precision=None,
        accumulate_grad_batches=num_batches,
        monitor=False,
        report=False,
    )


class Stream(IterableDataset[Tensor]):
    """A loader over it does not know its length."""

    def __iter__(self):
        return iter(Vectors(24).data)


def sgd_lit(package: Any, loader: Any, seen: list[Tensor]) -> Any:
    """A module without dropout in float64 that records the gradient before each step."""
    lit = make_lit(package)
    for block in lit.model.blocks:
        block.dropout.p = 0.0
    lit.double()

    def on_before_optimizer_step(self, optimizer):
        seen.append(self.model.head.weight.grad.clone())

    def training_step(self, batch, batch_idx):
        loss = self.model(batch.double())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    type(lit).on_before_optimizer_step = on_before_optimizer_step
    type(lit).training_step = training_step
    type(lit).validation_step = lambda self, batch, batch_idx: None
    type(lit).configure_optimizers = lambda self: torch.optim.SGD(self.parameters(), lr=0.0)
    type(lit).train_dataloader = lambda self: loader
    return lit


def gradients_of_windows(lit: Any, loader: Any, window: int) -> list[Tensor]:
    """The truth: mean of the losses of each window, by hand."""
    batches, gradients = list(loader), []
    for start in range(0, len(batches), window):
        lit.zero_grad()
        losses = [lit.model.train()(b.double()) for b in batches[start : start + window]]
        torch.stack(losses).mean().backward()
        gradients.append(lit.model.head.weight.grad.clone())
    return gradients


@pytest.fixture(params=PACKAGES)
def package(request):
    return PACKAGES[request.param]


LOADERS = {
    "known length": lambda: DataLoader(Vectors(24), batch_size=4),
    "unknown length": lambda: DataLoader(Stream(), batch_size=4),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
def test_gradient_is_the_mean_over_each_window(package, kind, window):
    seen: list[Tensor] = []
    loader = LOADERS[kind]()
    lit = sgd_lit(package, loader, seen)
    expected = gradients_of_windows(lit, loader, window)
    fit(lit, only_accumulate(window), package=package, log_every_n_steps=1)
    assert len(seen) == len(expected)
    for ours, truth in zip(seen, expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=0.0)


def test_lightnings_own_last_window_is_too_small(package):
    """What the setting is for; if this fails, Lightning has mended its issue 19987."""
    seen: list[Tensor] = []
    loader = LOADERS["known length"]()
    lit = sgd_lit(package, loader, seen)
    expected = gradients_of_windows(lit, loader, 4)
    fit(lit, package=package, accumulate_grad_batches=4, log_every_n_steps=1)
    torch.testing.assert_close(seen[0], expected[0], rtol=1e-12, atol=0.0)
    torch.testing.assert_close(seen[1], expected[1] / 2, rtol=1e-12, atol=0.0)


def test_limited_batches_end_the_window(package):
    seen: list[Tensor] = []
    loader = LOADERS["known length"]()
    lit = sgd_lit(package, loader, seen)
    expected = gradients_of_windows(lit, list(loader)[:5], 3)
    fit(lit, only_accumulate(3), package=package, limit_train_batches=5, log_every_n_steps=1)
    assert len(seen) == 2
    torch.testing.assert_close(seen[1], expected[1], rtol=1e-12, atol=0.0)


def test_full_windows_are_bit_identical_to_the_trainers_own(package):
    lit = make_lit(package)
    ours = fit(lit, only_accumulate(3), package=package, max_epochs=2)
    theirs = fit(lit, package=package, accumulate_grad_batches=3, max_epochs=2)
    assert_same(ours, theirs)
    assert ours[2].global_step == theirs[2].global_step == 4


def test_logged_loss_is_unscaled_and_the_same(package):
    lit = make_lit(package)
    _, _, ours = fit(lit, only_accumulate(3), package=package)
    _, _, theirs = fit(lit, package=package, accumulate_grad_batches=3)
    assert ours.callback_metrics == theirs.callback_metrics
    assert ours.callback_metrics["loss"] > 0.05


def test_steps_and_schedules_follow_the_window(package):
    lit = make_lit(package)
    estimated: list[float] = []

    def configure_optimizers(self):
        estimated.append(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    type(lit).configure_optimizers = configure_optimizers
    _, _, trainer = fit(lit, only_accumulate(4), package=package)
    assert estimated == [2]
    assert trainer.global_step == 2
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25
    assert trainer.accumulate_grad_batches == 1


def test_last_window_is_right_under_the_gradient_scaler():
    """float16 cannot run here; a scaler with bfloat16 takes the same path through Lightning."""
    package = PACKAGES["lightning"]
    gradients = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        seen: list[Tensor] = []
        lit = sgd_lit(package, LOADERS["known length"](), seen).float()
        type(lit).training_step = lambda self, batch, batch_idx: self.model(batch)
        plugin = package.plugins.MixedPrecision("16-mixed", "cpu", scaler)
        plugin.precision = "bf16-mixed" if scaler is None else "16-mixed"
        fit(lit, only_accumulate(4), plugins=[plugin], log_every_n_steps=1)
        gradients.append(seen[1])
    torch.testing.assert_close(*gradients, rtol=0.05, atol=1e-3)


def test_batch_norm_is_warned_about():
    with pytest.warns(ExactnessWarning, match=r"nn\.GroupNorm"):
        fit(make_lit(model="batch_norm"), only_accumulate(2))


def test_manual_optimization_is_refused():
    lit = make_lit()
    lit.automatic_optimization = False
    with pytest.raises(IncompatibleError, match="accumulate in `training_step`"):
        fit(lit, only_accumulate(2))


def test_the_trainers_own_value_is_kept_with_a_notice():
    callback = MemSaveCallback(monitor=False)
    fit(make_lit(), callback, accumulate_grad_batches=4)
    row = next(row for row in callback.rows if row.name == "accumulate_grad_batches")
    assert (row.value, row.status) == ("4", "unchanged")
    assert "pass it to `MemSaveCallback` for the right scale" in row.details[0]


def test_width_of_the_cases_is_what_the_loaders_give():
    assert Vectors()[0].shape == (WIDTH,)


class TestOpenWindow:
    """Gradients are in no checkpoint."""

    def save_at(self, package: Any, path: Any, batch_idx: int, **settings: Any) -> None:
        class Saving(package.Callback):  # type: ignore[name-defined, misc]
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, index):
                if index == batch_idx:
                    trainer.save_checkpoint(path / "first.ckpt")
                    trainer.save_checkpoint(path / "second.ckpt")

        callback = MemSaveCallback(None, optimizer=None, monitor=False, report=False)
        trainer = make_trainer(package, callback, Saving(), limit_train_batches=5, **settings)
        trainer.fit(make_lit(package))
        trainer.save_checkpoint(path / "end.ckpt")

    def test_is_said_once_with_the_way_out(self, package, tmp_path):
        with pytest.warns(MemsaveWarning, match="accumulation window of 3 batches") as said:
            self.save_at(package, tmp_path, 3, accumulate_grad_batches=3)
        messages = [str(w.message) for w in said if "accumulation window" in str(w.message)]
        assert len(messages) == 1
        assert "every_n_train_steps" in messages[0]

    @pytest.mark.parametrize(("batch_idx", "window"), [(2, 3), (4, 3), (1, 1)])
    def test_a_complete_window_is_not_mentioned(self, package, tmp_path, batch_idx, window):
        self.save_at(package, tmp_path, batch_idx, accumulate_grad_batches=window)
