"""Offloading with blocks that stay on the device, in a Trainer."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memsave.callbacks import run_plan
from lightning_memsave.core.memory import is_fake
from lightning_memsave.errors import ConfigurationError, IncompatibleError
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.techniques.offloading.technique import Offloading
from tests.callbacks.lit import (
    LIGHTNING,
    Trace,
    assert_same,
    fit,
    make_lit,
    make_trainer,
    model_step,
    no_step,
    peak_of,
    quiet,
    rows_of,
    summary_of,
)

pytestmark = pytest.mark.usefixtures("no_prediction")

HALVE = MicroBatching("halve")
CLIPPED = {"gradient_clip_val": 0.1}
BF16: dict[str, Any] = {"precision": "bf16-mixed"}
IN_BACKWARD: dict[str, Any] = {"optimizer_in_backward": True}
STATE_IN_8BIT: dict[str, Any] = {"optimizer": LowBitOptimizer(force_8bit=("*",))}
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipped": ({"activation_checkpointing": "all"}, CLIPPED),
    "micro-batches": ({"micro_batch_size": 2}, CLIPPED),
    "accumulated": ({}, {"accumulate_grad_batches": 4}),
    "in backward": (IN_BACKWARD, {}),
    "in backward, accumulated": (IN_BACKWARD, {"accumulate_grad_batches": 2}),
    "8-bit": (STATE_IN_8BIT | {"activation_checkpointing": "all"}, {}),
    "8-bit in backward": (STATE_IN_8BIT | IN_BACKWARD, {}),
    "master": (BF16 | {"low_precision_weights": "master", "micro_batch_size": 2}, CLIPPED),
    "split in backward": (BF16 | {"low_precision_weights": "split"} | IN_BACKWARD, {}),
}
"""Settings of the callback and of the Trainer."""


def only(resident: Any, what: str = "parameters", **settings: Any) -> Any:
    offload = None if resident is None else Offloading(what, resident=resident)
    return quiet(**({"preset": "off", "micro_batch_size": HALVE, "offload": offload} | settings))


@pytest.mark.parametrize("resident", [1, "50%", 4])
@pytest.mark.parametrize("name", BESIDE)
class TestEachShare:
    def test_trains_bit_for_bit(self, name, resident):
        """As without offloading, or where weights wait in bfloat16 as if all did."""
        settings, trainer = BESIDE[name]
        first = 0 if "low_precision_weights" in settings else None
        lit = make_lit(model="tied")
        expected = fit(lit, only(first, **settings), max_epochs=2, **trainer)
        callback = only(resident, **settings)
        found = fit(lit, callback, max_epochs=2, **trainer)
        assert all(row.status != "off" for row in callback.rows), callback.rows
        if settings.get("low_precision_weights") == "split":
            # In the middle of two bfloat16 values halves are rounded up, and autocast to even.
            assert found[0] == pytest.approx(expected[0], rel=2**-9)
        else:
            assert_same(found, expected)

    def test_is_predicted_to_the_byte(self, name, resident):
        settings, trainer = BESIDE[name]
        callback = only(resident, predict=60, **settings)
        fit(make_lit(model="tied", training_step=model_step), callback, **trainer)
        assert callback.prediction is not None
        # On a CPU, 8-bit states on both sides share two tables, which are where they are first.
        tables = 2048 if name == "8-bit in backward" else 0
        assert callback.prediction.peak_bytes == peak_of(callback) + tables
        by_category = callback.prediction.peak.by_category()
        by_category["optimizer_state"] -= tables
        assert by_category == summary_of(callback).by_category


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("settings", [{}, STATE_IN_8BIT, IN_BACKWARD])
def test_a_fit_resumes_with_another_share(tmp_path, settings):
    lit, runs = make_lit(model="tied"), []
    for shares in ((0, 0), (3, 1), ("50%", None), (None, 4)):
        file, modules = tmp_path / f"{shares}.ckpt", [copy.deepcopy(lit) for _ in range(2)]
        trainer = make_trainer(LIGHTNING, only(shares[0], **settings))
        torch.manual_seed(2)
        trainer.fit(modules[0])
        trainer.save_checkpoint(file)
        trace = Trace(LIGHTNING)
        more = make_trainer(LIGHTNING, only(shares[1], **settings), trace.callback, max_epochs=2)
        torch.manual_seed(3)
        more.fit(modules[1], ckpt_path=file)
        runs.append((trace.losses, modules[1].state_dict()))
    for run in runs[1:]:
        assert_same(run, runs[0])


def test_the_table_says_how_many_blocks_stay():
    callback = only("60%", "parameters+activations")
    fit(make_lit(), callback)
    details = rows_of(callback)["offload"].details
    assert "the last 2 of 4 blocks stay on the device" in details
    assert any("weights of 2 blocks on the device when they compute" in each for each in details)


def test_more_blocks_than_there_are_end_the_fit_before_it_begins():
    with pytest.raises(IncompatibleError, match=r"`resident=9`: .* Use a number up to 4"):
        fit(make_lit(), only(9))


def auto(**settings: Any) -> Any:
    return only("auto", predict=60, **settings)


def lit_of_steps() -> Any:
    return make_lit(model="tied", training_step=model_step)


def wide_model() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(nn.Linear(64, 256), *layers, nn.Linear(256, 16))


def mean_step(self: Any, batch: Any, batch_idx: int) -> Any:
    return self.model(batch).square().mean()


class TestAuto:
    def test_what_fits_is_plain_training(self):
        lit, callback, plain = lit_of_steps(), auto(), only(None, predict=60)
        assert_same(fit(lit, callback), fit(lit, plain))
        (row,) = (row for row in callback.rows if row.name == "offload")
        assert row.status == "off"
        assert row.details[0].endswith("everything fits the device")
        assert peak_of(callback) == peak_of(plain)
        assert callback.prediction is not None
        assert callback.prediction.peak_bytes == peak_of(plain)

    @pytest.mark.parametrize("settings", [{}, IN_BACKWARD, {"activation_checkpointing": "all"}])
    @pytest.mark.parametrize("share", [0.6, 0.9])
    def test_as_many_blocks_stay_as_fit(self, monkeypatch, settings, share):
        lit, plain = lit_of_steps(), only(None, predict=60, **settings)
        expected = fit(lit, plain)
        room = int(share * peak_of(plain))
        monkeypatch.setattr(run_plan, "_free_bytes", lambda device: room)
        callback = auto(**settings)
        assert_same(fit(lit, callback), expected)
        assert peak_of(callback) <= room
        assert callback.prediction is not None
        assert callback.prediction.peak_bytes == peak_of(callback)
        number = callback.effective_arguments()["offload"].resident
        note = f"{number} of 4 blocks stay there"
        assert any(line.endswith(note) for line in rows_of(callback)["offload"].details)
        more = only(number + 1 if number < 4 else None, predict=60, **settings)
        fit(lit, more)
        assert peak_of(more) > room

    def test_a_second_fit_chooses_again(self, monkeypatch):
        lit, callback = lit_of_steps(), auto()
        fit(lit, callback)
        room = int(0.8 * peak_of(callback))
        monkeypatch.setattr(run_plan, "_free_bytes", lambda device: room)
        fit(lit, callback)
        assert peak_of(callback) <= room
        assert rows_of(callback)["offload"].status == "on"

    def test_beside_a_preset_weights_wait_as_it_says(self, monkeypatch):
        lit = lit_of_steps()
        offload = Offloading("parameters+activations", resident="auto")
        settings: dict[str, Any] = {"preset": "offload", "exactness": "bitwise", "predict": 60}
        plain = quiet(**settings, offload=None)
        expected = fit(lit, plain)
        room = int(0.9 * peak_of(plain))
        monkeypatch.setattr(run_plan, "_free_bytes", lambda device: room)
        callback = quiet(**settings, offload=offload)
        assert_same(fit(lit, callback), expected)
        assert peak_of(callback) <= room
        assert callback.effective_arguments()["offload"].resident > 0

    def test_a_plan_fills_its_budget(self):
        lit = make_lit(model=wide_model(), training_step=mean_step, validation_step=no_step)
        off = dict.fromkeys(
            ("activation_checkpointing", "micro_batch_size", "optimizer", "chunked_cross_entropy")
        )
        off |= dict.fromkeys(("optimizer_in_backward", "low_precision_weights", "attention"))
        plain = quiet(preset="off", micro_batch_size=None, predict=60)
        expected = fit(lit, plain)
        budget = int(0.6 * peak_of(plain))
        offload = Offloading("parameters", resident="auto")
        callback = quiet(**off, budget=budget, offload=offload)
        assert_same(fit(lit, callback), expected)
        assert callback.plan is not None
        chosen = callback.plan.plan
        assert chosen.settings["offload"].resident > 0
        assert chosen.peak_bytes == peak_of(callback) <= budget

    def test_a_plan_that_fits_without_is_without(self):
        off = dict.fromkeys(("micro_batch_size", "optimizer", "chunked_cross_entropy"))
        offload = Offloading("parameters", resident="auto")
        callback = quiet(**off, budget="1GiB", exactness="bitwise", offload=offload)
        fit(lit_of_steps(), callback)
        assert callback.plan is not None
        assert callback.plan.plan.settings["offload"] is None
        assert rows_of(callback)["offload"].details == ("the plan fits the device without it",)

    def test_a_failed_prediction_ends_the_fit_before_it_begins(self):
        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            loss = model_step(self, batch, batch_idx)
            if is_fake(loss):
                raise ValueError("no values")
            return loss

        lit = make_lit(model="tied", training_step=training_step)
        with pytest.raises(IncompatibleError, match=r"`resident='auto'`: .*`resident=4`"):
            fit(lit, auto())


class TestHostBudget:
    def test_beside_a_technique_that_names_none(self):
        offload = Offloading("parameters", resident=1)
        with pytest.raises(IncompatibleError, match=r"`host_budget` is 1\.00 KiB"):
            fit(lit_of_steps(), quiet(preset="off", offload=offload, host_budget="1KiB"))

    def test_twice(self):
        offload = Offloading("parameters", host_budget="1GiB")
        with pytest.raises(ConfigurationError, match="`host_budget='2GiB'` is not used with"):
            quiet(preset="off", offload=offload, host_budget="2GiB")
