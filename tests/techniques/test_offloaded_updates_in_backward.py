"""Offloaded weights that are updated in backward: the same training without whole gradients."""

import functools
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memsave import IncompatibleError, MemsaveError, Offloading, OptimizerInBackward
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.techniques import tiled_steps
from lightning_memsave.techniques.offloading import residence
from lightning_memsave.techniques.offloading.part import Part
from lightning_memsave.techniques.optimizer_in_backward.updates import UpdatesInBackward
from lightning_memsave.techniques.optimizer_step import ACTIVE_UPDATES
from tests.cases import MODELS, Model, make_batch, make_model
from tests.helpers import assert_same
from tests.techniques.offloaded_loops import Offloaded, assert_bitwise

KINDS = ["AdamW", "fused AdamW", "momentum", "Adafactor", "8bit"]
Run = functools.partial(Offloaded, in_backward=True)


class TestBitwise:
    @pytest.mark.parametrize("name", ["tied", "used_twice", "eager_bert", "frozen"])
    def test_models(self, name):
        assert_bitwise(Run(name, "parameters"), Run(name, "parameters", in_backward=False))

    @pytest.mark.parametrize("rounding", [None, "master", "split"])
    @pytest.mark.parametrize("optimizer", KINDS)
    def test_optimizers(self, optimizer, rounding, monkeypatch):
        """Gradients in bfloat16 are widened tile by tile."""
        monkeypatch.setattr(tiled_steps, "MIN_TILE_NUMEL", 2**11)
        how: dict[str, Any] = {"optimizer": optimizer, "rounding": rounding}
        assert_bitwise(Run(**how), Run(**how, in_backward=False))

    @pytest.mark.parametrize("rounding", [None, "master", "split"])
    def test_clipped_by_value(self, rounding):
        ours = Run(rounding=rounding, in_backward=OptimizerInBackward(clip_value=1e-4))
        theirs = Run(rounding=rounding, in_backward=False)
        for number in range(3):
            torch.manual_seed(number)
            theirs.whole(make_batch(number)).backward()
            nn.utils.clip_grad_value_(theirs.model.parameters(), 1e-4)
            theirs.optimizer.step()
            theirs.optimizer.zero_grad()
            ours.step(number)
        assert_same(ours.model, theirs.model)

    def test_unused_and_resident_parameters(self):
        """What never has a gradient does not hold up its part; others are updated on the device."""
        runs = []
        for in_backward in (True, False):
            model = make_model("dropout").train()
            model.blocks[1].unused = nn.Parameter(torch.ones(3))
            model.table = nn.Embedding(8, 1, sparse=True)
            offloading = Offloading()
            offloading.apply(model)
            dense = [p for p in model.parameters() if p is not model.table.weight]
            optimizer = torch.optim.SGD(
                [{"params": [*model.table.parameters()]}, {"params": dense}]
            )
            if in_backward:
                OptimizerInBackward().apply(optimizer)
            offloading.update_in_background(optimizer)
            for number in range(3):
                torch.manual_seed(number)
                loss = model(make_batch(number)) * model.table(torch.tensor([number, 1])).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            runs.append(model)
        assert_same(*runs)

    def test_schedulers_and_state_dicts_in_the_middle(self):
        ours, theirs = Run(), Run(in_backward=False)
        for run in (ours, theirs):
            scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
            for number in range(4):
                run.step(number)
                scheduler.step()
                if number == 1:
                    saved = run.optimizer.state_dict()
                    run.optimizer.load_state_dict(saved)
                    run.model.load_state_dict(run.model.state_dict())
        assert_same(ours.model, theirs.model)


class _OnAnotherDevice(Part):
    """Data on another device drops the AccumulateGrad node, as data of another type does here."""

    def leave(self) -> None:
        super().leave()
        for param in self.params:
            data = param.data
            param.data = torch.empty(0, dtype=torch.float64)
            param.data = data


class _CalledTwice(Model):
    """As with two views of each sample."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.run_blocks(x), self.run_blocks(x.flip(0))
        return self.head(one * other.detach() + one.square() - other).mean()


class TestUsedTwice:
    """Each use of a streamed block has its own gradient, and there is one update."""

    @pytest.mark.parametrize("rounding", [None, "master", "split"])
    @pytest.mark.parametrize("name", ["used_twice", "called twice"])
    def test_as_updated_by_the_step(self, name, rounding, monkeypatch):
        monkeypatch.setattr(residence, "Part", _OnAnotherDevice)
        monkeypatch.setitem(MODELS, "called twice", _CalledTwice)
        how: dict[str, Any] = {"what": "parameters", "rounding": rounding}
        assert_bitwise(Run(name, **how), Run(name, **how, in_backward=False))

    @pytest.mark.gpu
    @pytest.mark.parametrize("name", ["used_twice", "called twice"])
    def test_on_a_gpu(self, name, monkeypatch):
        monkeypatch.setitem(MODELS, "called twice", _CalledTwice)
        how: dict[str, Any] = {"what": "parameters", "device": "cuda"}
        assert_bitwise(Run(name, **how), Run(name, **how, in_backward=False))

    @pytest.mark.parametrize("recomputes", [False, True])
    @pytest.mark.parametrize("name", ["used_twice", "called twice"])
    def test_as_without_offloading(self, name, recomputes, monkeypatch):
        monkeypatch.setattr(residence, "Part", _OnAnotherDevice)
        monkeypatch.setitem(MODELS, "called twice", _CalledTwice)
        assert_bitwise(Run(name, "parameters", recomputes=recomputes), Offloaded(name, None))

    def test_once_again_in_the_next_step(self, monkeypatch):
        """An evaluation in between is no use."""
        monkeypatch.setattr(residence, "Part", _OnAnotherDevice)
        made = Run("dropout", what="parameters")
        for number in range(2):
            with torch.no_grad():
                made.model(make_batch(number))
                made.model(make_batch(number))
            made.model(make_batch(number)).backward()
            assert all(param.grad is None for param in made.model.blocks.parameters())
            made.optimizer.step()


class TestMemory:
    @pytest.mark.parametrize("rounding", [None, "master", "split"])
    def test_gradients_of_two_parts_are_alive(self, rounding):
        made = Run(optimizer="fused AdamW", rounding=rounding)
        with LiveTensors(made.model, [made.optimizer]) as counter:
            for number in range(3):
                made.step(number)
            made.residence.finish()
        params = [*made.model.parameters()]
        weights = sum(p.nbytes for p in params)
        is_half = rounding is not None
        copies = [p.nbytes // (1 + (is_half and p.ndim > 1)) for p in params]
        slabs = 2 * sum(copies[:6])
        assert ACTIVE_UPDATES[made.optimizer].bytes_at_a_time == slabs
        expected = 3 * weights + 4 * len(params) + slabs
        if rounding == "master":
            expected += sum(copies)
        elif rounding == "split":  # a NaN in the place of each
            expected += 4 * sum(p.ndim > 1 for p in params)
        assert counter.peak.host_bytes == expected
        assert counter.peak.parameter_bytes == sum(copies)

    def test_updates_run_while_backward_does(self):
        made = Run()
        made.step(0)
        made.handle.wait()
        block = made.model.get_submodule("blocks")[3]
        before = made.optimizer.state[block.up.weight]["step"].item()
        seen = []

        def look(_: Tensor) -> None:
            made.handle.residence.parts[4].wait()
            seen.append(made.optimizer.state[block.up.weight]["step"].item())

        hook = made.model.get_submodule("blocks")[0].up.weight.register_hook(look)
        made.model(make_batch(1)).backward()
        hook.remove()  # it knows the model, in a circle that Python does not see whole
        assert seen == [before + 1]
        assert all(p.grad is None for p in made.model.parameters())


def test_gradients_of_tables_are_there_one_at_a_time(monkeypatch):
    """Also where the host has other work to do first."""
    tables = nn.ModuleList(nn.Embedding(64, 8) for _ in range(3))
    offloading = Offloading("embeddings", min_table_bytes=1)
    handle = offloading.apply(tables)
    assert handle.residence is not None
    optimizer = torch.optim.SGD(tables.parameters(), lr=0.1)
    OptimizerInBackward().apply(optimizer)
    offloading.update_in_background(optimizer)
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    numbers = []
    take = UpdatesInBackward.take

    def counted(updates: Any, param: nn.Parameter, part: Part) -> bool:
        alive.add(param.grad)
        if len(alive) > 1:  # the host's thread lets go of the last one, or it is at its work still
            time.sleep(0.05)
        numbers.append(len(alive))
        return take(updates, param, part)

    monkeypatch.setattr(UpdatesInBackward, "take", counted)
    ids = torch.arange(4)
    loss = sum(table(ids).sum() for table in tables)
    handle.residence.worker.submit(lambda: time.sleep(0.2))
    loss.backward()
    optimizer.step()
    assert numbers == [1, 1, 1]


class TestFailures:
    def test_of_a_backward_pass_leaves_nothing_behind(self):
        made, twin = Run(), Run()
        hook = made.model.get_parameter("head.weight").register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.step(0)
        hook.remove()
        made.residence.leave()
        updates = ACTIVE_UPDATES[made.optimizer]
        assert not updates.has_updated
        updates.forget()
        assert_bitwise(made, twin)

    def test_of_an_update_comes_to_who_waits(self):
        made = Run()
        made.step(0)
        made.handle.wait()
        state = made.optimizer.state[made.model.get_parameter("blocks.2.up.weight")]
        state["exp_avg"] = torch.zeros(3, 3)
        made.step(1)
        with pytest.raises(RuntimeError, match="size"):
            made.handle.wait()
        made.handle.wait()

    def test_a_second_backward_pass_is_refused(self):
        made = Run()
        made.model(make_batch(0)).backward()
        with pytest.raises(IncompatibleError, match="second gradient"):
            made.model(make_batch(1)).backward()

    def test_needs_updates_in_the_background(self):
        model = make_model("dropout").train()
        Offloading().apply(model)
        optimizer = torch.optim.AdamW(model.parameters())
        OptimizerInBackward().apply(optimizer)
        with pytest.raises(IncompatibleError, match="update_in_background"):
            model(make_batch(0)).backward()

    def test_offloading_comes_first(self):
        model = make_model("dropout").train()
        optimizer = torch.optim.AdamW(model.parameters())
        OptimizerInBackward().apply(optimizer)
        with pytest.raises(IncompatibleError, match="Apply `Offloading` before"):
            Offloading().apply(model)

    def test_a_total_norm_is_refused(self):
        model = make_model("dropout").train()
        Offloading().apply(model)
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(MemsaveError, match="known only after backward"):
            OptimizerInBackward(clip_norm=1.0).apply(optimizer)

    def test_undone_in_the_middle(self):
        made, twin = Run(), Run(in_backward=False)
        assert_bitwise(made, twin, 2)
        made.in_backward.undo()
        assert_bitwise(made, twin, 2)
