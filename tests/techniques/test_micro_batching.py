"""Micro-batches in a plain PyTorch loop."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memsave.errors import ConfigurationError, IncompatibleError, MemoryExhaustedError
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.techniques._micro_batches.loss_weights import (
    guess,
    read_weights,
    weightings_of,
)
from lightning_memsave.techniques._micro_batches.training_state import TrainingState
from lightning_memsave.techniques.micro_batching import MicroBatching
from tests.out_of_memory import MESSAGE, OutOfMemoryAt


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("limit", [16, 15, 7, 3])
def test_the_sequence_of_sizes(limit):
    """Halved until it fits, and kept for the batches that follow."""
    sizes = []
    model = make_model()

    def loss_of(batch):
        sizes.append(len(batch))
        if len(batch) > limit:
            raise torch.OutOfMemoryError(MESSAGE)
        return model(batch).square().mean()

    step = MicroBatching(module=model).apply(loss_of).target
    step(torch.randn(16, 6))
    tried = {16: [16], 15: [16, 8, 8], 7: [16, 8, 4, 4, 4, 4], 3: [16, 8, 4, *[2] * 8]}[limit]
    assert sizes == tried
    sizes.clear()
    step(torch.randn(16, 6))
    assert sizes == [size for size in tried if size == tried[-1]]


@pytest.mark.parametrize("place", range(0, 40, 4))
def test_a_repeated_batch_is_as_if_it_had_been_smaller_from_the_start(place):
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    results = []
    for size, mode in ((4, OutOfMemoryAt()), ("auto", OutOfMemoryAt(place))):
        model = make_model()
        technique = MicroBatching(size, module=model)  # type: ignore[arg-type] # "auto" or 4

        def loss_of(batch, model=model, mode=mode):
            mode.is_armed = True
            return model(batch).square().mean()

        step = technique.apply(loss_of).target
        torch.manual_seed(3)
        with mode:
            loss = step(batch)
        assert mode.num_ops > max(mode.places, default=0)
        results.append((loss, gradients(model), list(model.buffers())))
    (loss, theirs, buffers), (same_loss, ours, same_buffers) = results
    assert torch.equal(loss, same_loss)
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(buffers, same_buffers, strict=True))


def test_gradients_of_earlier_batches_survive():
    model = make_model().eval()

    def loss_of(batch):
        if len(batch) > 4:
            loss = model(batch).square().mean()
            loss.backward()  # half a backward pass has happened when memory runs out
            raise torch.OutOfMemoryError(MESSAGE)
        return model(batch).square().mean()

    batches = torch.randn(2, 8, 6)
    for batch in batches:
        model(batch).square().mean().backward()
    expected = gradients(model)
    model.zero_grad()
    model(batches[0]).square().mean().backward()
    MicroBatching(module=model).apply(loss_of).target(batches[1])
    for ours, truth in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(ours, truth)


def test_floor():
    model = make_model()

    def loss_of(batch):
        raise torch.OutOfMemoryError(MESSAGE)

    with pytest.raises(MemoryExhaustedError, match="2 samples at once, repeated with 1"):
        MicroBatching(module=model).apply(loss_of).target(torch.randn(4, 6))


def test_autocast_around_the_step_keeps_no_copies_of_weights():
    """Outside of our step a plain loop may have `torch.autocast`, whose cache lives as long."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    alive: list[int] = []

    def loss_of(batch):
        alive.append(live.live_bytes)
        return model(batch).square().mean()

    step = MicroBatching(1).apply(loss_of).target
    batch = torch.randn(6, 256)
    with LiveTensors(model) as live, torch.autocast("cpu", torch.bfloat16):
        step(batch)
    copies = 4 * 256 * 256 * 2
    assert max(alive[1:]) - min(alive[1:]) < 0.05 * copies
    parameters = sum(p.nbytes for p in model.parameters())
    assert alive[-1] - batch.nbytes - 2 * parameters < 0.5 * copies


def test_state_is_put_back():
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.frozen = nn.BatchNorm1d(3).eval()
            self.accuracy = torchmetrics.MeanMetric()
            self.outputs = torchmetrics.CatMetric()
            self.register_buffer("table", torch.zeros(2), persistent=False)

    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), float(np.random.rand())]

    module: Any = Module()
    module.accuracy(torch.tensor(1.0))
    module.outputs.update(torch.tensor([1.0]))
    module.norm.weight.grad = torch.ones(3)
    state = TrainingState(module, gradients="keep")
    first = draw()
    for _ in range(2):  # a batch can be repeated more than once
        module.norm(torch.randn(4, 3))
        module.accuracy(torch.tensor(5.0))
        module.outputs.update(torch.tensor([2.0]))
        module.norm.weight.grad.add_(1)
        module.table.fill_(1.0)
        state.restore()
        assert module.norm.running_mean.tolist() == [0, 0, 0]
        assert module.norm.num_batches_tracked == 0
        assert module.accuracy.compute() == 1
        assert module.accuracy._update_count == 1
        assert module.outputs.compute() == 1
        assert module.norm.weight.grad.tolist() == [1, 1, 1]
        assert draw() == first
    assert module.table.tolist() == [1, 1], "what is not in `state_dict` is not copied"
    TrainingState(module, gradients="drop").restore()
    assert module.norm.weight.grad is None


IGNORING = {"labels": torch.tensor([[1, 2], [3, -100]])}


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (IGNORING, "weighted by the entries of `labels` that are not -100"),
        ({"labels": torch.tensor([[1, 2]])}, "weighted by samples"),
        ({"labels": torch.tensor([1, -100])}, "weighted by samples"),
        ({"labels": ["a"]}, "weighted by samples"),
        (torch.zeros(3), "weighted by samples"),
    ],
)
def test_the_guess_where_nothing_is_proven(batch, expected):
    assert guess(batch).text == expected


def test_weights_of_all_micro_batches_are_read_at_once():
    """Each number that is read alone is one more wait for a GPU."""

    class Reads(TorchDispatchMode):
        num_reads = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.num_reads += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    labels = torch.tensor([[1, -100], [2, 3], [-100, -100], [4, 5]])
    parts = [{"labels": part} for part in labels.split(1)]
    weightings = weightings_of("auto", parts[0])
    with Reads() as reads:
        rows = read_weights(weightings, parts)
    assert reads.num_reads == 0
    assert dict(zip([w.text for w in weightings], rows, strict=True)) == {
        "weighted by samples": [1, 1, 1, 1],
        "weighted by the entries of `labels` that are not -100": [1, 2, 0, 2],
        "weighted by the entries of `labels` that are not 0": [2, 2, 2, 2],
        "weighted by the entries of `labels` that are not -1": [2, 2, 2, 2],
        "weighted by the entries of `labels` that are not -100, without the first of each sample": [
            *(0, 1, 0, 1)
        ],
        "weighted by the entries of `labels` that are not 0, without the first of each sample": [
            *(1, 1, 1, 1)
        ],
        "weighted by the entries of `labels` that are not -1, without the first of each sample": [
            *(1, 1, 1, 1)
        ],
        "added up, as the loss is a sum over samples": [1, 1, 1, 1],
    }


def test_tokens_need_labels():
    step = MicroBatching(2, loss_weight="tokens").apply(lambda batch: batch.sum()).target
    with pytest.raises(ConfigurationError, match="no tensor named `labels`"):
        step(torch.zeros(4, 2))


def test_half_precision_is_refused():
    model = nn.Linear(2, 2).to(torch.bfloat16)
    with pytest.raises(IncompatibleError, match=r"torch\.bfloat16.*bf16-mixed"):
        MicroBatching(2, module=model).apply(lambda batch: model(batch).sum())
    model.requires_grad_(False)
    assert MicroBatching(2, module=model).check(lambda batch: model(batch).sum()) == []


def test_shrinking_needs_the_module():
    with pytest.raises(IncompatibleError, match="Pass `module=model`"):
        MicroBatching().apply(lambda batch: batch.sum())
