"""The mixins: one callback for all of them, in both packages, unless the Trainer has one."""

import copy
import pickle
from typing import Any

import lightning.pytorch
import pytest
import torch
from torch import Tensor

from lightning_memsave import (
    ActivationCheckpointing,
    ActivationCheckpointingMixin,
    ConfigurationError,
    GPUMemoryMonitor,
    LowBitOptimizerMixin,
    MemoryLoggingMixin,
    MemSaveCallback,
)
from lightning_memsave.modules.lightning_pytorch import CheckpointedTransformer
from lightning_memsave.modules.mixins import everything_off
from lightning_memsave.techniques.registry import with_preset
from tests.callbacks.lit import assert_same, fit, loader, make_lit, make_trainer
from tests.callbacks.test_memory_monitor import loggers
from tests.cases import make_model
from tests.modules.tiny import CONFIGS


def make(*mixins: type, package: Any = lightning.pytorch, **attributes: Any) -> Any:
    return make_lit(package, "dropout", *mixins, **attributes)


def on_in(callback: MemSaveCallback) -> list[str]:
    return [row.name for row in callback.rows if row.status == "on"]


def ours(trainer: Any) -> list[Any]:
    return [c for c in trainer.callbacks if isinstance(c, MemSaveCallback | GPUMemoryMonitor)]


def test_checkpointing_gives_the_same_training_bit_for_bit(package):
    plain = fit(make(package=package), package=package)
    saving = fit(make(ActivationCheckpointingMixin, package=package), package=package)
    assert_same(plain[:2], saving[:2])
    [callback] = ours(saving[2])
    assert on_in(callback) == ["early_release", "activation_checkpointing"]


def test_the_optimizer_is_8_bit_and_nothing_else_changes(package):
    _, _, trainer = fit(make(LowBitOptimizerMixin, package=package), package=package)
    states = trainer.optimizers[0].state.values()
    assert any(t.dtype == torch.uint8 for s in states for t in s.values() if torch.is_tensor(t))
    [callback] = ours(trainer)
    assert on_in(callback) == ["early_release", "optimizer"]


def test_memory_is_logged_by_a_monitor_alone(package, tmp_path):
    logger = loggers(package, tmp_path)[1]
    lit = make(MemoryLoggingMixin, package=package, log_memory_every_n_steps=2)
    _, _, trainer = fit(lit, package=package, logger=logger, log_every_n_steps=1)
    [monitor] = ours(trainer)
    assert isinstance(monitor, GPUMemoryMonitor)
    assert [step for step, _ in logger.monitored] == [1, 3, 5]  # counted from 0


def test_several_mixins_come_together(package):
    lit = make(
        ActivationCheckpointingMixin,
        LowBitOptimizerMixin,
        MemoryLoggingMixin,
        package=package,
        activation_checkpointing=2,
        low_bit_optimizer="lion_8bit",
        log_memory_every_n_steps=3,
    )
    _, _, trainer = fit(lit, package=package)
    callback, monitor = ours(trainer)
    assert callback.arguments["activation_checkpointing"] == 2
    assert callback.arguments["optimizer"] == "lion_8bit"
    assert monitor.every_n_steps == 3
    assert with_preset(callback.arguments)["precision"] is None
    assert monitor.summary.num_steps == 6


def test_a_mixin_adds_to_checkpointed_transformer():
    class Lit(MemoryLoggingMixin, ActivationCheckpointingMixin, CheckpointedTransformer):
        log_memory_every_n_steps = 7
        activation_checkpointing = 1

    config, task = CONFIGS["bert"]
    memsave = {"activation_checkpointing": "all", "optimizer": "lion_8bit"}
    callback, monitor = Lit(config, task=task, memsave=memsave).configure_callbacks()
    assert callback.arguments["activation_checkpointing"] == 1
    assert callback.arguments["optimizer"] == "lion_8bit"
    assert monitor.every_n_steps == 7
    callback, _ = Lit(config, task=task, memsave=None).configure_callbacks()
    assert with_preset(callback.arguments)["optimizer"] is None


@pytest.mark.parametrize(
    ("mixin", "own"),
    [
        (ActivationCheckpointingMixin, MemSaveCallback(optimizer=None)),
        (MemoryLoggingMixin, MemSaveCallback(optimizer=None)),
        (MemoryLoggingMixin, GPUMemoryMonitor(5)),
    ],
    ids=["checkpointing", "logging", "monitor"],
)
def test_what_the_trainer_was_given_wins(mixin, own):
    trainer = fit(make(mixin), own)[2]
    assert ours(trainer) == [own]


def test_a_monitor_of_the_trainer_takes_the_place_of_ours():
    lit = make(ActivationCheckpointingMixin, MemoryLoggingMixin)
    own = GPUMemoryMonitor(5)
    trainer = fit(lit, own)[2]
    [callback] = [c for c in ours(trainer) if c is not own]
    assert own.summary is not None
    assert callback.monitor.summary is None


def test_the_same_callback_comes_to_each_trainer_and_stage():
    lit = make(ActivationCheckpointingMixin)
    found = []
    for _ in range(2):
        trainer = make_trainer()
        trainer.fit(lit)
        trainer.fit(lit)
        found += ours(trainer)
    assert len(found) == 2
    assert found[0] is found[1]


def test_another_setting_makes_another_callback():
    lit = make(ActivationCheckpointingMixin)
    trainer = make_trainer()
    trainer.fit(lit)
    lit.activation_checkpointing = 1
    trainer.fit(lit)
    [callback] = ours(trainer)
    assert callback.arguments["activation_checkpointing"] == 1
    lit.activation_checkpointing = None
    trainer.fit(lit)
    assert ours(trainer) == []


def test_the_next_module_of_a_trainer_brings_its_own():
    first = make(ActivationCheckpointingMixin, LowBitOptimizerMixin)
    second = make(MemoryLoggingMixin)
    trainer = make_trainer()
    trainer.fit(first)
    [before] = ours(trainer)
    trainer.fit(second)
    [monitor] = ours(trainer)
    assert isinstance(monitor, GPUMemoryMonitor)
    assert type(trainer.optimizers[0]) is torch.optim.AdamW
    trainer.fit(first)
    assert ours(trainer) == [before]


def test_callbacks_of_other_classes_stay():
    own = lightning.pytorch.Callback()

    class Bringing(ActivationCheckpointingMixin, lightning.pytorch.LightningModule):
        def configure_callbacks(self):
            return [*super().configure_callbacks(), own]

    [callback, other] = Bringing().configure_callbacks()
    assert isinstance(callback, MemSaveCallback)
    assert other is own


def test_a_callback_that_a_base_class_brings_wins():
    given = MemSaveCallback()

    class Base(lightning.pytorch.LightningModule):
        def configure_callbacks(self):
            return given

    class Lit(ActivationCheckpointingMixin, Base):
        pass

    assert Lit().configure_callbacks() == [given]


def test_nothing_of_it_is_in_state_or_hyperparameters():
    plain, lit = make(), make(ActivationCheckpointingMixin, MemoryLoggingMixin)
    fit(lit)
    lit.configure_callbacks()
    assert Picklable([]).hparams == {}
    assert lit.state_dict().keys() == plain.state_dict().keys()
    assert [n for n, _ in lit.named_modules()] == [n for n, _ in plain.named_modules()]


class Picklable(
    ActivationCheckpointingMixin, MemoryLoggingMixin, lightning.pytorch.LightningModule
):
    """At module level, as pickle needs it."""

    def __init__(self, keep: list[Any]) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="keep")
        self.model, self.keep = make_model("dropout"), keep

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.keep.append(copy.deepcopy(self))
            pickle.dumps(self)
        return self.model(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_make_their_own_callback(how):
    lit = Picklable([])
    callbacks = lit.configure_callbacks()
    other = copy.deepcopy(lit) if how == "deepcopy" else pickle.loads(pickle.dumps(lit))
    others = other.configure_callbacks()
    assert len(callbacks) == 2
    assert all(another is not one for another, one in zip(others, callbacks, strict=True))
    assert repr(others) == repr(callbacks)


@pytest.mark.filterwarnings("ignore:activation_checkpointing changed nothing")  # its blocks know
def test_a_copy_made_while_training_trains_alone():
    keep: list[Any] = []
    lit = Picklable(keep)
    make_trainer().fit(lit, loader())
    [other] = keep
    before = copy.deepcopy(lit.state_dict())
    trainer = make_trainer()
    trainer.fit(other, loader())
    assert all(torch.equal(value, before[name]) for name, value in lit.state_dict().items())
    assert ours(trainer) != lit.configure_callbacks()


def test_everything_off_changes_nothing():
    lit = make()
    callback = MemSaveCallback(**everything_off(), report=False)
    trainer = fit(lit, callback)[2]
    assert {row.status for row in callback.rows} <= {"unchanged", "off"}
    assert_same(fit(lit)[:2], fit(lit, callback)[:2])
    assert type(trainer.optimizers[0]) is torch.optim.AdamW


# --- wrong classes and attributes ---


def test_a_mixin_behind_the_lightning_module_is_refused(package):
    with pytest.raises(
        ConfigurationError, match=r"class Lit\(ActivationCheckpointingMixin, LightningModule\)"
    ):

        class Lit(package.LightningModule, ActivationCheckpointingMixin):  # type: ignore[misc, name-defined]
            pass


@pytest.mark.parametrize(
    ("mixin", "attribute", "value", "remedy"),
    [
        (ActivationCheckpointingMixin, "activation_checkpointing", "some", '"all"'),
        (LowBitOptimizerMixin, "low_bit_optimizer", "7bit", "8bit"),
        (MemoryLoggingMixin, "log_memory_every_n_steps", 0, "every_n_steps=1"),
    ],
)
def test_a_wrong_attribute_is_refused_with_its_class(mixin, attribute, value, remedy):
    with pytest.raises(ConfigurationError, match=remedy):
        type("Lit", (mixin, lightning.pytorch.LightningModule), {attribute: value})


def test_all_wrong_attributes_are_named_at_once():
    bases = (ActivationCheckpointingMixin, LowBitOptimizerMixin, lightning.pytorch.LightningModule)
    with pytest.raises(ConfigurationError, match="2 problems"):
        type("Lit", bases, {"activation_checkpointing": -1, "low_bit_optimizer": "7bit"})


def test_a_property_is_asked_for_each_instance():
    class Lit(ActivationCheckpointingMixin, lightning.pytorch.LightningModule):
        def __init__(self, every: int) -> None:
            super().__init__()
            self.every = every

        @property
        def activation_checkpointing(self) -> Any:  # type: ignore[override]
            return ActivationCheckpointing(f"every:{self.every}")

    [callback] = Lit(3).configure_callbacks()
    assert callback.arguments["activation_checkpointing"].which == "every:3"
