"""Weights whose copy for the device is half of the float32 number on the host."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memsave.core.memory import emulating_cuda, is_host, mark_as_host
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.techniques import tiled_steps
from lightning_memsave.techniques.flat_memory import ALIGNMENT_BYTES
from lightning_memsave.techniques.offloading.halves import join_weight, split_weight
from tests.cases import make_batch
from tests.helpers import assert_same, in_pairs
from tests.techniques.test_offloaded_updates_in_backward import KINDS, Run

TIE = -(2**15)  # the lower half of a number between two bfloat16 numbers


def halves_of(values: Tensor) -> tuple[Tensor, Tensor]:
    upper = torch.empty_like(values, dtype=torch.bfloat16)
    lower = torch.empty_like(values, dtype=torch.int16)
    split_weight(values.clone(), upper, lower)
    return upper, lower


def bits_of(values: Tensor) -> Tensor:
    return values.view(torch.int32)


class TestHalves:
    def test_are_joined_to_the_same_bits(self):
        """Also subnormal numbers, zeros and infinities; NaN stays NaN."""
        torch.manual_seed(0)
        special = [0x00000000, 0x7F800000, 0x7F7FFFFF, 0x00000001, 0x7FC00000, 0x7FFFFFFF]
        signed = [*special, *(bits - 2**31 for bits in special)]
        bits = torch.cat([torch.tensor(signed), torch.randint(-(2**31), 2**31, (2**20,))])
        values = bits.to(torch.int32).view(torch.float32)
        upper, lower = halves_of(values)
        joined, is_nan = join_weight(upper, lower), values.isnan()
        assert torch.equal(bits_of(joined)[~is_nan], bits_of(values)[~is_nan])
        assert torch.equal(joined.isnan(), is_nan)
        assert torch.equal(upper.isnan(), is_nan)

    def test_the_upper_one_differs_from_rounding_to_even_in_ties_only(self):
        bits = torch.randint(-(2**31), 2**31, (2**20,)).to(torch.int32)
        bits[::7] = (bits[::7] & ~0xFFFF) | 0x8000
        values = bits.view(torch.float32)
        upper, lower = halves_of(values)
        differs = (upper != values.bfloat16()) & ~values.isnan()
        assert differs.any()
        assert (lower[differs] == TIE).all()
        # Away from zero.
        assert (upper[differs].abs().float() > values[differs].abs()).all()

    def test_in_any_memory_order(self):
        values = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
        upper, lower = halves_of(values)
        joined = join_weight(upper, lower)
        assert torch.equal(joined, values)
        assert joined.stride() == values.stride()


class Constant(nn.Module):
    """Gradients do not depend on the weights, so that training is exact as long as updates are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(64, 96) for _ in range(3)])
        with torch.no_grad():
            for block in self.blocks:  # many ties
                weight: Any = block.weight
                bits_of(weight.data)[::3].bitwise_and_(~0xFFFF).bitwise_or_(0x8000)
        self.seen: list[Tensor] = []

    def forward(self, batch: Tensor) -> Tensor:
        losses = []
        for block in self.blocks:
            self.seen.append(block.weight.detach().clone())
            losses.append(block(batch).sum())
        return torch.stack(losses).sum()


@pytest.fixture
def constant(monkeypatch):
    monkeypatch.setattr("tests.techniques.offloaded_loops.make_batch", batch)
    monkeypatch.setattr("tests.techniques.offloaded_loops.make_model", lambda _: Constant())
    monkeypatch.setattr(tiled_steps, "MIN_TILE_NUMEL", 2**11)


def batch(number: int) -> Tensor:
    torch.manual_seed(number)
    return torch.randn(4, 64)


class TestBesideMasters:
    @pytest.mark.usefixtures("constant")
    @pytest.mark.parametrize("in_backward", [True, False])
    @pytest.mark.parametrize("optimizer", KINDS)
    def test_masters_are_exact_and_copies_differ_in_ties(self, optimizer, in_backward):
        runs = [
            Run(rounding=rounding, optimizer=optimizer, in_backward=in_backward)
            for rounding in ("master", "split")
        ]
        for run in runs:
            for number in range(4):
                run.step(number)
            run.handle.wait()
        assert_same(runs[0].model, runs[1].model)
        assert_same(runs[0].optimizer, runs[1].optimizer)
        masters: list[Any] = [block.weight for block in Constant().blocks]
        seen: list[Any] = [run.model.seen for run in runs]
        num_ties = 0
        for index, (one, other) in enumerate(zip(*seen, strict=True)):
            assert one.dtype is other.dtype is torch.bfloat16
            if index < len(masters):
                differs = one != other
                num_ties += int(differs.sum())
                _, lower = halves_of(masters[index].detach())
                assert (lower[differs] == TIE).all()
        assert num_ties > 500

    def test_other_optimizers_need_no_more_than_offloading(self):
        """Without updates in the background, weights are whole in each step."""
        runs = []
        for in_background in (True, False):
            run = Run(rounding="split", in_backward=False, in_background=in_background)
            for number in range(3):
                run.step(number)
            runs.append(run)
        assert_same(runs[0].model, runs[1].model)

    @pytest.mark.usefixtures("constant")
    def test_sums_of_gradients(self):
        runs = []
        for rounding in ("master", "split"):
            run = Run(rounding=rounding, in_backward=False)
            for number in range(3):
                for part in range(2):
                    run.whole(batch(10 * number + part)).backward()
                nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
                run.optimizer.step()
                run.optimizer.zero_grad()
            runs.append(run)
        assert_same(runs[0].model, runs[1].model)


class TestWholeWeights:
    def test_are_there_after_waiting_until_the_next_forward_pass(self):
        made = Run(rounding="split")
        weight = made.model.get_parameter("head.weight")
        with LiveTensors(made.model, [made.optimizer]) as counter:
            made.step(0)
            assert weight.isnan().all()  # nobody reads it unnoticed
            made.handle.wait()
            assert not weight.isnan().any()
            assert all(p.dtype is torch.float32 for p in made.model.parameters())
            whole = [p for p in made.model.parameters() if p.ndim > 1]
            with_whole = counter._host_bytes
            made.whole(make_batch(1)).backward()
            # Halves take what whole weights took; a NaN that all elements share is besides.
            assert counter._host_bytes == with_whole + 4 * len(whole)
            made.optimizer.step()

    def test_memory_of_weights_is_freed(self):
        """Memory comes in pieces: what stays is not in one with what goes."""
        made = Run(rounding="split")
        for number in range(2):
            made.step(number)
            made.model.state_dict()
        made.step(2)
        made.residence.finish()
        pieces = [piece() for piece in made.residence.memory._pieces]
        num_bytes = sum(piece.nbytes for piece in pieces if piece is not None)
        params = [*made.model.parameters()]
        slabs = made.in_backward.updates.bytes_at_a_time
        padding = ALIGNMENT_BYTES * 3 * len(params)
        assert num_bytes <= sum(4 * p.numel() for p in params) + slabs + padding

    def test_changes_of_weights_between_steps_count(self):
        made = Run(rounding="split")
        made.step(0)
        made.handle.wait()
        with torch.no_grad():
            for param in made.model.parameters():
                param.fill_(0.1 + 2**-20)
        saved = {name: value.clone() for name, value in made.model.state_dict().items()}
        made.model.eval()
        with torch.no_grad():
            made.whole(make_batch(0))
        for name, value in made.model.state_dict().items():
            assert torch.equal(value, saved[name])

    @pytest.mark.parametrize(
        ("optimizer", "saves_with", "loads_with"),
        in_pairs(["AdamW", "8bit"], ["master", "split"], ["master", "split"]),
    )
    def test_checkpoints_load_in_both_directions(self, saves_with, loads_with, optimizer):
        made = Run(rounding=saves_with, optimizer=optimizer)
        for number in range(2):
            made.step(number)
        file = io.BytesIO()
        saved = {"model": made.model.state_dict(), "optimizer": made.optimizer.state_dict()}
        assert all(value.dtype is torch.float32 for value in saved["model"].values())
        torch.save(saved, file)
        file.seek(0)
        found: Any = torch.load(file, weights_only=True)
        other = Run(rounding=loads_with, optimizer=optimizer)
        other.step(9)
        other.model.load_state_dict(found["model"])
        other.optimizer.load_state_dict(found["optimizer"])
        assert_same(made.model, other.model)
        other.handle.wait()
        twin = Run(rounding=loads_with, optimizer=optimizer)
        twin.model.load_state_dict(found["model"])
        twin.optimizer.load_state_dict(copy.deepcopy(found["optimizer"]))
        for number in range(2, 4):
            assert torch.equal(other.step(number), twin.step(number))
        assert_same(other.model, twin.model)
        if saves_with == loads_with:
            for number in range(2, 4):
                made.step(number)
            assert_same(made.model, other.model)

    def test_undone_they_are_whole(self):
        made = Run(rounding="split")
        made.step(0)
        saved = {name: value.clone() for name, value in made.model.state_dict().items()}
        made.step(1)
        made.model.load_state_dict(saved)
        made.whole(make_batch(2)).backward()
        made.handle.undo()
        assert not any(is_host(p.untyped_storage()) for p in made.model.parameters())
        copied = copy.deepcopy(made.model)
        assert all(p.dtype is torch.float32 for p in copied.parameters())
        assert not any(p.isnan().any() for p in copied.parameters())


def test_tiles_on_the_host_are_as_small_as_without_a_gpu():
    with FakeTensorMode(), emulating_cuda():
        on_gpu, on_host = (nn.Parameter(torch.empty(2**27)) for _ in range(2))
        mark_as_host(on_host)
        assert tiled_steps._tile_numel(on_gpu) == 4 * tiled_steps._tile_numel(on_host)
