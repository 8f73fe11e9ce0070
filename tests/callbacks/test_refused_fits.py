"""A refused fit leaves the Trainer and the module as they were, whenever it is refused."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memsave import LowBitOptimizer, MemSaveCallback, MicroBatching, Offloading
from lightning_memsave.errors import IncompatibleError, InfeasiblePlanError, MemsaveError
from tests.callbacks.lit import PACKAGES, Vectors, make_lit, make_trainer
from tests.cases import WIDTH
from tests.helpers import snapshot

pytestmark = [
    pytest.mark.usefixtures("no_prediction"),
    pytest.mark.filterwarnings("ignore:.*batch normalisation"),
]


def contrastive(lit: Any) -> None:
    """A loss that is no mean over samples."""

    def compute(batch: Tensor, batch_idx: int) -> Tensor:
        return lit.model.head(batch).std(0).sum()

    lit.training_step = compute


def own_step(lit: Any) -> None:
    lit.automatic_optimization = False


def sgd(lit: Any) -> None:
    lit.configure_optimizers = lambda: torch.optim.SGD(
        lit.parameters(), lr=0.1, momentum=0.9, nesterov=True
    )


def lbfgs(lit: Any) -> None:
    lit.configure_optimizers = lambda: torch.optim.LBFGS(lit.parameters())


def batch_norm(lit: Any) -> None:
    lit.model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3))
    )
    lit.training_step = lambda batch, batch_idx: lit.model(batch).square().mean()


def large(lit: Any) -> None:
    lit.model = nn.Sequential(nn.Linear(WIDTH, 9_000), nn.Linear(9_000, WIDTH))
    lit.training_step = lambda batch, batch_idx: lit.model(batch).square().mean()


def unchanged(lit: Any) -> None:
    """A module as any other."""


EVERYTHING: dict[str, Any] = {
    "preset": "off",
    "precision": "bf16-mixed",
    "accumulate_grad_batches": 2,
    "activation_checkpointing": "all",
    "optimizer_in_backward": True,
}
PLANNED = {"activation_checkpointing": None, "optimizer_in_backward": None}
REFUSALS: dict[str, tuple[dict[str, Any], Any, str]] = {
    # In `setup`, before anything is changed.
    "manual optimization": ({}, own_step, "automatic_optimization=False"),
    "host memory": ({"offload": Offloading("optimizer", host_budget=1)}, unchanged, "host_budget"),
    # In `setup`, by what is applied after the precision.
    "no block": ({"blocks": "re:nothing.*"}, unchanged, "nothing in `Lit` matches"),
    "no head": ({"chunked_cross_entropy": True}, unchanged, "chunked_cross_entropy"),
    # When optimizers are configured, or in `on_fit_start`.
    "another optimizer": ({"optimizer": "8bit"}, sgd, "nesterov"),
    "pattern": ({"optimizer": LowBitOptimizer(keep_32bit=("*.nix",))}, unchanged, "matches no"),
    "LBFGS": ({"low_precision_weights": "stochastic"}, lbfgs, "LBFGS"),
    # In the first batch.
    "loss": ({"micro_batch_size": 2}, contrastive, "micro_batch_size=2"),
    "blocks": (
        {"micro_batch_size": MicroBatching(2, of="blocks"), "blocks": "Sequential"},
        batch_norm,
        "of=.blocks",
    ),
    "no plan": ({"budget": "1MiB", "preset": None, **PLANNED}, large, "1.00 MiB"),
}


def functions_of(thing: Any) -> dict[str, Any]:
    """What stands in an object instead of the methods of its class."""
    return {name: value for name, value in vars(thing).items() if inspect.isroutine(value)}


def state_of(trainer: Any) -> dict[str, Any]:
    connector, loop = trainer._accelerator_connector, trainer.fit_loop
    things = {
        "trainer": trainer,
        "strategy": trainer.strategy,
        "loop": loop,
        "epoch": loop.epoch_loop,
        "optimization": loop.epoch_loop.automatic_optimization,
        "manual": loop.epoch_loop.manual_optimization,
        "validation": loop.epoch_loop.val_loop,
        "connector": connector,
        "data": trainer._data_connector,
    }
    return {
        "precision": trainer.precision,
        "plugin": trainer.strategy.precision_plugin,
        "plugin of connector": connector.precision_plugin,
        "flag": connector._precision_flag,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "callbacks": list(trainer.callbacks),
        "classes": {name: type(thing) for name, thing in things.items()},
        "functions": {name: functions_of(thing) for name, thing in things.items()},
    }


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.turns(10)
def test_leaves_trainer_and_module_as_they_were(name, package):
    settings, change, message = REFUSALS[name]
    lit = make_lit(PACKAGES[package])
    change(lit)
    callback = MemSaveCallback(**(EVERYTHING | settings))
    clip = 0.5 if lit.automatic_optimization else None
    trainer = make_trainer(
        PACKAGES[package], callback, gradient_clip_val=clip, num_sanity_val_steps=0
    )
    before, module = state_of(trainer), snapshot(lit)
    weights = copy.deepcopy(lit.state_dict())
    data = DataLoader(Vectors(), batch_size=4)
    with pytest.raises(MemsaveError, match=message) as refusal:
        trainer.fit(lit, data)
    assert isinstance(refusal.value, IncompatibleError | InfeasiblePlanError)
    assert trainer.global_step == 0
    assert state_of(trainer) == before
    after = snapshot(lit)
    for one in (module, after):  # what Lightning itself leaves in the root
        root = one.pop("")
        one["functions"] = functions_of(root[0])
    assert after == module
    # Weights were converted before there was an optimizer, and are given back rounded.
    tolerance = 2**-8 if "low_precision_weights" in settings else 0
    for key, value in lit.state_dict().items():
        torch.testing.assert_close(value, weights[key], rtol=tolerance, atol=0)
