"""Micro-batches in a Trainer: the same training, also where memory runs out."""

import bisect
import contextlib
import copy
import functools
import gc
import importlib
import random
import weakref
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSaveCallback, PeakMemory
from lightning_memsave.callbacks.settings import micro_batch_size as _micro_batching
from lightning_memsave.errors import (
    ExactnessWarning,
    IncompatibleError,
    MemoryExhaustedError,
    MemsaveWarning,
)
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.techniques.micro_batching import training_state
from lightning_memsave.techniques.micro_batching.training_state import TrainingState
from lightning_memsave.techniques.optimizer_step import allocate_state
from tests.callbacks.lit import (
    LIGHTNING,
    SmallerFrom,
    Vectors,
    assert_same,
    callback_with,
    fit,
    gradients_of,
    loader_of,
    make_lit,
    make_trainer,
    no_step,
    only,
    rows_of,
    scaling,
    without_dropout,
)
from tests.cases import MODELS
from tests.out_of_memory import MESSAGE, OutOfMemoryAt

pytestmark = pytest.mark.usefixtures("no_prediction")

RETRIED = "ignore:Out of memory with:lightning_memsave.errors.MemsaveWarning"
BATCH_NORM = "ignore:.*and batch normalisation:lightning_memsave.errors.ExactnessWarning"


def row(callback: MemSaveCallback) -> Any:
    return rows_of(callback)["micro_batch_size"]


def vectors_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def vector_batches() -> list[Any]:
    torch.manual_seed(0)
    shapes = [12, 12, 12, 7]
    return [{"x": torch.randn(n, 5).double(), "y": torch.randn(n, 3).double()} for n in shapes]


def make_vectors_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


class TestSameGradients:
    def test_clipping_and_scaler(self, package):
        """Unscaled and clipped once, after the last part."""

        found = []
        for callbacks in ([], [only(5)]):
            plugin = scaling(package)
            how = {"package": package, "plugins": [plugin], "gradient_clip_val": 0.01}
            model, batches = make_vectors_model(), vector_batches()
            found.append(gradients_of(model, batches, vectors_loss, *callbacks, logs=True, **how))
            assert plugin.scaler.get_scale() == 2.0**10
        (theirs, plain), (ours, saving) = found
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        assert saving[0] == pytest.approx(plain[0], rel=1e-12)

    def test_lbfgs_runs_its_closure_again_and_again(self, package):
        lit = make_lit(
            package,
            configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters(), max_iter=4),
            training_step=lambda self, batch, batch_idx: self.model(batch.double()),
            validation_step=no_step,
        )
        without_dropout(lit).double()
        plain = fit(lit, package=package, limit_train_batches=2)
        saving = fit(lit, only(3), package=package, limit_train_batches=2)
        for name, value in plain[1].items():
            torch.testing.assert_close(saving[1][name], value, rtol=1e-8, atol=1e-10)


class TestOnePart:
    """Sizes with which batches stay whole."""

    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("size", ["auto", 4, 1000])
    @pytest.mark.filterwarnings(BATCH_NORM)
    def test_is_bit_identical(self, name, size):
        lit = make_lit(model=name)
        plain = fit(lit, accumulate_grad_batches=2)
        saving = fit(lit, only(size), accumulate_grad_batches=2)
        assert_same(plain, saving)
        assert plain[2].callback_metrics == saving[2].callback_metrics
        assert plain[2].global_step == saving[2].global_step


def logging_lit(package: Any, mode: OutOfMemoryAt) -> Any:
    """Memory can run out once values are logged, to the end of backward."""

    def training_step(self, batch, batch_idx):
        prediction = self.model(batch["x"])
        loss = nn.functional.mse_loss(prediction, batch["y"])
        self.error(prediction, batch["y"])
        self.mean(loss)
        self.values.update(prediction[:, 0].detach())
        both = {"on_step": True, "on_epoch": True}
        self.log("loss", loss, **both)
        self.log("sized", loss, batch_size=len(batch["x"]), **both)
        self.log("sum", prediction.sum(), reduce_fx="sum", **both)
        self.log("max", prediction.max(), reduce_fx="max", **both)
        self.log("min", prediction.min(), reduce_fx="min", **both)
        self.log("constant", 3.0, **both)
        self.log("metric", self.error, **both)
        mode.is_armed = torch.is_grad_enabled()  # not in the proof
        return {"loss": loss, "prediction": prediction, "name": "all"}

    def on_train_epoch_end(self):
        self.log("all", self.values.compute().sum())
        self.values.reset()

    lit = make_lit(
        package,
        make_vectors_model(),
        training_step=training_step,
        on_train_epoch_end=on_train_epoch_end,
        on_after_backward=lambda self: setattr(mode, "is_armed", False),
        validation_step=no_step,
        train_dataloader=lambda self: loader_of(vector_batches()),
    )
    lit.mean = torchmetrics.MeanMetric()
    lit.error = torchmetrics.MeanSquaredError()
    lit.values = torchmetrics.CatMetric()
    return lit.double()


class TestLoggedValues:
    def compare(self, package: Any, callback: MemSaveCallback, *places: int) -> Any:
        """Give the outputs of all steps with and without it."""
        found = []
        for callbacks, mode in (([], OutOfMemoryAt()), ([callback], OutOfMemoryAt(*places))):
            steps, outputs = list[Any](), list[Any]()

            def record(self, trainer, pl_module, out, *_, steps=steps, outputs=outputs):
                steps.append({k: v.item() for k, v in trainer.logged_metrics.items()})
                outputs.append(out)

            recorder = callback_with(package, on_train_batch_end=record)
            settings = {"package": package, "log_every_n_steps": 1, "max_epochs": 2}
            torch.manual_seed(0)
            with mode:
                fit(logging_lit(package, mode), *callbacks, recorder, **settings)
            found.append((steps, outputs))
        (plain, theirs), (saving, ours) = found
        assert len(plain) == 8
        for logged, truth in zip(saving, plain, strict=True):
            assert list(logged) == list(truth)
            assert logged == pytest.approx(truth, rel=1e-5)
        return zip(theirs, ours, strict=True)

    @pytest.mark.parametrize("size", [5, 1])
    def test_names_and_values_as_for_the_whole_batch(self, package, size):
        for theirs, ours in self.compare(package, only(size)):
            torch.testing.assert_close(ours["prediction"], theirs["prediction"])
            assert not ours["prediction"].requires_grad
            assert ours["loss"].item() == pytest.approx(theirs["loss"].item())
            assert ours["name"] == "all"

    @pytest.mark.filterwarnings(RETRIED)
    @pytest.mark.parametrize("place", [0, 12, 40])
    def test_what_was_logged_before_memory_ran_out_counts_once(self, package, place):
        callback = only("auto")
        self.compare(package, callback, place)
        assert callback._micro_batches.size == 6


def armed_lit(package: Any, model: str, mode: OutOfMemoryAt, **methods: Any) -> Any:
    """Memory can run out from the beginning of ``training_step`` to the end of backward."""

    def training_step(self, batch, batch_idx):
        if torch.is_grad_enabled():  # not in the proof
            mode.starts.append(mode.num_ops)
            mode.is_armed = True
        loss = self.model(batch)
        self.error(loss.detach())
        self.log("metric", self.error, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    lit = make_lit(
        package,
        model,
        training_step=training_step,
        on_after_backward=lambda self: setattr(mode, "is_armed", False),
        validation_step=no_step,
        **methods,
    )
    lit.error = torchmetrics.MeanMetric()
    return lit


def run_armed(
    places: tuple[int, ...], model: str, *, smaller_from: int | None = None, **settings: Any
) -> tuple[Any, OutOfMemoryAt, MemSaveCallback]:
    """Fit with memory running out at some places, or with a smaller size from some batch on."""
    mode = OutOfMemoryAt(*places)
    callback = only("auto", **settings.pop("memsave", {}))
    how: Any = {"limit_train_batches": 3, "limit_val_batches": 0, "log_every_n_steps": 1}
    smaller, lit = SmallerFrom(callback, smaller_from), armed_lit(LIGHTNING, model, mode)
    torch.manual_seed(0)
    with mode:
        result = fit(lit, callback, smaller, **(how | settings))
    return result, mode, callback


@functools.cache
def ops_of_batches(model: str, settings: tuple[tuple[str, Any], ...] = ()) -> list[int]:
    """Find the first operator of each of the three whole batches, and the end of the last."""
    _, mode, _ = run_armed((), model, **unfrozen(settings))
    assert len(mode.starts) == 3
    return [*mode.starts, mode.num_ops]


# Their losses are no mean over samples, or depend on buffers that the part before has changed, so
# that "auto" yields.
INSEPARABLE = ("tuple_output", "new_tensors", "classifier", "transformer", "spectral_norm")


def unfrozen(settings: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return {k: dict(v) if isinstance(v, tuple) else v for k, v in settings}


@functools.cache
def smaller_from(batch: int, model: str, settings: tuple[tuple[str, Any], ...]) -> Any:
    return run_armed((), model, smaller_from=batch, **unfrozen(settings))[0]


def check_place(place: int, model: str, settings: tuple[tuple[str, Any], ...] = ()) -> None:
    batch = bisect.bisect_right(ops_of_batches(model, settings), place) - 1
    result, _, callback = run_armed((place,), model, **unfrozen(settings))
    expected = smaller_from(batch, model, settings)
    assert callback._micro_batches.size == 2
    assert_same(result, expected)
    for name, value in expected[2].callback_metrics.items():
        assert torch.equal(result[2].callback_metrics[name], value), name
    assert result[2].global_step == expected[2].global_step


@pytest.mark.filterwarnings(RETRIED, BATCH_NORM)
class TestOutOfMemory:
    @pytest.mark.slow
    @pytest.mark.parametrize("part", range(6))
    @pytest.mark.parametrize("num_places", [1, pytest.param(50, marks=pytest.mark.exhaustive)])
    def test_at_random_places(self, part, num_places):
        random.seed(part)
        combinations = [
            (*accumulation, ("memsave", (("activation_checkpointing", checkpointing),)))
            for accumulation in ((), (("accumulate_grad_batches", 2),))
            for checkpointing in ("all", None)
        ]
        # Each model with another of them first.
        matrix = [
            (model, combinations[(turn + number) % 4])
            for turn in range(4)
            for number, model in enumerate(name for name in MODELS if name not in INSEPARABLE)
            if not (model == "unrepeated" and "'all'" in str(combinations[(turn + number) % 4]))
        ]
        own = matrix[part::6]
        for number in range(num_places):
            model, settings = own[number % len(own)]
            check_place(random.randrange(ops_of_batches(model, settings)[-1]), model, settings)

    def test_is_said_once_and_in_the_table(self):
        callback = only("auto")
        mode = OutOfMemoryAt(5)
        lit = armed_lit(LIGHTNING, "dropout", mode)
        match = "Out of memory with 4 samples at once, repeated with 2"
        with mode, pytest.warns(MemsaveWarning, match=match):
            fit(lit, callback)
        assert (
            row(callback).details[0] == "in micro-batches of 2 samples, as memory ran out with more"
        )
        assert row(callback).exactness == "rounding"

    def test_batch_norm_is_warned_of_when_it_happens(self):
        mode = OutOfMemoryAt(5)
        lit = armed_lit(LIGHTNING, "batch_norm", mode)
        with pytest.warns(ExactnessWarning, match="batch normalisation"), mode:
            fit(lit, only("auto"))

    @pytest.mark.filterwarnings(BATCH_NORM)
    def test_batch_norm_never_gets_a_sample_alone(self):
        """The last batch has 4 samples: in parts of 3 and 1 the second one would be refused."""
        lit = make_lit(model="batch_norm")
        type(lit).train_dataloader = lambda self: DataLoader(Vectors(44), batch_size=8)
        losses, _, trainer = fit(lit, only(3))
        assert trainer.global_step == len(losses) == 6

    def test_size_is_in_the_checkpoint_and_one_that_is_given_wins(self, package, tmp_path):
        path, following = tmp_path / "last.ckpt", tmp_path / "next.ckpt"
        mode = OutOfMemoryAt(5)
        with mode:
            lit = armed_lit(package, "dropout", mode)
            fit(lit, only("auto"), package=package)[2].save_checkpoint(path)
        for size, in_force, saved in (("auto", 2, 2), (4, 4, None), (None, None, None)):
            trainer = make_trainer(package, callback := only(size), max_epochs=2)
            trainer.fit(make_lit(package), ckpt_path=path)
            if size == "auto":
                assert callback._micro_batches.size == in_force
            else:
                assert callback.effective_arguments()["micro_batch_size"] == in_force
            trainer.save_checkpoint(following)
            for each in (path, following):
                found = torch.load(each, weights_only=True)["callbacks"]
                expected = 2 if each is path else saved
                assert found == {"MemSaveCallback": {"micro_batch_size": expected}}
        with pytest.warns(UserWarning, match=r"add the following callbacks: \['MemSaveCallback'\]"):
            make_trainer(package, max_epochs=2).fit(make_lit(package), ckpt_path=path)

    def test_loops_in_a_checkpoint_are_those_of_a_run_without_us(self, package, tmp_path):
        found = []
        for callbacks in ([], [only("auto")]):
            trainer = fit(make_lit(package), *callbacks, package=package)[2]
            trainer.save_checkpoint(tmp_path / "last.ckpt")
            loops = torch.load(tmp_path / "last.ckpt", weights_only=True)["loops"]
            found.append(loops["fit_loop"])
        assert found[0] == found[1]

    def test_does_not_claim_one_sample_where_no_batch_could_be_split(self, package):
        def training_step(self, batch, batch_idx):
            if torch.is_grad_enabled():
                raise torch.OutOfMemoryError(MESSAGE)
            return 0 * self.model(batch)  # in the proof

        lit = make_lit(package, training_step=training_step)
        with pytest.raises(MemoryExhaustedError, match="cannot be proven as long as") as caught:
            make_trainer(package, only("auto")).fit(lit)
        assert "one sample" not in str(caught.value)
        assert MESSAGE in str(caught.value)

    def test_floor(self, package):
        """With one sample there is nothing smaller: what was tried is said, all is restored."""

        def training_step(self, batch, batch_idx):
            if not torch.is_grad_enabled():
                return self.model(batch)  # the proof
            self.model(batch).backward()  # gradients that must not stay
            raise torch.OutOfMemoryError(MESSAGE)

        lit = make_lit(package, training_step=training_step)
        before = {name: value.clone() for name, value in lit.state_dict().items()}
        trainer = make_trainer(package, callback := only("auto"))
        with pytest.raises(MemoryExhaustedError) as caught:
            trainer.fit(lit)
        message = str(caught.value)
        assert MESSAGE in message
        assert "4 samples at once, repeated with 2" in message
        assert "2 samples at once, repeated with 1" in message
        assert 'activation_checkpointing="all"' in "".join(caught.value.__notes__)
        assert all(torch.equal(v, before[k]) for k, v in lit.state_dict().items())
        assert all(p.grad is None for p in lit.parameters())
        assert callback._micro_batches.runner is None
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        assert type(loop).__name__ == "_AutomaticOptimization"

    def test_a_fixed_size_raises_what_torch_raised(self, package):
        mode = OutOfMemoryAt(5)
        with mode, pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            fit(armed_lit(package, "dropout", mode), only(2), package=package)

    def test_nothing_of_the_failed_try_stays_alive(self):
        """The traceback would keep every tensor of the step (pytorch issue 18853)."""
        alive: list[list[bool]] = []
        refs: list[Any] = []

        def training_step(self, batch, batch_idx):
            if not torch.is_grad_enabled():
                return self.model.head(batch).square().mean()  # the proof
            alive.append([ref() is not None for ref in refs])
            hidden = self.model.head(batch)
            refs.append(weakref.ref(hidden))
            if len(batch) > 2:
                raise torch.OutOfMemoryError(MESSAGE)
            return hidden.square().mean()

        gc.disable()
        try:
            fit(
                make_lit(training_step=training_step),
                only("auto"),
                limit_train_batches=1,
                limit_val_batches=0,
            )
        finally:
            gc.enable()
        assert alive[:2] == [[], [False]]


def long_fit(
    *places: int, smaller_from: int | None = None, sizes: tuple[int, ...] = (4,) * 9
) -> tuple[Any, OutOfMemoryAt, MemSaveCallback]:
    """Three windows of three batches."""
    data = [*Vectors(sum(sizes)).data.split(sizes)]
    mode, callback = OutOfMemoryAt(*places), only("auto")
    lit = armed_lit(LIGHTNING, "dropout", mode, train_dataloader=lambda self: loader_of(data))
    smaller = SmallerFrom(callback, smaller_from)
    how = {"accumulate_grad_batches": 3, "limit_val_batches": 0, "log_every_n_steps": 1}
    torch.manual_seed(0)
    with mode:
        return fit(lit, callback, smaller, **how), mode, callback


class TestProbe:
    """Gradients of a window are copied until two steps have shown that memory is enough."""

    @pytest.fixture
    def gradients(self, monkeypatch):
        taken: list[str] = []

        class Noted(TrainingState):
            def __init__(self, module: nn.Module, *, gradients: Any, known: Any = None) -> None:
                taken.append(gradients)
                super().__init__(module, gradients=gradients, known=known)

        monkeypatch.setattr(training_state, "TrainingState", Noted)
        return taken

    def test_gradients_are_copied_in_two_steps_and_for_a_batch_larger_than_any(self, gradients):
        long_fit()
        assert gradients == ["drop", "keep", "keep"] * 2 + ["drop", "leave", "leave"]
        long_fit(sizes=(4, 4, 4, 4, 4, 4, 4, 4, 5))
        assert gradients[-3:] == ["drop", "leave", "keep"]

    @pytest.mark.filterwarnings(RETRIED)
    @pytest.mark.parametrize(("offset", "batch"), [(3, 7), (-1, 6)])
    def test_a_forward_pass_and_the_first_batch_of_a_window_can_be_repeated(self, offset, batch):
        """Without the copy."""
        result, _, callback = long_fit(long_fit()[1].starts[7] + offset)
        assert callback._micro_batches.size == 2
        assert_same(result, long_fit(smaller_from=batch)[0])

    def test_a_backward_pass_cannot_and_says_what_to_do(self):
        start = long_fit()[1].starts[8]
        with pytest.raises(MemoryExhaustedError, match="`micro_batch_size=4`"):
            long_fit(start - 1)


def two_groups(params: Any, lr: float) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.AdamW([{"params": params[:4]}, {"params": params[4:]}])


OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9),
    "NAdam": torch.optim.NAdam,
    "two groups": two_groups,
}


def lit_with(optimizer: str) -> Any:
    make = OPTIMIZERS[optimizer]
    return make_lit(configure_optimizers=lambda self: make(self.parameters(), lr=1e-3))


class TestOutOfMemoryAroundTheBatch:
    """Memory runs out anywhere between the hooks around a batch that no update follows."""

    def run(self, *places: int, size: int | None = None) -> Any:
        mode, callback = OutOfMemoryAt(*places), only("auto")
        lit = logging_lit(LIGHTNING, OutOfMemoryAt())
        lit.norm = nn.BatchNorm1d(5)
        step = type(lit).training_step

        def training_step(self, batch, batch_idx):
            return step(self, {**batch, "x": self.norm(batch["x"])}, batch_idx)

        type(lit).training_step = training_step
        smaller = SmallerFrom(callback, None if size is None else 1, size or 0)
        arming = callback_with(
            on_train_batch_start=lambda self, trainer, pl_module, batch, batch_idx: setattr(
                mode,
                "is_armed",
                batch_idx == 1,  # of a window of three
            ),
            on_train_batch_end=lambda *_: setattr(mode, "is_armed", False),
        )
        limits: Any = {"limit_train_batches": 3, "limit_val_batches": 0, "log_every_n_steps": 1}
        torch.manual_seed(0)
        with mode:
            result = fit(
                lit.double(), callback, smaller, arming, accumulate_grad_batches=3, **limits
            )
        return result, mode, callback._micro_batches.size

    @pytest.mark.slow
    @pytest.mark.filterwarnings(RETRIED, BATCH_NORM)
    @pytest.mark.parametrize("distance", [None, 1, 6, 25])
    @pytest.mark.parametrize("spacing", [11, pytest.param(3, marks=pytest.mark.exhaustive)])
    def test_is_that_of_a_smaller_size_or_of_none(self, distance, spacing):
        """Once, or twice with the second one in what follows the first."""
        whole, mode, _ = around_a_batch(None)
        expected: Any = {None: whole} | {size: around_a_batch(size)[0] for size in (6, 3)}
        assert mode.num_ops > 150
        sizes = []
        for place in range(0, mode.num_ops, spacing * (1 if distance is None else 3)):
            places = (place,) if distance is None else (place, place + distance)
            result, _, size = self.run(*places)
            sizes.append(size)
            assert_same(result, expected[size])
            logged, truth = result[2].callback_metrics, expected[size][2].callback_metrics
            assert logged.keys() == truth.keys()
            assert [k for k in truth if not torch.equal(logged[k], truth[k])] == []
        assert set(sizes) >= ({6, None} if distance is None else {3})


@functools.cache
def around_a_batch(size: int | None) -> Any:
    return TestOutOfMemoryAroundTheBatch().run(size=size)


class TestOutOfMemoryInTheStep:
    @pytest.mark.parametrize(
        ("name", "optimizer"),
        [*((name, None) for name in OPTIMIZERS), ("AdamW", "8bit"), ("two groups", "8bit")],
    )
    def test_state_is_there_before_any_parameter_changes(self, name, optimizer, monkeypatch):
        """Memory runs out at operators of making state: no parameter has changed."""
        num_failed = 0
        for place in range(0, 1000, 8):
            mode = OutOfMemoryAt(place)
            monkeypatch.setattr(_micro_batching, "allocate_state", armed_allocation(mode))
            lit = lit_with(name)
            before = {k: v.clone() for k, v in lit.state_dict().items()}
            callback = only("auto", optimizer=optimizer)
            trainer = make_trainer(LIGHTNING, callback, max_steps=1, limit_val_batches=0)
            with mode, contextlib.suppress(MemoryExhaustedError):
                trainer.fit(lit)
                break
            assert list(lit.parameters())[-1] not in trainer.optimizers[0].state
            assert [k for k, v in lit.state_dict().items() if not torch.equal(v, before[k])] == []
            num_failed += 1
        assert num_failed > 3
        assert len(trainer.optimizers[0].state) == len(list(lit.parameters()))

    def test_advice(self):
        class Failing(torch.optim.SGD):
            def step(self, closure=None):
                closure()
                raise torch.OutOfMemoryError(MESSAGE)

        lit = make_lit(configure_optimizers=lambda self: Failing(self.parameters(), lr=0.1))
        with pytest.raises(MemoryExhaustedError, match=r"step of `Failing`.*Tried") as e:
            fit(lit, only("auto"))
        assert 'optimizer="8bit"' in str(e.value)
        assert e.value.__context__ is None

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_making_state_early_changes_nothing(self, name):
        lit = lit_with(name)
        assert_same(fit(lit), fit(lit, only("auto")))

    def test_hooks_before_the_first_step_find_no_state(self):
        seen = []

        def look(self, optimizer, *_, **__):
            seen.append(len(optimizer.state))

        hooks = {"on_before_optimizer_step": look, "configure_gradient_clipping": look}
        fit(make_lit(**hooks), only("auto"), limit_train_batches=2, max_epochs=1)
        num_parameters = len(list(make_lit().parameters()))
        assert seen == [0, 0, num_parameters, num_parameters]


def armed_allocation(mode: OutOfMemoryAt) -> Any:
    def allocate(optimizer: torch.optim.Optimizer) -> None:
        with mode.armed():
            allocate_state(optimizer)

    return allocate


class TestMemory:
    def peak(self, lit: Any, *callbacks: Any, **settings: Any) -> int:
        with PeakMemory(lit) as peak:
            trainer = make_trainer(LIGHTNING, *callbacks, max_epochs=1, **settings)
            trainer.fit(lit)
        return peak.allocated_bytes

    def make(self, width: int, batch_size: int) -> Any:
        torch.manual_seed(0)
        layers = (m for _ in range(4) for m in (nn.Linear(width, width), nn.GELU()))
        data = torch.randn(batch_size * 3, width)
        return make_lit(
            model=nn.Sequential(*layers),
            training_step=lambda self, batch, batch_idx: self.model(batch).square().mean(),
            validation_step=no_step,
            configure_optimizers=lambda self: torch.optim.SGD(self.parameters(), lr=1e-3),
            train_dataloader=lambda self: loader_of(list(data.split(batch_size))),
        )

    def test_activations_of_one_part_at_a_time(self):
        plain = self.peak(self.make(64, 1024))
        parts = self.peak(self.make(64, 1024), only(128))
        data = 1024 * 3 * 64 * 4
        assert parts - data < 0.35 * (plain - data)

    def test_autocast_copies_of_weights_do_not_outlive_a_part(self):
        """What is alive when a part begins: weights, gradients, data, and nothing else."""
        lit, alive = self.make(512, 16), []
        original = type(lit).training_step

        def training_step(self, batch, batch_idx):
            if torch.is_grad_enabled():  # not in the proof
                alive.append(live.live_bytes)
            return original(self, batch, batch_idx)

        type(lit).training_step = training_step
        with LiveTensors(lit) as live:
            make_trainer(LIGHTNING, only(1), precision="bf16-mixed").fit(lit)
        copies = sum(p.numel() * 2 for p in lit.parameters())
        assert max(alive[1:16]) - min(alive[1:16]) < 0.1 * copies
        assert alive[16] - alive[0] < 0.1 * copies


def test_half_parameters_of_a_late_model_are_refused():
    lit = make_lit(configure_model=lambda self: self.model.to(torch.bfloat16))
    with pytest.raises(IncompatibleError, match=r"torch\.bfloat16"):
        fit(lit, only(2))


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_module_that_takes_the_iterator_is_left_alone(package):
    def training_step(self, dataloader_iter):
        return self.model(next(dataloader_iter)[0])

    lit = make_lit(package, training_step=training_step)
    settings = {"package": package, "max_steps": 3, "limit_val_batches": 0}
    assert_same(fit(lit, **settings), fit(lit, only("auto"), **settings))


def test_a_step_that_returns_nothing(package):
    lit = make_lit(package, training_step=no_step)
    before = copy.deepcopy(lit.state_dict())
    trainer = make_trainer(package, only(2))
    # Lightning says it once in a process.
    loops = importlib.import_module(f"{package.__name__}.loops.optimization.automatic")
    loops.Closure.warning_cache.clear()
    with pytest.warns(UserWarning, match="`training_step` returned `None`"):
        trainer.fit(lit)
    assert all(torch.equal(v, before[k]) for k, v in lit.state_dict().items())
    assert trainer.global_step == 6


def test_the_callback_serves_a_second_fit_and_copies(package):
    callback = only(2)
    lit = make_lit(package)
    first = fit(lit, copy.deepcopy(callback), package=package)
    assert_same(first, fit(lit, callback, package=package))
    assert_same(first, fit(lit, callback, package=package))


def wide_lit() -> Any:
    """A whole batch of it keeps about 350 MiB of activations, its weights 2 MiB."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    data = list(torch.randn(3, 16384, 256))
    return make_lit(
        model=nn.Sequential(*blocks),
        training_step=lambda self, batch, batch_idx: self.model(batch).square().mean(),
        train_dataloader=lambda self: loader_of(data),
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings(RETRIED)
def test_a_gpu_that_really_runs_out():
    """The allocator gets less than the whole batch needs; the result is that of the parts."""
    callback = only("auto")
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    before = torch.cuda.get_per_process_memory_fraction()
    torch.cuda.set_per_process_memory_fraction((2**28 + torch.cuda.memory_reserved()) / total)
    try:
        shrunk = fit(wide_lit(), callback, accelerator="gpu", limit_val_batches=0)
    finally:
        torch.cuda.set_per_process_memory_fraction(before)
    size = callback._micro_batches.size
    assert size in {8192, 4096, 2048}
    parts = fit(wide_lit(), only(size), accelerator="gpu", limit_val_batches=0)
    for name, value in parts[1].items():
        torch.testing.assert_close(shrunk[1][name], value, rtol=1e-5, atol=1e-6)
