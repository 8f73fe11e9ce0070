"""What a fit measures of its plan corrects it: memory, times, at most three times, and resumed."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_memsave import MemSaveCallback
from lightning_memsave.callbacks.settings.budget import BudgetSetting
from lightning_memsave.planning.ladder import RunPlan
from lightning_memsave.planning.plan import Plan
from lightning_memsave.units import MIB
from tests.callbacks.lit import fit, make_lit, make_trainer, rows_of
from tests.callbacks.test_budget import Encoder, encoder, equal

EPOCHS = 3  # of 6 steps
SHORT: dict[str, Any] = {"limit_train_batches": 2}  # in each epoch
FASTER = 1.5  # of what the unchanged fit needs: all plans fit


def budget_of(callback: MemSaveCallback) -> BudgetSetting:
    return callback._settings.find(BudgetSetting)


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, Tensor], int]:
    callback = MemSaveCallback(stack="off", precision="32-true")
    losses, state, _ = fit(encoder(), callback, max_epochs=EPOCHS)
    assert callback.monitor is not None
    assert callback.monitor.summary is not None
    return losses, state, callback.monitor.summary.peak_bytes or 0


class Watches(pl.Callback):
    """Remembers the plan of each step."""

    def __init__(self, callback: MemSaveCallback) -> None:
        self.callback = callback
        self.plans: list[Plan] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        plan = budget_of(self.callback)._plan
        assert plan is not None
        self.plans.append(plan)

    @property
    def changes(self) -> list[int]:
        """The steps, counted from 0, that are the first ones with their plan."""
        pairs = enumerate(zip(self.plans, self.plans[1:], strict=False), 1)
        return [step for step, (before, plan) in pairs if plan != before]


class Holds(pl.Callback):
    """Holds more and more tensors, which no prediction can know."""

    def __init__(self, num_bytes: int, path: Path, times: int = 1) -> None:
        self.num_bytes, self.path, self.times = num_bytes, path, times
        self.start: int | None = None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.start is None:
            self.start = trainer.global_step
        times = self.times + (trainer.global_step - self.start) // 4
        self.held = torch.ones(times * self.num_bytes // 4)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def test_memory_that_cannot_be_predicted_changes_the_plan_three_times_also_resumed(tmp_path, plain):
    losses, state, plain_bytes = plain
    path = tmp_path / "six.ckpt"
    more = plain_bytes // 8

    def make() -> tuple[MemSaveCallback, Watches]:
        callback = MemSaveCallback(budget=plain_bytes, exactness="bitwise")
        return callback, Watches(callback)

    callback, watches = make()
    fitted = fit(encoder(), callback, watches, Holds(more, path), max_epochs=EPOCHS)
    assert fitted[0] == losses
    assert equal(fitted[1], state)
    assert watches.changes == [4, 8, 12]  # and not at 16
    sizes = [watches.plans[step].device_bytes for step in (0, 4, 8, 12)]
    assert sizes == sorted(set(sizes), reverse=True)
    for times, size in enumerate(sizes[1:], 1):
        assert size <= plain_bytes - times * more
    (note,) = [d for d in rows_of(callback)["budget"].details if d.startswith("changed")]
    assert "above the predicted one" in note

    saved = torch.load(path, weights_only=True)["callbacks"][callback.state_key]["plan"]
    assert saved["correction"]["num_checks"] == 1
    assert saved["correction"]["offset_bytes"] == pytest.approx(more, abs=100)
    assert saved["correction"]["too_large_bytes"] == sizes[0]
    assert saved["correction"]["factors"].keys() == {"forward", "backward", "optimizer"}

    class Reads(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.read = resumed.plan.state(resumed.plan.plan)
            self.details = rows_of(resumed)["budget"].details

    resumed, watches = make()
    reads = Reads()
    callbacks = (resumed, watches, reads, Holds(more, path, times=2))
    make_trainer(pl, *callbacks, max_epochs=1 + EPOCHS).fit(encoder(), ckpt_path=path)
    assert reads.read == saved
    assert any("above the predicted one" in detail for detail in reads.details)
    assert resumed.plan.correction.num_checks == 3
    assert watches.changes == [4, 8]  # and not at 12
    assert all(plan.device_bytes < sizes[0] for plan in watches.plans)


class Sleeps(pl.Callback):
    """Makes one phase slow, in the steps that are measured."""

    def __init__(self, phase: str, seconds: float) -> None:
        self.phase, self.seconds, self.num_steps = phase, seconds, 0

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.num_steps += 1
        self._sleep("forward")

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self._sleep("backward")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._sleep("optimizer")

    def _sleep(self, phase: str) -> None:
        if phase == self.phase and 2 <= self.num_steps <= 4:
            time.sleep(self.seconds)


@pytest.fixture(scope="module")
def small(plain, tmp_path_factory) -> tuple[Path, Plan]:
    """A checkpoint with a plan that recomputes one or two blocks."""
    path = tmp_path_factory.mktemp("small") / "two.ckpt"
    callback = MemSaveCallback(budget=int(0.84 * plain[2]), exactness="bitwise")
    _, _, trainer = fit(encoder(), callback, **SHORT)
    trainer.save_checkpoint(path)
    assert callback.plan is not None
    return path, callback.plan.plan


# Other plans differ in the time of backward only: a change is worth it where that matters.
@pytest.mark.parametrize(
    ("phase", "seconds", "is_worth_it"),
    [("backward", 0.2, True), ("forward", 0.6, False), ("optimizer", 0.6, False)],
)
@pytest.mark.daily(3)
def test_measured_times_decide_whether_a_faster_plan_is_worth_a_change(
    phase, seconds, is_worth_it, plain, small
):
    path, plan = small
    assert plan.seconds_by_phase["recomputation"] > 0
    callback = MemSaveCallback(budget=int(FASTER * plain[2]), exactness="bitwise")
    watches = Watches(callback)
    slow = Sleeps(phase, seconds)
    trainer = make_trainer(pl, callback, watches, slow, max_epochs=4, **SHORT)
    trainer.fit(encoder(), ckpt_path=path)
    assert watches.changes == ([4] if is_worth_it else [])
    factors = callback.plan.correction.factors
    assert max(factors, key=factors.__getitem__) == phase
    assert callback.plan.correction.offset_bytes is None  # nothing measures it
    if is_worth_it:
        assert watches.plans[-1].seconds_by_phase["recomputation"] == 0
        assert watches.plans[-1].settings["activation_checkpointing"] is None
    else:
        assert watches.plans[-1] == plan


def test_a_loss_that_cannot_be_split_is_not_changed_to_micro_batches(small):
    class Root(Encoder):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sqrt()

    class Retries(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            made = callback.plan
            settings = {**made.plan.settings, "micro_batch_size": 2}
            made.ladder += (replace(made.plan, settings=settings, device_bytes=MIB),)

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            budget_of(callback).note_retries(trainer, trainer.global_step)

    callback = MemSaveCallback(budget="1GiB", exactness="rounding")
    watches = Watches(callback)
    trainer = make_trainer(pl, callback, watches, Retries(), max_epochs=4, **SHORT)
    trainer.fit(make_lit(model=Root()), ckpt_path=small[0])
    assert len(watches.changes) > 1
    assert {plan.settings["micro_batch_size"] for plan in watches.plans} == {"auto"}


def made_of(*plans: Plan, margin_bytes: int = 0) -> RunPlan:
    return RunPlan(plans[0], 100, margin_bytes, plans)


def a_plan(num_bytes: int, forward: float, backward: float, **settings: Any) -> Plan:
    times = {"forward": forward, "recomputation": backward / 2, "backward": backward / 2}
    phases = {**times, "optimizer": 1.0}
    return Plan(settings, "", "rounding", num_bytes, num_bytes, sum(phases.values()), True, phases)


def anything(plan: Plan) -> bool:
    return True


def test_a_phase_that_is_slower_than_estimated_is_saved():
    many_passes, recomputing = a_plan(90, 4.0, 4.0), a_plan(80, 2.0, 6.5)
    made = made_of(many_passes, recomputing)
    assert made.better_than(many_passes, anything) is None
    measured = {"forward": 8.0, "backward": 4.0, "optimizer": 1.0}
    made.correct(many_passes, 90, measured)
    assert made.correction.factors == {"forward": 2.0, "backward": 1.0, "optimizer": 1.0}
    assert made.seconds_of(recomputing) == 11.5
    assert made.better_than(many_passes, anything) == recomputing
    assert made.better_than(many_passes, lambda plan: plan is many_passes) is None
    # It takes longer than was thought, so the former is known to be faster.
    made.correct(recomputing, 80, {"forward": 8.0, "backward": 6.5, "optimizer": 1.0})
    assert made.better_than(recomputing, anything) == many_passes
    made.correct(many_passes, 90, measured)
    assert made.better_than(many_passes, anything) is None


def test_a_clock_never_changes_results():
    now, faster = a_plan(80, 4.0, 4.0, micro_batch_size=2), a_plan(90, 1.0, 1.0, micro_batch_size=4)
    made = made_of(now, faster)
    assert made.better_than(now, anything) is None
    recomputing_less = a_plan(85, 4.0, 2.0, micro_batch_size=2)
    made = made_of(now, faster, recomputing_less)
    assert made.better_than(now, anything) == recomputing_less
    smaller = a_plan(70, 9.0, 9.0, micro_batch_size=1)
    made = made_of(now, smaller)
    made.correct(now, 101, {})  # memory does
    assert made.better_than(now, anything) == smaller


def test_what_was_left_for_memory_is_never_returned_to():
    large, small = a_plan(90, 1.0, 1.0), a_plan(50, 9.0, 9.0)
    made = made_of(large, small)
    made.correct(large, 101, {})
    assert made.better_than(large, anything) == small
    made.correct(small, 40, {})
    assert made.correction.offset_bytes == -10  # by this the larger one would fit
    assert made.better_than(small, anything) is None
    read = RunPlan.from_state(made.state(small))
    assert read is not None
    assert read.correction == made.correction
    assert read.better_than(small, anything) is None


@pytest.mark.parametrize(("measured", "expected"), [(95, None), (100, None), (101, 70), (111, 50)])
def test_the_margin_may_be_used_but_a_change_leaves_it(measured, expected):
    plans = [a_plan(size, 1.0, 1.0) for size in (90, 80, 70, 50)]
    made = made_of(*plans, margin_bytes=10)
    made.correct(plans[0], measured, {})
    found = made.better_than(plans[0], anything)
    assert (found.device_bytes if found else None) == expected


def test_updates_in_backward_belong_to_backward():
    plan = a_plan(90, 4.0, 4.0, optimizer_in_backward=True)
    made = made_of(plan)
    made.correct(plan, None, {"forward": 4.0, "backward": 10.0, "optimizer": 0.1})
    assert made.correction.factors == {"forward": 1.0, "backward": 2.0}
    assert made.correction.offset_bytes is None
