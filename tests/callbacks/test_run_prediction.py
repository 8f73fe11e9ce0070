"""The prediction that each run makes of itself: how good it is, and that it leaves no trace."""

import json
import logging
import random
import re
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, cast

import lightning.pytorch
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from lightning_memsave.callbacks.memory_monitor import GPUMemoryMonitor
from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.callbacks.run_prediction import effective_settings
from lightning_memsave.core.out_of_memory import is_out_of_memory
from lightning_memsave.prediction import predict as prediction
from lightning_memsave.techniques.optimizer_in_backward.technique import OptimizerInBackward
from lightning_memsave.techniques.optimizer_step import ACTIVE_UPDATES
from tests.callbacks.lit import (
    Vectors,
    WithLoss,
    callback_with,
    loader,
    make_lit,
    make_trainer,
    model_step,
)
from tests.cases import WIDTH, make_model

HOOKS = (
    *("prepare_data", "setup", "configure_model", "configure_callbacks", "on_fit_start"),
    *("on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end"),
    *("on_fit_end", "on_save_checkpoint", "on_load_checkpoint", "teardown", "on_exception"),
    *("train_dataloader", "val_dataloader", "on_validation_start", "on_validation_end"),
)


def conv_net() -> nn.Module:
    def loss_of(model: Any, x: Tensor) -> Tensor:
        images = x.repeat_interleave(48, 1).view(-1, 3, 32, 32)
        hidden = model[0](images).mean((2, 3))
        return nn.functional.cross_entropy(model[1](hidden), torch.arange(len(x)) % 10)

    stages = [
        nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        for _ in range(3)
    ]
    images = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *stages)
    return WithLoss(nn.Sequential(images, nn.Linear(32, 10)), loss_of)


def roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(
        vocab_size=300,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=WIDTH + 2,
    )
    return WithLoss(
        RobertaForMaskedLM(config),
        lambda model, ids: model(ids, attention_mask=ids != config.pad_token_id, labels=ids).loss,
    )


def tokens(self: Any = None) -> DataLoader[Tensor]:
    ids = torch.randint(2, 300, (16, 32), generator=torch.Generator().manual_seed(4))
    ids[:, 24:] = 1  # padding
    return DataLoader(cast(Dataset[Tensor], ids), batch_size=4)


def measured_and_predicted() -> tuple[Any, Any]:
    report = json.loads(Path("memsave_report.json").read_text())
    return report["measured"], report["predicted"]


def fit(lit: Any, callback: Any, package: Any = lightning.pytorch, **settings: Any) -> Any:
    trainer = make_trainer(package, callback, **({"max_steps": 3} | settings))
    trainer.fit(lit)
    return trainer


def assert_is_predicted(callback: Any, expected: bool = True) -> None:
    assert (callback.prediction is not None) == expected, callback._prediction.note


def assert_peak(rel: float = 1e-3) -> tuple[Any, Any]:
    measured, predicted = measured_and_predicted()
    assert predicted["peak_bytes"] == pytest.approx(measured["peak_bytes"], rel=rel)
    return measured, predicted


class TestPredictedEqualsMeasured:
    @pytest.mark.parametrize("make", [conv_net, roberta], ids=["conv", "roberta"])
    def test_bare_callback(self, package, make):
        callback = MemSaveCallback()
        lit = make_lit(package, make())
        if make is not conv_net:
            lit.train_dataloader = lit.val_dataloader = tokens
        fit(lit, callback, package)
        assert callback.prediction.guesses == ()
        measured, predicted = assert_peak()
        assert predicted["error"] == predicted["peak_bytes"] / measured["peak_bytes"] - 1
        assert callback.prediction.peak_bytes == predicted["peak_bytes"]
        for found in (measured, predicted):
            assert found["peak_bytes"] == sum(found["by_category"].values())
        for name, num_bytes in measured["by_category"].items():
            assert predicted["by_category"][name] == pytest.approx(num_bytes, rel=0.01, abs=64)

    @pytest.mark.parametrize(
        "settings",
        [
            {"accumulate_grad_batches": 3, "max_steps": 2},
            {"precision": "bf16-true"},
            {"gradient_clip_val": 0.1},
        ],
        ids=str,
    )
    def test_settings_of_the_trainer(self, settings):
        fit(make_lit(model="dropout"), MemSaveCallback(optimizer=None), **settings)
        assert_peak()

    def test_buffers_that_a_repeated_batch_needs_are_not_said_to_be_on_the_host(self, capsys):
        lit = make_lit(model="dropout")
        lit.register_buffer("betas", torch.linspace(0, 1, 1000))
        fit(lit, MemSaveCallback(optimizer=None))
        assert "on the host" not in capsys.readouterr().out

    @pytest.mark.parametrize("kind", ["fold", "mean of patches", "patches far apart"])
    def test_storages_that_are_larger_than_their_tensors(self, kind):
        """torch resizes what was made for the input of `fold`, and of the backward of `unfold`."""

        def loss_of(model: Any, x: Tensor) -> Tensor:
            functional = nn.functional
            images = model(x.repeat_interleave(64, 1).view(-1, 4, 32, 32))
            if kind == "patches far apart":
                return functional.unfold(images, 2, stride=4).mean(-1).square().mean()
            patches = functional.unfold(images, 3, padding=1)
            if kind == "mean of patches":
                return patches.mean(-1).square().mean()
            return functional.fold(patches, (32, 32), 3, padding=1).square().mean()

        lit = make_lit(model=WithLoss(nn.Conv2d(4, 4, 3, padding=1), loss_of))
        fit(lit, MemSaveCallback(preset="off", micro_batch_size=None), limit_val_batches=0)
        assert_peak()

    @pytest.mark.parametrize("window", [2, 3])
    def test_gradients_of_a_window_beside_updates_in_backward(self, window):
        """All are there in the batches between, and in the last one they go one by one."""

        def loss_of(model: Any, x: Tensor) -> Tensor:
            return model[-1](model[:-1](x.unsqueeze(1).repeat(1, 64, 1)).mean(1)).square().mean()

        blocks = [nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True) for _ in range(3)]
        lit = make_lit(model=WithLoss(nn.Sequential(*blocks, nn.Linear(WIDTH, 512)), loss_of))
        settings = {"max_epochs": 3, "max_steps": 6, "log_every_n_steps": 1}
        fit(lit, MemSaveCallback(preset="bitwise"), accumulate_grad_batches=window, **settings)
        assert_peak()

    @pytest.mark.parametrize("window", [1, 2])
    def test_gradients_wait_on_the_device_where_that_does_not_raise_the_peak(self, window):
        peaks, hosts, weights = [], [], []

        def on_train_batch_end(self, *args: Any) -> None:
            copies = ACTIVE_UPDATES[self.optimizers().optimizer].held._copies.values()
            self.host_bytes = sum(copy.untyped_storage().nbytes() for copy in copies)

        for kept_bytes in (0, None):
            technique = OptimizerInBackward(kept_bytes=kept_bytes)
            callback = MemSaveCallback(preset="off", optimizer_in_backward=technique)
            torch.manual_seed(1)
            lit = make_lit(model=wide(), on_train_batch_end=on_train_batch_end)
            fit(lit, callback, gradient_clip_val=0.1, accumulate_grad_batches=window)
            measured, predicted = assert_peak()
            assert predicted["host_bytes"] == lit.host_bytes
            peaks.append(measured["peak_bytes"])
            hosts.append(lit.host_bytes)
            weights.append(lit.model.state_dict())
        assert peaks[0] == peaks[1]
        assert hosts[1] < hosts[0]
        assert callback.prediction.kept_gradient_bytes > 0
        assert all(torch.equal(a, b) for a, b in zip(*(w.values() for w in weights), strict=True))

    def test_modules_that_skip_their_first_batch_or_leave_the_epoch(self):
        skips = {"on_train_batch_start": lambda self, batch, batch_idx: -1}
        fit(make_lit(**skips), callback := MemSaveCallback(), max_steps=-1, max_epochs=1)
        assert "No batch was trained on" in callback._prediction.note

    @pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
    @pytest.mark.parametrize("is_of_callback", [False, True], ids=["module", "callback"])
    def test_optimizers_that_start_hooks_switch_to_training(self, hook, is_of_callback):
        class Switched(torch.optim.AdamW):
            is_training = False

            def train(self) -> None:
                self.is_training = True

            def eval(self) -> None:
                self.is_training = False

            def step(self, closure: Any = None) -> Any:
                assert self.is_training, "not in train mode"
                return super().step(closure)

        def switch(owner: Any, trainer: Any = None, *_: Any) -> None:
            for optimizer in (trainer or owner.trainer).optimizers:
                optimizer.train()

        configured = {"configure_optimizers": lambda self: Switched(self.parameters(), lr=1e-3)}
        methods = {} if is_of_callback else {hook: switch}
        lit = make_lit(training_step=model_step, **configured, **methods)
        switching = lightning.pytorch.Callback()
        if is_of_callback:
            setattr(switching, hook, lambda trainer, module: switch(None, trainer))
        callback = MemSaveCallback(preset="off")
        make_trainer(lightning.pytorch, callback, switching, max_steps=3).fit(lit)
        assert_is_predicted(callback)
        assert_peak(rel=0)

    def test_manual_optimization_with_two_optimizers(self):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.model(batch))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            blocks = torch.optim.SGD(self.model.blocks.parameters(), lr=0.1, momentum=0.9)
            return [blocks, torch.optim.AdamW(self.model.head.parameters())]

        lit = make_lit(
            automatic_optimization=False,
            training_step=training_step,
            configure_optimizers=configure_optimizers,
        )
        fit(lit, MemSaveCallback(), max_steps=8)
        assert_peak()

    def test_batches_that_had_to_shrink_before(self):
        callback = MemSaveCallback(activation_checkpointing=None, optimizer=None)
        fit(make_lit(model=wide()), callback, max_steps=2)
        whole = callback.prediction.peak_bytes
        callback._micro_batches.size = 1  # as a checkpoint would set it
        fit(make_lit(model=wide()), callback, max_steps=2)
        _, predicted = assert_peak(rel=0.01)
        assert predicted["peak_bytes"] < 0.7 * whole


def wide() -> nn.Module:
    """Most memory is in activations."""

    def loss_of(model: Any, x: Tensor) -> Tensor:
        hidden = model[0](x).repeat(1, 64).view(-1, 64, 32)
        for _ in range(8):
            hidden = hidden.sin()
        return model[1](hidden).mean()

    return WithLoss(nn.Sequential(nn.Linear(WIDTH, 32), nn.Linear(32, 1)), loss_of)


class Awkward(nn.Module):
    """Draws from every generator, and keeps what it sees in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = make_model("batch_norm")
        self.first = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.randn_like(x) * random.random() + float(np.random.rand())
        return self.blocks(self.dropout(self.first(x)))


class TestTrainingIsTheSame:
    @pytest.mark.parametrize("bare", [False, True], ids=["no-technique", "bare"])
    def test_bit_for_bit(self, package, bare):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.model(batch)
            self.mean.update(loss.detach())
            self.log("mean", self.mean)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.seen.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            steps = self.trainer.estimated_stepping_batches  # of the Trainer of the fit
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / self.trainer.max_epochs)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def run(predict: bool) -> dict[str, Any]:
            torch.manual_seed(3)
            random.seed(3)
            np.random.seed(3)
            steps = {"training_step": training_step, "configure_optimizers": configure_optimizers}
            lit = make_lit(package, Awkward(), **steps)
            lit.mean, lit.seen = MeanMetric(), []
            off: Any = {} if bare else {"activation_checkpointing": None, "optimizer": None}
            callback = MemSaveCallback(predict=predict, **off)
            trainer = make_trainer(package, callback, max_epochs=2, log_every_n_steps=1)
            trainer.fit(lit)
            assert_is_predicted(callback, predict)
            schedule = trainer.lr_scheduler_configs[0].scheduler
            return {
                "losses": lit.seen,
                "state": lit.state_dict(),
                "optimizer": trainer.optimizers[0].state_dict(),
                "logged": dict(trainer.logged_metrics),
                "rates": [*schedule.get_last_lr(), schedule.last_epoch],
                "random": [torch.rand(1).item(), random.random(), np.random.rand()],
            }

        torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)

    @pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
    def test_resume_in_the_middle_of_an_epoch(self, package, tmp_path):
        def run(predict: bool, *, resumed: bool) -> tuple[list[float], dict[str, Any]]:
            losses: list[float] = []
            lit = make_lit(package, on_train_batch_end=lambda s, o, b, i: losses.append(o["loss"]))
            callback = MemSaveCallback(predict=predict)
            steps = {"max_steps": 6 if resumed else 3, "max_epochs": -1}
            trainer = make_trainer(package, callback, **steps)
            trainer.fit(lit, ckpt_path=tmp_path / "middle.ckpt" if resumed else None)
            if not resumed:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")
            assert trainer.global_step == (6 if resumed else 3)
            assert_is_predicted(callback, predict)
            return losses[-3:], lit.state_dict()

        run(True, resumed=False)
        torch.manual_seed(0)
        predicted = run(True, resumed=True)
        torch.manual_seed(0)
        torch.testing.assert_close(run(False, resumed=True), predicted, rtol=0, atol=0)

    def test_a_batch_of_an_own_class_is_not_changed(self):
        class Batch:
            def __init__(self, x: Tensor) -> None:
                self.x = x
                self.seen: list[int] = []

        batches = []

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            batch.seen.append(batch_idx)
            batch.x = batch.x * 2
            batches.append(batch)
            return self.model(batch.x)

        callback = MemSaveCallback(optimizer=None)
        data = DataLoader(Vectors(8), batch_size=4, collate_fn=lambda x: Batch(torch.stack(x)))
        trainer = make_trainer(lightning.pytorch, callback, max_epochs=1)
        trainer.fit(make_lit(training_step=training_step), data)
        assert_is_predicted(callback)
        real = batches[-2:]
        assert [batch.seen for batch in real] == [[0], [1]]
        assert all(type(batch.x) is Tensor for batch in real)


def spy_on(cls: type, calls: list[str]) -> type:
    """A subclass that writes down which hooks are called."""

    def note(name: str) -> Any:
        def method(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return getattr(super(spy, self), name)(*args, **kwargs)

        return method

    spy = type("Spy", (cls,), {name: note(name) for name in HOOKS if hasattr(cls, name)})
    return spy


class TestNoTrace:
    @pytest.mark.parametrize("ends_well", [True, False])
    def test_hooks_are_called_as_often(self, package, ends_well):
        def run(predict: bool) -> list[str]:
            calls: list[str] = []

            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                if batch_idx == 2 and not ends_well:
                    raise ValueError
                return self.model(batch)

            lit = make_lit(package, training_step=training_step)
            lit.__class__ = spy_on(type(lit), calls)
            callback = MemSaveCallback(predict=predict)
            own = spy_on(package.Callback, calls)()
            settings = {"max_epochs": 2, "default_root_dir": f"runs-{predict}"}
            trainer = make_trainer(package, callback, own, enable_checkpointing=True, **settings)
            try:
                trainer.fit(lit)
            except ValueError:
                assert not ends_well
            assert_is_predicted(callback, predict)
            return calls

        assert run(True) == run(False)

    def test_callbacks_that_the_module_configures_take_no_part(self, package):
        calls: list[str] = []
        own = callback_with(package, on_train_batch_start=lambda *_: calls.append("batch"))
        lit = make_lit(package, configure_callbacks=lambda self: [own])
        fit(lit, callback := MemSaveCallback(), package)
        assert callback.prediction is not None
        assert calls == ["batch"] * 3

    def test_nothing_is_said_but_one_line(self, package, capfd, caplog):
        user = logging.getLogger("somebody")

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.log("other", 1.0, prog_bar=True)
            print("printed")  # noqa: T201
            print("complained", file=sys.stderr)  # noqa: T201
            user.warning("logged")
            warnings.warn("warned", stacklevel=1)
            torch.ones(2).resize_(1)  # torch warns of it once
            return self.model(batch)

        def run(predict: bool) -> tuple[str, str, list[str], list[str]]:
            caplog.clear()
            lit = make_lit(package, training_step=training_step)
            with caplog.at_level(logging.INFO), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                callback = MemSaveCallback(predict=predict)
                fit(lit, callback, package)
            assert_is_predicted(callback, predict)
            return (
                *capfd.readouterr(),
                [re.sub(r"in \d+ ms", "in some ms", r.getMessage()) for r in caplog.records],
                [str(w.message) for w in caught],
            )

        predicted, plain = run(True), run(False)
        line = [message for message in predicted[2] if message.startswith("Predicted peak memory")]
        assert len(line) == 1
        predicted[2].remove(line[0])
        assert predicted[2] == plain[2]
        before, _, after = predicted[0].partition("Memory of this fit")  # of which times differ
        assert before == plain[0].partition("Memory of this fit")[0]
        assert "predicted" in after
        assert predicted[0].count("printed") == predicted[1].count("complained") == 3
        assert predicted[3].count("warned") == plain[3].count("warned") == 3

    def test_module_trainer_and_process_are_as_before(self, package):
        seen: list[Any] = []

        def state_of(trainer: Any, lit: Any) -> Any:
            return (
                vars(lit).keys(),
                {name: vars(part).keys() for name, part in lit.named_modules()},
                [id(t) for t in lit.state_dict(keep_vars=True).values()],
                lit.trainer is trainer,
                [type(c) for c in trainer.callbacks],
                trainer.global_step,
                {n: signal.getsignal(n) for n in signal.valid_signals()},
                threading.active_count(),
                nn.Module._apply,
                Tensor.__deepcopy__,
                torch.UntypedStorage.resize_,
                [handler.filters[:] for handler in logging.root.handlers],
                sys.stdout,
                sys.stderr,
                warnings.filters[:],
            )

        class Watching(MemSaveCallback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                seen.append(state_of(trainer, pl_module))
                super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
                seen.append(state_of(trainer, pl_module))

        lit = make_lit(package, roberta())
        lit.train_dataloader = lit.val_dataloader = tokens
        fit(lit, callback := Watching(), package, max_steps=1)
        assert callback.prediction is not None
        assert seen[0] == seen[1]

    def test_modes_of_the_user_do_not_see_it(self):
        counts: list[int] = []

        class Counter(TorchDispatchMode):
            num_calls = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                Counter.num_calls += 1
                return func(*args, **(kwargs or {}))

        for predict in (True, False):
            Counter.num_calls = 0
            # The proof of the loss may need no more memory than was predicted, and measures it.
            off: dict[str, Any] = {"optimizer": None, "micro_batch_size": None}
            callback = MemSaveCallback(predict=predict, **off)
            with Counter():
                fit(make_lit(), callback, max_steps=2)
            assert_is_predicted(callback, predict)
            counts.append(Counter.num_calls)
        assert counts[0] == counts[1]


def note_of(callback: MemSaveCallback) -> str:
    assert callback.prediction is None
    report = json.loads(Path("memsave_report.json").read_text())
    assert report["predicted"] == {"note": callback._prediction.note}
    assert report["measured"]["num_steps"] == 3
    return callback._prediction.note


def test_is_asked_for_with_the_first_batch_only(monkeypatch):
    """What is in force takes time to find out, which no step should take."""
    asked, original = [], MemSaveCallback.effective_arguments

    def counted(self):
        asked.append(self)
        return original(self)

    monkeypatch.setattr(MemSaveCallback, "effective_arguments", counted)
    callback = MemSaveCallback(report=False)
    fit(make_lit(), callback)
    assert asked == [callback]


class TestWhatCannotBePredicted:
    """It trains all the same, and the report says why."""

    def test_real_data_is_needed(self, package, capsys, caplog):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.model(batch) * float(batch.detach().numpy().max())

        line = training_step.__code__.co_firstlineno + 1
        callback = MemSaveCallback(optimizer=None)
        with caplog.at_level(logging.INFO):
            fit(make_lit(package, training_step=training_step), callback, package)
        note = note_of(callback)
        assert note == (
            f"test_run_prediction.py, line {line} needs the values of a tensor, which only a real "
            "step has: `return self.model(batch) * float(batch.detach().numpy().max())`"
        )
        assert caplog.messages.count(f"Memory is not predicted: {note}.") == 1
        said = capsys.readouterr().out
        assert "  not predicted: why is in the log, at the start of fit\n" in said
        assert note not in said

    def test_no_copy_can_be_made(self):
        def refuse(self) -> Any:
            raise TypeError("no state")

        fit(make_lit(__getstate__=refuse), callback := MemSaveCallback(optimizer=None))
        assert "`Lit` cannot be copied (TypeError: no state)" in note_of(callback)

    def test_compiled(self):
        lit = make_lit()
        lit.model.blocks[0].compile(backend="eager")
        fit(lit, callback := MemSaveCallback(optimizer=None, activation_checkpointing=None))
        note = callback._prediction.note
        assert "torch.compile" in note
        assert measured_and_predicted()[1] == {"note": note}

    def test_time_limit(self):
        fit(make_lit(), callback := MemSaveCallback(optimizer=None, predict=0.001))
        assert "more than 0.001 seconds" in note_of(callback)
        assert "`predict=`" in note_of(callback)

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (SystemExit("bye"), "SystemExit: bye"),
            (RuntimeError("first\nsecond"), "RuntimeError: first"),
            (AssertionError(), "AssertionError"),
            (TimeoutError("no answer"), ""),  # the user's own is told apart
        ],
        ids=repr,
    )
    def test_the_users_code_fails(self, error, reason):
        fit(failing(error), callback := MemSaveCallback(optimizer=None))
        note = note_of(callback)
        if not reason:
            assert note == "TimeoutError: no answer"
            return
        assert note.startswith("test_run_prediction.py, line ")
        assert f" raises {reason} where the step runs on fake tensors" in note

    def test_an_interruption_ends_the_run(self, package):
        seen: list[BaseException] = []
        seeing = callback_with(package, on_exception=lambda *args: seen.append(args[-1]))
        before = signal.getsignal(signal.SIGINT)
        trainer = make_trainer(package, MemSaveCallback(), seeing, max_steps=3)
        try:
            with pytest.raises(SystemExit):
                trainer.fit(failing(KeyboardInterrupt(), package))
        finally:
            signal.signal(signal.SIGINT, before)  # Lightning ignores it from then on
        assert [type(error) for error in seen] == [KeyboardInterrupt]
        assert trainer.global_step == 0

    def test_precision_and_device(self):
        trainer = make_trainer(lightning.pytorch, plugins=[lightning.pytorch.plugins.Precision()])
        trainer.strategy.precision_plugin.precision = "transformer-engine"
        callback = MemSaveCallback(optimizer=None)
        trainer.callbacks.append(callback)
        trainer.fit_loop.epoch_loop.max_steps = 3
        trainer.fit(make_lit())
        assert note_of(callback) == "not for precision transformer-engine"


def failing(error: BaseException, package: Any = lightning.pytorch) -> Any:
    """A module that can only train on tensors with data."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if type(batch) is not Tensor:
            raise error
        return self.model(batch)

    return make_lit(package, training_step=training_step)


class TestSwitch:
    def test_off(self, capsys):
        fit(make_lit(), callback := MemSaveCallback(optimizer=None, predict=False))
        assert callback.prediction is None
        assert measured_and_predicted()[1] is None
        assert "predicted" not in capsys.readouterr().out


class TestSummary:
    def test_both_figures_are_printed(self, package, capsys):
        fit(make_lit(package), MemSaveCallback(optimizer=None), package)
        measured, predicted = measured_and_predicted()
        lines = capsys.readouterr().out.splitlines()
        (peak,) = [line for line in lines if line.startswith("  peak memory: ")]
        assert f", predicted 1.15 MiB ({100 * predicted['error']:+.2f} %)" in peak
        zero = ("buffer", "other", "weight copy")
        assert not any(line.strip().startswith(zero) for line in lines)
        assert measured["by_category"]["buffer"] == 0

    def test_beside_a_monitor_of_the_users_own(self, package, capsys):
        """Which forgets the prediction in a fit without one."""
        for order in (0, 1):
            monitor, callback = GPUMemoryMonitor(), MemSaveCallback(optimizer=None)
            callbacks = (monitor, callback) if order else (callback, monitor)
            make_trainer(package, *callbacks, max_steps=3).fit(make_lit(package))
            assert monitor.summary.prediction is callback.prediction is not None
            assert monitor.summary.prediction_error == pytest.approx(0, abs=1e-3)
            assert capsys.readouterr().out.count("predicted 1.15 MiB") == 1
            measured, predicted = measured_and_predicted()
            assert measured["peak_bytes"] == monitor.summary.peak_bytes
            assert predicted["error"] == monitor.summary.prediction_error
        fit(make_lit(package), monitor, package)
        assert monitor.summary.prediction is None
        assert "predicted" not in capsys.readouterr().out

    def test_time_does_not_count_the_prediction(self, monkeypatch):
        def slow(question: Any) -> Any:
            time.sleep(0.5)
            raise ValueError("no")

        monkeypatch.setattr("lightning_memsave.prediction.predict.predict", slow)
        start = time.perf_counter()
        fit(make_lit(), callback := MemSaveCallback(optimizer=None), max_steps=1)
        of_everything = time.perf_counter() - start
        assert callback._prediction.seconds >= 0.5
        assert callback.monitor.summary.seconds <= of_everything - 0.5


class TestFits:
    def test_each_fit_has_its_own(self):
        callback = MemSaveCallback(optimizer=None)
        fit(make_lit(), callback)
        first = callback.prediction
        fit(make_lit(model=conv_net()), callback)
        assert callback.prediction is not first
        assert_peak()
        fit(failing(ValueError("no")), callback)
        assert "ValueError: no" in note_of(callback)

    def test_an_error_in_the_first_batch(self):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if type(batch) is Tensor:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return self.model(batch)

        lit = make_lit(training_step=training_step)
        callback = MemSaveCallback(optimizer=None, micro_batch_size=None)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            fit(lit, callback)
        assert is_out_of_memory(caught.value)
        measured, predicted = measured_and_predicted()
        assert measured["num_steps"] == 0
        assert predicted["peak_bytes"] == callback.prediction.peak_bytes

    def test_a_fit_without_batches(self):
        trainer = make_trainer(lightning.pytorch, callback := MemSaveCallback(), max_steps=3)
        lit = make_lit()
        trainer.fit_loop.epoch_loop.trainer.limit_train_batches = 0
        trainer.fit(lit, loader())
        assert callback.prediction is None
        assert callback._prediction.note == ""


@pytest.mark.parametrize(
    "loss_of", [lambda m, x: m(x).square().mean(), lambda m, x: m(x).std(0).sum()]
)
def test_copies_of_buffers_for_a_repeated_batch_need_no_memory_of_the_device(loss_of):
    """Neither where the loss is of samples nor where it is not."""
    model = WithLoss(nn.Linear(WIDTH, WIDTH), loss_of)
    model.register_buffer("table", torch.zeros(512, 512))
    fit(make_lit(model=model), callback := MemSaveCallback())
    assert callback.prediction.guesses == ()
    assert_peak()


def test_details_of_what_gave_way_are_off_in_the_prediction():
    belonging = {"blocks": "Block", "host_budget": "1GiB"}
    found = effective_settings(dict(MemSaveCallback().arguments) | belonging, [], None)
    assert (found["blocks"], found["host_budget"]) == (None, None)


class LoadedInWorkers(Dataset[Tensor]):
    """Counts over all processes the samples that have been loaded."""

    def __init__(self) -> None:
        self.num_loaded = torch.zeros((), dtype=torch.long).share_memory_()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        self.num_loaded += 1
        return Vectors().data[index]


def test_the_next_batches_load_meanwhile(package, monkeypatch):
    """Workers of the DataLoader are there: they load three batches more while it predicts."""
    data, batch_size, seen = LoadedInWorkers(), 4, []
    lit = make_lit(
        package,
        train_dataloader=lambda self: DataLoader(
            data, batch_size, num_workers=1, prefetch_factor=4
        ),
    )
    predict = prediction.predict

    def predict_when_loaded(step):
        until = time.monotonic() + 60
        while data.num_loaded < 4 * batch_size and time.monotonic() < until:
            time.sleep(0.01)
        seen.append(int(data.num_loaded))
        return predict(step)

    monkeypatch.setattr(prediction, "predict", predict_when_loaded)
    callback = MemSaveCallback(report=False)
    trainer = make_trainer(package, callback, limit_val_batches=0, limit_train_batches=2)
    trainer.fit(lit)
    assert callback.prediction is not None
    (num_loaded,) = seen
    assert num_loaded >= 4 * batch_size
