"""A refused fit leaves the Trainer and the module as they were, whenever it is refused."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memsave import (
    LowBitOptimizer,
    MemSaveCallback,
    MicroBatching,
    Offloading,
    OptimizerInBackward,
)
from lightning_memsave.errors import IncompatibleError, InfeasiblePlanError, MemsaveError
from tests.callbacks.lit import Vectors, WithLoss, late, make_lit, make_trainer
from tests.cases import WIDTH, make_model
from tests.helpers import snapshot

pytestmark = [
    pytest.mark.usefixtures("no_prediction"),
    pytest.mark.filterwarnings("ignore:.*batch normalisation"),
]


def with_methods(**methods: Any) -> Any:
    """A change of a module: the class gets other methods."""

    def change(lit: Any) -> None:
        for name, method in methods.items():
            setattr(type(lit), name, method)

    return change


def with_model(*layers: Any) -> Any:
    """A change of a module: these layers, and the mean of their squares."""

    def change(lit: Any) -> None:
        lit.model = WithLoss(nn.Sequential(*(make() for make in layers)))

    return change


def unrepeated(lit: Any) -> None:
    lit.model = make_model("unrepeated")


def unchanged(lit: Any) -> None:
    """A module as any other."""


def linear_and_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


def contrastive(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
    return self.model.head(batch).std(0).sum()


def nesterov(self: Any) -> Any:
    return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def lbfgs(self: Any) -> Any:
    return torch.optim.LBFGS(self.parameters())


def leave_out(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
    closure() if batch_idx == 0 else optimizer.step(closure=closure)


def two_passes(self: Any, loss: Tensor) -> None:
    loss.backward()
    self.model(torch.ones(4, WIDTH)).backward()


OFF: dict[str, Any] = {"preset": "off"}
EVERYTHING: dict[str, Any] = OFF | {
    "precision": "bf16-mixed",
    "accumulate_grad_batches": 2,
    "activation_checkpointing": "all",
    "optimizer_in_backward": True,
}
PLANNED = {"activation_checkpointing": None, "optimizer_in_backward": None}
OFFLOADED = OFF | {"offload": "optimizer"}
HALF = {"precision": "bf16-mixed"}
IN_BACKWARD = OFF | {"optimizer_in_backward": True}
OF_BOTH = "Remove one of the two"
OVERRIDDEN = r"(?s)`Lit\.optimizer_step` is overridden.*or set `optimizer_in_backward=None`"
# Settings of the callback, the change of the module, the message, settings of the Trainer.
LATE: list[tuple[dict[str, Any], Any, str]] = [
    # In `setup`, before anything is changed.
    ({}, with_methods(automatic_optimization=False), "automatic_optimization=False"),
    ({"offload": Offloading("optimizer", host_budget=1)}, unchanged, "host_budget"),
    # In `setup`, by what is applied after the precision.
    ({"blocks": "re:nothing.*"}, unchanged, "nothing in `Lit` matches"),
    ({"chunked_cross_entropy": True}, unchanged, "chunked_cross_entropy"),
    # When optimizers are configured, or in `on_fit_start`.
    ({"optimizer": "8bit"}, with_methods(configure_optimizers=nesterov), "nesterov"),
    ({"optimizer": LowBitOptimizer(keep_32bit=("*.nix",))}, unchanged, "matches no"),
    (
        {"low_precision_weights": "stochastic"},
        with_methods(configure_optimizers=lbfgs),
        "LBFGS",
    ),
    # In the first batch.
    ({"micro_batch_size": 2}, with_methods(training_step=contrastive), "micro_batch_size=2"),
    (
        {"micro_batch_size": MicroBatching(2, of="blocks"), "blocks": "Sequential"},
        with_model(*[linear_and_norm] * 3),
        "of=.blocks",
    ),
    (
        {"budget": "1MiB", "preset": None, **PLANNED},
        with_model(lambda: nn.Linear(WIDTH, 9_000), lambda: nn.Linear(9_000, WIDTH)),
        "1.00 MiB",
    ),
]
OF_MODULES: list[tuple[dict[str, Any], Any, str]] = [
    ({"activation_checkpointing": 9}, unchanged, r'Use a number up to 4, or "all"'),
    ({"activation_checkpointing": "sqrt"}, unchanged, r'Use "all", which needs less memory'),
    (
        {"activation_checkpointing": "all", "blocks": "Blocck"},
        late,
        "Did you mean `Block`.*or set `activation_checkpointing=None`",
    ),
    ({"blocks": "Typo"}, late, r"matches `blocks='Typo'`. Classes that repeat: `Block` \(4\)"),
    (
        {"activation_checkpointing": "all"},
        unrepeated,
        "recomputing single layers saves nothing.*or set `activation_checkpointing=None`",
    ),
    (
        {"chunked_cross_entropy": True},
        late,
        r'`ChunkedCrossEntropy\(heads="lm_head"\)`.*`chunked_cross_entropy=None`',
    ),
    ({"attention": "sdpa"}, late, "contains no Hugging Face model.*`attention=None`"),
    (
        {"optimizer": "8bit"},
        with_methods(configure_optimizers=nesterov),
        "nesterov.*or set `optimizer=None`",
    ),
    *(
        ({"optimizer": optimizer}, unchanged, r"a pattern .* such as `model\.head\.bias`")
        for optimizer in (
            LowBitOptimizer(keep_32bit=("no.*",)),
            LowBitOptimizer(force_8bit=("no.*",)),
        )
    ),
    (
        IN_BACKWARD,
        with_methods(automatic_optimization=False),
        "which of its backward passes completes",
    ),
    (IN_BACKWARD, with_methods(configure_optimizers=lbfgs), "LBFGS"),
    *(
        (
            IN_BACKWARD,
            with_methods(**{hook: lambda *_, **__: None}),
            rf"`Lit\.{hook}`.*or set `optimizer_in_backward=None`",
        )
        for hook in ("on_after_backward", "on_before_optimizer_step", "optimizer_zero_grad")
    ),
    (
        OFF | HALF | {"low_precision_weights": "master"},
        unchanged,
        'Set `offload="optimizer"` as well',
    ),
    (
        OFFLOADED | HALF | {"low_precision_weights": "stochastic"},
        unchanged,
        'Use `low_precision_weights="master"`',
    ),
    (OFFLOADED | {"host_budget": "1MiB"}, unchanged, "`host_budget` is 1.00 MiB"),
]
OF_TRAINERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (HALF, {"precision": "bf16-true"}, OF_BOTH),
    ({"low_precision_weights": "kahan"}, {"precision": "bf16-true"}, OF_BOTH),
    ({"precision": "64-true"}, HALF, OF_BOTH),
    (
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 3},
        r"or pass `accumulate_grad_batches=3` here too",
    ),
    (OFFLOADED, {"precision": "bf16-true"}, 'Use `precision="bf16-mixed"`'),
    (
        OFFLOADED | IN_BACKWARD,
        {"gradient_clip_val": 1.0},
        "the norm of all gradients is known only after backward",
    ),
    (
        OFF | {"optimizer_in_backward": OptimizerInBackward(clip_norm=0.01)},
        {"gradient_clip_val": 1.0},
        "or pass `clip_norm=1.0` here too",
    ),
]
REFUSALS = [
    *((EVERYTHING | settings, change, message, {}) for settings, change, message in LATE),
    *((settings, change, message, {}) for settings, change, message in OF_MODULES),
    *((settings, unchanged, message, how) for settings, how, message in OF_TRAINERS),
]


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


@pytest.mark.parametrize(
    ("settings", "change", "message", "how"), REFUSALS, ids=[row[2][:40] for row in REFUSALS]
)
def test_leaves_trainer_and_module_as_they_were(package, settings, change, message, how):
    lit = make_lit(package)
    change(lit)
    callback = MemSaveCallback(**settings)
    if lit.automatic_optimization and "accumulate_grad_batches" in settings:
        how = {"gradient_clip_val": 0.5} | how
    trainer = make_trainer(package, callback, num_sanity_val_steps=0, **how)
    before, module = state_of(trainer), snapshot(lit)
    weights = copy.deepcopy(lit.state_dict())
    data = DataLoader(Vectors(), batch_size=4)
    with pytest.raises(MemsaveError, match=message) as refusal:
        trainer.fit(lit, data)
    assert isinstance(refusal.value, IncompatibleError | InfeasiblePlanError)
    assert trainer.global_step == 0
    if change is late:  # its layers have been made meanwhile
        return
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


@pytest.mark.parametrize(
    ("methods", "settings", "message"),
    [
        ({"backward": two_passes}, {}, r"a second backward pass in `Lit\.backward`"),
        ({"optimizer_step": leave_out}, {}, OVERRIDDEN),
        ({"optimizer_step": leave_out}, {"micro_batch_size": 2}, OVERRIDDEN),
    ],
)
def test_what_a_step_shows_is_refused_in_it(package, methods, settings, message):
    lit, callback = make_lit(package, **methods), MemSaveCallback(**(IN_BACKWARD | settings))
    with pytest.raises(IncompatibleError, match=message):
        make_trainer(package, callback).fit(lit)
    assert "configure_optimizers" not in vars(lit)
