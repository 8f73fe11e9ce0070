"""Presets and what is near the floor, in a Trainer."""

import copy
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSaveCallback, Offloading
from lightning_memsave.callbacks.settings.optimizer_in_backward import OptimizerInBackwardSetting
from lightning_memsave.errors import IncompatibleError
from lightning_memsave.techniques.optimizer_in_backward.technique import OptimizerInBackward
from lightning_memsave.techniques.registry import PRESETS, values_of
from lightning_memsave.trainer.precision import half_precision_on_cpu
from tests.callbacks.lit import (
    LIGHTNING,
    assert_same,
    callback_with,
    fit,
    late,
    loader,
    make_lit,
    make_trainer,
    only,
    quiet,
    rows_of,
)
from tests.cases import MODELS
from tests.helpers import snapshot

pytestmark = pytest.mark.usefixtures("no_prediction", "any_saving_counts")


@functools.cache
def plain_fit(name: str) -> Any:
    return fit(make_lit(model=name), max_epochs=3)


class TestPresets:
    def test_bitwise_is_bitwise(self, package):
        lit = make_lit(package)
        callback = MemSaveCallback(preset="bitwise")
        assert_same(fit(lit, package=package), fit(lit, callback, package=package))
        rows = rows_of(callback)
        assert "asked for" not in str(callback.rows)
        off = rows["preset"].details[1]
        assert off.startswith("off in this preset: precision, attention, chunked_cross_entropy, ")
        assert {row.exactness for row in rows.values()} == {"", "bitwise"}
        assert rows["optimizer_in_backward"].status == "on"
        assert rows["activation_checkpointing"].status == "on"

    def test_off_says_that_batches_are_not_repeated(self):
        """Whether `"auto"` was written cannot be told; with `"halve"` there is nothing to say."""
        said = '`micro_batch_size="auto"` is off, too, also where it is written: only `"halve"`'
        for size in ("auto", "halve"):
            fit(make_lit(), callback := quiet(preset="off", micro_batch_size=size))
            details = rows_of(callback)["preset"].details
            assert any(said in each for each in details) == (size == "auto")

    def test_single_gpu_learns_the_same(self, package):
        lit = make_lit(package, "classifier")
        callback = MemSaveCallback(preset="single_gpu")
        plain, *_ = fit(lit, package=package, max_epochs=3)
        losses, state, _ = fit(lit, callback, package=package, max_epochs=3)
        assert losses[0] == pytest.approx(plain[0], rel=1e-2)
        assert losses[-1] == pytest.approx(plain[-1], rel=5e-2)
        rows = rows_of(callback)
        assert rows["low_precision_weights"].value == "'stochastic'"
        assert rows["precision"].value == "bf16-mixed"
        assert "updated in backward" in rows["optimizer_in_backward"].details[0]
        assert rows["attention"].status == "off"  # no model of Hugging Face, and no warning of it
        assert all(tensor.dtype != torch.bfloat16 for tensor in state.values())

    # The presets as published, on every awkward model.
    @pytest.mark.filterwarnings("ignore::lightning_memsave.errors.NoEffectWarning")
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("preset", PRESETS)
    def test_trains_as_exactly_as_declared(self, name, preset):
        callback = MemSaveCallback(preset=preset, predict=False)
        plain = plain_fit(name)
        ours = fit(make_lit(model=name), callback, max_epochs=3)
        if preset == "bitwise":
            assert_same(plain, ours)
        else:
            assert ours[0][-1] <= plain[0][-1] * 1.05
        assert all(row.status == "on" for row in callback.rows if row.exactness)

    @pytest.mark.parametrize("optimizer", ["auto", "8bit", "paged_8bit"])
    def test_embeddings_have_8_bits_with_every_8bit_optimizer(self, optimizer):
        callback = quiet(preset="single_gpu", optimizer=optimizer)
        fit(make_lit(model="classifier"), callback)
        assert "embedding" not in str(rows_of(callback)["optimizer"].details)

    def test_says_what_it_stands_for(self, package):
        lit, callback = make_lit(package), MemSaveCallback(preset="classic", optimizer=None)
        fit(lit, callback, package=package)
        row = rows_of(callback)["preset"]
        assert row.value == "'classic'"
        assert "activation_checkpointing='all'" in row.details[0]
        assert "optimizer" not in row.details[0].replace("optimizer_in_backward", "")
        assert row.details[1].startswith("off in this preset: attention, chunked_cross_entropy, ")
        assert row.details[2] == "given beside it: optimizer"
        assert rows_of(callback)["optimizer"].status == "unchanged"
        assert "`None` was given" in rows_of(callback)["optimizer"].details[0]
        report = json.loads(Path("memsave_report.json").read_text())
        assert report["settings"]["preset"] == "classic"

    def test_bare_callback_is_the_classic_preset_and_says_what_is_off(self):
        lit, bare, named = make_lit(), MemSaveCallback(), MemSaveCallback(preset="classic")
        assert_same(fit(lit, bare), fit(lit, named))
        rows = [
            # The proof of the loss says how long it took.
            re.sub(r"in \d+ ms", "in some ms", str([r for r in c.rows if r.name != "preset"]))
            for c in (bare, named)
        ]
        assert rows[0] == rows[1]
        row = rows_of(bare)["preset"]
        assert row.status == "unchanged"
        assert row.details == (
            "\"auto\" means the values of `preset='classic'`, without attention, "
            "chunked_cross_entropy, offload, low_precision_weights, "
            "optimizer_in_backward",
        )
        assert rows_of(bare)["early_release"].status == "on"

    @pytest.mark.parametrize("preset", ["classic", "single_gpu", "bitwise"])
    @pytest.mark.parametrize("what", ["optimizer", "embeddings"])
    def test_what_offload_switches_off_says_so(self, preset, what):
        layers = nn.Embedding(64, 64), nn.Flatten(), *(nn.Linear(64, 64) for _ in "abc")
        lit = make_lit(
            model=nn.Sequential(*layers),
            training_step=lambda self, batch, batch_idx: self.model(batch).square().mean(),
        )
        data: Any = DataLoader(torch.arange(16)[:, None], batch_size=4)  # type: ignore[arg-type]
        callback = quiet(preset=preset, offload=Offloading(what, min_table_bytes=4))
        make_trainer(LIGHTNING, callback, limit_val_batches=0).fit(lit, data)
        rows = rows_of(callback)
        assert rows["offload"].status == "on"
        for name in ("optimizer", "optimizer_in_backward"):
            is_off = values_of(preset)[name] is not None and what == "optimizer"
            said = name in rows and "`offload='optimizer'` " in rows[name].details[0]
            assert said == is_off
            if is_off:
                assert (rows[name].value, rows[name].status) == ("auto", "off")
                assert not re.search(rf"\b{name}\b", str(rows["preset"].details))

    def test_off_leaves_all_but_what_is_named(self, package):
        lit, callback = make_lit(package), MemSaveCallback(preset="off")
        assert_same(fit(lit, package=package), fit(lit, callback, package=package))
        assert {row.status for row in callback.rows} == {"unchanged"}
        assert '`"halve"` repeats a batch' in rows_of(callback)["preset"].details[1]
        callback = MemSaveCallback(preset="off", activation_checkpointing="all")
        fit(lit, callback, package=package)
        on = [row.name for row in callback.rows if row.status == "on"]
        assert on == ["early_release", "activation_checkpointing"]

    @pytest.mark.parametrize("limit", ["bitwise", "rounding"])
    def test_parts_beyond_the_limit_yield(self, limit):
        lit = make_lit(model="classifier")
        callback = MemSaveCallback(preset="single_gpu", exactness=limit)
        ours = fit(lit, callback)
        rows = rows_of(callback)
        for name in ("optimizer", "low_precision_weights", "precision"):
            assert rows[name].status == "off"
            assert f"`exactness='{limit}'` does not allow" in rows[name].details[0]
        assert rows["optimizer_in_backward"].status == "on"
        if limit == "bitwise":
            assert_same(fit(lit), ours)
            assert rows["chunked_cross_entropy"].status == "off"

    def test_precision_of_the_user_wins_over_weights_of_the_preset(self):
        fit(make_lit(), callback := MemSaveCallback(preset="single_gpu", precision="32-true"))
        row = rows_of(callback)["low_precision_weights"]
        assert row.status == "off"
        assert "`precision='32-true'` was given" in row.details[0]

    @pytest.mark.parametrize("preset", PRESETS)
    def test_everything_is_undone(self, package, preset):
        lit = make_lit(package, "classifier")
        before = snapshot(lit)
        callback = MemSaveCallback(preset=preset)
        for _ in range(2):
            make_trainer(package, callback).fit(lit)
            after = snapshot(lit)
            for name, module in before.items():
                assert after[name][0] is module[0]
                assert after[name][3] == module[3] or name == "", name
            assert all(p.dtype == torch.float32 for p in lit.parameters())
            hooks = [p._post_accumulate_grad_hooks for p in lit.parameters()]
            assert not any(hooks)

    @pytest.mark.parametrize("preset", PRESETS)
    def test_resume_half_way(self, preset, tmp_path):
        lit = make_lit(model="classifier")

        def train(**settings: Any) -> dict[str, torch.Tensor]:
            own = copy.deepcopy(lit)
            callback = MemSaveCallback(preset=preset)
            trainer = make_trainer(LIGHTNING, callback, SeededEpochs(tmp_path), max_epochs=2)
            trainer.fit(own, **settings)
            return {name: tensor.clone() for name, tensor in own.state_dict().items()}

        straight = train()
        resumed = train(ckpt_path=tmp_path / "epoch=0.ckpt")
        assert [k for k in straight if not torch.equal(straight[k], resumed[k])] == []

    @pytest.mark.parametrize("preset", ["single_gpu", "bitwise"])
    def test_checkpoint_loads_anywhere(self, preset, tmp_path):
        lit = make_lit(model="classifier")
        callback = MemSaveCallback(preset=preset)
        make_trainer(LIGHTNING, callback, SeededEpochs(tmp_path)).fit(copy.deepcopy(lit))
        path = tmp_path / "epoch=0.ckpt"
        lit.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        assert all(p.dtype == torch.float32 for p in lit.parameters())
        # Without the techniques; the callback itself turns 8-bit state into what torch keeps.
        trainer = make_trainer(LIGHTNING, only(), max_epochs=2)
        trainer.fit(lit, ckpt_path=path)
        assert trainer.global_step == 12


class SeededEpochs(LIGHTNING.Callback):  # type: ignore[name-defined, misc]
    """The same random numbers for each batch, whichever was the first; saves after each epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        torch.manual_seed(100 * trainer.current_epoch + batch_idx)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"epoch={trainer.current_epoch}.ckpt")


GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")


BOUND = OptimizerInBackward(clip_norm=0.01)


class TestOptimizerInBackward:
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"gradient_clip_val": 1e-3},
            {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"},
            {"gradient_clip_val": -1},  # for Lightning, no bound
            {"gradient_clip_val": 0.0},
            {"accumulate_grad_batches": 4},  # of six batches: the last window is short
            {"max_epochs": 2, "precision": "bf16-mixed"},
        ],
        ids=lambda settings: "+".join(f"{k}={v}" for k, v in settings.items()) or "plain",
    )
    def test_is_bitwise(self, package, settings):
        lit, callback = make_lit(package), only(optimizer_in_backward=True)
        how = {"package": package, **settings}
        assert_same(fit(lit, **how), fit(lit, callback, **how))
        assert rows_of(callback)["optimizer_in_backward"].status == "on"

    def test_a_gradient_scaler_of_the_trainer_is_refused(self, package):
        how = {"package": package, "plugins": [half_precision_on_cpu(package)]}
        with pytest.raises(IncompatibleError, match=r'Use `precision="bf16-mixed"`, or set'):
            fit(make_lit(package), only(optimizer_in_backward=True), **how)

    def test_a_gradient_scaler_of_the_callback_is_refused_before_training(self, monkeypatch):
        """Lightning has none on a CPU: the plugin gets its scaler while settings are applied."""
        callback = only(optimizer_in_backward=True)
        trainer = make_trainer(LIGHTNING, callback)
        setting = callback._settings.find(OptimizerInBackwardSetting)
        assert setting.check(trainer, make_lit()) == []
        trainer.strategy.precision_plugin = half_precision_on_cpu(LIGHTNING)
        with pytest.raises(IncompatibleError, match="parameters are updated already"):
            setting.apply(trainer, make_lit())

    @pytest.mark.parametrize("part", ["model", "blocks"])
    def test_a_compiled_model_is_refused_and_compiled_blocks_are_not(self, package, part):
        lit, callback = make_lit(package), only(optimizer_in_backward=True)
        trainer = make_trainer(package, callback, max_steps=1)
        # In place: a copy of a compiled module is not compiled.
        for module in [lit.model] if part == "model" else lit.model.blocks:
            module.compile(backend="eager")
        if part == "blocks":
            assert callback._settings.find(OptimizerInBackwardSetting).check(trainer, lit) == []
            return
        with pytest.raises(IncompatibleError, match=r"`model` is compiled.* blocks one by one"):
            trainer.fit(lit)
        wrapped = make_lit(package)
        wrapped.model = torch.compile(wrapped.model, backend="eager")
        with pytest.raises(IncompatibleError, match=r"`model` is compiled as a whole"):
            make_trainer(package, only(optimizer_in_backward=True)).fit(wrapped)

    def test_a_batch_is_repeated_while_nothing_is_updated(self):
        def training_step(self, batch, batch_idx):
            if len(batch) == 4 and torch.is_grad_enabled():  # not in the proof
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
            return self.model(batch)

        lit = make_lit(training_step=training_step)
        callback = only(micro_batch_size="auto", optimizer_in_backward=True)
        with pytest.warns(UserWarning, match="repeated with 2"):
            found = fit(lit, callback)
        assert_same(found, fit(lit, only(micro_batch_size=2)))

    @pytest.mark.parametrize("hook", GRADIENT_HOOKS)
    def test_hooks_of_callbacks_are_refused(self, package, hook):
        own = callback_with(package, "Guard", **{hook: lambda *_: None})
        given = package.callbacks.LambdaCallback(**{hook: lambda *_: None})
        for callback, name in ((own, "Guard"), (given, "LambdaCallback")):
            with pytest.raises(IncompatibleError, match=rf"`{name}\.{hook}` runs when"):
                fit(make_lit(package), only(optimizer_in_backward=True), callback, package=package)

    def test_no_callback_of_lightning_looks_at_gradients(self, package):
        """Or it would have to be refused as well."""
        found = [
            (name, hook)
            for name in package.callbacks.__all__
            for hook in GRADIENT_HOOKS
            if hook in vars(getattr(package.callbacks, name)) and name != "Callback"
        ]
        assert found == []

    @pytest.mark.parametrize(
        ("own", "algorithm", "line"),
        [
            (OptimizerInBackward(), None, "clips the norm of all gradients at 0.01"),
            (BOUND, "norm", "clips the norm of all gradients"),
            (BOUND, "value", "clips all values at 0.01"),
        ],
    )
    def test_table_shows_what_is_clipped_for_the_trainer(self, own, algorithm, line):
        callback = only(optimizer_in_backward=own)
        settings = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
        _, _, trainer = fit(make_lit(), callback, **settings)
        row = rows_of(callback)["optimizer_in_backward"]
        assert line in row.details[1]
        assert row.value == repr(own)
        assert trainer.gradient_clip_val == 0.01
        fit(make_lit(), callback)
        assert len(rows_of(callback)["optimizer_in_backward"].details) == 1

    @pytest.mark.parametrize(
        ("settings", "of_trainer", "text"),
        [
            ({}, {}, "updated in backward, gradients "),
            ({}, {"accumulate_grad_batches": 3}, "are alive while 3 batches accumulate"),
            ({"accumulate_grad_batches": 2}, {}, "are alive while 2 batches accumulate"),
            ({"size": 2}, {}, "are alive while the micro-batches of a batch accumulate"),
            ({"size": "auto"}, {}, "while the micro-batches of a halved batch accumulate"),
        ],
    )
    def test_table_shows_when_all_gradients_are_alive(self, settings, of_trainer, text):
        callback = only(optimizer_in_backward=True, **settings)
        fit(make_lit(), callback, **of_trainer)
        details = "; ".join(rows_of(callback)["optimizer_in_backward"].details)
        assert text in details
        is_split = settings.get("size") == 2
        accumulates = "accumulate_grad_batches" in settings | of_trainer
        assert ("at a time" in details) == (not is_split and not accumulates)

    def test_table_knows_the_scheduler(self, package):
        callback = only(optimizer_in_backward=True)
        scheduler = package.callbacks.GradientAccumulationScheduler({0: 1, 1: 4})
        fit(make_lit(package), callback, scheduler, package=package)
        details = rows_of(callback)["optimizer_in_backward"].details
        assert "are alive while several batches accumulate" in details[0]

    def test_table_shows_the_sizes_of_weights_that_are_cast_late(self):
        settings: dict[str, Any] = {"low_precision_weights": "kahan", "precision": "auto"}
        shown = []
        for lit in (make_lit(), late(make_lit())):
            callback = only(**settings, optimizer_in_backward=True)
            make_trainer(LIGHTNING, callback).fit(lit)
            shown.append(rows_of(callback)["optimizer_in_backward"].details)
        assert shown[0] == shown[1]

    def test_an_own_optimizer_step_may_change_settings(self, package):
        def optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (batch_idx + 1)
            optimizer.step(closure=closure)

        lit = make_lit(package, optimizer_step=optimizer_step)
        ours = fit(lit, only(optimizer_in_backward=True), package=package)
        assert_same(fit(lit, package=package), ours)


class TestLowPrecisionWeights:
    def test_brings_autocast_and_leaves_float32(self, package):
        lit, callback = make_lit(package), only(precision="auto", low_precision_weights="kahan")
        plain, *_ = fit(lit, package=package)
        losses, state, _ = fit(lit, callback, package=package)
        assert losses[-1] == pytest.approx(plain[-1], rel=2e-2)
        assert rows_of(callback)["precision"].value == "bf16-mixed"
        assert "compensation" not in str(state.keys())
        row = rows_of(callback)["low_precision_weights"]
        assert "rounded with a bfloat16 compensation" in row.details[1]

    def test_sums_of_parts_are_float32(self):
        settings = {"precision": "auto", "low_precision_weights": "stochastic"}
        for size, expected in ((None, torch.bfloat16), (2, torch.float32)):
            dtypes: list[Any] = []

            def note(self: Any, trainer: Any, module: Any, optimizer: Any, dtypes=dtypes) -> None:
                dtypes.append(module.model.head.weight.grad.dtype)

            fit(make_lit(), only(size, **settings), callback_with(on_before_optimizer_step=note))
            assert set(dtypes) == {expected}

    def test_other_precisions_are_refused(self):
        with pytest.raises(IncompatibleError, match=r"computes in 32-true.*bf16-mixed"):
            fit(make_lit(), only(low_precision_weights="kahan"))
        ours = fit(make_lit(), only(low_precision_weights="kahan"), precision="bf16-mixed")
        assert len(ours[0]) == 6


class TestPrediction:
    @pytest.mark.parametrize("model", ["classifier", "eager_bert"])
    @pytest.mark.parametrize("preset", PRESETS)
    def test_predicted_is_measured(self, preset, model):
        callback = MemSaveCallback(preset=preset, predict=20.0)
        trainer = make_trainer(LIGHTNING, callback, max_epochs=1)
        trainer.fit(make_lit(model=model), loader(48, batch_size=16))
        report = json.loads(Path("memsave_report.json").read_text())
        predicted, measured = (report[key]["peak_bytes"] for key in ("predicted", "measured"))
        assert predicted == pytest.approx(measured, rel=0.01)
