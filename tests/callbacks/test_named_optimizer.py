"""`MemSaveCallback(optimizer=...)` with other optimizers than the configured one, by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, NAdam
from torch.optim.lr_scheduler import OneCycleLR

from lightning_memsave import (
    ConfigurationError,
    IncompatibleError,
    LowBitOptimizer,
    MemSaveCallback,
    NamedOptimizer,
    plan_memory,
)
from lightning_memsave.core.trainer_facts import TrainerFacts
from lightning_memsave.measure.storages import tensors_in
from lightning_memsave.techniques.registry import current_settings
from tests.callbacks.lit import (
    LIGHTNING,
    callback_with,
    fit,
    make_lit,
    make_trainer,
    quiet,
    rows_of,
    without_dropout,
)
from tests.helpers import assert_same

NAMES = ("muon", "muon_8bit", "adamw_bf16_state", "torch.optim:NAdam")
BESIDE: tuple[dict[str, Any], ...] = (
    {"offload": "optimizer"},
    {"offload": "parameters+activations"},
    {"optimizer_in_backward": True},
    {"offload": "parameters", "optimizer_in_backward": True},
)
CLIPPED = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}


def configure(self: Any) -> Any:
    optimizer = AdamW(self.parameters(), lr=1e-3)
    schedule = OneCycleLR(optimizer, 1e-2, total_steps=20)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def lit_of(package: Any = LIGHTNING, **methods: Any) -> Any:
    return without_dropout(make_lit(package, configure_optimizers=configure, **methods))


def only(name: Any, **settings: Any) -> MemSaveCallback:
    return quiet(preset="off", optimizer=name, **settings)


class Notes:
    """Rate and momentum of each step, and the state of the optimizer after the last one."""

    def __init__(self, package: Any = LIGHTNING) -> None:
        self.rates: list[Any] = []
        self.state: Any = None
        hooks = {"on_train_batch_end": self._note, "on_train_end": self._note_state}
        self.callback = callback_with(
            package, **{name: lambda _, *args, do=do: do(*args) for name, do in hooks.items()}
        )

    def _note(self, trainer: Any, *_: Any) -> None:
        (group,) = trainer.optimizers[0].param_groups
        self.rates.append((group["lr"], group["betas"]))

    def _note_state(self, trainer: Any, *_: Any) -> None:
        self.state = trainer.optimizers[0].state_dict()


@pytest.mark.parametrize("name", NAMES)
def test_schedules_go_on(package, name):
    plain, ours = Notes(package), Notes(package)
    fit(lit_of(package), plain.callback, package=package)
    fit(lit_of(package), only(name), ours.callback, package=package)
    assert plain.rates == ours.rates
    assert len({rate for rate, _ in plain.rates}) == 6


def test_a_class_trains_as_if_the_project_returned_it(package):
    def own(self: Any) -> Any:
        return NAdam(self.parameters(), lr=1e-3, weight_decay=0.01)

    expected = fit(make_lit(package, configure_optimizers=own), package=package)[:2]
    found = fit(make_lit(package), only("torch.optim:NAdam"), package=package)[:2]
    assert_same(list(found), list(expected))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("settings", "how"),
    [*((each, {}) for each in BESIDE), *((each, CLIPPED) for each in BESIDE[:3])],
    ids=str,
)
def test_trains_the_same_beside_bitwise_settings(name, settings, how):
    expected = fit(lit_of(), only(name), **how)[:2]
    found = fit(lit_of(), only(name, **settings), **how)[:2]
    assert_same(list(found), list(expected))


@pytest.mark.parametrize("offload", [None, "parameters"])
@pytest.mark.parametrize("name", NAMES)
def test_resumes_bit_for_bit(package, name, offload, tmp_path):
    straight, resumed, path = Notes(package), Notes(package), tmp_path / "half.ckpt"
    how = {"package": package, "max_epochs": 2}
    losses, weights, _ = fit(lit_of(package), only(name), straight.callback, **how)
    stopped = make_trainer(package, only(name))
    stopped.fit(lit_of(package))
    stopped.save_checkpoint(path)
    callbacks = (only(name, offload=offload), resumed.callback)
    lit = lit_of(package)
    seen: list[float] = []
    note = {"on_train_batch_end": lambda _, t, m, out, *__: seen.append(out["loss"].item())}
    trainer = make_trainer(package, *callbacks, callback_with(package, **note), max_epochs=2)
    trainer.fit(lit, ckpt_path=path)
    assert seen == losses[6:]
    assert resumed.rates == straight.rates[6:]
    assert_same(resumed.state, straight.state)
    assert_same(lit.state_dict(), weights)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("muon", None),
        (None, "muon"),
        ("8bit", "muon"),
        ("8bit", "muon_8bit"),
        ("muon_8bit", "8bit"),
        (None, "torch.optim:NAdam"),
        (None, "torch.optim:Adafactor"),
        ("muon", "torch.optim:Adafactor"),
        ("8bit", "torch.optim:NAdam"),
        ("muon", "adamw_bf16_state"),
    ],
)
def test_checkpoints_of_another_optimizer_are_refused_before_the_first_step(
    first, second, tmp_path
):
    trainer = make_trainer(LIGHTNING, only(first))
    trainer.fit(lit_of())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(IncompatibleError, match="The checkpoint's optimizer state: it was written"):
        make_trainer(LIGHTNING, only(second)).fit(lit_of(), ckpt_path=tmp_path / "x.ckpt")


def batch_of(rows: int = 4) -> Any:
    return torch.randn(rows, 64)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_is_predicted_to_the_byte(name):
    held: list[int] = []

    def note(_: Any, trainer: Any, *__: Any) -> None:
        found = {id(t): t.nbytes for t in tensors_in(trainer.optimizers[0].state)}
        held.append(sum(found.values()))  # all parameters share a table

    callback = MemSaveCallback(preset="off", optimizer=name)
    make_trainer(LIGHTNING, callback, callback_with(on_train_end=note)).fit(lit_of())
    report = json.loads(Path("memsave_report.json").read_text())
    found = [report[which]["by_category"]["optimizer_state"] for which in ("measured", "predicted")]
    assert found == held * 2
    assert rows_of(callback)["optimizer"].status == "on"


@pytest.mark.parametrize(
    ("kind", "name"), [(NamedOptimizer, "muon"), (LowBitOptimizer, "muon_8bit")]
)
def test_plans_keep_what_was_named_and_are_read_from_checkpoints(kind, name):
    technique = kind(name, optimizer_kwargs={"ns_steps": 3, "betas": (0.8, 0.9)})
    settings = {"optimizer": technique}
    plan = plan_memory(lit_of(), batch_of(), settings=settings, budget="1GiB", device="cpu").plan
    assert plan.settings["optimizer"] == technique
    assert eval(plan.how).arguments["optimizer"] == technique
    again = current_settings(json.loads(json.dumps(plan.to_dict()["settings"])))
    assert again["optimizer"] == technique


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("muon_8bits", 'there is no such optimizer. Did you mean "muon_8bit"'),
        ("moun", 'Did you mean "muon"'),
        ("nadam", '"package:Class" for any other'),
        ("torch.optim:Adamm", "Did you mean `torch.optim:Adam`"),
    ],
)
def test_wrong_names_say_what_to_type(value, text):
    with pytest.raises(ConfigurationError, match=text):
        MemSaveCallback(optimizer=value)


def test_muon_is_refused_where_it_has_no_blocks_or_no_whole_matrices():
    head = make_lit(model=nn.Linear(64, 64), training_step=lambda s, b, i: s.model(b).sum())
    for name in ("muon", "muon_8bit"):
        with pytest.raises(IncompatibleError, match="is a matrix of a repeated block"):
            make_trainer(LIGHTNING, only(name)).fit(head)
    for strategy in ("ModelParallelStrategy", "DeepSpeedStrategy", "PipelineStrategyMixin"):
        facts = TrainerFacts((strategy,), 2, None)
        (problem,) = NamedOptimizer("muon").conflicts(facts, "`optimizer='muon'`")
        assert "a process has no whole matrices" in problem.why
        assert NamedOptimizer("torch.optim:NAdam").conflicts(facts, "") == []
    (problem,) = LowBitOptimizer("muon_8bit").conflicts(
        TrainerFacts(("ModelParallelStrategy",), 2, None), "`optimizer='muon_8bit'`"
    )
    assert "a process has no whole matrices" in problem.why


def test_the_blocks_of_the_callback_are_those_of_muon():
    for blocks, number in ((None, 8), ("re:model.blocks.[01]", 4)):
        for name in ("muon", "muon_8bit"):
            callback = only(name, blocks=blocks)
            fit(lit_of(), callback)
            (detail,) = rows_of(callback)["optimizer"].details
            assert f" for {number} matrices of blocks" in detail


def test_presets_leave_the_named_one():
    callback = quiet(optimizer="muon", preset="single_gpu", micro_batch_size=2)
    fit(lit_of(), callback)
    row = rows_of(callback)["optimizer"]
    assert "Muon for 8 matrices" in row.details[0]
    assert rows_of(callback)["low_precision_weights"].status == "on"


def test_a_loss_is_proven_inside_of_the_step_of_a_class_that_updates_all_together():
    """Its step calls the closure, and the proof puts hooks on the optimizer meanwhile."""
    name, found = "tests.own_optimizers:AdaptsRate", []
    exact = {"precision": "32-true", "low_precision_weights": None, "predict": True}
    for preset in ("off", "offload"):
        callback = quiet(preset=preset, optimizer=name, **(exact if preset == "offload" else {}))
        losses, weights, _ = fit(lit_of(), callback)
        found.append([losses, weights])
    assert_same(*found)
    assert "proven with" in " ".join(rows_of(callback)["micro_batch_size"].details)
