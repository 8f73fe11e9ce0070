"""Code that ordinary projects have is predicted, and the prediction is right."""

import math
import queue
import threading
from dataclasses import replace
from functools import partial, update_wrapper
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, cast

import lightning.pytorch
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_memsave.callbacks.memory_summary import MemorySummary
from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.prediction.work import Work
from tests.callbacks.lit import WithLoss, make_lit, make_trainer, model_step
from tests.callbacks.test_run_prediction import (
    assert_is_predicted,
    assert_peak,
    fit,
    measured_and_predicted,
    wide,
)
from tests.cases import WIDTH, Block
from tests.helpers import set_clock


def assert_predicted(callback: MemSaveCallback, abs_bytes: int = 64) -> None:
    assert_is_predicted(callback)
    measured, predicted = assert_peak()
    for name, num_bytes in measured["by_category"].items():
        assert predicted["by_category"][name] == pytest.approx(
            num_bytes, rel=0.01, abs=abs_bytes
        ), name


def test_metrics_logged_in_training_and_validation():
    """Lightning remembers their names under their ids, which those of a copy are not."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        self.train_acc(logits, batch[1])
        self.log("train/acc", self.train_acc, on_step=True, on_epoch=True)
        return nn.functional.cross_entropy(logits, batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.val_acc(self.model(batch[0]), batch[1])
        self.log("val/acc", self.val_acc)

    steps = {"training_step": training_step, "validation_step": validation_step}
    lit = make_lit(model=nn.Linear(WIDTH, 3), **steps)
    lit.train_acc, lit.val_acc = MulticlassAccuracy(3), MulticlassAccuracy(3)
    data = DataLoader(TensorDataset(torch.randn(24, WIDTH), torch.arange(24) % 3), batch_size=4)
    callback = MemSaveCallback(None, optimizer=None)
    make_trainer(lightning.pytorch, callback, max_steps=3).fit(lit, data, data)
    measured, predicted = measured_and_predicted()
    # The first batch, which is not predicted, keeps the four counts of the metric from before it,
    # and there is no last loss yet.
    assert measured["peak_bytes"] - predicted["peak_bytes"] == 4 * 3 * 8 - 4


class Owner(nn.Module):
    """A model that holds what projects hold beside parameters."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.__dict__.update(held)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def nothing() -> MemSaveCallback:
    """The callback without techniques."""
    return MemSaveCallback(None, optimizer=None, micro_batch_size=None)


class Uncopied:
    """Its copies are counted."""

    num_copies = 0

    def __deepcopy__(self, memo: Any) -> "Uncopied":
        type(self).num_copies += 1
        return Uncopied()

    def __reduce__(self) -> Any:
        type(self).num_copies += 1
        return Uncopied, ()


class TestWhatAModuleHolds:
    def test_is_shared_where_it_is_large_and_never_written_into(self):
        """Nor is anything waited for, or thrown away that acts when it is."""
        ended: list[int] = []

        class Server:
            def __del__(self) -> None:
                ended.append(id(self))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            held = self.model
            shared.append((held.corpus.base is corpus, held.bank[0] is bank[0]))
            held.small[batch_idx] += 1
            held.bank[batch_idx].add_(1)
            held.running.add_(1)
            held.seen["steps"] += 1
            with held.lock, held.condition:
                held.file.write(f"{batch_idx}\n")
                held.queue.put(batch_idx)
            return held(batch + int(held.corpus[batch_idx]))

        shared: list[Any] = []
        corpus, small = np.zeros(2**21, dtype=np.uint8), np.zeros(4)
        bank, running = [torch.zeros(2) for _ in range(2000)], torch.zeros(3, dtype=torch.int64)
        filled: queue.Queue[int] = queue.Queue(3)  # more than three would wait for ever
        lit, server, seen = make_lit(training_step=training_step), Server(), {"steps": 0}
        with Path("log.txt").open("w") as file:
            lit.model = Owner(
                corpus=corpus,
                small=small,
                bank=bank,
                running=running,
                seen=seen,
                texts=[Uncopied() for _ in range(2000)],
                server=server,
                lock=threading.Lock(),
                condition=threading.Condition(),
                file=file,
                queue=filled,
            )
            fit(lit, callback := nothing())
        assert_predicted(callback)
        assert shared[0] == (True, True)
        assert Uncopied.num_copies == 0
        assert small.tolist() == [1, 1, 1, 0]
        assert [bank[i].tolist() for i in range(4)] == [[1, 1], [1, 1], [1, 1], [0, 0]]
        assert running.tolist() == [3, 3, 3]
        assert seen == {"steps": 3}
        assert Path("log.txt").read_text() == "0\n1\n2\n"
        assert [filled.get() for _ in range(3)] == [0, 1, 2]
        assert ended == []

    def test_the_time_limit_is_kept_while_copying(self, monkeypatch):
        now_s = [0.0]
        set_clock(monkeypatch, lambda: now_s[0])

        class Slow:
            num_copies = 0

            def __reduce__(self) -> Any:
                Slow.num_copies += 1
                now_s[0] += 0.05
                return Slow, ()

        lit = make_lit(model=Owner(slow=[Slow() for _ in range(100)]))
        fit(lit, callback := MemSaveCallback(None, optimizer=None, predict=0.3))
        assert callback.prediction is None
        assert "more than 0.3 seconds" in callback._prediction.note
        assert Slow.num_copies < 20

    def test_functions_that_close_over_it(self):
        """A hook that keeps features, as one writes it: those of the copy are the copy's."""
        kept: list[Tensor] = []

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
                self.features = kept
                self.first.register_forward_hook(lambda m, i, output: kept.append(output))
                self.loss = lambda: self.head(self.features.pop()).square().mean()

            def forward(self, x: Tensor) -> Tensor:
                self.first(x)
                return self.loss()

        fit(make_lit(model=Net()), callback := nothing())
        assert_predicted(callback)
        assert kept == []

    def test_code_that_reaches_the_real_module_leaves_no_gradient_there(self):
        gradients: list[Any] = []
        lit = make_lit(
            model=Owner(),
            training_step=lambda self, batch, batch_idx: REAL[0](batch),
            on_train_batch_start=lambda self, batch, batch_idx: gradients.append(
                REAL[0].linear.weight.grad
            ),
        )
        REAL[:] = [lit.model]
        fit(lit, callback := nothing(), max_steps=1)
        assert_is_predicted(callback)
        assert gradients[-1] is None  # the ones before are those of the prediction


REAL: list[Any] = []


def set_method(lit: Any) -> None:
    """As LightningCLI does for ``--optimizer=AdamW``."""
    optimizer = torch.optim.AdamW(lit.parameters())

    def configure(module: Any, optimizer: Any) -> Any:
        return optimizer

    wrapped = update_wrapper(partial(configure, optimizer=optimizer), configure)
    lit.configure_optimizers = MethodType(wrapped, lit)


def set_closure(lit: Any) -> None:
    optimizer = torch.optim.AdamW(lit.parameters())

    def configure_optimizers() -> Any:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    lit.configure_optimizers = configure_optimizers


def set_lambda_with_a_global_name(lit: Any) -> None:
    """As at the top level of a script, where nothing is closed over."""
    REAL[:] = [lit]
    lit.configure_optimizers = lambda: torch.optim.AdamW(REAL[0].parameters())


def set_lambda_with_a_global_optimizer(lit: Any) -> None:
    REAL[:] = [torch.optim.AdamW(lit.parameters())]
    lit.configure_optimizers = lambda: [REAL[0]]


class TestConfigureOptimizersOnTheInstance:
    @pytest.mark.parametrize(
        "assign",
        [
            set_method,
            set_closure,
            set_lambda_with_a_global_name,
            set_lambda_with_a_global_optimizer,
        ],
    )
    @pytest.mark.parametrize("bare", [False, True], ids=["nothing", "bare"])
    def test_has_the_optimizer_state_that_is_counted(self, assign, bare):
        lit = make_lit()
        del type(lit).configure_optimizers
        assign(lit)
        fit(lit, callback := MemSaveCallback() if bare else nothing())
        assert_predicted(callback)
        assert callback.prediction.peak.optimizer_state_bytes > 0

    def test_the_optimizer_itself_stays_as_it_is(self):
        lit = make_lit()
        set_lambda_with_a_global_optimizer(lit)
        optimizer = REAL[0]
        fit(lit, callback := nothing(), max_steps=1)
        assert_is_predicted(callback)
        parameters = list(lit.parameters())
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == list(map(id, parameters))
        assert all(type(optimizer.state[p]["exp_avg"]) is Tensor for p in parameters)
        assert {float(optimizer.state[p]["step"]) for p in parameters} == {1.0}

    def test_of_a_module_that_is_converted_before(self):
        lit = make_lit()
        set_lambda_with_a_global_name(lit)
        fit(lit, callback := nothing(), precision="bf16-true")
        assert_predicted(callback)


class Adapted(nn.Module):
    """A frozen layer with a low-rank update, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def stacked(block: Any, num_frozen: int = 0) -> nn.Module:
    blocks = nn.Sequential(*[block() for _ in range(4)])
    blocks[:num_frozen].requires_grad_(False)
    return WithLoss(blocks)


NESTEROV = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)


def plain() -> Block:
    return Block(nn.LayerNorm(WIDTH))


def trained(lit: Any) -> list[nn.Parameter]:
    return [p for p in lit.parameters() if p.requires_grad]


@pytest.mark.filterwarnings("ignore")
class TestArgumentsThatYield:
    """What yields in the fit yields in the prediction with all that belongs to it."""

    @pytest.mark.parametrize(
        ("make_optimizer", "model", "beside"),
        [
            (torch.optim.AdamW, lambda: stacked(Adapted), {}),
            (torch.optim.AdamW, lambda: stacked(plain, num_frozen=3), {}),
            (NESTEROV, lambda: stacked(plain), {}),
            (torch.optim.RAdam, lambda: stacked(plain), {}),
            (torch.optim.Adafactor, lambda: stacked(plain), {"optimizer_in_backward": None}),
        ],
        ids=["lora", "frozen", "nesterov", "radam", "adafactor"],
    )
    def test_single_gpu(self, make_optimizer, model, beside):
        lit = make_lit(
            model=model(), configure_optimizers=lambda self: make_optimizer(trained(self))
        )
        fit(lit, callback := MemSaveCallback(preset="single_gpu", **beside))
        assert_is_predicted(callback)


def guarded(guard: Any) -> Any:
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.model(batch)
        return None if guard(loss) else loss

    return make_lit(training_step=training_step)


class TestGuards:
    """A step is predicted whose numbers are finite."""

    @pytest.mark.parametrize(
        "guard",
        [
            torch.isnan,
            lambda loss: not torch.isfinite(loss).all(),
            lambda loss: math.isnan(loss.item()),
            lambda loss: loss != loss,  # noqa: PLR0124
            lambda loss: loss == float("inf"),
            lambda loss: bool(loss.isneginf() | loss.isposinf() | loss.isnan()),
        ],
    )
    def test_are_not_met(self, guard):
        lit = guarded(guard)
        with fake_tensors() as fakes:
            twin = fakes.copy_module(lit)
            loss = twin.training_step(fakes.copy_batch(torch.randn(4, WIDTH)), 0)
        assert loss is not None
        code = getattr(guard, "__code__", None)
        asks_for_a_number = code is not None and code.co_names[:1] == ("math",)
        assert bool(fakes.guesses) == asks_for_a_number

    def test_in_a_fit(self):
        fit(guarded(torch.isnan), callback := nothing())
        assert_predicted(callback)
        assert callback.prediction.guesses == ()

    def test_guesses_stand_beside_the_figure(self, capsys, caplog):
        with caplog.at_level("INFO"):
            fit(guarded(lambda loss: loss < -1e9), callback := nothing())
        (guess,) = callback.prediction.guesses
        assert guess.endswith("a condition on data was assumed to be true")
        assert f"  guessed: {guess}\n" in capsys.readouterr().out
        assert any(
            message.startswith("Predicted peak memory") and guess in message
            for message in caplog.messages
        )


class TestStandardRecipes:
    def test_grad_norm(self):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log_dict(grad_norm(self.model, norm_type=2))

        lit = make_lit(on_before_optimizer_step=on_before_optimizer_step)
        fit(lit, callback := nothing())
        # What is logged in one step and kept to the next is not counted in that.
        assert_predicted(callback, abs_bytes=512)
        assert callback.prediction.guesses == ()

    @pytest.mark.parametrize("is_sorted", [True, False])
    def test_packed_sequences(self, is_sorted):
        order = [8, 6, 3, 2] if is_sorted else [3, 8, 2, 6]

        def loss_of(model: Any, x: Tensor) -> Tensor:
            inputs, lengths = x.view(len(x), 8, 8), torch.tensor(order)
            packed = pack_padded_sequence(inputs, lengths, True, enforce_sorted=is_sorted)
            padded, lengths = pad_packed_sequence(model[0](packed)[0], batch_first=True)
            assert lengths.tolist() == order
            return model[1](padded).square().mean()

        rnn = nn.LSTM(8, 16, batch_first=True, bidirectional=True)
        model = WithLoss(nn.Sequential(rnn, nn.Linear(32, 1)), loss_of)
        fit(make_lit(model=model), callback := nothing())
        assert_predicted(callback)
        assert callback.prediction.guesses == ()


class TestSummary:
    def test_one_step_has_no_percentage(self, capsys):
        fit(make_lit(), nothing(), max_steps=1)
        assert measured_and_predicted()[1]["error"] is None
        printed = capsys.readouterr().out
        assert "%" not in printed.partition("Memory of this fit")[2]
        assert "  not comparable: optimizer state comes with the second step\n" in printed

    def test_one_step_without_optimizer_state_has_one(self, capsys):
        sgd = lambda self: torch.optim.SGD(self.parameters(), lr=0.1)  # noqa: E731
        fit(make_lit(configure_optimizers=sgd), nothing(), max_steps=1)
        assert measured_and_predicted()[1]["error"] == pytest.approx(0, abs=1e-3)
        assert "not comparable" not in capsys.readouterr().out

    def test_larger_batches_that_come_later(self, capsys):
        class Growing(torch.utils.data.Sampler[list[int]]):
            def __iter__(self) -> Any:
                yield from ([0, 1], [2, 3], [0, 1], list(range(16)), [0, 1])

        rows = cast("Dataset[Tensor]", torch.randn(24, WIDTH))
        data = DataLoader(rows, batch_sampler=Growing())
        callback = nothing()
        make_trainer(lightning.pytorch, callback, max_epochs=1).fit(
            make_lit(training_step=model_step), data
        )
        summary = callback.monitor.summary
        assert summary.by_category["input"] == 16 * WIDTH * 4
        assert (summary.num_counted_steps, summary.num_steps) == (3, 5)
        printed = capsys.readouterr().out
        assert "  counted in: 3 of 5 steps\n" in printed
        assert "  not comparable: later batches were larger than the first\n" in printed
        assert " for the first batch (" in printed

    def test_what_prints_the_same_is_printed_once(self):
        summary = MemorySummary("cpu", 2**30, {"activation": 2**30 + 8}, num_steps=2)
        predicted = SimpleNamespace(
            measurable_bytes=2**30 + 8,
            peak=MemoryBreakdown(activation_bytes=2**30),
            reserved_bytes=None,
            guesses=(),
            work=Work(),
            settings={},
        )
        rows = dict(replace(summary, prediction=cast("Any", predicted)).rows())
        assert rows["  activation"] == "1.00 GiB"


class TestPhases:
    @pytest.mark.parametrize("logs", [True, False])
    def test_updates_are_not_the_end_of_forward(self, logs):
        def logging_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.model(batch)
            self.log("loss", loss, prog_bar=True)
            return loss

        lit = make_lit(model=wide(), training_step=logging_step if logs else model_step)
        fit(lit, callback := nothing())
        peaks = callback.prediction.by_phase
        assert peaks["forward"].activation_bytes > 1000
        assert peaks["optimizer"].activation_bytes < 100
