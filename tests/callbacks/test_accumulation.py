from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from lightning_memsave import MemSaveCallback, MicroBatching
from lightning_memsave.errors import ExactnessWarning, IncompatibleError, MemsaveWarning
from tests.callbacks.lit import (
    Vectors,
    assert_same,
    callback_with,
    fit,
    gradients_of,
    loader_of,
    make_lit,
    make_trainer,
    no_step,
    quiet,
    rows_of,
    scaling,
    without_dropout,
)
from tests.cases import WIDTH, make_model

pytestmark = pytest.mark.usefixtures("no_prediction")


def only_accumulate(num_batches: int) -> MemSaveCallback:
    return quiet(None, optimizer=None, precision=None, accumulate_grad_batches=num_batches)


class Stream(IterableDataset[Tensor]):
    """A loader over it does not know its length."""

    def __iter__(self):
        return iter(batches_of_vectors())


def batches_of_vectors() -> list[Tensor]:
    return [*Vectors(24).data.double().split(4)]


def loss_of(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch)
    return loss


def seen_and_expected(
    window: int, *callbacks: Any, batches: Any = None, **settings: Any
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """The gradient of each step, and that of the mean of the losses of each window, by hand."""
    given = batches_of_vectors() if batches is None else batches
    model = without_dropout(make_model("dropout")).double()
    seen, _ = gradients_of(
        model, given, loss_of, *callbacks, logs=True, log_every_n_steps=1, **settings
    )
    chosen, expected = batches_of_vectors()[: settings.get("limit_train_batches")], []
    for start in range(0, len(chosen), window):
        losses = torch.stack([model(batch) for batch in chosen[start : start + window]])
        expected.append([*torch.autograd.grad(losses.mean(), [*model.parameters()])])
    assert len(seen) == len(expected)
    return seen, expected


@pytest.mark.parametrize("make_batches", [batches_of_vectors, Stream])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
def test_gradient_is_the_mean_over_each_window(package, make_batches, window):
    for limits in ({}, {"limit_train_batches": 5}):
        how: dict[str, Any] = {"package": package, "batches": make_batches()} | limits
        assert_close(*seen_and_expected(window, only_accumulate(window), **how))


def test_lightnings_own_last_window_is_too_small(package):
    """What the setting is for; if this fails, Lightning has mended its issue 19987."""
    seen, expected = seen_and_expected(4, package=package, accumulate_grad_batches=4)
    assert_close(seen, [expected[0], [gradient / 2 for gradient in expected[1]]])


def test_last_window_is_right_under_the_gradient_scaler(package):
    how = {"package": package, "plugins": [scaling(package)]}
    assert_close(*seen_and_expected(4, only_accumulate(4), **how))


def test_full_windows_are_bit_identical_to_the_trainers_own(package):
    """With the logged loss, which is not scaled."""
    lit = make_lit(package)
    ours = fit(lit, only_accumulate(3), package=package, max_epochs=2)
    theirs = fit(lit, package=package, accumulate_grad_batches=3, max_epochs=2)
    assert_same(ours, theirs)
    assert ours[2].global_step == theirs[2].global_step == 4
    assert ours[2].callback_metrics == theirs[2].callback_metrics
    assert ours[2].callback_metrics["loss"] > 0.05


def test_steps_and_schedules_follow_the_window(package):
    estimated: list[float] = []

    def configure_optimizers(self):
        estimated.append(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    lit = make_lit(package, configure_optimizers=configure_optimizers)
    _, _, trainer = fit(lit, only_accumulate(4), package=package)
    assert estimated == [2]
    assert trainer.global_step == 2
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25
    assert trainer.accumulate_grad_batches == 1


def test_batch_norm_is_warned_about():
    with pytest.warns(ExactnessWarning, match=r"nn\.GroupNorm"):
        fit(make_lit(model="batch_norm"), only_accumulate(2))


def test_manual_optimization_is_refused():
    lit = make_lit(automatic_optimization=False)
    with pytest.raises(IncompatibleError, match="accumulate in `training_step`"):
        fit(lit, only_accumulate(2))


def test_the_trainers_own_value_is_kept_with_a_notice():
    fit(make_lit(), callback := MemSaveCallback(), accumulate_grad_batches=4)
    row = rows_of(callback)["accumulate_grad_batches"]
    assert (row.value, row.status) == ("4", "unchanged")
    assert "pass it to `MemSaveCallback` for the right scale" in row.details[0]


class TestOpenWindow:
    """Gradients are in no checkpoint."""

    def save_at(self, package: Any, path: Any, batch_idx: int, **settings: Any) -> None:
        def save(self, trainer, *args):
            if args[-1] == batch_idx:
                trainer.save_checkpoint(path / "first.ckpt")
                trainer.save_checkpoint(path / "second.ckpt")

        callbacks = quiet(None, optimizer=None), callback_with(package, on_train_batch_end=save)
        trainer = make_trainer(package, *callbacks, limit_train_batches=5, **settings)
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


def tagger(reduction: str = "mean") -> Any:
    """Its loss is a mean over labels other than -100, of which batches have more or fewer."""

    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["x"]
        for block in self.model[:3]:
            x = x + block(x)
        logits = self.model[3](x).flatten(0, 1)
        return cross_entropy(logits, batch["labels"].flatten(), reduction=reduction)

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return make_lit(
        model=nn.Sequential(*blocks, nn.Linear(WIDTH, 5)).double(),
        training_step=training_step,
        validation_step=no_step,
        configure_optimizers=lambda self: torch.optim.SGD(self.parameters(), lr=0.1),
    )


def tagged(number: int = 7, num_samples: int = 4, *, is_full_at_first: bool = False) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    batches: list[Any] = []
    for index in range(number):
        x = torch.randn(num_samples, 6, WIDTH, generator=generator, dtype=torch.float64)
        labels = torch.randint(5, (num_samples, 6), generator=generator)
        if index or not is_full_at_first:
            lengths = torch.randint(1, 6, (num_samples, 1), generator=generator)
            labels[torch.arange(6) >= lengths] = -100
        batches.append({"x": x, "labels": labels})
    return batches


def trained_by_hand(lit: Any, batches: list[Any], window: int) -> list[Tensor]:
    """Each step has the gradient of the mean over all labels of its window."""
    optimizer = lit.configure_optimizers()
    for start in range(0, len(batches), window):
        chosen = batches[start : start + window]
        optimizer.zero_grad()
        counts = [(batch["labels"] != -100).sum() for batch in chosen]
        for batch, count in zip(chosen, counts, strict=True):
            (lit.training_step(batch, 0) * count / sum(counts)).backward()
        optimizer.step()
    return [*lit.parameters()]


def trained(lit: Any, batches: list[Any], **settings: Any) -> tuple[list[Tensor], MemSaveCallback]:
    callback = quiet(**{"preset": "off", "micro_batch_size": MicroBatching("halve"), **settings})
    trainer = make_trainer(pl, callback, max_epochs=1)
    trainer.fit(lit, loader_of(batches))
    return [*lit.parameters()], callback


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class TestTokens:
    """A batch with few tokens weighs little (huggingface/transformers #34191, torchtune #1875)."""

    @pytest.mark.parametrize("is_full_at_first", [False, True])
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"micro_batch_size": 2},
            {"optimizer_in_backward": True},
            {"offload": "optimizer"},
            {"offload": "parameters"},
            {"offload": "parameters", "optimizer_in_backward": True},
            {"activation_checkpointing": "all", "blocks": "Sequential"},
        ],
        ids=str,
    )
    def test_the_gradient_is_that_of_the_window(self, settings, is_full_at_first):
        batches = tagged(is_full_at_first=is_full_at_first)
        found, _ = trained(tagger(), batches, accumulate_grad_batches=3, **settings)
        assert_close(found, trained_by_hand(tagger(), batches, 3))

    def test_without_proofs_all_weigh_the_same_and_the_table_says_so(self):
        batches = tagged()
        settings = {"accumulate_grad_batches": 3, "micro_batch_size": None}
        found, callback = trained(tagger(), batches, **settings)
        with pytest.raises(AssertionError):
            assert_close(found, trained_by_hand(tagger(), batches, 3))
        row = rows_of(callback)["accumulate_grad_batches"]
        assert "all batches weigh the same" in row.details[-1]

    def test_a_sum_keeps_the_scale_of_the_project(self):
        batches = tagged(6)
        found, _ = trained(tagger("sum"), batches, accumulate_grad_batches=3)
        lit = tagger("sum")
        trainer = make_trainer(pl, max_epochs=1, accumulate_grad_batches=3)
        trainer.fit(lit, loader_of(batches))
        assert_close(found, [*lit.parameters()])

    def test_a_given_weight_serves_batches_of_one_sample(self):
        batches = tagged(num_samples=1)
        size = MicroBatching("halve", loss_weight="tokens")
        found, _ = trained(tagger(), batches, accumulate_grad_batches=3, micro_batch_size=size)
        assert_close(found, trained_by_hand(tagger(), batches, 3))
