"""Weights, gradients and updates on the simulated streams of a GPU: the same bits, and no races."""

import functools
import gc
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memsave import ActivationCheckpointing, LowPrecisionWeights, Offloading
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.offloading import copies
from lightning_memsave.techniques.offloading.copies import StreamCopies
from lightning_memsave.techniques.offloading.host_worker import HostWorker
from tests.cases import MODELS, make_batch, make_model
from tests.helpers import assert_same, clones, in_pairs
from tests.techniques.offloaded_loops import (
    LOOPS,
    OPTIMIZERS,
    optimizer_of,
    trained,
    trained_without,
)
from tests.techniques.races import Races

EVERYTHING = {
    "optimizer": Offloading(),
    "parameters": Offloading("parameters"),
    "everything": Offloading(True, min_bytes=1),
}
SHARES = {"half of the blocks": Offloading("parameters+activations", min_bytes=1, resident="50%")}
"""On a GPU, whose kernels round otherwise than the host's, not the same bits as of the host."""


# On a CPU, scales and gradients that are given are the device's memory, and the worker's as well.
LOOPS_HERE = [loop for loop in LOOPS if loop != "on gradients that somebody has set"]
KINDS = [kind for kind in OPTIMIZERS if kind not in ("fused AdamW", "8bit")]


@pytest.mark.parametrize(
    ("what", "name", "loop", "kind", "which", "is_late"),
    in_pairs(
        *(
            [*EVERYTHING, *SHARES],
            [*MODELS],
            LOOPS_HERE,
            KINDS,
            [None, "all", "selective"],
            [False, True],
        )
    ),
)
def test_training_is_the_same_bit_for_bit(what, name, loop, kind, which, is_late):  # noqa: PLR0917
    with Races(is_late=is_late).running():
        model = make_model(name).train()
        if which is not None and name != "unrepeated":
            ActivationCheckpointing(which).apply(model)
        optimizer = optimizer_of(model, kind)
        technique = (EVERYTHING | SHARES)[what]
        handle = technique.apply(model)
        technique.update_in_background(optimizer)
        saving = trained(model, optimizer, loop)
        handle.undo()
    assert_same(saving, trained_without(name, loop, kind))


@pytest.mark.parametrize(
    ("adds", "dtype", "shape"),
    in_pairs([False, True], [torch.float32, torch.bfloat16], [(), (0, 3), (40, 70)]),
)
def test_gradients_land_in_any_layout_and_type(shape, dtype, adds):
    with Races(is_late=True).running():
        memory = HostMemory()
        copies = StreamCopies(HostWorker(in_background=True), memory, torch.device("cpu"))
        pairs = []
        for number in range(3):
            source = torch.randn(shape).to(dtype)
            if number and source.ndim:
                source = source.t().contiguous().t()
            target = memory.tensors_like([torch.empty(shape)])[0].fill_(1.0)
            pairs.append((target, source))
            copies.to_host(*pairs[-1], adds=adds)
        copies.finish()
        for target, source in pairs:
            assert torch.equal(target, source.float() + adds)


class _Lagging(StreamCopies):
    """Its streams are busy with something else before each copy."""

    def _run_on(self, stream: Any, *tensors: Any) -> Any:
        sleep(stream)
        return super()._run_on(stream, *tensors)


def sleep(stream: Any) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(random.choice([0, 10**5, 10**7]))


class OnDevice(nn.Module):
    """A model on a device that is busy now and then, in autocast if its weights are bfloat16."""

    def __init__(self, name: str, device: str, *, is_low: bool) -> None:
        super().__init__()
        self.model, self.device = make_model(name).train().to(device), device
        self.is_low = is_low
        for module in self.model.modules():
            module.register_forward_pre_hook(self._lag)

    def _lag(self, *_: object) -> None:
        if self.device == "cuda":
            sleep(torch.cuda.current_stream())

    def forward(self, number: int) -> Tensor:
        torch.manual_seed(number)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.is_low):
            loss: Tensor = self.model(make_batch(number).to(self.device))
        return loss


Found = tuple[list[Tensor], dict[str, Tensor]]


def offloaded_on(device: str, name: str, what: str, *, is_low: bool) -> Found:
    """Three steps of two passes each, all that was asked for on the host."""
    whole = OnDevice(name, device, is_low=is_low)
    technique = EVERYTHING[what]
    handles: list[Any] = [ActivationCheckpointing().apply(whole.model)]
    handles.append(technique.apply(whole.model))
    if is_low:
        handles.append(LowPrecisionWeights("master").apply(whole.model))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3, fused=True)
    handles.append(technique.update_in_background(optimizer))
    losses = []
    for number in range(3):
        for part in range(2):
            loss = whole(10 * number + part)
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    state = clones(whole.model.state_dict())
    for each in reversed(handles):
        each.undo()
    return losses, state


@functools.cache
def by_hand_on(device: str, name: str, *, is_low: bool) -> Found:
    """The same by a loop that stops for each copy; the host updates with the same kernel."""
    whole = OnDevice(name, device, is_low=is_low)
    masters = {n: nn.Parameter(p.detach().cpu().clone()) for n, p in whole.model.named_parameters()}
    if is_low:
        LowPrecisionWeights().apply(whole.model)
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-3, fused=True)
    losses = []
    for number in range(3):
        for param_name, param in whole.model.named_parameters():
            param.data = masters[param_name].detach().to(device, param.dtype, copy=True)
        for part in range(2):
            loss = whole(10 * number + part)
            loss.backward()
            losses.append(loss.detach())
            for param_name, param in whole.model.named_parameters():
                assert param.grad is not None
                gradient, before = param.grad.float().cpu(), masters[param_name].grad
                masters[param_name].grad = gradient if before is None else before + gradient
                param.grad = None
        nn.utils.clip_grad_norm_(masters.values(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: masters[n].detach() for n in whole.model.state_dict()}


@pytest.mark.parametrize("is_low", [False, True])
@pytest.mark.parametrize("what", EVERYTHING)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def test_streams_that_lag_behind_give_the_same_bits(device, what, is_low, monkeypatch):
    """On a CPU the test is tested."""
    monkeypatch.setattr(copies, "StreamCopies", _Lagging)
    expected = by_hand_on(device, "dropout", is_low=is_low)
    for _ in range(3 if device == "cuda" else 1):
        assert_same(offloaded_on(device, "dropout", what, is_low=is_low), expected)


@pytest.mark.gpu
def test_memory_of_a_gpu_does_not_grow_with_streams_that_lag_behind(monkeypatch):
    monkeypatch.setattr(copies, "StreamCopies", _Lagging)
    found = []
    for _ in range(4):
        offloaded_on("cuda", "dropout", "everything", is_low=False)
        gc.collect()
        found.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert found[1:] == [found[1]] * 3
