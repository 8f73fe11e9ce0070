"""Updates that begin in backward, in a Trainer: what it clips, and where there are none."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import Precision

from lightning_memsave import MemSaveCallback, Offloading
from lightning_memsave.techniques.flat_memory import ALIGNMENT_BYTES
from lightning_memsave.techniques.offloading.early_updates import EarlyUpdate, EarlyUpdates
from tests.callbacks.lit import (
    assert_same,
    callback_with,
    fit,
    make_lit,
    model_step,
    peak_of,
    quiet,
    rows_of,
    summary_of,
)

pytestmark = pytest.mark.usefixtures("no_prediction")
CLIPPED: dict[str, Any] = {"gradient_clip_val": 0.25, "max_epochs": 2}


def only(early: Any, **settings: Any) -> MemSaveCallback:
    offload = None if early is None else Offloading("parameters", early_updates=early)
    return quiet(**({"preset": "off", "offload": offload} | settings))


def sometimes_large(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.model(batch) * (100.0 if batch_idx % 3 == 1 else 0.01)
    self.log("loss", loss)
    return loss


def lit_of(**methods: Any) -> Any:
    return make_lit(model="tied", **({"training_step": sometimes_large} | methods))


@pytest.fixture
def begun(monkeypatch):
    """Early updates that were there when a step decided about them, and whether they stood."""
    found: list[bool] = []
    settle = EarlyUpdates.settle

    def noted(updates: Any, *given: Any) -> Any:
        updates._residence.worker.submit(lambda: None).result()  # a slow host would begin none
        settled = settle(updates, *given)
        found.extend(settled.values())
        return settled

    monkeypatch.setattr(EarlyUpdates, "settle", noted)
    return found


@pytest.mark.parametrize(
    ("settings", "trainer"),
    [
        ({}, {}),
        ({"activation_checkpointing": "all"}, {"accumulate_grad_batches": 2}),
        ({"low_precision_weights": "split"}, {"precision": "bf16-mixed"}),
        ({"micro_batch_size": 2}, {}),
    ],
)
def test_trains_bit_for_bit(settings, trainer, begun):
    how = CLIPPED | trainer
    without = None if "low_precision_weights" not in settings else 0
    expected = fit(lit_of(), only(without, **settings), **how)
    assert not begun
    callback = only("100%", **settings)
    assert_same(fit(lit_of(), callback, **how), expected)
    assert {*begun} == {True, False}
    assert "updates of 4 blocks may begin in backward" in rows_of(callback)["offload"].details


def test_only_the_last_batch_of_a_step_begins_updates(begun, monkeypatch):
    num_saved = 0
    save = EarlyUpdate.save

    def counted(early: Any) -> None:
        nonlocal num_saved
        num_saved += 1
        save(early)

    monkeypatch.setattr(EarlyUpdate, "save", counted)
    fit(lit_of(), only("100%"), accumulate_grad_batches=3)
    assert 0 < num_saved <= 2 * 4  # two steps of four blocks


def _nothing(*_: Any) -> None:
    pass


def _clip(self: Any, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
    self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


class ClipsEach(Precision):
    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        for param in self.main_params(optimizer):
            torch.nn.utils.clip_grad_norm_([param], clip_val)


class ClipsMatrices(Precision):
    def main_params(self, optimizer: Any) -> Any:
        return (param for param in super().main_params(optimizer) if param.ndim > 1)


@pytest.mark.parametrize(
    ("why", "lit", "callbacks", "trainer"),
    [
        ("Lit.on_before_optimizer_step", {"on_before_optimizer_step": _nothing}, [], {}),
        ("Lit.configure_gradient_clipping", {"configure_gradient_clipping": _clip}, [], {}),
        ("Own.on_after_backward", {}, [callback_with(on_after_backward=_nothing)], {}),
        ("values are clipped", {}, [], {"gradient_clip_algorithm": "value"}),
        ("ClipsEach.clip_grad_by_norm", {}, [], {"plugins": ClipsEach()}),
        ("ClipsMatrices.main_params", {}, [], {"plugins": ClipsMatrices()}),
    ],
)
def test_where_none_begins_the_table_says_why(why, lit, callbacks, trainer, begun):
    callback, how = only("100%"), CLIPPED | trainer
    found = fit(lit_of(**lit), callback, *callbacks, **how)
    assert not begun
    (detail,) = (d for d in rows_of(callback)["offload"].details if "no update begins" in d)
    assert why in detail
    assert_same(found, fit(lit_of(**lit), only(None), *callbacks, **how))


def test_none_begins_beside_updates_in_backward(begun):
    callback = only("100%", optimizer_in_backward=True)
    fit(lit_of(), callback)
    assert not begun
    details = rows_of(callback)["offload"].details
    assert "no update begins in backward: `optimizer_in_backward` updates there" in details


def test_host_memory_is_predicted():
    lit = make_lit(
        model="tied",
        training_step=model_step,
        configure_optimizers=lambda self: torch.optim.AdamW(self.parameters(), fused=True),
    )
    predicted, counted = [], []
    for early in (0, 2):
        callback = only(early, predict=60)
        fit(lit, callback, gradient_clip_val=1.0)
        assert callback.prediction is not None
        assert callback.prediction.peak_bytes == peak_of(callback)
        predicted.append(callback.prediction.peak.host_bytes)
        counted.append(summary_of(callback).host_bytes)
    more = predicted[1] - predicted[0], counted[1] - counted[0]
    block = sum(p.numel() for p in lit.model.blocks[0].parameters())
    assert more[0] > 2 * 12 * block
    assert abs(more[0] - more[1]) <= 2 * ALIGNMENT_BYTES  # of pieces, and norms of 4 bytes
