"""A budget in a second fit: what of the first one's plan stays, and what must not."""

import json
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from torch import Tensor, nn

from lightning_memsave import MemSaveCallback
from lightning_memsave.callbacks.run_plan import _conflicting
from tests.callbacks.lit import fit, make_trainer, rows_of
from tests.callbacks.test_budget import ONLY_IN_PARTS, FailsAt, Wide, lit_of, plain_fit

BATCH = 8


class Sizes(pl.Callback):
    """Remembers how many samples pass at once."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.found: set[int] = set()

        def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if torch.is_grad_enabled():  # not in the proof of the loss
                self.found.add(len(args[0]))

        self.hook = pl_module.model.register_forward_pre_hook(note)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.hook.remove()


@pytest.fixture(scope="module")
def plain_bytes() -> int:
    return plain_fit(lit_of(Wide, False, BATCH))[2]


@pytest.fixture(scope="module")
def in_parts(plain_bytes, tmp_path_factory) -> tuple[Any, Any]:
    """A checkpoint whose plan has micro-batches, and the plan."""
    path = tmp_path_factory.mktemp("parts") / "last.ckpt"
    callback = MemSaveCallback(budget=plain_bytes // 2, **ONLY_IN_PARTS)
    _, _, trainer = fit(lit_of(Wide, False, BATCH), callback)
    trainer.save_checkpoint(path)
    assert callback.plan is not None
    return path, callback.plan.plan


def test_a_run_that_may_change_less_has_whole_batches_again(plain_bytes, in_parts):
    path, plan = in_parts
    assert plan.settings["micro_batch_size"] < BATCH
    for arguments, sizes in (
        (ONLY_IN_PARTS, {plan.settings["micro_batch_size"]}),
        ({**ONLY_IN_PARTS, "exactness": "bitwise"}, {BATCH}),
    ):
        callback = MemSaveCallback(budget=2 * plain_bytes, **arguments)
        seen = Sizes()
        trainer = make_trainer(pl, callback, seen, max_epochs=2)
        trainer.fit(lit_of(Wide, False, BATCH), ckpt_path=path)
        assert seen.found == sizes
        assert all(p.exactness == "bitwise" or sizes != {BATCH} for p in callback.plan.ladder)


def test_a_second_fit_has_a_plan_of_its_own(plain_bytes):
    callback = MemSaveCallback(budget=plain_bytes // 2, **ONLY_IN_PARTS)
    fit(lit_of(Wide, False, BATCH), callback)
    first = callback.plan.plan.settings["micro_batch_size"]
    assert first < BATCH
    seen = Sizes()
    _, _, trainer = fit(lit_of(Wide, False, first), callback, seen)
    assert callback.plan.plan.settings["micro_batch_size"] == "auto"
    assert callback._micro_batches.size is None
    assert seen.found == {first}
    trainer.validate(lit_of(Wide, False, first))
    assert callback.plan is not None


def test_table_and_report_show_the_plan_in_force(plain_bytes, tmp_path):
    callback = MemSaveCallback(budget=int(0.6 * plain_bytes), **ONLY_IN_PARTS)
    fit(lit_of(Wide, False, BATCH), callback, FailsAt(2, 2), default_root_dir=tmp_path)
    first = callback.plan.plan.settings["micro_batch_size"]
    assert f"in micro-batches of {first // 2} samples, as planned" in (
        rows_of(callback)["micro_batch_size"].details
    )
    written = json.loads((tmp_path / "memsave_report.json").read_text())["plan"]
    assert written["plan"]["settings"]["micro_batch_size"] == first
    assert written["in_force"]["settings"]["micro_batch_size"] == first // 2


def test_what_the_trainer_cannot_split_is_not_planned_in_parts():
    callback = MemSaveCallback(budget="1GiB", exactness="rounding")
    lit = lit_of(Wide, False, BATCH)
    for others, expected in (((), False), ((BatchSizeFinder(max_trials=1),), True)):
        trainer = make_trainer(pl, callback, *others)
        closed = _conflicting(trainer, lit, callback.arguments)
        assert ("micro_batch_size" in closed) is expected
