"""A missing private name of another package is refused before a fit changes anything."""

import importlib
import re
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch import nn

from lightning_memsave import IncompatibleError, MemSaveCallback
from lightning_memsave.trainer import private_names
from lightning_memsave.trainer.private_names import COMMANDS, NAMES, TESTED, check_names
from tests.callbacks.lit import make_trainer

ROOT = Path(__file__).parents[2]
CHECKED = [
    pytest.param(row, name, id=f"{row.owner}.{name}")
    for row in NAMES
    if row.argument != COMMANDS
    for name in row.names.split()
]
ALL = {row.argument for row in NAMES}
# Each argument that has names of its own; offloading leaves no optimizer to update in backward.
ON: dict[str, Any] = {
    "": {},
    "predict": {"predict": True},
    "micro_batch_size": {"micro_batch_size": 1},
    "offload": {"offload": "parameters"},
    "chunked_cross_entropy": {"chunked_cross_entropy": True},
    "activation_checkpointing": {"activation_checkpointing": "all"},
    "low_precision_weights": {"low_precision_weights": "stochastic"},
    "optimizer_in_backward": {"optimizer_in_backward": True},
}


@pytest.fixture(scope="module", autouse=True)
def _everything_is_loaded():
    for row in NAMES:
        if not row.owner.startswith("Trainer"):
            importlib.import_module(row.owner.partition(":")[0])


def state_of(trainer: Any) -> list[Any]:
    """Everything that the callback may change: the objects themselves, by identity."""
    fit_loop = trainer.fit_loop
    owners = [trainer, trainer.strategy, fit_loop, fit_loop._data_source, fit_loop.epoch_loop]
    owners += [fit_loop.epoch_loop.automatic_optimization, trainer._accelerator_connector]
    own = [{name: id(value) for name, value in vars(owner).items()} for owner in owners]
    return [*own, [*map(id, trainer.callbacks)]]


# What torch is made of cannot be taken away: it gets another name in the list instead.
@pytest.mark.parametrize(("row", "name"), CHECKED)
def test_a_missing_name_is_refused_before_anything_is_changed(row, name, monkeypatch):
    callback = MemSaveCallback(preset="off", report=False, **{"predict": False, **ON[row.argument]})
    trainer, lit = make_trainer(lightning.pytorch, callback), lightning.pytorch.LightningModule()
    lit.layer = nn.Linear(2, 2)
    names = [f"{each}_renamed" if each == name else each for each in row.names.split()]
    renamed = row._replace(names=" ".join(names))
    rows = [renamed if each is row else each for each in NAMES]
    monkeypatch.setattr(private_names, "NAMES", rows)
    before, modules = state_of(trainer), [vars(m).copy() for m in lit.modules()]
    with pytest.raises(IncompatibleError) as caught:
        callback.setup(trainer, lit, "fit")
    assert state_of(trainer) == before
    assert [vars(m) for m in lit.modules()] == modules
    path = f"{row.owner}.{name}_renamed".replace(":", ".")
    (problem,) = caught.value.problems
    assert problem.what == f"`{path}`"
    package = path.partition(".")[0].replace("Trainer", "lightning")
    assert f'pip install "{package}=={TESTED[package]}"' in problem.fix
    assert re.match(rf"{package} \d+\.\d+", problem.why)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("torch._C", "_current_graph_task_id"),
        ("torch.utils._python_dispatch", "_disable_current_modes"),
        ("lightning.pytorch.trainer.connectors.data_connector", "_process_dataloader"),
        ("lightning.pytorch.loops.optimization.automatic:_AutomaticOptimization", "_make_closure"),
        ("torch.amp:GradScaler", "_unscale_grads_"),
    ],
)
def test_a_name_that_is_taken_away_is_missed(owner, name, monkeypatch):
    module, _, path = owner.partition(":")
    found = importlib.import_module(module)
    trainer = make_trainer(lightning.pytorch)
    monkeypatch.delattr(getattr(found, path) if path else found, name)
    problems = check_names(trainer, ALL)
    missing = {problem.what.strip("`").rpartition(".")[2] for problem in problems}
    assert missing == {name}


def test_the_other_package_is_named_by_its_own_name(monkeypatch):
    from pytorch_lightning.trainer.connectors import data_connector

    monkeypatch.delattr(data_connector, "_process_dataloader")
    assert check_names(make_trainer(lightning.pytorch), ALL) == []
    (problem,) = check_names(make_trainer(pytorch_lightning), ALL)
    assert problem.what.startswith("`pytorch_lightning.trainer.connectors.data_connector._process")
    assert f'"pytorch-lightning=={TESTED["pytorch-lightning"]}"' in problem.fix


def test_what_is_off_is_not_missed(monkeypatch):
    monkeypatch.delattr(torch.amp.GradScaler, "_unscale_grads_")
    trainer = make_trainer(lightning.pytorch)
    assert check_names(trainer, ALL - {"offload"}) == []
    (problem,) = check_names(trainer, ["offload"])
    assert problem.why.endswith("which `offload` needs")
    assert problem.fix.endswith("or set `offload=None`.")


def test_what_is_not_loaded_is_not_missed(monkeypatch):
    rows = (private_names.Names("transformers.no_such_module:Thing", "_name"),)
    monkeypatch.setattr(private_names, "NAMES", rows)
    assert check_names(make_trainer(lightning.pytorch), ALL) == []


def test_tested_versions_are_those_that_are_installed_for_tests():
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    assert {p: pinned[p] for p in TESTED if p != "torch"} == {
        p: version for p, version in TESTED.items() if p != "torch"
    }
    short = TESTED["torch"].rpartition(".")[0]
    assert (
        f"tested with torch {short}, Lightning {TESTED['lightning']}"
        in (ROOT / "README.md").read_text()
    )
