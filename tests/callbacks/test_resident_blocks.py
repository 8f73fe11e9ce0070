"""Offloading with blocks that stay on the device, in a Trainer."""

import copy
from typing import Any

import pytest
import torch

from lightning_memsave.errors import IncompatibleError
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
