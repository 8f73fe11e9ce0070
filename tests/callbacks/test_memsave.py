"""What `MemSaveCallback` does in a Trainer, alone and beside what else users have there."""

import contextlib
import gc
import importlib.metadata
import importlib.util
import io
import json
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from rich.console import Console
from torch import nn

from lightning_memsave import GPUMemoryMonitor, MemSaveCallback
from lightning_memsave.callbacks import report as _report
from lightning_memsave.core.technique import Row
from lightning_memsave.errors import IncompatibleError, MemsaveWarning
from lightning_memsave.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from tests.callbacks.lit import (
    LIGHTNING,
    Trace,
    assert_same,
    callback_with,
    fit,
    late,
    make_lit,
    make_trainer,
    no_step,
    only,
    quiet,
    rows_of,
    summary_of,
)
from tests.cases import MODELS
from tests.helpers import assert_same as assert_same_nested
from tests.helpers import snapshot


def exact(**settings: Any) -> MemSaveCallback:
    """Everything that is bitwise: what must not be seen in the numbers."""
    return MemSaveCallback(exactness="bitwise", **settings)


def status(callback: MemSaveCallback, name: str) -> str:
    return rows_of(callback)[name].status


def details(callback: MemSaveCallback, name: str) -> str:
    return " ".join(rows_of(callback)[name].details)


def stop(self: Any, trainer: Any, *_: Any) -> None:
    if trainer.fit_loop.epoch_loop.batch_idx == 1:
        raise ArithmeticError("in the middle of fit")


class TestOneLine:
    @pytest.mark.usefixtures("any_saving_counts")
    def test_bare_callback_switches_everything_on(self, package):
        lit, callback = make_lit(package), MemSaveCallback()
        losses, _, trainer = fit(lit, callback, package=package)
        assert status(callback, "activation_checkpointing") == "on"
        assert status(callback, "optimizer") == "on"
        assert status(callback, "precision") == "unchanged"
        assert type(trainer.optimizers[0]).__module__ != "torch.optim.adamw"
        plain, *_ = fit(lit, package=package)
        assert losses[0] == plain[0]
        assert losses[-1] == pytest.approx(plain[-1], rel=0.05)

    def test_stands_alone_and_not_in_a_list(self, package):
        trainer = package.Trainer(callbacks=MemSaveCallback(), logger=False, accelerator="cpu")
        assert any(isinstance(c, MemSaveCallback) for c in trainer.callbacks)

    @pytest.mark.parametrize("name", [name for name in MODELS if name != "unrepeated"])
    def test_what_is_bitwise_is_bitwise(self, package, name):
        lit = make_lit(package, name)
        assert_same(fit(lit, package=package), fit(lit, exact(), package=package))

    def test_names_and_steps_of_logged_values_stay(self, package, tmp_path):
        from_csv = {}
        for key, callbacks in (("plain", []), ("saving", [exact(predict=False, report=False)])):
            logger = package.loggers.CSVLogger(tmp_path / key)
            fit(make_lit(package), *callbacks, package=package, logger=logger, log_every_n_steps=1)
            from_csv[key] = (Path(logger.log_dir) / "metrics.csv").read_text()
        assert from_csv["plain"] == from_csv["saving"]


class TestNothingLeftBehind:
    def test_module_is_as_before_after_an_exception(self, package):
        lit, callback = make_lit(package), MemSaveCallback()
        before = {name: sorted(vars(m)) for name, m in lit.model.named_modules()}
        with pytest.raises(ArithmeticError):
            make_trainer(package, callback, callback_with(package, on_train_batch_end=stop)).fit(
                lit
            )
        assert {name: sorted(vars(m)) for name, m in lit.model.named_modules()} == before
        assert "configure_optimizers" not in vars(lit)
        report = json.loads(Path("memsave_report.json").read_text())
        assert report["status"] == "ArithmeticError: in the middle of fit"

    def test_fit_twice(self, package):
        lit, reference = make_lit(package), make_lit(package)
        for module, callbacks in ((lit, [exact()]), (reference, [])):
            for _ in range(2):
                torch.manual_seed(2)
                make_trainer(package, *callbacks).fit(module)
        assert_same_nested(lit, reference)

    def test_a_used_callback_holds_neither_module_nor_optimizers(self):
        lit, callback = make_lit(), MemSaveCallback()
        lit.own = lit.configure_optimizers()
        lit.configure_optimizers = lambda own=lit.own: own
        trainer = make_trainer(LIGHTNING, callback)
        trainer.fit(lit)
        for name in ("log", "log_dict"):
            delattr(callback, name)  # Lightning puts it there, bound to the module
        held = [weakref.ref(lit), weakref.ref(lit.own), weakref.ref(trainer.optimizers[0])]
        del lit, trainer
        gc.collect()
        assert [ref() for ref in held] == [None, None, None]
        again = pickle.loads(pickle.dumps(callback))
        assert (repr(again), again.rows) == (repr(callback), callback.rows)

    @pytest.mark.parametrize("hook", ["configure_optimizers", "configure_model"])
    @pytest.mark.usefixtures("any_saving_counts")
    def test_rows_of_an_earlier_trainer_are_forgotten(self, hook):
        def fail(self: Any) -> None:
            raise ArithmeticError("too early")

        lit, callback = make_lit(configure_model=lambda self: None), MemSaveCallback()
        make_trainer(LIGHTNING, callback).fit(lit)
        name = "activation_checkpointing" if hook == "configure_model" else "optimizer"
        assert status(callback, name) == "on"
        setattr(type(lit), hook, fail)
        with pytest.raises(ArithmeticError):
            make_trainer(LIGHTNING, callback).fit(lit)
        assert name not in rows_of(callback)

    def test_checkpoint_loads_without_the_callback(self, package, tmp_path):
        saver = package.callbacks.ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=2)
        lit, how = make_lit(package), {"package": package, "enable_checkpointing": True}
        _, state, trainer = fit(lit, saver, MemSaveCallback(), **how)
        assert type(trainer.callbacks[-1]) is package.callbacks.ModelCheckpoint
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        for name in ("a.ckpt", "last.ckpt"):
            saved = torch.load(tmp_path / name, weights_only=True)["state_dict"]
            assert saved.keys() == lit.state_dict().keys()
            lit.load_state_dict(saved)
            assert_same_nested(dict(lit.state_dict()), state)

    def test_resume_gives_the_straight_run(self, package, tmp_path):
        reseed = callback_with(
            package,
            on_train_batch_start=lambda self, trainer, *_: torch.manual_seed(trainer.global_step),
        )

        def run(ckpt_path: Path | None, max_epochs: int) -> tuple[list[float], Any, Any]:
            lit, trace = make_lit(package), Trace(package)
            callbacks = (MemSaveCallback(), reseed, trace.callback)
            trainer = make_trainer(package, *callbacks, max_epochs=max_epochs)
            trainer.fit(lit, ckpt_path=ckpt_path)
            return trace.losses, lit.state_dict(), trainer

        straight = run(None, 2)
        run(None, 1)[2].save_checkpoint(tmp_path / "a.ckpt")
        resumed = run(tmp_path / "a.ckpt", 2)
        assert straight[0][6:] == resumed[0]
        assert all(torch.equal(v, resumed[1][k]) for k, v in straight[1].items())


class TestNothingSilent:
    @pytest.mark.usefixtures("any_saving_counts")
    def test_table_says_what_is_on_and_why_not(self, capsys):
        fit(make_lit(), MemSaveCallback())
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "MemSaveCallback:"
        assert "  precision=32-true: unchanged. kept on cpu; set `precision=` to change it" in lines
        checkpointing = next(line for line in lines if "activation_checkpointing" in line)
        assert checkpointing.endswith("on (bitwise). 4 of 4 blocks recomputed: 4 x Block")
        assert any(line.startswith("  optimizer='8bit': on (approximate). AdamW") for line in lines)

    def test_table_is_a_table_on_a_terminal_where_brackets_are_no_markup(self):
        file = io.StringIO()
        rows = [
            Row("activation_checkpointing", "'all'", "on"),
            Row("[/]name", "[red]value", "on", ("`re:model[/]x`", "[bold]why")),
        ]
        _report.print_table(rows, Console(file=file, force_terminal=True, width=100))
        shown = ("activation_checkpointing", "┃", "[/]name", "[red]value", "model[/]x", "[bold]why")
        assert all(text in file.getvalue() for text in shown)

    def test_a_module_without_an_optimizer_is_told_so(self):
        lit = make_lit(configure_optimizers=lambda self: None, training_step=no_step)
        callback = MemSaveCallback(None)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`LightningModule.configure_optimizers` returned")
            warnings.filterwarnings("ignore", "`training_step` returned `None`")
            make_trainer(LIGHTNING, callback).fit(lit)
        assert status(callback, "optimizer") == "off"
        assert details(callback, "optimizer") == "the module configures no optimizer"

    @pytest.mark.usefixtures("any_saving_counts")
    def test_report_is_written_beside_the_logs(self, package, tmp_path):
        logger = package.loggers.CSVLogger(tmp_path)
        callback = MemSaveCallback()
        settings = {"logger": logger, "log_every_n_steps": 1}
        fit(make_lit(package), callback, package=package, **settings)
        report = json.loads((Path(logger.log_dir) / "memsave_report.json").read_text())
        assert report["status"] == "finished"
        assert report["settings"]["optimizer"] == "auto"
        assert report["settings"]["preset"] is None
        assert report["settings"]["predict"] is True
        names = {"micro_batch_size", "evaluation", "activation_checkpointing", "early_release"}
        assert {row["name"] for row in report["changes"]} == names | {"optimizer"}
        assert report["versions"]["torch"] == importlib.metadata.version("torch")
        measured = report["measured"]
        parameters = sum(p.numel() * 4 for p in make_lit(package).parameters())
        assert measured["peak_bytes"] > 2 * parameters
        assert sum(measured["by_category"].values()) == measured["peak_bytes"]
        assert measured["by_category"]["parameter"] == parameters

    def test_a_report_that_cannot_be_written_hides_no_exception(self, package):
        stopping = callback_with(package, on_train_batch_end=stop)
        with (
            pytest.warns(MemsaveWarning, match="cannot be written"),
            pytest.raises(ArithmeticError, match="in the middle of fit"),
        ):
            fit(
                make_lit(package), exact(), stopping, package=package, default_root_dir="/proc/none"
            )

    def test_report_is_written_to_remote_folders(self, package, tmp_path):
        folder = f"memory://runs/{package.__name__}"
        fit(make_lit(package), exact(), package=package, default_root_dir=folder)
        path = f"/runs/{package.__name__}/memsave_report.json"
        assert json.loads(MemoryFileSystem().cat(path))["status"] == "finished"
        assert list(tmp_path.iterdir()) == []

    def test_report_can_be_switched_off(self, capsys):
        fit(make_lit(), quiet())
        assert capsys.readouterr().out == ""
        assert not Path("memsave_report.json").exists()

    def test_a_model_without_blocks_has_a_row_and_no_warning(self, recwarn):
        callback = MemSaveCallback()
        fit(make_lit(model="unrepeated"), callback)
        assert status(callback, "activation_checkpointing") == "off"
        row = details(callback, "activation_checkpointing")
        assert "no module class with layers inside is used twice" in row
        assert "blocks=" not in row
        assert not [w for w in recwarn if issubclass(w.category, MemsaveWarning)]

    def test_a_second_callback_does_nothing_and_says_so(self):
        second = MemSaveCallback()
        with pytest.warns(MemsaveWarning, match="Remove one"):
            result = fit(make_lit(), exact(), second)
        assert second.rows == [] or all(row.status != "on" for row in second.rows)
        assert_same(fit(make_lit()), result)

    def test_without_bitsandbytes_auto_leaves_the_optimizer_and_8bit_is_refused(self, monkeypatch):
        real = importlib.util.find_spec
        find_spec = lambda name: None if name == "bitsandbytes" else real(name)  # noqa: E731
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        callback = MemSaveCallback()
        _, _, trainer = fit(make_lit(), callback)
        assert type(trainer.optimizers[0]) is torch.optim.AdamW
        assert details(callback, "optimizer").startswith("bitsandbytes is not installed")
        with pytest.raises(IncompatibleError, match="Run `pip install -U 'bitsandbytes>="):
            fit(make_lit(), MemSaveCallback(optimizer="8bit"))

    def test_repr_shows_what_was_asked_for_without_defaults(self):
        expected = "MemSaveCallback(activation_checkpointing=2, optimizer=None)"
        assert repr(MemSaveCallback(2, optimizer=None)) == expected
        assert repr(MemSaveCallback(optimizer="auto", blocks=None)) == "MemSaveCallback()"

    def test_settings_in_the_report_are_what_was_written(self):
        technique = ActivationCheckpointing(2, blocks="Block")
        callback = MemSaveCallback(technique, optimizer=LowBitOptimizer(keep_32bit=("*head*",)))
        fit(make_lit(), callback)
        assert "2 of 4 blocks" in details(callback, "activation_checkpointing")
        settings = json.loads(Path("memsave_report.json").read_text())["settings"]
        assert settings["activation_checkpointing"] == repr(technique)


class TestStages:
    @pytest.mark.parametrize("stage", ["validate", "test", "predict"])
    def test_evaluation_is_as_without_it(self, package, stage):
        lit = make_lit(package)
        before = snapshot(lit.model)
        how = {} if stage == "predict" else {"verbose": False}
        plain = getattr(make_trainer(package), stage)(lit, **how)
        ours = getattr(make_trainer(package, MemSaveCallback()), stage)(lit, **how)
        assert str(plain) == str(ours)
        assert snapshot(lit.model) == before
        assert not Path("memsave_report.json").exists()

    def test_evaluation_runs_in_the_precision_that_was_set(self):
        lit = make_lit()
        trainer = make_trainer(LIGHTNING, MemSaveCallback(precision="bf16-mixed"))
        set_here = trainer.predict(lit)
        given = make_trainer(LIGHTNING, precision="bf16-mixed").predict(lit)
        assert all(torch.equal(a, b) for a, b in zip(set_here, given, strict=True))


class TestBesideOthers:
    @pytest.mark.usefixtures("any_saving_counts")
    def test_learning_rate_finder_sees_checkpointed_blocks_and_the_8bit_optimizer(self, package):
        seen: list[Any] = []

        class Finder(package.callbacks.LearningRateFinder):  # type: ignore[name-defined, misc]
            def lr_find(self, trainer, pl_module):
                seen.append([type(o).__module__ for o in trainer.optimizers])
                seen.append("forward" in vars(pl_module.model.blocks[0]))
                super().lr_find(trainer, pl_module)

        finder = Finder(num_training_steps=5)
        callback = MemSaveCallback()
        fit(make_lit(package), finder, callback, package=package)
        assert "torch.optim" not in seen[0][0]
        assert seen[1] is True
        assert finder.optimal_lr is not None

    def test_batch_size_finder_works(self, package):
        sizes = []
        for callbacks in ([], [exact()]):
            finder = package.callbacks.BatchSizeFinder(max_trials=2, steps_per_trial=1)
            lit = make_lit(package)
            make_trainer(package, finder, *callbacks).fit(lit)
            sizes.append((finder.optimal_batch_size, lit.batch_size))
        assert sizes[0] == sizes[1]

    def test_averages_of_weights_are_as_without_it(self, package):
        makers = [lambda: package.callbacks.StochasticWeightAveraging(1e-3, swa_epoch_start=1)]
        if hasattr(package.callbacks, "EMAWeightAveraging"):  # lightning has it from 2.6 on
            makers.append(lambda: package.callbacks.EMAWeightAveraging(decay=0.5))
        lit, how = make_lit(package, "batch_norm"), {"package": package, "max_epochs": 3}
        for make in makers:
            plain = fit(lit, make(), **how)
            for callback in (exact(), only("auto")):
                assert_same(plain, fit(lit, make(), callback, **how))

    def test_accumulation_scheduler_is_kept(self, package):
        callback, scheduler = exact(), package.callbacks.GradientAccumulationScheduler
        plain = fit(make_lit(package), scheduler({0: 2}), package=package)
        assert_same(plain, fit(make_lit(package), scheduler({0: 2}), callback, package=package))
        assert "set by the Trainer" in details(callback, "accumulate_grad_batches")

    @pytest.mark.parametrize("algorithm", ["norm", "value"])
    def test_gradient_clipping(self, package, algorithm):
        settings = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
        plain = fit(make_lit(package), package=package, **settings)
        assert_same(plain, fit(make_lit(package), exact(), package=package, **settings))
        fit(make_lit(package), MemSaveCallback(), package=package, **settings)

    @pytest.mark.usefixtures("any_saving_counts")
    def test_manual_optimization(self, package):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.model(batch)
            self.manual_backward(loss)
            optimizer.step()
            return {"loss": loss.detach()}

        lit = make_lit(package, automatic_optimization=False, training_step=training_step)
        assert_same(fit(lit, package=package), fit(lit, exact(), package=package))
        callback = MemSaveCallback()
        fit(lit, callback, package=package)
        assert status(callback, "optimizer") == "on"

    def test_a_module_built_in_configure_model(self, package):
        plain, callback = fit(late(make_lit(package)), package=package), exact()
        assert_same(plain, fit(late(make_lit(package)), callback, package=package))
        assert status(callback, "activation_checkpointing") == "on"


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_memory_falls_and_precision_is_chosen():
    peaks = {}
    for key, callback in (
        ("plain", MemSaveCallback(None, optimizer=None, precision=None)),
        ("saving", MemSaveCallback()),
    ):
        model = nn.Sequential(
            *[nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(8)]
        )
        lit = make_lit(
            model=model,
            training_step=lambda self, batch, batch_idx: (
                self.model(batch.repeat(1, 4).unsqueeze(1).expand(-1, 256, -1)).square().mean()
            ),
            validation_step=no_step,
        )
        fit(lit, callback, accelerator="gpu")
        peaks[key] = json.loads(Path("memsave_report.json").read_text())["measured"]["peak_bytes"]
    assert peaks["saving"] < 0.5 * peaks["plain"]
    row = rows_of(callback)["precision"]
    # float16 overflows in models that bfloat16 trains: it has to be asked for.
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    assert (row.status, row.value) == (
        ("on", "bf16-mixed") if has_bf16 else ("unchanged", "32-true")
    )


@pytest.mark.parametrize("error", [None, RuntimeError("in the middle")])
def test_the_monitor_is_among_the_callbacks_while_a_fit_lasts(package, error):
    seen = []

    def look(self, trainer, *_):
        seen.append([type(c) for c in trainer.callbacks])
        if error is not None:
            raise error

    looking, callback = callback_with(package, on_train_batch_start=look), MemSaveCallback()
    trainer = make_trainer(package, looking, callback)
    before = sorted(map(id, trainer.callbacks))
    with contextlib.nullcontext() if error is None else pytest.raises(RuntimeError):
        trainer.fit(make_lit(package))
    assert seen[0][:3] == [MemSaveCallback, GPUMemoryMonitor, type(looking)]
    assert sorted(map(id, trainer.callbacks)) == before
    assert summary_of(callback) is not None


def test_no_warning_is_given_where_all_is_well():
    with warnings.catch_warnings():
        warnings.simplefilter("error", MemsaveWarning)
        fit(make_lit(), MemSaveCallback())
