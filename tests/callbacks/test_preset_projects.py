"""A preset refuses no project: its parts yield where they conflict, and the table says so."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_memsave import MemSaveCallback
from lightning_memsave.techniques.registry import values_of
from lightning_memsave.trainer.precision import half_precision_on_cpu
from tests.awkward_projects import TwoOptimizers
from tests.callbacks.lit import WithLoss, late, make_lit, make_trainer, only, rows_of

pytestmark = pytest.mark.usefixtures("no_prediction", "any_saving_counts")

PRESETS = ("classic", "bitwise", "single_gpu", "offload")
CHECKPOINTING, UPDATES, WEIGHTS = (
    "activation_checkpointing",
    "optimizer_in_backward",
    "low_precision_weights",
)


@dataclass(frozen=True)
class Project:
    """What somebody has, and which parts of the presets yield to it, with a word of the reason."""

    make: Callable[[], Any]
    yields: dict[str, str] = field(default_factory=dict)
    trainer: Callable[[], dict[str, Any]] = dict
    callbacks: Callable[[], list[Any]] = list
    finds_nothing: frozenset[str] = frozenset(("chunked_cross_entropy", "attention"))


def lit_with(**methods: Any) -> Callable[[], Any]:
    return functools.partial(make_lit, **methods)


def two_optimizers() -> Any:
    """Stepped by hand, as in a GAN."""
    lit: Any = TwoOptimizers()
    lit.train_dataloader = lambda: lit.loader(1)
    return lit


def log_gradients(self: Any, *_: Any) -> None:
    norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
    assert norms
    self.log("gradient", torch.stack(norms).max())


def log_gradients_of_module(trainer: Any, module: Any, *_: Any) -> None:
    log_gradients(module)


def two_passes(self: Any, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def every_second(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
    optimizer.step(closure=closure) if batch_idx % 2 == 0 else closure()


def zero_gradients(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def clip(self: Any, optimizer: Any, *_: Any, **__: Any) -> None:
    torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


def lbfgs(self: Any) -> Any:
    return torch.optim.LBFGS(self.parameters(), max_iter=2)


def sgd(self: Any) -> Any:
    return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9, nesterov=True)


def half() -> Any:
    return make_lit(on_after_batch_transfer=lambda self, batch, i: batch.bfloat16()).bfloat16()


def bert() -> Any:
    lit = make_lit(model="eager_bert")
    lit.model.bert.activation_checkpointing_enable()
    return lit


class Checkpointed(nn.Module):
    """A block that recomputes itself, as it was done before."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Any:
        x = x.requires_grad_() if not x.requires_grad else x
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.is_reentrant)


def recomputing(is_reentrant: bool) -> Callable[[], Any]:
    return lambda: make_lit(
        model=WithLoss(nn.Sequential(*[Checkpointed(is_reentrant) for _ in range(3)]))
    )


def frozen() -> Any:
    lit = make_lit()
    lit.model.blocks.requires_grad_(False)
    return lit


def projected() -> Any:
    """Its first layer has as many outputs as a head has classes."""
    blocks = (nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(2))
    layers = nn.Linear(64, 1024), nn.Sequential(*blocks), nn.Linear(1024, 8)
    return make_lit(model=WithLoss(nn.Sequential(*layers)))


def scaler() -> dict[str, Any]:
    return {"plugins": [half_precision_on_cpu(pl)]}


OWN_HOOKS: dict[str, Any] = {
    "on_after_backward": log_gradients,
    "on_before_optimizer_step": log_gradients,
    "configure_gradient_clipping": clip,
    "optimizer_zero_grad": zero_gradients,
    "backward": two_passes,
    "optimizer_step": every_second,
}
RUN_PER_PART: dict[str, tuple[str, ...]] = dict.fromkeys(OWN_HOOKS, ())
RUN_PER_PART |= dict.fromkeys(("optimizer_zero_grad", "backward"), ("micro_batch_size",))
BY_HAND = "automatic_optimization=False"
PROJECTS = {
    "plain": Project(make_lit),
    "gan": Project(
        two_optimizers,
        {
            UPDATES: BY_HAND,
            "micro_batch_size": BY_HAND,
            "early_release": BY_HAND,
        },
    ),
    **{
        hook: Project(
            lit_with(**{hook: method}), dict.fromkeys((UPDATES, *RUN_PER_PART[hook]), f"Lit.{hook}")
        )
        for hook, method in OWN_HOOKS.items()
    },
    "callback that reads gradients": Project(
        make_lit,
        {UPDATES: "LambdaCallback.on_after_backward"},
        callbacks=lambda: [pl.callbacks.LambdaCallback(on_after_backward=log_gradients_of_module)],
    ),
    "lbfgs": Project(
        lit_with(configure_optimizers=lbfgs),
        {UPDATES: "LBFGS", WEIGHTS: "LBFGS", "optimizer": "LBFGS"},
    ),
    "sgd with nesterov": Project(lit_with(configure_optimizers=sgd), {"optimizer": "nesterov"}),
    "clipped": Project(make_lit, trainer=lambda: {"gradient_clip_val": 1.0}),
    "accumulation": Project(make_lit, trainer=lambda: {"accumulate_grad_batches": 4}),
    **{
        precision: Project(
            make_lit,
            dict.fromkeys((WEIGHTS, "offload"), precision)
            | {"precision": f"given it|{precision}", **others},
            trainer=functools.partial(dict, precision=precision),
        )
        for precision, others in (
            ("64-true", {"optimizer": "AdamW"}),
            ("bf16-true", {"micro_batch_size": "half"}),
        )
    },
    "gradient scaler": Project(
        make_lit,
        {
            "precision": "MixedPrecision",
            WEIGHTS: "16-mixed",
            UPDATES: "only after backward, when parameters are updated already",
        },
        trainer=scaler,
    ),
    "weights in half precision": Project(
        half, {"precision": "kept on cpu|bfloat16", WEIGHTS: "32-true", "micro_batch_size": "half"}
    ),
    "weight averaging": Project(
        make_lit,
        {WEIGHTS: "EMAWeightAveraging"},
        callbacks=lambda: [pl.callbacks.EMAWeightAveraging()],
    ),
    "pruning": Project(
        make_lit,
        {WEIGHTS: "float32 tensors"},
        callbacks=lambda: [pl.callbacks.ModelPruning("l1_unstructured", amount=0.1)],
    ),
    "batch size finder": Project(
        make_lit,
        {"micro_batch_size": "BatchSizeFinder"},
        callbacks=lambda: [pl.callbacks.BatchSizeFinder(max_trials=1)],
    ),
    "own checkpointing": Project(recomputing(False)),
    "own checkpointing, reentrant": Project(recomputing(True)),
    "own checkpointing of Hugging Face": Project(bert, {CHECKPOINTING: "themselves already"}),
    "late layers": Project(lambda: late(make_lit())),
    "frozen blocks": Project(frozen),
    "wide first layer": Project(projected, finds_nothing=frozenset(("attention",))),
    "ddp of one process": Project(
        make_lit,
        {
            UPDATES: "keeps all gradients in its buckets",
            WEIGHTS: "sums gradients of processes in their own type",
            "offload": "",
        },
        trainer=lambda: {"strategy": "ddp"},
    ),
}


@pytest.mark.filterwarnings("ignore")  # of Lightning and torch, each project has its own
@pytest.mark.parametrize("name", PROJECTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_no_project_is_refused(name, preset):
    project = PROJECTS[name]
    callback = MemSaveCallback(preset=preset)
    lit = project.make()
    settings = {"max_epochs": 1, **project.trainer()}
    trainer = make_trainer(pl, callback, *project.callbacks(), **settings)
    before = [p.detach().clone() for p in lit.parameters()]
    try:
        trainer.fit(lit)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert trainer.global_step > 0
    after = list(lit.parameters())
    assert len(before) != len(after) or any(map(torch.any, map(torch.ne, before, after)))
    assert all(p.isfinite().all() for p in lit.parameters())
    shown = rows_of(callback)
    meant = [part for part in project.yields if part in shown and _has(callback, part)]
    if (name, preset) == ("lbfgs", "offload"):  # float32 on the host needs no rounding of updates
        meant.remove(WEIGHTS)
    assert [part for part in meant if shown[part].status == "on"] == []
    for part in meant:
        assert re.search(project.yields[part], "; ".join(shown[part].details))
    off = {part for part, row in shown.items() if row.status == "off" and _has(callback, part)}
    if UPDATES in meant:
        assert re.search(r"it would save up to [\d.]+ KiB", shown[UPDATES].details[-1])
    assert off - set(meant) <= project.finds_nothing, shown


def _has(callback: MemSaveCallback, part: str) -> bool:
    """Say whether the preset would do it."""
    return values_of(callback.arguments["preset"]).get(part) is not None


def trainer_of(strategy: str) -> Any:
    trainer = make_trainer(pl, strategy="ddp", devices=2)
    if strategy == "fsdp":  # which the Trainer itself refuses without a GPU
        trainer.strategy.__class__ = pl.strategies.FSDPStrategy
        trainer.strategy._precision_plugin = trainer.strategy.mixed_precision = None
    return trainer


def problems_of(callback: MemSaveCallback, trainer: Any) -> dict[str, Any]:
    """Each process asks itself this before it trains; none has to be started for it."""
    lit, settings = make_lit(), callback._settings._settings
    return {s.name: (s.is_asked, s.check(trainer, lit)) for s in settings}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_processes_are_not_refused(strategy, preset):
    found = problems_of(MemSaveCallback(preset=preset), trainer_of(strategy))
    assert [name for name, (is_asked, problems) in found.items() if is_asked and problems] == []
    if preset in ("bitwise", "single_gpu"):
        (problem,) = found[UPDATES][1]
        why = {"ddp": "keeps all gradients in its buckets", "fsdp": "shares gradients between"}
        assert why[strategy] in problem.why
        assert "`optimizer_in_backward=None`" in problem.fix
    if preset in ("classic", "single_gpu") and strategy == "fsdp":
        assert "shards parameters" in found["optimizer"][1][0].why


@pytest.mark.parametrize(
    ("strategy", "name", "value", "message"),
    [
        ("ddp", UPDATES, True, "`DDPStrategy` keeps all gradients"),
        ("fsdp", UPDATES, True, "`FSDPStrategy` shares gradients"),
        ("ddp", WEIGHTS, "kahan", "sums gradients of processes in their own type"),
        ("fsdp", WEIGHTS, "kahan", "`FSDPStrategy` decides itself"),
        ("fsdp", "chunked_cross_entropy", True, "`FSDPStrategy` may have freed"),
    ],
)
def test_several_processes_are_refused_by_a_value(strategy, name, value, message):
    is_asked, problems = problems_of(only(**{name: value}), trainer_of(strategy))[name]
    assert is_asked
    assert any(message in problem.why for problem in problems)
