"""Every technique in modules with ``torch.compile``: the table tells the truth about its effect."""

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_memsave import IncompatibleError, LowBitOptimizer, MemSaveCallback, MicroBatching
from lightning_memsave.techniques.registry import entries
from tests.callbacks.lit import make_lit, make_trainer, quiet, rows_of

pytestmark = [
    pytest.mark.usefixtures("no_prediction"),
    pytest.mark.slow,
    # Graphs that are made anew for other sizes or modes are no concern of these tests.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]

compile_ = functools.partial(torch.compile, backend="aot_eager")


def make_gpt2() -> Any:
    torch.manual_seed(0)
    make_config: Any = GPT2Config  # without types
    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    no_dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = make_config(**sizes, **no_dropout, use_cache=False, attn_implementation="eager")
    return make_lit(
        model=GPT2LMHeadModel(config),
        training_step=lambda self, tokens: self.model(input_ids=tokens, labels=tokens).loss,
        validation_step=lambda self, tokens: self.log(
            "val", self.model(input_ids=tokens, labels=tokens).loss
        ),
    )


def compiled_lit(way: str) -> Any:
    lit = make_gpt2()
    if way == "lit":
        return compile_(lit)
    if way == "model":
        lit.model = compile_(lit.model)
    else:
        blocks = lit.model.transformer.h
        for index, block in enumerate(blocks):
            blocks[index] = compile_(block)
    return lit


class Seen(pl.Callback):
    """What a step really does, seen from outside of all compiled graphs."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.facts: dict[str, Any] = {"saved bytes": 0, "had gradients": False}
        self._storages: dict[int, int] = {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        # Inside of micro-batches: the one is called in their parts, the other by the strategy.
        run, evaluate = trainer.strategy.training_step, pl_module.validation_step

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            self._storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        def training_step(batch: Any, *args: Any) -> Any:
            gradients = [p.grad for p in pl_module.parameters() if p.requires_grad]
            self.facts["samples"] = len(batch)
            self.facts["had gradients"] |= any(g is not None for g in gradients)
            self.facts["dtypes"] = {p.dtype for p in pl_module.parameters()}
            self._storages = {p.untyped_storage().data_ptr(): 0 for p in pl_module.parameters()}
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = run(batch, *args)
            own = {p.untyped_storage().data_ptr() for p in pl_module.parameters()}
            self.facts["saved bytes"] = sum(n for k, n in self._storages.items() if k not in own)
            return result

        def validation_step(batch: Any) -> Any:
            self.facts["validation samples"] = len(batch)
            return evaluate(batch)

        trainer.strategy.training_step = training_step
        pl_module.validation_step = validation_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        self.facts["steps"] = trainer.global_step
        gradients = [p.grad for p in pl_module.parameters() if p.requires_grad]
        self.facts["has gradients"] = any(g is not None for g in gradients)
        values = [v for state in trainer.optimizers[0].state.values() for v in state.values()]
        self.facts["state"] = {v.dtype for v in values if isinstance(v, torch.Tensor)}


def fit_compiled(
    way: str, trainer_settings: dict[str, Any], **settings: Any
) -> tuple[Seen, MemSaveCallback]:
    torch._dynamo.reset()
    tokens: Any = torch.randint(96, (12, 16), generator=torch.Generator().manual_seed(0))
    data = DataLoader(tokens, 4)
    seen = Seen()
    callback = quiet(preset="off", **settings)
    limits = {"limit_val_batches": 1 if "micro_batch_size" in settings else 0}
    trainer = make_trainer(pl, callback, seen, **limits, **trainer_settings)
    lit = compiled_lit(way)
    trainer.fit(lit, data, data)
    return seen, callback


@functools.cache
def without(way: str, **trainer_settings: Any) -> Seen:
    return fit_compiled(way, trainer_settings)[0]


Facts = dict[str, Any]


def saves(ours: Facts, plain: Facts) -> bool:
    return bool(ours["saved bytes"] < 0.98 * plain["saved bytes"])


# Settings, and whether a step shows that they work, from the facts with and without them.
CASES: dict[str, tuple[dict[str, Any], Callable[[Facts, Facts], bool]]] = {
    **{
        f"checkpointing {which}": ({"activation_checkpointing": which}, saves)
        for which in ("all", "nested", "selective", "every:2", 1, "50%")
    },
    "offload": ({"offload": "optimizer"}, saves),
    "blocks": ({"micro_batch_size": MicroBatching(2, of="blocks")}, saves),
    "attention": ({"attention": "sdpa"}, saves),
    "chunked_cross_entropy": ({"chunked_cross_entropy": True}, saves),
    "early_release": (
        {"precision": "32-true"},
        lambda ours, plain: plain["had gradients"] and not ours["had gradients"],
    ),
    "optimizer": (
        {"optimizer": LowBitOptimizer(force_8bit=("*",))},
        lambda ours, plain: torch.uint8 in ours["state"],
    ),
    "low_precision_weights": (
        {"low_precision_weights": "stochastic", "precision": "bf16-mixed"},
        lambda ours, plain: torch.bfloat16 in ours["dtypes"],
    ),
    "optimizer_in_backward": (
        {"optimizer_in_backward": True},
        lambda ours, plain: plain["has gradients"] and not ours["has gradients"],
    ),
    "micro_batch_size": ({"micro_batch_size": 2}, lambda ours, plain: ours["samples"] == 2),
    "evaluation": ({"micro_batch_size": 2}, lambda ours, _: ours["validation samples"] == 2),
    "accumulate_grad_batches": (
        {"accumulate_grad_batches": 3},
        lambda ours, plain: ours["steps"] == 1 and without("model").facts["steps"] == 3,
    ),
    "precision": ({"precision": "bf16-mixed"}, saves),
}
# What the same module gets from the Trainer without the callback, to compare losses with.
SAME: dict[str, dict[str, Any]] = {
    "low_precision_weights": {"precision": "bf16-mixed"},
    "accumulate_grad_batches": {"accumulate_grad_batches": 3},
}
# Relative difference of losses; bitwise without an entry.
TOLERANCE = {
    # "evaluation" is by the argument before it.
    **dict.fromkeys(("attention", "chunked_cross_entropy", "micro_batch_size", "evaluation"), 1e-5),
    **dict.fromkeys(("optimizer", "low_precision_weights", "precision"), 2e-2),
}
AS_A_WHOLE = ("chunked_cross_entropy", "optimizer_in_backward")
"""What needs ordinary calls of modules, and is refused where there are none."""
NEVER = ("offload", "blocks")
WAYS = ("lit", "model", "blocks")


def test_every_argument_is_tried():
    tried = {name for settings, _ in CASES.values() for name in settings}
    assert {entry.argument for entry in entries()} <= tried


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_works_or_is_refused(name, way):
    settings, works = CASES[name]
    if name in NEVER or (name in AS_A_WHOLE and way != "blocks"):
        with pytest.raises(IncompatibleError, match=r"compiled.* `\w+=None`") as refusal:
            fit_compiled(way, {}, **settings)
        assert len(refusal.value.problems) == 1
        return
    seen, callback = fit_compiled(way, {}, **settings)
    rows = rows_of(callback)
    assert {rows[argument].status for argument in settings if argument in rows} == {"on"}
    assert seen.losses[0] != seen.losses[-1]
    assert seen.losses == pytest.approx(
        without(way, **SAME.get(name, {})).losses, rel=TOLERANCE.get(name, 0), abs=0
    )
    assert works(seen.facts, without(way).facts)


@pytest.mark.parametrize("way", ["lit", "model"])
@pytest.mark.slow
def test_a_preset_leaves_out_what_would_be_refused(way):
    torch._dynamo.reset()
    callback = quiet(preset="single_gpu")
    tokens: Any = torch.randint(96, (4, 16))
    data = DataLoader(tokens, 4)
    make_trainer(pl, callback, limit_val_batches=0).fit(compiled_lit(way), data)
    rows = rows_of(callback)
    for name in AS_A_WHOLE:
        assert rows[name].status == "off"
        assert "compiled" in " ".join(rows[name].details)
