"""Offloading with blocks that stay on the device, in a Trainer."""

import copy
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_memsave.callbacks import run_plan
from lightning_memsave.callbacks.settings.micro_batches import try_step
from lightning_memsave.callbacks.settings.offload import OffloadSetting
from lightning_memsave.core.memory import is_fake
from lightning_memsave.errors import ConfigurationError, IncompatibleError
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.techniques.named_optimizer.technique import NamedOptimizer
from lightning_memsave.techniques.offloading import host_updates
from lightning_memsave.techniques.offloading.part import Part
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.residences import residence_of
from tests.callbacks.lit import (
    LIGHTNING,
    Trace,
    assert_same,
    fit,
    make_lit,
    make_trainer,
    model_step,
    no_step,
    peak_of,
    quiet,
    rows_of,
    summary_of,
)
from tests.virtual_gpu import counters

pytestmark = pytest.mark.usefixtures("no_prediction")

HALVE = MicroBatching("halve")
CLIPPED = {"gradient_clip_val": 0.1}
BF16: dict[str, Any] = {"precision": "bf16-mixed"}
IN_BACKWARD: dict[str, Any] = {"optimizer_in_backward": True}
STATE_IN_8BIT: dict[str, Any] = {"optimizer": LowBitOptimizer(force_8bit=("*",))}
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipped": ({"activation_checkpointing": "all"}, CLIPPED),
    "micro-batches": ({"micro_batch_size": 2}, CLIPPED),
    "accumulated": ({}, {"accumulate_grad_batches": 4}),
    "in backward": (IN_BACKWARD, {}),
    "in backward, accumulated": (IN_BACKWARD, {"accumulate_grad_batches": 2}),
    "8-bit": (STATE_IN_8BIT | {"activation_checkpointing": "all"}, {}),
    "8-bit in backward": (STATE_IN_8BIT | IN_BACKWARD, {}),
    "master": (BF16 | {"low_precision_weights": "master", "micro_batch_size": 2}, CLIPPED),
    "split in backward": (BF16 | {"low_precision_weights": "split"} | IN_BACKWARD, {}),
}
"""Settings of the callback and of the Trainer."""


def only(resident: Any, what: str = "parameters", **settings: Any) -> Any:
    offload = None if resident is None else Offloading(what, resident=resident, min_bytes=1)
    return quiet(**({"preset": "off", "micro_batch_size": HALVE, "offload": offload} | settings))


@pytest.mark.parametrize("resident", [1, "50%", 4])
@pytest.mark.parametrize("name", BESIDE)
class TestEachShare:
    def test_trains_bit_for_bit(self, name, resident):
        """As without offloading, or where weights wait in bfloat16 as if all did."""
        settings, trainer = BESIDE[name]
        first = 0 if "low_precision_weights" in settings else None
        lit = make_lit(model="tied")
        expected = fit(lit, only(first, **settings), max_epochs=2, **trainer)
        callback = only(resident, **settings)
        found = fit(lit, callback, max_epochs=2, **trainer)
        assert all(row.status != "off" for row in callback.rows), callback.rows
        if settings.get("low_precision_weights") == "split":
            # In the middle of two bfloat16 values halves are rounded up, and autocast to even.
            assert found[0] == pytest.approx(expected[0], rel=2**-9)
        else:
            assert_same(found, expected)

    def test_is_predicted_to_the_byte(self, name, resident):
        settings, trainer = BESIDE[name]
        callback = only(resident, predict=60, **settings)
        fit(make_lit(model="tied", training_step=model_step), callback, **trainer)
        assert callback.prediction is not None
        # On a CPU, 8-bit states on both sides share two tables, which are where they are first.
        tables = 2048 if name == "8-bit in backward" else 0
        assert callback.prediction.peak_bytes == peak_of(callback) + tables
        by_category = callback.prediction.peak.by_category()
        by_category["optimizer_state"] -= tables
        assert by_category == summary_of(callback).by_category


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("settings", [{}, STATE_IN_8BIT, IN_BACKWARD])
def test_a_fit_resumes_with_another_share(tmp_path, settings):
    lit, runs = make_lit(model="tied"), []
    for shares in ((0, 0), (3, 1), ("50%", None), (None, 4)):
        file, modules = tmp_path / f"{shares}.ckpt", [copy.deepcopy(lit) for _ in range(2)]
        trainer = make_trainer(LIGHTNING, only(shares[0], **settings))
        torch.manual_seed(2)
        trainer.fit(modules[0])
        trainer.save_checkpoint(file)
        trace = Trace(LIGHTNING)
        more = make_trainer(LIGHTNING, only(shares[1], **settings), trace.callback, max_epochs=2)
        torch.manual_seed(3)
        more.fit(modules[1], ckpt_path=file)
        runs.append((trace.losses, modules[1].state_dict()))
    for run in runs[1:]:
        assert_same(run, runs[0])


def test_the_table_says_how_many_blocks_stay():
    callback = only("60%", "parameters+activations")
    fit(make_lit(), callback)
    details = rows_of(callback)["offload"].details
    assert "the last 2 of 4 blocks stay on the device" in details
    assert any("weights of 2 blocks on the device when they compute" in each for each in details)


def test_more_blocks_than_there_are_end_the_fit_before_it_begins():
    with pytest.raises(IncompatibleError, match=r"`resident=9`: .* Use a number up to 4"):
        fit(make_lit(), only(9))


class ChangesTo(Callback):
    """Corrects the number of resident blocks after some batches, as what was measured does."""

    def __init__(self, callback: Any, numbers: dict[int, int]) -> None:
        self.callback, self.numbers = callback, numbers

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        number = self.numbers.get(batch_idx) if trainer.current_epoch == 0 else None
        if number is not None:
            setting = self.callback._settings.find(OffloadSetting)
            assert setting._correct(trainer, number, "a test wants it")
            assert setting._handle.num_resident == number


class TestCorrected:
    @pytest.mark.parametrize("what", ["optimizer", "parameters", "parameters+activations"])
    @pytest.mark.parametrize("numbers", [{1: 4}, {1: 0}, {0: 3, 2: 1, 3: 4, 4: 2}])
    def test_trains_bit_for_bit(self, what, numbers):
        lit = make_lit(model="dropout")
        callback = only(2, what)
        found = fit(lit, callback, ChangesTo(callback, numbers), max_epochs=2)
        assert_same(found, fit(lit, only(None), max_epochs=2))

    @pytest.mark.parametrize("numbers", [{1: 4}, {1: 0}, {0: 3, 2: 1, 3: 4}])
    @pytest.mark.parametrize("name", BESIDE)
    def test_beside_other_settings(self, name, numbers):
        settings, trainer = BESIDE[name]
        lit = make_lit(model="tied")
        expected = fit(lit, only(2, **settings), max_epochs=2, **trainer)
        callback = only(2, **settings)
        found = fit(lit, callback, ChangesTo(callback, numbers), max_epochs=2, **trainer)
        if settings.get("low_precision_weights") == "split":
            assert found[0] == pytest.approx(expected[0], rel=2**-9)
        else:
            assert_same(found, expected)

    @pytest.mark.parametrize("settings", [{}, STATE_IN_8BIT, IN_BACKWARD])
    def test_needs_what_the_number_needs(self, settings):
        lit = lit_of_steps()
        callback, more = (only(number, predict=60, **settings) for number in (0, 4))
        found = fit(lit, callback, ChangesTo(callback, {0: 4}))
        assert_same(found, fit(lit, more))
        tables = 2048 if settings is STATE_IN_8BIT else 0  # of 8-bit state, for each block
        assert peak_of(callback) == peak_of(more) + 4 * tables
        assert callback.prediction is None  # which was of another number

    def test_the_table_and_the_arguments_say_the_number(self):
        callback = only(1, "parameters+activations")
        fit(make_lit(), callback, ChangesTo(callback, {0: 3}))
        details = rows_of(callback)["offload"].details
        assert "the last 3 of 4 blocks stay on the device" in details
        assert "what 1 blocks save for backward on the host" in details
        assert details[-1].endswith(
            "3 of 4 blocks stay on the device, no longer 1: a test wants it"
        )
        assert callback.effective_arguments()["offload"].resident == 3

    @pytest.mark.parametrize("settings", [{}, STATE_IN_8BIT, IN_BACKWARD])
    def test_a_checkpoint_after_it(self, tmp_path, settings):
        lit, runs = make_lit(model="tied"), []
        for numbers in ({}, {1: 4, 3: 1}):
            file, modules = tmp_path / f"{len(numbers)}.ckpt", [copy.deepcopy(lit) for _ in "12"]
            callback = only(2, **settings)
            trainer = make_trainer(LIGHTNING, callback, ChangesTo(callback, numbers))
            torch.manual_seed(2)
            trainer.fit(modules[0])
            trainer.save_checkpoint(file)
            trace = Trace(LIGHTNING)
            more = make_trainer(LIGHTNING, only(2, **settings), trace.callback, max_epochs=2)
            torch.manual_seed(3)
            more.fit(modules[1], ckpt_path=file)
            runs.append((trace.losses, modules[1].state_dict()))
        assert_same(*runs)

    def test_weights_that_come_to_the_host_go_back_in_bfloat16_as_others(self):
        callback = only(2, **BF16, low_precision_weights="master")
        types = []

        class Looks(ChangesTo):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
                matrices = [p for p in pl_module.parameters() if p.ndim > 1]
                parts = [residence_of(pl_module).part_of(param) for param in matrices]
                pairs = zip(parts, matrices, strict=True)
                types.append({part.device_dtype_of(p) for part, p in pairs if part is not None})

        fit(make_lit(model="tied"), callback, Looks(callback, {1: 0}))
        assert types == [{torch.bfloat16}] * 6

    @pytest.mark.gpu
    @pytest.mark.parametrize("kind", ["adamw_bf16_state", "muon", "torch.optim:NAdam"])
    def test_of_named_optimizers(self, kind):
        """Counts of steps and the like go where the optimizer has them."""

        def train(numbers: dict[int, int], **fused: Any) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = wide_model().cuda()
            adamw = torch.optim.AdamW(model.parameters(), **fused)
            named = NamedOptimizer(kind, blocks=nn.Sequential, module=model)
            optimizer = named.apply(adamw).target
            offloading = Offloading("parameters", blocks=nn.Sequential, resident=2)
            with offloading.apply(model) as handle, offloading.update_in_background(optimizer):
                for step in range(5):
                    if step in numbers:
                        handle.keep_on_device(numbers[step], [optimizer])
                    model(torch.randn(2, 64).cuda()).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return [param.cpu() for param in model.parameters()]

        for fused in [{}, {"fused": True}] if kind == "muon" else [{}]:
            expected = train({}, **fused)
            assert all(map(torch.equal, train({1: 5, 3: 0}, **fused), expected))

    def test_in_a_loop_of_ones_own(self):
        def train(numbers: dict[int, int]) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = wide_model()
            optimizer = torch.optim.AdamW(model.parameters())
            offloading = Offloading("parameters", blocks=nn.Sequential, resident=2)
            with offloading.apply(model) as handle, offloading.update_in_background(optimizer):
                for step in range(5):
                    if step in numbers:
                        handle.keep_on_device(numbers[step], [optimizer])
                        assert handle.num_resident == numbers[step]
                    model(torch.randn(2, 64)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return [*model.parameters()]

        expected = train({})
        assert all(map(torch.equal, train({1: 5, 3: 0}), expected))

    def test_keeps_weights_that_the_project_has_replaced(self):
        def optimizer_step(self: Any, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
            optimizer.step(closure)
            for param in self.parameters():
                param.data = param.data * 0.5

        lit, callback = make_lit(model="tied", optimizer_step=optimizer_step), only(2)
        found = fit(lit, callback, ChangesTo(callback, {1: 4, 2: 0}))
        assert_same(found, fit(lit, only(None)))

    def test_an_update_that_runs_out_of_memory_fails(self, monkeypatch):
        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        model = wide_model()
        optimizer = torch.optim.AdamW(model.parameters())
        offloading = Offloading("parameters", blocks=nn.Sequential, resident=2)
        with offloading.apply(model) as handle, offloading.update_in_background(optimizer):
            model(torch.randn(2, 64)).square().mean().backward()
            monkeypatch.setattr(host_updates, "plain_step", fail)
            optimizer.step()
            with pytest.raises(torch.OutOfMemoryError):
                handle.keep_on_device(3, [optimizer])

    def test_no_room_on_the_device_leaves_all_as_it_was(self, monkeypatch):
        release, calls = Part.release, []

        def release_once(self: Any, device: torch.device) -> None:
            calls.append(self)
            if len(calls) == 2:  # after half of it
                self.params[0].data = self.params[0].data.clone()
                raise torch.OutOfMemoryError("CUDA out of memory.")
            release(self, device)

        lit, callback = make_lit(model="tied"), only(0)
        expected = fit(lit, only(0))

        class Grows(ChangesTo):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                if batch_idx == 1:
                    monkeypatch.setattr(Part, "release", release_once)
                    setting = self.callback._settings.find(OffloadSetting)
                    assert setting._correct(trainer, 3, "a test wants it")
                    assert setting._handle.num_resident == 1

        assert_same(fit(lit, callback, Grows(callback, {})), expected)
        assert "the last 1 of 4 blocks stay on the device" in rows_of(callback)["offload"].details


class TestMeasured:
    """What follows from what was measured, which only a GPU does."""

    @pytest.fixture
    def roomy(self, monkeypatch):
        """A module, and the number of blocks that stay in a part of the memory of its steps."""
        lit, plain = lit_of_steps(), only(None, predict=60)
        fit(lit, plain)
        room = int(0.8 * peak_of(plain))
        monkeypatch.setattr(run_plan, "_free_bytes", lambda device: room)
        return lit

    def fit_measured(self, lit: Any, callback: Any, *free_bytes: int) -> list[int]:
        numbers = []

        class Measures(Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                setting = callback._settings.find(OffloadSetting)
                if batch_idx < len(free_bytes):
                    setting._correction.fill(trainer, free_bytes[batch_idx])
                numbers.append(setting._handle.num_resident)

        fit(lit, callback, Measures())
        return numbers

    def test_more_blocks_stay_as_far_as_they_fit(self, roomy):
        callback = auto()
        numbers = self.fit_measured(roomy, callback, -1)
        first, each = numbers[0], callback._settings.find(OffloadSetting)._block_bytes
        assert first < 4
        callback = auto()
        assert self.fit_measured(roomy, callback, each - 1, each, 9 * each)[:3] == [
            first,
            first + 1,
            4,
        ]

    @pytest.mark.parametrize("settings", [IN_BACKWARD, {"micro_batch_size": None}])
    def test_never_more_where_a_batch_cannot_be_repeated(self, roomy, settings):
        callback = auto(**settings)
        numbers = self.fit_measured(roomy, callback, 2**40)
        assert set(numbers) == {numbers[0]}
        assert numbers[0] < 4
        details = rows_of(callback)["offload"].details
        assert any(line.startswith("never more blocks stay") for line in details)

    @pytest.mark.parametrize("accumulated", [1, 3])
    def test_fewer_blocks_repeat_a_batch_that_ran_out_of_memory(self, roomy, accumulated):
        callback, numbers = auto(), []
        how: dict[str, Any] = {"accumulate_grad_batches": accumulated, "max_epochs": accumulated}

        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            loss = self.model(batch)
            setting = callback._settings.find(OffloadSetting)
            # In the middle of a window, where steps have fitted before.
            place = (0, 3) if accumulated == 1 else (2, 4)
            if (self.current_epoch, batch_idx) == place and not is_fake(loss):
                numbers.append(setting._handle.num_resident)
                if numbers[-1]:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss

        lit = make_lit(model="tied", training_step=training_step)
        found = fit(lit, callback, **how)
        assert numbers[0] > 0
        assert numbers[-1] == 0
        assert callback._micro_batches.size is None
        assert_same(found, fit(roomy, only(0), **how))
        assert rows_of(callback)["offload"].details[-1].endswith(": memory ran out")
        assert callback.effective_arguments()["offload"].resident == 0


def auto(**settings: Any) -> Any:
    return only("auto", predict=60, **settings)


def lit_of_steps() -> Any:
    return make_lit(model="tied", training_step=model_step)


def wide_model() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(nn.Linear(64, 256), *layers, nn.Linear(256, 16))


def mean_step(self: Any, batch: Any, batch_idx: int) -> Any:
    return self.model(batch).square().mean()


class TestAuto:
    def test_what_fits_is_plain_training(self):
        lit, callback, plain = lit_of_steps(), auto(), only(None, predict=60)
        assert_same(fit(lit, callback), fit(lit, plain))
        (row,) = (row for row in callback.rows if row.name == "offload")
        assert row.status == "off"
        assert row.details[0].endswith("everything fits the device")
        assert peak_of(callback) == peak_of(plain)
        assert callback.prediction is not None
        assert callback.prediction.peak_bytes == peak_of(plain)

    @pytest.mark.parametrize("rounding", ["master", "split"])
    def test_what_fits_has_no_weights_in_16_bits_of_those_on_the_host(self, rounding):
        lit, callback = lit_of_steps(), auto(low_precision_weights=rounding, **BF16)
        assert_same(fit(lit, callback), fit(lit, only(None, **BF16)))

    @pytest.mark.parametrize("settings", [{}, IN_BACKWARD, {"activation_checkpointing": "all"}])
    @pytest.mark.parametrize("share", [0.6, 0.9])
    def test_as_many_blocks_stay_as_fit(self, monkeypatch, settings, share):
        lit, plain = lit_of_steps(), only(None, predict=60, **settings)
        expected = fit(lit, plain)
        room = int(share * peak_of(plain))
        monkeypatch.setattr(run_plan, "_free_bytes", lambda device: room)
        callback = auto(**settings)
        assert_same(fit(lit, callback), expected)
        assert peak_of(callback) <= room
        assert callback.prediction is not None
        assert callback.prediction.peak_bytes == peak_of(callback)
        number = callback.effective_arguments()["offload"].resident
        note = f"{number} of 4 blocks stay there"
        assert any(line.endswith(note) for line in rows_of(callback)["offload"].details)
        more = only(number + 1 if number < 4 else None, predict=60, **settings)
        fit(lit, more)
        assert peak_of(more) > room

    def test_a_second_fit_chooses_again(self, monkeypatch):
        lit, callback = lit_of_steps(), auto()
        fit(lit, callback)
        room = int(0.8 * peak_of(callback))
        monkeypatch.setattr(run_plan, "_free_bytes", lambda device: room)
        fit(lit, callback)
        assert peak_of(callback) <= room
        assert rows_of(callback)["offload"].status == "on"

    def test_beside_a_preset_weights_wait_as_it_says(self, monkeypatch):
        lit = lit_of_steps()
        offload = Offloading("parameters+activations", resident="auto")
        settings: dict[str, Any] = {"preset": "offload", "exactness": "bitwise", "predict": 60}
        plain = quiet(**settings, offload=None)
        expected = fit(lit, plain)
        room = int(0.9 * peak_of(plain))
        monkeypatch.setattr(run_plan, "_free_bytes", lambda device: room)
        callback = quiet(**settings, offload=offload)
        assert_same(fit(lit, callback), expected)
        assert peak_of(callback) <= room
        assert callback.effective_arguments()["offload"].resident > 0

    def test_a_plan_fills_its_budget(self):
        lit = make_lit(model=wide_model(), training_step=mean_step, validation_step=no_step)
        off = dict.fromkeys(
            ("activation_checkpointing", "micro_batch_size", "optimizer", "chunked_cross_entropy")
        )
        off |= dict.fromkeys(("optimizer_in_backward", "low_precision_weights", "attention"))
        plain = quiet(preset="off", micro_batch_size=None, predict=60)
        expected = fit(lit, plain)
        budget = int(0.6 * peak_of(plain))
        offload = Offloading("parameters", resident="auto")
        callback = quiet(**off, budget=budget, offload=offload)
        assert_same(fit(lit, callback), expected)
        assert callback.plan is not None
        chosen = callback.plan.plan
        assert chosen.settings["offload"].resident > 0
        assert chosen.peak_bytes == peak_of(callback) <= budget

    def test_blocks_of_a_plan_leave_where_memory_runs_out(self):
        numbers: list[int] = []

        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            loss = mean_step(self, batch, batch_idx)
            if batch_idx == 3 and not is_fake(loss):
                numbers.append(callback._settings.find(OffloadSetting)._handle.num_resident)
                if numbers[-1] == numbers[0]:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss

        steps: dict[str, Any] = {"training_step": training_step, "validation_step": no_step}
        lit = make_lit(model=wide_model(), **steps)
        off = dict.fromkeys(("activation_checkpointing", "optimizer", "chunked_cross_entropy"))
        off |= dict.fromkeys(("optimizer_in_backward", "low_precision_weights", "attention"))
        plain = quiet(preset="off", micro_batch_size=None, predict=60)
        fit(make_lit(model=wide_model(), **steps | {"training_step": mean_step}), plain)
        offload = Offloading("parameters", resident="auto")
        callback = quiet(**off, budget=int(0.6 * peak_of(plain)), offload=offload)
        fit(lit, callback)
        first = numbers[0]
        assert first > 0
        assert numbers == [first, first, first - 1]  # at first the cache alone was freed
        assert callback.effective_arguments()["offload"].resident == first - 1

    def test_a_plan_that_fits_without_is_without(self):
        off = dict.fromkeys(("micro_batch_size", "optimizer", "chunked_cross_entropy"))
        offload = Offloading("parameters", resident="auto")
        callback = quiet(**off, budget="1GiB", exactness="bitwise", offload=offload)
        fit(lit_of_steps(), callback)
        assert callback.plan is not None
        assert callback.plan.plan.settings["offload"] is None
        assert rows_of(callback)["offload"].details == ("the plan fits the device without it",)

    def test_a_failed_prediction_ends_the_fit_before_it_begins(self):
        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            loss = model_step(self, batch, batch_idx)
            if is_fake(loss):
                raise ValueError("no values")
            return loss

        lit = make_lit(model="tied", training_step=training_step)
        with pytest.raises(IncompatibleError, match=r"`resident='auto'`: .*`resident=4`"):
            fit(lit, auto())


def large_lit() -> Any:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6)]
    model = nn.Sequential(nn.Linear(64, 2048), *layers, nn.Linear(2048, 16))
    return make_lit(model=model, training_step=mean_step, validation_step=no_step)


class Numbers(Callback):
    """Notes how many blocks stay on the device after each batch; state is where weights are."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.found: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.found.append(self.callback._settings.find(OffloadSetting)._handle.num_resident)
        (optimizer,) = trainer.optimizers
        for param, state in optimizer.state.items():
            moments = [v for v in state.values() if isinstance(v, torch.Tensor) and v.numel() > 1]
            assert moments
            assert all(moment.is_cuda == param.is_cuda for moment in moments)


@pytest.mark.gpu
class TestOnAGPU:
    GPU: ClassVar[dict[str, Any]] = {"accelerator": "gpu"}
    PRESET: ClassVar[dict[str, Any]] = {"preset": "offload"}

    @pytest.fixture
    def gpu(self) -> Any:
        torch.cuda.empty_cache()
        yield torch.device("cuda", 0)
        counters.set_memory(torch.cuda.get_device_properties(0).total_memory)

    def expect(self, number: int, **settings: Any) -> tuple[Any, int, Any]:
        """Fit with a fixed number; give what it finds, reserves, and is predicted to need."""
        torch.cuda.reset_peak_memory_stats()
        callback = only(number, predict=60, **settings)
        found = fit(large_lit(), callback, **self.GPU)
        num_bytes = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        return found, num_bytes, callback.prediction

    def let_be_free(self, monkeypatch: Any, prediction: Any) -> None:
        """Let so much be free, beside the margin."""
        room = prediction.device_bytes + 2**28
        monkeypatch.setattr(run_plan, "_free_bytes", lambda device: room)

    def assert_close(self, found: Any, expected: Any, settings: Any) -> None:
        tolerance = 1e-2 if settings is self.PRESET else 1e-4  # of bfloat16
        assert found[0] == pytest.approx(expected[0], rel=tolerance)
        for name, value in found[1].items():
            torch.testing.assert_close(
                value, expected[1][name], rtol=tolerance, atol=tolerance / 10
            )

    @pytest.mark.parametrize("settings", [{}, {"optimizer": "8bit"}, PRESET])
    def test_more_blocks_stay_where_steps_leave_room(self, gpu, monkeypatch, settings):
        expected, _, prediction = self.expect(2, **settings)
        self.let_be_free(monkeypatch, prediction)
        callback = auto(**settings)
        numbers = Numbers(callback)
        self.assert_close(fit(large_lit(), callback, numbers, **self.GPU), expected, settings)
        assert numbers.found[0] < 3
        assert numbers.found[1:] == [6] * 5

    # More room moves where memory runs out: in a pass, in the state, in the step itself.
    @pytest.mark.parametrize("more", [2**22, 2**24, 2**26, 2**27])
    @pytest.mark.parametrize("settings", [{}, PRESET])
    def test_blocks_leave_where_memory_runs_out(self, gpu, monkeypatch, settings, more):
        expected, needed, _ = self.expect(1, **settings)
        _, _, prediction = self.expect(5, **settings)
        self.let_be_free(monkeypatch, prediction)
        free, total = torch.cuda.mem_get_info(gpu)
        counters.set_memory(total - free + needed + more)
        callback = auto(**settings)
        numbers = Numbers(callback)
        self.assert_close(fit(large_lit(), callback, numbers, **self.GPU), expected, settings)
        assert numbers.found == sorted(numbers.found, reverse=True)
        assert numbers.found[0] < 5
        assert rows_of(callback)["offload"].details[-1].endswith(": memory ran out")
        assert callback._micro_batches.size is None


@pytest.mark.gpu
@pytest.mark.parametrize("weight_decay", [0, 0.1])
@pytest.mark.parametrize(
    "kind", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "Adamax"]
)
def test_what_a_step_needs_for_a_moment_is_tried(kind, weight_decay):
    params = [nn.Parameter(torch.zeros(2**18, device="cuda")) for _ in range(4)]
    optimizer = getattr(torch.optim, kind)(params, lr=0.1, weight_decay=weight_decay)

    def peak_of(call: Any) -> int:
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated()

    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()  # which makes its state
    assert peak_of(lambda: try_step(optimizer)) == peak_of(optimizer.step)


class TestHostBudget:
    def test_beside_a_technique_that_names_none(self):
        offload = Offloading("parameters", resident=1)
        with pytest.raises(IncompatibleError, match=r"`host_budget` is 1\.00 KiB"):
            fit(lit_of_steps(), quiet(preset="off", offload=offload, host_budget="1KiB"))

    def test_twice(self):
        offload = Offloading("parameters", host_budget="1GiB")
        with pytest.raises(ConfigurationError, match="`host_budget='2GiB'` is not used with"):
            quiet(preset="off", offload=offload, host_budget="2GiB")
