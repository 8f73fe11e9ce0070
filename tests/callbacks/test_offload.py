"""Offloading in a Trainer: bit for bit the same training, and what it says."""

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memsave import MemSaveCallback
from lightning_memsave.core.blocks import find_blocks
from lightning_memsave.core.memory import is_host
from lightning_memsave.core.trainer_facts import TrainerFacts
from lightning_memsave.errors import IncompatibleError
from lightning_memsave.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_memsave.techniques.flat_memory import ALIGNMENT_BYTES
from lightning_memsave.techniques.low_bit_optimizer.state_precision import low_bit_state_bytes
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.low_precision_weights.technique import LowPrecisionWeights
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.techniques.named_optimizer.technique import NamedOptimizer
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.optimizer_kinds import KIND_BY_WORD
from lightning_memsave.units import format_bytes
from tests.callbacks.lit import (
    LIGHTNING,
    Trace,
    assert_same,
    callback_with,
    fit,
    make_lit,
    make_trainer,
    model_step,
    peak_of,
    quiet,
    rows_of,
    summary_of,
)
from tests.helpers import assert_same as assert_same_nested
from tests.helpers import snapshot

pytestmark = pytest.mark.usefixtures("no_prediction")

TABLES = Offloading("embeddings", min_table_bytes=2**12)
HALVE = MicroBatching("halve")
ROWS = 2**14
"""Bytes of a batch's rows and indices, at least."""


def only(**settings: Any) -> MemSaveCallback:
    """Offloading and nothing else."""
    return quiet(**({"preset": "off", "offload": "optimizer"} | settings))


def fused_lit(model: str) -> Any:
    """A module whose step logs nothing, and whose optimizer allocates nothing on the way."""
    return make_lit(
        model=model,
        training_step=model_step,
        configure_optimizers=lambda self: torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True),
    )


def averages(package: Any) -> dict[str, Any]:
    """The callbacks that read all weights in each step; older packages lack one."""
    settings = {"StochasticWeightAveraging": {"swa_lrs": 1e-2, "swa_epoch_start": 1}}
    settings |= {"EMAWeightAveraging": {}}
    known = (name for name in settings if hasattr(package.callbacks, name))
    return {n: lambda n=n: getattr(package.callbacks, n)(**settings[n]) for n in known}


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 4},
    "bf16": {"precision": "bf16-mixed"},
    "validated": {"val_check_interval": 2, "num_sanity_val_steps": 2},
}


CHECKPOINTED: dict[str, Any] = {"activation_checkpointing": "all", "micro_batch_size": 2}
IN_BACKWARD: dict[str, Any] = {"optimizer_in_backward": True}
CLIPPED: dict[str, Any] = {"gradient_clip_val": 0.1}
BITWISE: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    **{name: ("optimizer", {}, how) for name, how in SETTINGS.items()},
    **{
        f"in backward, {name}": ("optimizer", IN_BACKWARD | {"micro_batch_size": HALVE}, how)
        for name, how in SETTINGS.items()
        if name not in ("clipped", "validated")
    },
    **{
        str(what): (Offloading(what, min_bytes=1), CHECKPOINTED, CLIPPED)
        for what in ("parameters", "activations", True)
    },
    "sums of micro-batches": ("optimizer", {"micro_batch_size": 2}, CLIPPED),
    "8-bit state": ("optimizer", {"optimizer": "8bit"}, {}),
}
"""What is offloaded, beside which settings of the callback and of the Trainer."""


class TestBitwise:
    @pytest.mark.parametrize("name", BITWISE)
    def test_as_without(self, package, name):
        what, beside, how = BITWISE[name]
        lit, how = make_lit(package), {"package": package} | how
        plain, saving = only(offload=None, **beside), only(offload=what, **beside)
        assert_same(fit(lit, plain, **how), fit(lit, saving, **how))
        rows = rows_of(saving)
        assert rows["offload"].status == "on"
        if "optimizer_in_backward" in beside:
            is_sum = "accumulate_grad_batches" in how
            place = "are alive on the host while 4" if is_sum else "time on the host"
            assert place in rows["optimizer_in_backward"].details[0]

    def test_averages_of_weights_and_embeddings(self, package):
        """It reads all rows in each step."""
        for name, make in averages(package).items():
            how: dict[str, Any] = {"package": package, "max_epochs": 3}
            runs = [fit(make_lit(package), make(), *own, **how) for own in ([], [only()])]
            assert_same(*runs)
            lit, tables = make_lit(package, "classifier"), only(offload=TABLES)
            assert_same(
                fit(lit, make(), only(offload=None), **how), fit(lit, make(), tables, **how)
            )
            assert any(name in detail for detail in rows_of(tables)["offload"].details)

    def test_manual_optimization(self):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            optimizer = self.optimizers()
            loss = self.model(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            with torch.no_grad():
                for param in self.parameters():
                    param.data.clamp_(-0.1, 0.1)  # torch does not see it
            return loss

        lit = make_lit(automatic_optimization=False, training_step=training_step)
        callback = only()
        assert_same(fit(lit), fit(lit, callback))
        assert "Lit.training_step" in rows_of(callback)["offload"].details[-1]


class TestLossOutsideOfTheModel:
    """Logits are used when the model has returned, and its weights could be gone."""

    @staticmethod
    def lit() -> Any:
        def loss_of(self, x: Tensor, *_: Any) -> Tensor:
            model, tokens = self.model, x.argsort(-1)[:, :8]
            logits = model.head(model.run_blocks(model.embedding(tokens)))
            return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

        return make_lit(
            model="classifier",
            training_step=loss_of,
            validation_step=lambda self, batch, _: self.log("val_loss", loss_of(self, batch)),
        )

    @pytest.mark.parametrize("settings", ["plain", "bf16"])
    @pytest.mark.parametrize("what", ["optimizer", "parameters", True])
    def test_trains_and_validates(self, what, settings):
        how: dict[str, Any] = SETTINGS["validated"] | SETTINGS[settings]
        chunked = ChunkedCrossEntropy(heads="model.head")
        saving = only(offload=what, chunked_cross_entropy=chunked)
        plain = only(offload=None, chunked_cross_entropy=chunked)
        one, other = fit(self.lit(), plain, **how), fit(self.lit(), saving, **how)
        assert_same(one, other)
        losses = [each[2].callback_metrics["val_loss"] for each in (one, other)]
        assert torch.equal(*losses)
        assert rows_of(saving)["chunked_cross_entropy"].status == "on"


class TestOutOfMemory:
    @pytest.mark.filterwarnings("ignore:Out of memory with 4 samples")
    @pytest.mark.parametrize("what", ["optimizer", "parameters", True])
    @pytest.mark.parametrize("accumulated", [1, 2])
    def test_in_backward_the_batch_is_repeated(self, what, accumulated):
        """Some gradients have come by then, of which nothing may be left."""
        runs = []
        for offload in (None, Offloading(what, min_bytes=1)):
            callback = only(offload=offload, micro_batch_size=HALVE)
            lit = make_lit(model="tied", training_step=fails_once)
            losses, state, _ = fit(lit, callback, accumulate_grad_batches=accumulated)
            assert FAILURES == [3]
            FAILURES.clear()
            runs.append((losses, state))
        assert_same(*runs)


# Not of the module, whose attributes are as before when a batch is repeated.
FAILURES: list[int] = []


def fails_once(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
    """Memory runs out at the end of a backward pass."""

    def fail(_: Tensor) -> None:
        if batch_idx == 3 and not FAILURES:
            FAILURES.append(batch_idx)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def watch(_: Any, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail)

    hook = self.model.get_submodule("blocks.0").register_forward_hook(watch)
    loss: Tensor = self.model(batch)
    hook.remove()
    return loss


class SaveAtEnd(LIGHTNING.Callback):  # type: ignore[misc, name-defined]
    def __init__(self, path: Any) -> None:
        self.path = path

    def on_before_zero_grad(self, *_: Any) -> None:
        """Before the first step there is nothing to wait for."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


class TestCheckpoints:
    @pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
    @pytest.mark.parametrize(
        ("begins_with", "resumes_with"),
        [(True, False), (False, True)],
    )
    def test_are_those_of_a_plain_run(self, tmp_path, begins_with, resumes_with):
        lit = make_lit()
        files = []
        for name, is_saving in (("plain", False), ("begun", begins_with)):
            first = copy.deepcopy(lit)
            trainer = make_trainer(LIGHTNING, *([only()] if is_saving else []))
            torch.manual_seed(2)
            trainer.fit(first)
            files.append(tmp_path / f"{name}.ckpt")
            trainer.save_checkpoint(files[-1])
        assert_same_checkpoints(*files)
        runs = []
        for file, is_saving in ((files[0], False), (files[1], resumes_with)):
            resumed, trace = copy.deepcopy(lit), Trace(LIGHTNING)
            callbacks = [only()] if is_saving else []
            trainer = make_trainer(LIGHTNING, *callbacks, trace.callback, max_epochs=2)
            torch.manual_seed(3)
            trainer.fit(resumed, ckpt_path=file)
            runs.append((trace.losses, resumed.state_dict()))
        assert_same(*runs)

    def test_between_a_step_and_its_updates(self, tmp_path):
        """A process that is killed there loses nothing that a checkpoint has."""

        lit = make_lit()
        fit(lit, plain := SaveAtEnd(tmp_path / "plain"))
        fit(lit, only(), saving := SaveAtEnd(tmp_path / "saving"))
        assert_same_checkpoints(plain.path, saving.path)

    def test_of_an_optimizer_without_state_have_none(self, tmp_path):
        lit = make_lit(configure_optimizers=lambda self: torch.optim.SGD(self.parameters(), 0.1))
        fit(lit, only(), SaveAtEnd(tmp_path / "within"))
        trainer = make_trainer(LIGHTNING, only())
        trainer.fit(lit)
        trainer.save_checkpoint(tmp_path / "after")
        for name in ("within", "after"):
            checkpoint = torch.load(tmp_path / name, weights_only=True)
            assert checkpoint["optimizer_states"][0]["state"] == {}


def assert_same_checkpoints(*paths: Any) -> None:
    one, other = (torch.load(path, weights_only=True) for path in paths)
    for key in ("state_dict", "optimizer_states"):
        assert_same_nested(one[key], other[key])


class TestMemory:
    @pytest.mark.parametrize("settings", ["plain", "clipped", "accumulated", "bf16"])
    def test_is_predicted_to_the_byte(self, settings):
        lit = silent_lit("tied")
        how: dict[str, Any] = {"micro_batch_size": HALVE}
        callback, plain = only(predict=60, **how), only(offload=None, report=True, **how)
        for each in (callback, plain):
            fit(lit, each, **SETTINGS[settings])
        assert_predicted(callback)
        weights = sum(p.nbytes for p in lit.parameters())
        # The state, and gradients except those that are on their way.
        assert peak_of(callback) < peak_of(plain) - 2 * weights
        assert callback.prediction.peak.host_bytes >= 4 * weights

    @pytest.mark.parametrize("what", ["optimizer", "parameters"])
    def test_of_half_precision_is_predicted(self, what):
        """The proof of the loss computes in float32, and needs no more than a step."""
        callback = quiet(preset="single_gpu", offload=what, predict=60)
        fit(silent_lit("eager_bert"), callback)
        assert_predicted(callback)
        assert rows_of(callback)["low_precision_weights"].value == "'master'"
        summary = summary_of(callback)
        host = format_bytes(callback.prediction.peak.host_bytes)
        held = format_bytes(summary.host_bytes)
        assert dict(summary.rows())["on the host"] == f"{held}, predicted {host}"
        assert f"and {host} on the host: what is offloaded" in str(callback.prediction)

    def sizes(self, optimizer: Any, low: Any) -> dict[str, Any]:
        """What decides how many bytes a weight has, in a fit that is predicted."""
        return {
            "predict": 60,
            "optimizer": optimizer and LowBitOptimizer(force_8bit=("*",)),
            "low_precision_weights": low,
            "precision": low and "bf16-mixed",
            "micro_batch_size": HALVE,
        }

    @pytest.mark.parametrize("low", [None, "master", "split"])
    @pytest.mark.parametrize("optimizer", [None, "8bit"])
    def test_host_bytes_are_predicted(self, optimizer, low):
        """Of gradients, there is room for two blocks."""
        lit = fused_lit("tied")
        callback = only(**self.sizes(optimizer, low), optimizer_in_backward=True)
        fit(lit, callback)
        assert_predicted(callback)
        params = [*lit.parameters()]
        large = [p for p in params if p.numel() >= 4096]
        in_8bit = large if optimizer else []
        state_bytes = low_bit_state_bytes(KIND_BY_WORD["adamw"], params, in_8bit)
        state_bytes += 0 if optimizer else 4 * len(params)  # numbers of steps
        copies = [p.nbytes // (1 + (low is not None and p.ndim > 1)) for p in params]
        host_bytes = sum(p.nbytes for p in params) + state_bytes + 2 * sum(copies[:6])
        largest = max(p.nbytes for p in params)
        temporary_bytes = 0
        if low == "master":  # and one gradient in float32
            host_bytes, temporary_bytes = host_bytes + sum(copies), largest
        elif low == "split":  # and its weight, and a NaN in the place of each
            host_bytes += 4 * sum(p.ndim > 1 for p in params)
            temporary_bytes = 2 * largest
        assert callback.prediction.peak.host_bytes == host_bytes + temporary_bytes
        # Each tensor begins at a multiple of so many bytes.
        held_bytes = summary_of(callback).host_bytes
        assert 0 <= held_bytes - host_bytes <= ALIGNMENT_BYTES * 4 * len(params)

    @pytest.mark.parametrize("in_backward", [False, True], ids=["step", "backward"])
    @pytest.mark.parametrize("optimizer", [None, "8bit"])
    @pytest.mark.parametrize(
        ("what", "low"),
        [
            ("embeddings", None),  # with others it is refused
            *itertools.product(
                ["optimizer", "parameters", "parameters+embeddings"], [None, "master", "split"]
            ),
        ],
    )
    def test_host_bytes_of_all_pairs_are_predicted(self, what, low, optimizer, in_backward):
        """Beside what is counted, an update has copies of a weight and its gradient in float32."""
        lit = fused_lit("classifier")
        callback = only(
            **self.sizes(optimizer, low),
            offload=Offloading(what, min_table_bytes=2**12),
            optimizer_in_backward=in_backward,
        )
        fit(lit, callback)
        more = callback.prediction.peak.host_bytes - summary_of(callback).host_bytes
        params = [*lit.parameters()]
        largest = max(p.nbytes for p in params)
        assert -ALIGNMENT_BYTES * 4 * len(params) <= more <= (2 * largest if low else 0) + ROWS

    @pytest.mark.parametrize(
        ("what", "model"),
        [
            ("parameters", "frozen"),
            (True, "transformer"),
            ("parameters+embeddings", "classifier"),
        ],
    )
    def test_of_other_parts_is_predicted(self, what, model):
        lit = silent_lit(model)
        offload = Offloading(what, min_bytes=1, min_table_bytes=2**12)
        callback = only(offload=offload, activation_checkpointing="all", predict=60)
        fit(lit, callback)
        assert_predicted(callback)

    @pytest.mark.parametrize("last", [2, None])
    def test_after_the_fit_or_an_error_nothing_is_on_the_host(self, last):
        def fail(*args: Any) -> None:
            if args[-1] == last:
                raise KeyError("the user's")

        lit = make_lit()
        before, keys = inner(lit), list(lit.state_dict())
        trainer = make_trainer(LIGHTNING, only(), callback_with(on_train_batch_start=fail))
        with contextlib.nullcontext() if last is None else pytest.raises(KeyError):
            trainer.fit(lit)
        assert list(lit.state_dict()) == keys
        assert inner(lit) == before
        assert not any(is_host(p.untyped_storage()) for p in lit.parameters())


def silent_lit(model: str) -> Any:
    """A module whose step logs nothing, so that its memory is that of the model."""
    return make_lit(model=model, training_step=model_step)


def assert_predicted(callback: MemSaveCallback) -> None:
    assert callback.prediction is not None
    assert callback.prediction.peak_bytes == peak_of(callback)


def inner(lit: Any) -> dict[str, Any]:
    """All modules but the LightningModule itself, on which the Trainer leaves its own marks."""
    return {name: seen for name, seen in snapshot(lit).items() if name}


class TestMasters:
    def test_of_a_preset(self):
        """Presets that update on the device leave it to the host."""
        callback = only(preset="single_gpu", precision="bf16-mixed", low_precision_weights="master")
        losses, state, _ = fit(make_lit(), callback, max_epochs=2)
        rows = rows_of(callback)
        said = "9 tensors in bfloat16 on the device, in float32 on the host"
        assert rows["low_precision_weights"].details[0].startswith(said)
        assert rows["optimizer_in_backward"].status == "off"
        assert losses[-1] < losses[0]
        assert all(value.dtype is torch.float32 for value in state.values())

    @pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
    @pytest.mark.parametrize("optimizer", [None, "8bit"])
    def test_in_two_halves(self, tmp_path, optimizer):
        """Checkpoints load with and without updates in backward, and with whole masters."""
        lit = make_lit(model="tied")

        def train(name: str, rounding: str, start: Any = None, *, after: bool = False) -> Any:
            module = copy.deepcopy(lit)
            callback = only(
                precision="bf16-mixed",
                low_precision_weights=rounding,
                optimizer=optimizer,
                optimizer_in_backward=None if after else True,
                micro_batch_size=HALVE,
            )
            epochs = 1 if start is None else 2
            trainer = make_trainer(LIGHTNING, callback, max_epochs=epochs, val_check_interval=2)
            torch.manual_seed(epochs)
            trainer.fit(module, ckpt_path=start and tmp_path / start)
            trainer.save_checkpoint(tmp_path / name)
            details = rows_of(callback)["low_precision_weights"].details[0]
            assert ("in two halves" in details) == (rounding == "split")
            return module.state_dict(), torch.load(tmp_path / name, weights_only=True)

        train("one", "split")
        resumed, saved = train("two", "split", "one")
        again, expected = train("again", "split", "one", after=True)
        assert_same_nested(dict(resumed), dict(again))
        assert_same_nested(saved["optimizer_states"], expected["optimizer_states"])
        masters, _ = train("masters", "master", "one")
        for key, value in masters.items():
            assert value.dtype is resumed[key].dtype is torch.float32
            assert torch.allclose(value, resumed[key], atol=1e-2), key
        train("one", "master")
        back, _ = train("back", "split", "one")
        assert not any(value.isnan().any() for value in back.values())

    @pytest.mark.parametrize("optimizer", [None, "8bit"])
    def test_micro_batches_in_two_halves(self, optimizer):
        """Their gradients are added up; hooks between steps see whole weights."""

        def look(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            assert not any(p.isnan().any() for p in pl_module.parameters())

        runs = []
        for in_backward in (True, None):
            callback = only(
                precision="bf16-mixed",
                low_precision_weights="split",
                optimizer=optimizer,
                optimizer_in_backward=in_backward,
                micro_batch_size=2,
            )
            looking = callback_with(on_train_batch_end=look)
            runs.append(fit(make_lit(model="tied"), callback, looking))
            assert not torch.tensor(runs[-1][0]).isnan().any()
        assert_same(*runs)


class TestRefusals:
    @pytest.mark.parametrize(
        ("strategy", "advice"),
        [
            ("FSDPStrategy", "strategy's own offloading"),
            ("ModelParallelStrategy", "`FSDP2Strategy(offload_policy=CPUOffloadPolicy())`"),
            ("DeepSpeedStrategy", "strategy's own offloading"),
        ],
    )
    def test_of_strategies(self, strategy, advice):
        facts = TrainerFacts((strategy, "Strategy"), 2, None)
        (problem,) = Offloading().conflicts(facts, "`offload='optimizer'`")
        assert advice in problem.fix
        alone = Offloading("activations").conflicts(facts, "`offload='activations'`")
        assert bool(alone) == (strategy in ("FSDPStrategy", "DeepSpeedStrategy"))
        assert Offloading().conflicts(TrainerFacts(("SingleDeviceStrategy",), 1, None), "") == []


def test_state_of_tables_is_on_the_host():
    """Micro-batches allocate it before the step."""
    callback = only(
        offload=Offloading("parameters+embeddings", min_table_bytes=2**12),
        chunked_cross_entropy=ChunkedCrossEntropy(heads="model.head"),
        micro_batch_size=2,
        report=True,
    )

    def configure_optimizers(self: Any) -> Any:
        table = self.model.embedding.weight
        return torch.optim.AdamW(sorted(self.parameters(), key=lambda p: p is not table))

    fit(make_lit(model="tied", configure_optimizers=configure_optimizers), callback)
    assert summary_of(callback).to_dict()["by_category"]["optimizer_state"] == 0


MOMENTUM = {"momentum": 0.9}


@pytest.mark.parametrize(
    ("settings", "num_bytes", "num_moved"),
    [
        ({}, 16, 0),
        ({"low_precision_weights": "master"}, 18, 0),
        ({"low_precision_weights": LowPrecisionWeights("master")}, 18, 0),
        ({"low_precision_weights": "master", "optimizer_in_backward": True}, 14, 0),
        ({"optimizer": "8bit", "optimizer_in_backward": True}, 6, 2),
        ({"low_precision_weights": "split", "optimizer": LowBitOptimizer()}, 10, 2),
        ({"optimizer": "torch.optim:NAdam"}, 16, 8),
        ({"optimizer": "torch.optim:Adafactor"}, 8, 0),
        ({"optimizer": NamedOptimizer("torch.optim:SGD", optimizer_kwargs=MOMENTUM)}, 12, 4),
    ],
)
def test_host_budget_is_compared_with_what_all_settings_need(settings, num_bytes, num_moved):
    lit = make_lit()
    needed = num_bytes * sum(p.numel() for p in lit.parameters())
    how = {"precision": "bf16-mixed"} | settings
    largest = sum(p.numel() for p in find_blocks(lit)[0].module.parameters())
    if "optimizer_in_backward" in settings:  # gradients of two blocks
        needed += 2 * (2 if "low_precision_weights" in settings else 4) * largest
    needed += num_moved * max(p.numel() for p in lit.parameters())  # state of a weight
    with pytest.raises(IncompatibleError, match=f"host_budget={needed}`"):
        fit(lit, only(host_budget=needed - 1, **how))


SPLIT = {"low_precision_weights": "'split'"}


class TestPreset:
    def test_is_on(self):
        fit(make_lit(model="transformer"), callback := quiet(preset="offload"))
        rows = rows_of(callback)
        on = {"offload", "low_precision_weights", "activation_checkpointing", "precision"}
        assert {name for name, row in rows.items() if row.status == "on"} >= on
        assert rows["offload"].value == "'parameters+activations+embeddings'"
        assert "optimizer" not in rows

    def test_is_bitwise_on_a_cpu(self):
        callback = quiet(preset="offload", exactness="bitwise")
        make_trainer(LIGHTNING, callback, max_epochs=1).fit(make_lit())
        row = rows_of(callback)["offload"]
        assert (row.status, row.exactness) == ("on", "bitwise")
        assert any("no embedding" in detail for detail in row.details)

    @pytest.mark.parametrize(
        ("num_bytes", "settings"),
        [
            (18, {"low_precision_weights": "'master'"}),
            (16, SPLIT),
            (14, SPLIT | {"optimizer_in_backward": "True"}),
            (9, SPLIT | {"optimizer_in_backward": "True", "optimizer": "'8bit'"}),
        ],
    )
    def test_takes_the_fastest_form_for_which_the_host_has_memory(self, num_bytes, settings):
        lit = make_lit(model="transformer")
        num_elements = sum(p.numel() for p in lit.parameters())
        callback = quiet(preset="offload", host_budget=num_bytes * num_elements)
        fit(lit, callback)
        rows = rows_of(callback)
        names = ("low_precision_weights", "optimizer", "optimizer_in_backward")
        assert {n: rows[n].value for n in names if n in rows} == settings
        why = [d for d in rows["offload"].details if d.startswith("in a smaller form: ")]
        assert len(why) == (num_bytes < 18)
        assert all("without, the host needs " in detail for detail in why)

    def test_without_memory_on_the_host_is_the_next_smaller_preset(self):
        rows = []
        for settings in ({"preset": "offload", "host_budget": 2**10}, {"preset": "single_gpu"}):
            fit(make_lit(model="transformer"), callback := quiet(**settings))
            rows.append(rows_of(callback))
        least = rows[0].pop("offload")
        assert least.status == "off"
        assert "of host memory: `host_budget` is 1.00 KiB; as `preset='single_gpu'`" in str(least)
        assert rows[0] | {"preset": None} == rows[1] | {"preset": None}

    def test_without_memory_for_what_was_asked_for_says_how_much_it_needs(self):
        callback = quiet(preset="offload", host_budget=2**10, low_precision_weights="split")
        with pytest.raises(IncompatibleError, match=r"pass `host_budget=\d+` if there is enough"):
            fit(make_lit(model="transformer"), callback)

    def test_of_others_yields_to_what_the_host_has(self):
        lit = make_lit(model="transformer")
        needed = 11 * sum(p.numel() for p in lit.parameters())
        how: dict[str, Any] = {"preset": "classic", "offload": "optimizer"}
        callback = quiet(host_budget=needed, **how)
        fit(lit, callback)
        assert rows_of(callback)["optimizer"].value == "'8bit'"
        with pytest.raises(IncompatibleError, match=r"pass `host_budget=\d+`") as caught:
            fit(lit, quiet(host_budget=2**10, **how))
        least = int(str(caught.value).split("host_budget=")[1].split("`")[0])
        fit(lit, quiet(host_budget=least, **how))

    def test_leaves_a_table_on_the_device_that_a_head_computes_with(self):
        """It has the 64 MiB from which on tables go to the host; a second fit has none."""

        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(2**14, 2**10)
                self.head = nn.Linear(2**10, 2**14, bias=False)
                self.head.weight = self.embedding.weight

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.embedding(x.long().abs() % 8)[:, 0]).square().mean()

        lit = silent_lit("classifier")
        lit.model = Tied()
        callback = quiet(preset="offload", chunked_cross_entropy=None)
        fit(lit, callback, max_steps=1)
        row = rows_of(callback)["offload"]
        assert row.status == "on"
        assert "its output is computed with the whole table" in row.details[-2]
        assert not any("no embedding" in detail for detail in row.details)
        make_trainer(LIGHTNING, callback, max_epochs=1).fit(make_lit())
        assert any("no embedding" in detail for detail in rows_of(callback)["offload"].details)


def keeping_tables(rounding: str) -> LowPrecisionWeights:
    return LowPrecisionWeights(rounding, keep_fp32=("*embedding*",))


BF16: dict[str, Any] = {"precision": "bf16-mixed"}
EIGHT_BITS = LowBitOptimizer(force_8bit=("*",))
BY_VALUE: dict[str, Any] = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}


def rounded(rounding: str) -> dict[str, Any]:
    return BF16 | {"low_precision_weights": keeping_tables(rounding)}


BESIDE_TABLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipped by norm": ({}, CLIPPED),
    "clipped by value": ({}, BY_VALUE),
    "accumulated": ({}, {"accumulate_grad_batches": 2}),
    "in backward": (IN_BACKWARD, {}),
    "in backward, clipped": (IN_BACKWARD, BY_VALUE),
    "in backward, accumulated": (IN_BACKWARD, {"accumulate_grad_batches": 2}),
    "8-bit": ({"optimizer": LowBitOptimizer()}, {}),
    "8-bit, all": ({"optimizer": EIGHT_BITS}, {}),
    "8-bit in backward": (IN_BACKWARD | {"optimizer": EIGHT_BITS}, {}),
    "8-bit and kahan": (rounded("kahan") | {"optimizer": "8bit"}, {}),
    "stochastic in backward": (rounded("stochastic") | IN_BACKWARD, {}),
    "master": (rounded("master"), {}),
    "split in backward": (rounded("split") | IN_BACKWARD, {}),
}


@pytest.mark.parametrize("name", BESIDE_TABLES)
def test_tables_have_the_same_bits_beside(name):
    settings, trainer = BESIDE_TABLES[name]
    low = settings.get("low_precision_weights")
    others = "parameters+" if low is not None and low.rounding in ("master", "split") else ""
    found = []
    for what in (others.removesuffix("+") or None, f"{others}embeddings"):
        offload = None if what is None else Offloading(what, min_table_bytes=4)
        callback = only(offload=offload, **settings)
        found.append(fit(make_lit(model="classifier"), callback, max_epochs=2, **trainer))
    assert_same(*found)
    assert all(row.status != "off" for row in callback.rows), callback.rows
    assert any("1 embeddings on the host" in d for d in rows_of(callback)["offload"].details)


@pytest.mark.parametrize("clip", [{}, CLIPPED])
@pytest.mark.parametrize("in_backward", [None, True])
def test_tables_of_a_preset_of_one_gpu(in_backward, clip):
    """Each runs, or is refused in words; a preset keeps what goes together."""
    tables = Offloading("embeddings", min_table_bytes=4)
    how = IN_BACKWARD if in_backward else {}
    callback = quiet(preset="single_gpu", offload=tables, **how)
    if in_backward and clip:
        with pytest.raises(IncompatibleError, match="the norm of all gradients is known only"):
            fit(make_lit(model="classifier"), callback, **clip)
        return
    fit(make_lit(model="classifier"), callback, **clip)
    rows = rows_of(callback)
    assert rows["offload"].status == "on"
    assert rows["optimizer_in_backward"].status == ("off" if clip else "on")
    assert rows["optimizer"].status == "on"
    assert rows["low_precision_weights"].value == "'stochastic'"


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["optimizer", "parameters+activations"])
def test_updates_on_the_host_of_a_gpu_round_otherwise(package, what):
    gpu = {"accelerator": "gpu", "max_steps": 1}
    with pytest.raises(IncompatibleError, match=r"a CPU rounds .* Use `exactness=.rounding.`"):
        make_trainer(package, only(offload=what, exactness="bitwise"), **gpu).fit(make_lit(package))
    allowed = only(offload=what, exactness="rounding")
    make_trainer(package, allowed, **gpu).fit(make_lit(package))
    assert rows_of(allowed)["offload"].exactness == "rounding"
    exact = only(offload="activations", exactness="bitwise")
    make_trainer(package, exact, **gpu).fit(make_lit(package))
    assert rows_of(exact)["offload"].exactness in ("bitwise", "")


class Widens(nn.Linear):
    """Gives its weight another type, as `torch.renorm` does under autocast on CUDA."""

    def forward(self, x):
        self.weight.data = self.weight.data.float()
        return nn.functional.linear(x, self.weight.to(x.dtype))


def test_a_forward_that_changes_the_type_of_a_weight_is_refused():
    half = {"precision": "bf16-mixed", "low_precision_weights": "master"}
    callback = only(preset="off", offload="parameters", **half)
    lit = make_lit(model=nn.Sequential(*(Widens(64, 64, bias=False) for _ in range(3))))
    before = [param.clone() for param in lit.parameters()]
    with pytest.raises(IncompatibleError, match="forward replaces it by") as caught:
        fit(lit, callback)
    assert "Set `low_precision_weights=None`" in str(caught.value)
    assert all(map(torch.equal, before, lit.parameters()))
