"""A budget in a fit: the plan, what takes its place when memory runs out, checkpoints."""

import json
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_memsave import (
    ActivationCheckpointing,
    MemSaveCallback,
    MicroBatching,
    Offloading,
)
from lightning_memsave.callbacks.settings.budget import BudgetSetting
from lightning_memsave.errors import (
    ConfigurationError,
    IncompatibleError,
    InfeasiblePlanError,
    MemoryExhaustedError,
    MemsaveWarning,
)
from lightning_memsave.planning.step_time import Rates
from lightning_memsave.units import MIB
from tests.callbacks.lit import callback_with, fit, make_lit, make_trainer, peak_of, rows_of
from tests.helpers import assert_same, snapshot
from tests.out_of_memory import MESSAGE

# Predictions of many plans take long.
pytestmark = pytest.mark.slow

WIDTH = 64


# Not attributes of the module, which are restored before a batch is repeated.
FAILURES = {"left": 0}


class Encoder(nn.Module):
    """Blocks with far more activations than parameters, and dropout."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
            for _ in range(num_blocks)
        ]
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        run_out_if_told()
        # 4 vectors become as many sequences.
        return self.head(self.blocks(x.unsqueeze(1).repeat(1, 64, 1))).square().mean()


def encoder(package: Any = pl) -> Any:
    torch.manual_seed(1)
    return make_lit(package, Encoder())


@pytest.fixture(autouse=True)
def no_failures_left():
    yield
    FAILURES["left"] = 0


def plain_fit(lit: Any) -> tuple[list[float], dict[str, Tensor], int]:
    callback = MemSaveCallback(preset="off", precision="32-true")
    losses, state, _ = fit(lit, callback)
    return losses, state, peak_of(callback)


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, Tensor], int]:
    return plain_fit(encoder())


def bitwise(budget: Any, **arguments: Any) -> MemSaveCallback:
    return MemSaveCallback(budget=budget, exactness="bitwise", **arguments)


def plan_of(callback: MemSaveCallback) -> Any:
    """The plan in force."""
    return callback._settings.find(BudgetSetting)._plan


def run_out_if_told() -> None:
    if FAILURES["left"]:
        FAILURES["left"] -= 1
        raise torch.OutOfMemoryError(MESSAGE)


def assert_trains_as(plain: Any, callback: MemSaveCallback, *others: Any, **how: Any) -> None:
    lit = encoder(how.get("package", pl))
    losses, state, _ = fit(lit, callback, *others, **how)
    assert losses == plain[0]
    assert all(torch.equal(state[name], value) for name, value in plain[1].items())


@pytest.mark.parametrize("share", [0.45, 0.6])
def test_a_fit_stays_within_its_budget_and_trains_the_same(package, share, plain):
    budget = int(share * plain[2])
    callback = bitwise(budget)
    assert_trains_as(plain, callback, package=package)
    made, peak_bytes = callback.plan, peak_of(callback)
    assert made.plan.settings["activation_checkpointing"] is not None
    assert peak_bytes <= budget
    # Logged values of this module are 24 bytes.
    assert made.plan.device_bytes == pytest.approx(peak_bytes, abs=24)
    assert callback.prediction is made.plan.prediction
    row = rows_of(callback)["budget"]
    assert row.status == "on"
    assert "planned for" in row.details[0]
    assert "times the time" in row.details[1]
    report = json.loads(Path("memsave_report.json").read_text())
    assert report["settings"]["budget"] == budget
    found = report["plan"]
    assert found["plan"]["fits"]
    assert found["plan"]["device_bytes"] == made.plan.device_bytes
    assert report["measured"]["peak_bytes"] == peak_bytes
    assert not found["frontier"][0]["fits"]
    assert len(found["frontier"]) > 2


def test_gradients_that_wait_for_their_norm_on_the_host_are_none_of_the_blocks():
    """Of three blocks two steps are recorded, which wait for different gradients at their peak."""
    lit = make_lit(pl, Encoder(3))
    losses, state, _ = fit(lit, callback := bitwise("2.5MiB"), gradient_clip_val=0.1)
    expected = fit(lit, gradient_clip_val=0.1)
    assert losses == expected[0]
    assert_same(state, expected[1])
    assert callback.plan.plan.settings["optimizer_in_backward"]


def test_updates_in_backward_are_not_planned_where_gradients_may_change_after_it():
    def backward(self: Any, loss: Tensor) -> None:
        loss.backward()
        for param in self.parameters():
            param.grad *= 0.5

    with pytest.raises(InfeasiblePlanError, match=r"Not planned: .*`Lit\.backward` reads gradie"):
        fit(make_lit(pl, Encoder(3), backward=backward), bitwise("2.5MiB"))


def test_what_cannot_fit_ends_before_training_and_changes_nothing():
    lit = encoder()
    before = snapshot(lit.model)
    trainer = make_trainer(pl, bitwise("1MiB"))
    with pytest.raises(InfeasiblePlanError, match=r"The least found is .*Use `budget=\"\d+MiB\"`"):
        trainer.fit(lit)
    assert snapshot(lit.model) == before
    assert not hasattr(trainer.strategy, "_memsave_before_setup")


@pytest.mark.parametrize("kind", ["optimizer", "parameters", True])
def test_what_is_offloaded_stays_so_and_the_rest_is_planned(kind, plain):
    callback = bitwise(plain[2] // 2, offload=kind)
    assert_trains_as(plain, callback)
    assert callback.plan.plan.settings["offload"] == kind
    assert callback.plan.plan.device_bytes == pytest.approx(peak_of(callback), abs=24)
    assert callback.plan.plan.prediction.peak.host_bytes > 0


def test_given_settings_stay(plain):
    callback = MemSaveCallback(activation_checkpointing=None, optimizer=None, budget=plain[2] // 2)
    fit(encoder(), callback)
    assert callback.plan.plan.settings["activation_checkpointing"] is None
    assert isinstance(callback.plan.plan.settings["micro_batch_size"], int)
    assert peak_of(callback) <= plain[2] // 2


class FailsAt(pl.Callback):
    """Lets the next passes of a step run out of memory."""

    def __init__(self, step: int, num_failures: int) -> None:
        self.step, self.num_failures = step, num_failures

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.step:
            FAILURES["left"] = self.num_failures


@pytest.mark.parametrize(
    ("num_failures", "settings"),
    [(1, {}), (2, {}), (3, {}), (2, {"offload": "optimizer"}), (2, {"offload": True})],
)
def test_out_of_memory_changes_to_the_next_plan_and_not_the_training(num_failures, settings, plain):
    callback = bitwise(plain[2], **settings)
    assert_trains_as(plain, callback, FailsAt(2, num_failures))
    ladder = list(callback.plan.ladder)
    at = ladder.index(callback.plan.plan)
    assert plan_of(callback) == ladder[at + num_failures - 1]
    details = rows_of(callback)["budget"].details
    assert ("changed, as memory ran out" in details) is (num_failures > 1)


def test_after_the_last_plan_the_run_ends(plain):
    callback = bitwise(plain[2])
    why = r"(?s)micro-batches would change results.*Use `budget=\"free\"`"
    with pytest.raises(MemoryExhaustedError, match=why):
        fit(encoder(), callback, FailsAt(2, 100))


def test_after_the_last_plan_batches_are_split_where_that_is_allowed(plain):
    callback = MemSaveCallback(budget="1GiB", exactness="rounding", predict=60)
    fit(encoder(), callback, FailsAt(2, 5))
    assert plan_of(callback) != callback.plan.plan


class Wide(nn.Module):
    """Needs more memory for 8 samples without a graph than for one with a graph."""

    def __init__(self, is_contrastive: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.is_contrastive = is_contrastive

    def forward(self, x: Tensor) -> Tensor:
        run_out_if_told()
        vectors = (x.repeat(1, 512) * self.scale).exp().tanh()
        return contrast(vectors) if self.is_contrastive else vectors.square().mean()


class Contrastive(Encoder):
    """Compares the samples of a batch, so that it cannot be split."""

    def forward(self, x: Tensor) -> Tensor:
        run_out_if_told()
        return contrast(self.blocks(x.unsqueeze(1).repeat(1, 64, 1)).mean(1))


def contrast(vectors: Tensor) -> Tensor:
    vectors = nn.functional.normalize(vectors, dim=-1)
    return nn.functional.cross_entropy(vectors @ vectors.T, torch.arange(len(vectors)))


def test_a_search_that_is_cut_off_does_not_end_the_fit():
    callback = MemSaveCallback(budget="1GiB", predict=1e-9)
    with pytest.warns(MemsaveWarning, match="repeated with 2"):  # the plan is not known to fit
        fit(encoder(), callback, FailsAt(1, 2))
    row = rows_of(callback)["budget"]
    assert row.status == "on"
    assert "the search for a better plan was cut off" in row.details[1]
    assert rows_of(callback)["activation_checkpointing"].status == "on"


OFF = ("optimizer", "optimizer_in_backward", "chunked_cross_entropy", "low_precision_weights")
ONLY_IN_PARTS: dict[str, Any] = {**dict.fromkeys((*OFF, "attention")), "exactness": "rounding"}


def lit_of(model: type[nn.Module], argument: Any, batch_size: int) -> Any:
    torch.manual_seed(1)
    lit = make_lit(pl, model(argument))
    lit.batch_size = batch_size
    return lit


def test_the_proof_of_the_loss_needs_no_more_than_the_planned_step():
    budget = plain_fit(lit_of(Wide, False, 8))[2] // 4
    found = []
    for num_failures in (0, 1, 2):
        callback = MemSaveCallback(budget=budget, **ONLY_IN_PARTS)
        found.append(fit(lit_of(Wide, False, 8), callback, FailsAt(0, num_failures))[0])
        made, row = callback.plan, rows_of(callback)["micro_batch_size"]
        assert made.plan.settings["micro_batch_size"] == 1
        assert "proven with 2 samples of a batch" in row.details[1]
        # Memory that runs out in it says nothing of the plan.
        assert plan_of(callback) == made.plan
        # Lightning's metrics of the first batch are 60 bytes.
        assert peak_of(callback) == made.plan.device_bytes + 60
    assert found[0] == found[1] == found[2]


def test_a_loss_that_cannot_be_split_gets_a_plan_with_whole_batches():
    losses, _, plain_bytes = plain_fit(lit_of(Contrastive, 2, 4))
    budget_bytes = int(0.7 * plain_bytes)
    callback = MemSaveCallback(budget=budget_bytes, **ONLY_IN_PARTS)
    # A batch is repeated with the cache freed, and then with the next plan.
    found, _, _ = fit(lit_of(Contrastive, 2, 4), callback, FailsAt(1, 2))
    assert isinstance(callback.plan.plan.settings["micro_batch_size"], int)
    assert found == losses
    assert peak_of(callback) <= budget_bytes
    whole = [p for p in callback.plan.ladder if p.settings["micro_batch_size"] == "auto"]
    fitting = [plan for plan in whole if plan.device_bytes <= budget_bytes]
    assert plan_of(callback) == fitting[1]
    rows = rows_of(callback)
    assert "changed, as memory ran out" in rows["budget"].details
    assert "its loss cannot be split" in rows["micro_batch_size"].details[1]


def test_a_loss_that_cannot_be_split_ends_the_fit_where_only_micro_batches_fit():
    budget = plain_fit(lit_of(Wide, True, 8))[2] // 2
    callback = MemSaveCallback(budget=budget, **ONLY_IN_PARTS)
    why = r"its loss cannot be split.*`micro_batch_size=None`.*, `budget=\"\d+MiB\"`"
    with pytest.raises(InfeasiblePlanError, match=why) as failure:
        fit(lit_of(Wide, True, 8), callback)
    assert failure.value.smallest.settings["micro_batch_size"] == "auto"


class FailsInBackward(pl.Callback):
    """Lets the backward pass run out of memory, after some updates in it."""

    def on_before_backward(self, trainer, pl_module, loss):
        def fail(gradient: Tensor) -> None:
            raise torch.OutOfMemoryError(MESSAGE)

        if trainer.global_step:
            pl_module.model.blocks[0].linear1.weight.register_hook(fail)


def test_advice_after_a_failed_backward_pass_is_a_smaller_budget(plain):
    callback = bitwise(plain[2], optimizer_in_backward=True)
    why = r"(?s)has updated parameters already.*a smaller budget, such as `budget=\"\d+MiB\"`"
    with pytest.raises(MemoryExhaustedError, match=why) as failure:
        fit(encoder(), callback, FailsInBackward())
    assert "micro_batch_size=" not in str(failure.value)


def test_allocator_retries_change_to_a_smaller_plan(plain):
    def retry(self, trainer, pl_module, batch, batch_idx):
        budget = callback._settings.find(BudgetSetting)
        budget.note_retries(trainer, 0 if batch_idx < 2 else 3)

    callback = bitwise(plain[2])
    assert_trains_as(plain, callback, callback_with(on_train_batch_start=retry))
    assert "changed, as the allocator retried 3 times" in rows_of(callback)["budget"].details


def test_a_resumed_run_keeps_its_plan_and_plans_again_for_less(tmp_path, plain):
    plain_bytes, path = plain[2], tmp_path / "half.ckpt"

    class Saves(FailsAt):
        def on_train_end(self, trainer, pl_module):
            trainer.save_checkpoint(path)

    callback = bitwise(plain_bytes)
    fit(encoder(), callback, Saves(1, 2))
    in_force = plan_of(callback)
    assert in_force != callback.plan.plan

    for budget, is_kept in ((plain_bytes, True), (plain_bytes // 2, False)):
        resumed = bitwise(budget)
        make_trainer(pl, resumed, max_epochs=2).fit(encoder(), ckpt_path=path)
        assert (not resumed.plan.frontier) is is_kept
        assert peak_of(resumed) <= budget
        if is_kept:
            assert resumed.plan.plan.settings == in_force.settings
            assert resumed.plan.plan.peak_bytes == peak_of(resumed)
        else:
            assert resumed.plan.plan.device_bytes <= budget


@pytest.mark.parametrize(("batch_size", "is_kept"), [(2, True), (8, False)])
def test_a_run_that_resumes_with_other_batches_plans_again_if_they_do_not_fit(
    tmp_path, plain, batch_size, is_kept
):
    budget, path = plain[2] * 11 // 10, tmp_path / "last.ckpt"
    callback = bitwise(budget)
    _, _, trainer = fit(encoder(), callback)
    assert callback.plan.plan.short == "nothing on"
    trainer.save_checkpoint(path)
    lit, resumed = encoder(), bitwise(budget)
    lit.batch_size = batch_size
    make_trainer(pl, resumed, max_epochs=2).fit(lit, ckpt_path=path)
    assert (not resumed.plan.frontier) is is_kept
    assert resumed.plan.plan.peak_bytes == peak_of(resumed) <= budget


def test_a_resumed_run_keeps_blocks_on_the_device_and_plans_again_for_other_settings(
    tmp_path, plain
):
    def make(offload: Any) -> MemSaveCallback:
        given: dict[str, Any] = {"activation_checkpointing": "all", "micro_batch_size": None}
        budget = plain[2] * 2 // 5
        return MemSaveCallback(budget=budget, offload=offload, **ONLY_IN_PARTS | given)

    open_number, path = Offloading("parameters", resident="auto"), tmp_path / "last.ckpt"
    callback = make(open_number)
    _, _, trainer = fit(encoder(), callback)
    assert callback.plan.plan.settings["offload"].resident > 0
    trainer.save_checkpoint(path)

    resumed = make(open_number)
    make_trainer(pl, resumed, max_epochs=2).fit(encoder(), ckpt_path=path)
    assert resumed.plan.plan.settings == callback.plan.plan.settings
    assert peak_of(resumed) == pytest.approx(peak_of(callback), abs=24)
    with pytest.raises(InfeasiblePlanError):
        make_trainer(pl, make(None), max_epochs=2).fit(encoder(), ckpt_path=path)


def test_evaluation_needs_no_plan():
    callback = MemSaveCallback(budget="1GiB")
    make_trainer(pl, callback).validate(encoder(), verbose=False)
    assert callback.plan is None


def compiled() -> Any:
    lit = encoder()
    lit.model.compile(backend="eager")
    return lit


@pytest.mark.parametrize(
    ("budget", "make", "limits", "error", "why"),
    [
        ("1GiB", compiled, {}, IncompatibleError, "`budget='1GiB'`: the fit cannot be planned"),
        ("4096000GiB", encoder, {}, ConfigurationError, "is more than the .* of the device"),
        ("1GiB", encoder, {"limit_train_batches": 0}, IncompatibleError, "no batch to plan with"),
    ],
)
def test_what_cannot_be_planned_is_refused(budget, make, limits, error, why):
    with pytest.raises(error, match=why):
        make_trainer(pl, MemSaveCallback(budget=budget), **limits).fit(make())


BAD = [
    *(-1, 0, 1.5, float("nan"), float("inf"), True, [1], 4096),
    *("", "12", "-12GiB", "12TiBB", "5KiB", "Auto"),
]


@pytest.mark.parametrize("budget", BAD, ids=str)
def test_wrong_budgets_are_refused_with_what_to_type(budget):
    said = re.escape(f"`budget={budget!r}` is neither a size of at least 1 MiB")
    with pytest.raises(ConfigurationError, match=said) as failure:
        MemSaveCallback(budget=budget)
    assert 'Use a size such as `budget="12GiB"`' in str(failure.value)


def test_a_preset_beside_a_budget_is_refused():
    with pytest.raises(ConfigurationError, match="Remove one of the two"):
        MemSaveCallback(budget="1GiB", preset="off")


@pytest.mark.parametrize("budget", [0.5, "free"])
def test_shares_and_free_memory(budget):
    callback = bitwise(budget)
    fit(encoder(), callback, max_steps=1)
    assert callback.plan.budget_bytes > 100 * MIB
    assert callback.plan.plan.settings["activation_checkpointing"] is None


@pytest.mark.gpu
def test_the_budget_is_a_wall_and_is_taken_down():
    before = torch.cuda.get_per_process_memory_fraction()
    callback = bitwise("3GiB")
    fit(encoder(), callback, accelerator="gpu", max_steps=3)
    assert torch.cuda.get_per_process_memory_fraction() == before
    with pytest.raises(torch.OutOfMemoryError):
        fit(encoder(), callback, Grabs(), accelerator="gpu", max_steps=3)
    assert torch.cuda.get_per_process_memory_fraction() == before


@pytest.mark.gpu
def test_batches_do_not_wait_for_all_statistics_of_the_allocator(monkeypatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("`memory_stats` writes and sorts a hundred names")

    monkeypatch.setattr(torch.cuda, "memory_stats", refuse)
    callback = bitwise("3GiB")
    budget, trainer = callback._settings.find(BudgetSetting), make_trainer(accelerator="gpu")
    for is_start in (True, False):
        budget.watch(trainer, is_start=is_start)


class Grabs(pl.Callback):
    """Allocates more than the budget, though the GPU has more."""

    def on_train_start(self, trainer, pl_module):
        self.held = torch.empty(4 * 2**30, dtype=torch.uint8, device=pl_module.device)


def test_details_of_what_is_planned_may_be_given(plain):
    blocks = {"blocks": "TransformerEncoderLayer"}
    callback = bitwise(plain[2] // 2, host_budget="1GiB", **blocks)
    assert_trains_as(plain, callback)
    assert callback.plan.plan.settings["activation_checkpointing"] is not None
    unlimited = bitwise("1GiB", **blocks)
    assert_trains_as(plain, unlimited, FailsAt(1, 2))
    assert plan_of(unlimited).settings["activation_checkpointing"]


def test_what_the_user_gives_as_objects_is_neither_changed_nor_saved(tmp_path, plain, monkeypatch):
    # Which plan is the fastest, and has others after it, depends on what else the machine does.
    speed = {"float32": 2e11, "bfloat16": 1e12}
    rates = Rates(speed, speed, 1e10, 4e9, 2e-6, has_lanes=False)
    monkeypatch.setattr("lightning_memsave.planning.budget._rates_of_cpu", lambda _: rates)

    def in_parts(batch: Tensor, size: int) -> list[Tensor]:  # a local function cannot be pickled
        return list(batch.split(size))

    def make(**arguments: Any) -> MemSaveCallback:
        off: dict[str, Any] = {"optimizer": None, "optimizer_in_backward": None}
        given = ActivationCheckpointing("all")
        parts = MicroBatching("halve", split_batch=in_parts)
        sizes: dict[str, Any] = {"micro_batch_size": parts}
        return MemSaveCallback(given, budget=budget, **(off | sizes | arguments))

    budget = plain[2] * 2 // 5  # not without micro-batches
    callback = make()
    _, _, trainer = fit(encoder(), callback, FailsAt(1, 2))
    assert plan_of(callback) != callback.plan.plan
    assert rows_of(callback)["activation_checkpointing"].value == "'all'"
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = make()
    resumed_trainer = make_trainer(pl, resumed, max_epochs=2)
    resumed_trainer.fit(encoder(), ckpt_path=tmp_path / "last.ckpt")
    assert not resumed.plan.frontier
    assert rows_of(resumed)["activation_checkpointing"].value == "'all'"
    budget = plain[2]
    more_exact = make(exactness="bitwise", micro_batch_size="auto")
    make_trainer(pl, more_exact, max_epochs=2).fit(encoder(), ckpt_path=tmp_path / "last.ckpt")
    assert more_exact.plan.frontier
