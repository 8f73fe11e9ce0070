"""Validation, test and prediction in parts: the same values and outputs."""

import contextlib
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader
from transformers.modeling_outputs import MaskedLMOutput

from lightning_memsave import MemSaveCallback, MicroBatching
from lightning_memsave.errors import IncompatibleError, MemoryExhaustedError, MemsaveWarning
from tests.callbacks.lit import (
    LIGHTNING,
    callback_with,
    fit,
    loader_of,
    make_lit,
    make_trainer,
    quiet,
    rows_of,
)
from tests.helpers import in_pairs
from tests.out_of_memory import MESSAGE, OutOfMemoryAt

# What Lightning says of lists of strings in a batch, with and without us.
pytestmark = [
    pytest.mark.usefixtures("no_prediction"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
]


def only(size: Any, **settings: Any) -> MemSaveCallback:
    """Micro-batches and nothing else; a number is refused where evaluation cannot be split."""
    size = "halve" if size == "auto" else size
    technique = None if size is None else MicroBatching(size, evaluation=True)
    return quiet(**({"preset": "off", "micro_batch_size": technique} | settings))


def batches() -> DataLoader[Any]:
    torch.manual_seed(0)
    sizes: Any = [10, 10, 7]
    data: Any = [
        {"x": torch.randn(n, 5), "y": torch.randint(3, (n,)), "names": [f"s{i}" for i in range(n)]}
        for n in sizes
    ]
    return DataLoader(data, batch_size=None)


def recorder(package: Any) -> tuple[list[Any], Any]:
    """What steps give, and a callback that sees it."""
    seen: list[Any] = []
    record = lambda self, trainer, pl_module, outputs, *_, **__: seen.append(outputs)  # noqa: E731
    hooks = {"on_validation_batch_end": record, "on_test_batch_end": record}
    return seen, callback_with(package, **hooks)


def evaluating_lit(package: Any, output: str = "dict", **methods: Any) -> Any:
    def validation_step(self, batch, batch_idx):
        self.sizes.append(len(batch["x"]))
        logits = self.model(batch["x"])
        loss = nn.functional.cross_entropy(logits, batch["y"])
        self.accuracy(logits, batch["y"])
        self.log("accuracy", self.accuracy)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", logits.max(), reduce_fx="max")
        return {
            "dict": {"loss": loss, "logits": logits, "names": batch["names"], "kind": "all"},
            "model output": MaskedLMOutput(loss=loss, logits=logits),
            "nothing": None,
            "tensor": logits,
            "other": logits[:1].expand(50, 3),
        }[output]

    methods = {"validation_step": validation_step, "test_step": validation_step} | methods
    torch.manual_seed(1)
    lit = make_lit(
        package,
        nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5)),
        predict_step=lambda self, batch, batch_idx: (self.model(batch["x"]), batch["names"]),
        training_step=lambda self, batch, batch_idx: self.model(batch["x"]).square().mean(),
        **dict.fromkeys(
            (f"{name}_dataloader" for name in ("train", "val", "test", "predict")),
            lambda self: batches(),
        ),
        **methods,
    )
    lit.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
    lit.sizes = []
    return lit


def armed(lit: Any, mode: OutOfMemoryAt) -> Any:
    """Let memory run out in validation."""
    original = type(lit).validation_step

    def validation_step(self, batch, batch_idx):
        with mode.armed():
            return original(self, batch, batch_idx)

    type(lit).validation_step = validation_step
    return lit


def same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    torch.testing.assert_close(
        *({k: v for k, v in x.items() if k not in {"names", "kind"}} for x in (ours, theirs))
        if isinstance(ours, dict)
        else (ours, theirs)
    )


@pytest.mark.parametrize(
    ("size", "output", "stage"),
    in_pairs([1, 4, 100], ["dict", "model output", "nothing", "tensor"], ["validate", "test"]),
)
def test_values_and_outputs_as_for_whole_batches(package, size, output, stage):
    results = []
    for callbacks in ([], [only(size)]):
        seen, recording = recorder(package)
        trainer = make_trainer(package, *callbacks, recording)
        lit = evaluating_lit(package, output)
        logged = getattr(trainer, stage)(lit, verbose=False)[0]
        results.append((logged, seen, lit.sizes))
    (plain, outputs, sizes), (saving, ours, small) = results
    assert list(saving) == list(plain)
    assert saving == pytest.approx(plain, rel=1e-5)
    assert (max(sizes), max(small)) == (10, min(size, 10))
    for mine, truth in zip(ours, outputs, strict=True):
        if truth is not None:
            same(mine, truth)
    if output == "dict":
        assert [o["names"] for o in ours] == [o["names"] for o in outputs]


@pytest.mark.parametrize("size", [4, "auto"])
def test_predictions(package, size):
    lit = evaluating_lit(package)
    plain = make_trainer(package).predict(lit)
    saving = make_trainer(package, only(size)).predict(lit)
    for (mine, names), (truth, all_names) in zip(saving, plain, strict=True):
        torch.testing.assert_close(mine, truth)
        assert names == all_names


def test_within_a_fit_training_is_as_it_was(package):
    lit = evaluating_lit(package)
    lit.model[1].p = 0.0
    plain = fit(lit, package=package)
    saving = fit(lit, only(3), package=package)
    assert saving[0] == pytest.approx(plain[0], rel=1e-6)
    assert saving[2].callback_metrics["accuracy"] == plain[2].callback_metrics["accuracy"]


@pytest.mark.parametrize("place", [0, 5, 12])
def test_memory_that_runs_out(package, place):
    """Half the size for the same batch, and metrics count nothing twice."""
    plain = make_trainer(package).validate(evaluating_lit(package), verbose=False)[0]
    mode = OutOfMemoryAt(place)
    lit = armed(evaluating_lit(package), mode)
    trainer = make_trainer(package, only("auto"))
    with mode, pytest.warns(MemsaveWarning, match="10 samples at once, repeated with 5"):
        saving = trainer.validate(lit, verbose=False)[0]
    assert saving == pytest.approx(plain, rel=1e-5)
    assert lit.sizes[-4:] == [5, 5, 5, 2]


def test_gradients_of_a_window_stay_when_validation_repeats(package):
    """Validation in the middle of an accumulation window must not touch its gradients."""
    results = []
    for places in ((), (0,)):
        mode = OutOfMemoryAt(*places)
        lit = armed(evaluating_lit(package), mode)
        callback = only("auto" if places else None)
        settings = {"accumulate_grad_batches": 3, "val_check_interval": 1}
        warns = pytest.warns(MemsaveWarning, match="repeated with 5")
        with mode, warns if places else contextlib.nullcontext():
            results.append(fit(lit, callback, package=package, **settings))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(v, results[1][1][k]) for k, v in results[0][1].items())


def test_outputs_that_cannot_be_put_together(package):
    trainer = make_trainer(package, only(4))
    with pytest.raises(IncompatibleError, match="cannot be put together: `output` has neither"):
        trainer.validate(evaluating_lit(package, "other"), verbose=False)


def test_steps_are_restored(package):
    trainer = make_trainer(package, callback := only(4))
    trainer.validate(evaluating_lit(package), verbose=False)
    assert "validation_step" not in vars(trainer.strategy)
    assert not [name for name in vars(trainer.strategy) if "memsave" in name]
    runners = [vars(setting).get("_runner") for setting in callback._settings._settings]
    assert runners == [None] * len(runners)


# --- what is proven before a batch is split ---


def tokens() -> list[dict[str, torch.Tensor]]:
    """Two batches of eight samples with targets for 1 to 6 of 6 places."""
    random = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(2):
        targets = torch.randint(3, (8, 6), generator=random)
        lengths = torch.tensor([1, 6, 2, 3, 6, 1, 1, 4])
        targets[torch.arange(6) >= lengths[:, None]] = -100
        batches.append({"x": torch.randn(8, 6, 5, generator=random), "targets": targets})
    return batches


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Steps:
    """Validation steps of a model of tokens, most of which may not be split."""

    @staticmethod
    def mean_over_tokens(lit, batch):
        lit.log("loss", token_loss(lit.model(batch["x"]), batch["targets"]))

    @staticmethod
    def returned(lit, batch):
        logits = lit.model(batch["x"])
        return {"loss": token_loss(logits, batch["targets"]), "logits": logits}

    @staticmethod
    def perplexity(lit, batch):
        lit.log("perplexity", token_loss(lit.model(batch["x"]), batch["targets"]).exp())

    @staticmethod
    def contrastive(lit, batch):
        first = nn.functional.normalize(lit.model(batch["x"])[:, 0], dim=-1)
        lit.log("loss", nn.functional.cross_entropy(first @ first.T, torch.arange(len(first))))

    @staticmethod
    def two_means(lit, batch):
        logits = lit.model(batch["x"])
        lit.log("loss", token_loss(logits, batch["targets"]))
        lit.log("size", logits.square().mean())

    @staticmethod
    def square(lit, batch):
        first = lit.model(batch["x"])[:, 0]
        return {"scores": first @ first.T}


REFUSED = {
    "perplexity": "cannot be split",
    "contrastive": "cannot be split",
    "two_means": "cannot be split",
    "square": "depends on the others in its batch",
}


def token_lit(name: str, *, largest: int = 100) -> Any:
    """A module whose validation has memory for ``largest`` samples."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if len(batch["x"]) > largest:
            raise torch.OutOfMemoryError(MESSAGE)
        return getattr(Steps, name)(self, batch)

    steps = ("validation_step", "test_step", "predict_step")
    torch.manual_seed(1)
    return make_lit(
        model=nn.Linear(5, 3),
        val_dataloader=lambda self: loader_of(tokens()),
        **dict.fromkeys(steps, validation_step),
    )


def validate(lit: Any, *callbacks: Any) -> tuple[dict[str, Any], list[Any]]:
    seen, recording = recorder(LIGHTNING)
    logged = make_trainer(LIGHTNING, *callbacks, recording).validate(lit, verbose=False)
    return logged[0], seen


@pytest.mark.parametrize("name", ["mean_over_tokens", "returned"])
@pytest.mark.parametrize("callback", ["bare", 3])
def test_weights_are_proven(name, callback):
    """The guess for a key that is not ``labels`` would be samples, 4 % off."""
    truth, outputs = validate(token_lit(name))
    bare = quiet()
    if callback == "bare":
        with pytest.warns(MemsaveWarning, match="8 samples at once, repeated with 4"):
            found, mine = validate(token_lit(name, largest=4), bare)
        shown = rows_of(bare)["evaluation"]
        assert shown.details == ("in micro-batches of 4 samples, as memory ran out with more",)
        assert shown.exactness == "rounding"
    else:
        found, mine = validate(token_lit(name, largest=4), only(callback))
    assert found == pytest.approx(truth, rel=1e-6)
    torch.testing.assert_close(mine, outputs)


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_not_be_split_is_not(name):
    with pytest.raises(MemoryExhaustedError, match=REFUSED[name]) as caught:
        validate(token_lit(name, largest=4), only("auto"))
    assert "smaller batch in that DataLoader" in str(caught.value)
    with pytest.raises(IncompatibleError, match=REFUSED[name]):
        validate(token_lit(name), only(4))
    callback = quiet(preset="off", micro_batch_size=4)  # a number for training
    assert validate(token_lit(name), callback)[0] == validate(token_lit(name))[0]
    shown = rows_of(callback)["evaluation"]
    assert "`validation_step` passes whole: " in shown.details[-1]


def test_a_look_at_a_step_changes_no_learning_rate():
    def validation_step(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] *= 0.5
        self.log("loss", self.model(batch["x"]).mean())

    def rate(*callbacks: Any) -> float:
        lit = evaluating_lit(LIGHTNING, validation_step=validation_step)
        trainer = make_trainer(LIGHTNING, *callbacks, limit_train_batches=1, max_epochs=1)
        trainer.fit(lit)
        return float(trainer.optimizers[0].param_groups[0]["lr"])

    assert rate(quiet(preset="off", micro_batch_size=4)) == rate()


def test_evaluation_false_leaves_it_out():
    callback = quiet(micro_batch_size=MicroBatching(2, evaluation=False))
    lit = evaluating_lit(LIGHTNING)
    make_trainer(LIGHTNING, callback).validate(lit, verbose=False)
    assert max(lit.sizes) == 10
    shown = rows_of(callback)["evaluation"]
    assert (shown.status, *shown.details) == ("off", "`evaluation=False` was given")


def test_nothing_is_proven_while_memory_is_enough():
    lit = token_lit("contrastive")
    sizes = []
    original = type(lit).validation_step

    def validation_step(self, batch, batch_idx):
        sizes.append(len(batch["x"]))
        return original(self, batch, batch_idx)

    type(lit).validation_step = validation_step
    validate(lit, only("auto"))
    assert sizes == [8, 8]


def test_each_dataloader_is_proven_by_itself():
    lit = token_lit("mean_over_tokens", largest=2)
    other = [{k: v[:, :3] for k, v in batch.items()} for batch in tokens()]
    loaders = [loader_of(data) for data in (tokens(), other)]
    type(lit).val_dataloader = lambda self: loaders
    whole = token_lit("mean_over_tokens")
    type(whole).val_dataloader = lambda self: loaders
    with pytest.warns(MemsaveWarning, match="repeated with 2"):
        found, _ = validate(lit, only("auto"))
    assert found == pytest.approx(validate(whole)[0], rel=1e-6)


def test_the_proof_leaves_no_trace():
    results = []
    for callback in (only(None), only(4)):
        lit = evaluating_lit(LIGHTNING)
        torch.manual_seed(5)
        trainer = make_trainer(LIGHTNING, callback)
        logged = trainer.validate(lit, verbose=False)[0]
        results.append((logged, lit.accuracy.tp.tolist(), torch.rand(2).tolist()))
    (truth, hits, drawn), (found, counted, ours) = results
    assert found == pytest.approx(truth, rel=1e-5)
    assert (counted, ours) == (hits, drawn)


def test_several_processes_are_asked_for_it():
    """Whether their steps communicate is not known."""
    trainer = make_trainer(LIGHTNING, callback := MemSaveCallback(), devices=2)
    lit = token_lit("mean_over_tokens")
    problems = callback._settings.apply(trainer, lit, is_fit=False)
    assert problems == []
    shown = rows_of(callback)["evaluation"]
    assert shown.status == "off"
    assert "evaluation=True" in shown.details[0]
    callback._settings.undo()


@pytest.mark.parametrize(
    ("size", "why"),
    [
        (4, "each micro-batch would change what a batch changes once: `seen`"),
        (2**19, "a buffer of the module of over 1 MiB"),
    ],
)
def test_buffers_that_a_step_writes(size, why):
    """They would be written once for each part; of large ones there is not even a copy."""
    lit = token_lit("mean_over_tokens")
    lit.register_buffer("seen", torch.zeros(size))

    def validation_step(self, batch, batch_idx):
        self.seen += 1
        if len(batch["x"]) > 4:
            raise torch.OutOfMemoryError(MESSAGE)
        Steps.mean_over_tokens(self, batch)

    type(lit).validation_step = validation_step
    with pytest.raises(MemoryExhaustedError, match=why):
        validate(lit, only("auto"))


def test_one_sample_that_does_not_fit():
    with pytest.raises(MemoryExhaustedError, match="return less from the step") as caught:
        validate(token_lit("mean_over_tokens", largest=0), only("auto"))
    assert "2 samples at once, repeated with 1" in str(caught.value)
    assert "activation_checkpointing" not in str(caught.value)
