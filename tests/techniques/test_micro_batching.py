"""Micro-batches in a plain PyTorch loop."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import BaseModelOutput

from lightning_memsave import MicroBatching, OptimizerInBackward
from lightning_memsave.errors import (
    ConfigurationError,
    IncompatibleError,
    MemoryExhaustedError,
    MemsaveError,
)
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.techniques.micro_batching.training_state import KnownChanges, TrainingState
from tests.helpers import assert_same
from tests.out_of_memory import MESSAGE


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
        if torch.is_grad_enabled():  # not in the proof
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


def test_an_error_that_says_nothing():
    def fail(batch):
        raise MemoryError

    with pytest.raises(MemoryExhaustedError, match="cannot be reduced: MemoryError"):
        MicroBatching(module=nn.Linear(1, 1)).apply(fail).target(torch.zeros(1, 1))


def test_other_errors_inside_of_a_handler_are_not_repeated():
    """`except torch.OutOfMemoryError: train again` puts it into the context of each error."""
    sizes = []

    def fail(batch):
        sizes.append(len(batch))
        raise ValueError("wrong")

    step = MicroBatching(module=nn.Linear(1, 1)).apply(fail).target
    try:
        raise torch.OutOfMemoryError(MESSAGE)
    except torch.OutOfMemoryError:
        with pytest.raises(ValueError, match="wrong"):
            step(torch.zeros(8, 1))
    assert sizes == [8]


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


class Stateful(nn.Module):
    """Changes what a module can hold in every way that was seen in projects."""

    in_place: torch.Tensor
    replaced: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 2), nn.BatchNorm1d(6)
        self.metrics = nn.ModuleList([torchmetrics.MeanMetric(), torchmetrics.CatMetric()])
        for name in ("in_place", "through_data", "replaced", "removed"):
            self.register_buffer(name, torch.zeros(2), persistent=False)
        self.register_buffer("empty", None)
        self.num_calls, self.last = 0, torch.zeros(1)
        self.counted = torch.zeros(1)
        self.outputs: list[Any] = []
        self.totals = {"calls": 0}
        self.output = BaseModelOutput(last_hidden_state=torch.zeros(1))

    def forward(self, x):
        _ = torch.rand(1), random.random(), np.random.rand()
        self.norm(x)
        for metric in self.metrics:
            metric.update(x.mean().detach())
        assert all(p.requires_grad for p in self.parameters())
        self.in_place += 1
        self.through_data.data.add_(1)
        self.replaced = self.replaced + 1
        self.empty = torch.ones(1)
        if hasattr(self, "removed"):
            del self.removed
        self.register_buffer("cache", torch.zeros(len(x)), persistent=False)
        self.num_calls += 1
        self.last = x.mean().detach()
        self.counted += 1
        self.outputs.append(x.detach())
        self.totals["calls"] += 1
        self.added = True
        self.output = BaseModelOutput(last_hidden_state=torch.ones(1))
        self.requires_grad_(False).eval()
        if len(x) > 4:
            raise torch.OutOfMemoryError(MESSAGE)
        self.requires_grad_()
        return self.linear(x)


def all_state(module: nn.Module) -> dict[str, Any]:
    inner = vars(nn.Module())
    own = {name: value for name, value in vars(module).items() if name not in inner}
    own |= {"mode": module.training, "non-persistent": module._non_persistent_buffers_set}
    own |= {"norm": module.norm.state_dict(), "random": torch.get_rng_state()}
    own |= {"python": random.getstate(), "numpy": str(np.random.get_state())}
    own["metrics"] = [[m._update_count, *map(vars(m).get, m._defaults)] for m in module.metrics]
    return own | module._buffers


@pytest.mark.parametrize("is_training", [True, False])
def test_nothing_that_a_failed_try_changed_stays(is_training):
    """Whatever its first forward pass did, the second try would find the module as it did."""
    model = Stateful().train(is_training)
    tensor, before = model.in_place, copy.deepcopy(all_state(model))
    state = TrainingState(model, gradients="keep")
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.randn(8, 6))
    state.restore()
    assert_same(before, all_state(model))
    assert model.in_place is tensor


def test_what_changes_with_each_part_is_named():
    model = Stateful()
    step = MicroBatching(module=model).apply(lambda batch: model(batch).square().mean()).target
    with pytest.raises(MemoryExhaustedError, match="entry for each sample of the batch: `cache`"):
        step(torch.randn(8, 6))


def test_buffers_of_inference_are_put_back():
    """A table that validation has built under `torch.inference_mode` cannot be written outside."""
    model = nn.Linear(6, 2)
    with torch.inference_mode():
        model.register_buffer("table", torch.ones(2), persistent=False)
    state = TrainingState(model, gradients="drop")
    with torch.inference_mode():
        model.table.add_(1)
    state.restore()
    assert model.table.tolist() == [1, 1]


def test_large_tensors_of_a_module_are_not_copied():
    """Data that a module holds must not be there twice; it is put back if it was replaced."""
    model: Any = Stateful()
    model.data = torch.zeros(2**20)
    with LiveTensors(model) as live:
        before = live.live_bytes
        state = TrainingState(model, gradients="drop")
        assert live.live_bytes - before < 2**16
    data, model.data = model.data, None
    state.restore()
    assert model.data is data


def test_graphs_that_a_module_drops_are_not_kept():
    """RecurrentGemma keeps its last state with the graph behind it until the next forward."""
    model: Any = Stateful()
    with LiveTensors(model) as live:
        before = live.live_bytes
        model.last = model.linear(torch.ones(800, 6)).exp().sum(0)
        values = model.last.detach().clone()
        state = TrainingState(model, gradients="drop")
        kept = model.last
        state.restore()
        assert model.last is kept
        model.last = kept = None
        assert live.live_bytes - before < 800
    state.restore()
    assert torch.equal(model.last, values)


def test_tokens_need_labels():
    step = MicroBatching(2, loss_weight="tokens").apply(lambda batch: batch.sum()).target
    with pytest.raises(ConfigurationError, match="no tensor named `labels`"):
        step(torch.zeros(4, 2))


def test_updates_in_backward_of_another_model_go_on():
    """Only those of the model whose batch passes in parts wait for the last part."""
    models = [nn.Linear(6, 2), nn.Linear(6, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for optimizer in optimizers:
        OptimizerInBackward().apply(optimizer)
    before = copy.deepcopy([model.weight for model in models])
    seen: list[list[bool]] = []

    def loss_of(batch):
        loss = models[0](batch).square().mean()
        if not loss.requires_grad:  # in the proof
            return loss
        if not seen:  # while the backward pass of the first part runs
            other = models[1](batch).sum()
            loss.register_hook(lambda grad: other.backward())
        seen.append([bool((m.weight != b).any()) for m, b in zip(models, before, strict=True)])
        return loss

    MicroBatching(2, module=models[0]).apply(loss_of).target(torch.randn(4, 6))
    assert seen == [[False, False], [False, True]]
    assert bool((models[0].weight != before[0]).any())


def test_half_precision_is_refused():
    model = nn.Linear(2, 2).to(torch.bfloat16)
    with pytest.raises(IncompatibleError, match=r"torch\.bfloat16.*bf16-mixed"):
        MicroBatching(2, module=model).apply(lambda batch: model(batch).sum())
    model.requires_grad_(False)
    assert MicroBatching(2, module=model).check(lambda batch: model(batch).sum()) == []


def test_shrinking_needs_the_module():
    with pytest.raises(IncompatibleError, match="Pass `module=model`"):
        MicroBatching().apply(lambda batch: batch.sum())


def test_copies_of_all_buffers_wait_on_the_host():
    model = make_model()
    known = KnownChanges(model)
    with LiveTensors(model) as live:
        before = live.live_bytes
        known.save("drop", is_watched=True)
        assert live.live_bytes == before
        model[1].running_mean.add_(1)
        known.learn()
        assert known.changing == [model, model[1]]
        changing = known.save("drop", is_watched=False)
        assert live.live_bytes == before + sum(b.nbytes for b in model[1].buffers())
    model[1].running_mean.add_(1)
    changing.restore()
    assert torch.equal(model[1].running_mean, torch.ones(16))


@pytest.mark.gpu
def test_masks_are_drawn_again_where_offloading_keeps_all_weights_on_the_host():
    module = nn.Linear(2, 2)
    torch.rand(1, device="cuda")
    state = TrainingState(module, gradients="drop")
    mask = torch.rand(64, device="cuda").tolist()
    state.restore()
    assert torch.rand(64, device="cuda").tolist() == mask


def gradient_error(model: nn.Module, loss_of: Any, batch: Any) -> float:
    """The largest relative error of micro-batches' gradients in a plain loop."""
    loss_of(batch).backward()
    plain = gradients(model)
    model.zero_grad()
    MicroBatching(4, module=model).apply(loss_of).target(batch)
    pairs = zip(gradients(model), plain, strict=True)
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


class TestInAPlainLoop:
    """The loss is proven with the first batch that is split, as in a Trainer."""

    def classified(self):
        torch.manual_seed(0)
        return nn.Linear(6, 3), {"x": torch.randn(10, 6), "y": torch.arange(10) % 3}

    def test_labels_of_a_language_model(self):
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16)
        model = GPT2LMHeadModel(config).eval()
        ids = torch.randint(32, (10, 12))
        labels = ids.masked_fill(torch.arange(12) >= torch.arange(2, 12)[:, None], -100)
        batch = {"input_ids": ids, "labels": labels}
        # Of the bias of a key, gradients are rounding only.
        model.requires_grad_(False).transformer.wte.requires_grad_()
        assert gradient_error(model, lambda batch: model(**batch).loss, batch) < 1e-5

    @pytest.mark.parametrize(
        "loss_of",
        [
            lambda y, target: nn.functional.cross_entropy(y, target, torch.tensor([1.0, 5.0, 0.2])),
            lambda y, _: y.square().sum(),
        ],
        ids=["class weights", "sum"],
    )
    def test_weights_of_its_own_and_none(self, loss_of):
        model, batch = self.classified()
        error = gradient_error(model, lambda b: loss_of(model(b["x"]), b["y"]), batch)
        assert error < 1e-5

    @pytest.mark.parametrize("size", [4, "halve"])
    def test_time_first_is_refused(self, size):
        model = nn.LSTM(6, 5)

        def loss_of(batch):
            loss = model(batch["x"])[0].square().mean()
            if torch.is_grad_enabled() and size == "halve":
                raise torch.OutOfMemoryError(MESSAGE)
            return loss

        step = MicroBatching(size, module=model).apply(loss_of).target
        with pytest.raises(MemsaveError, match=r"its loss cannot be split.*Pass `loss_weight=`"):
            step({"x": torch.randn(12, 8, 6)})

    def test_a_given_weight_is_tested_too(self):
        model, batch = self.classified()
        step = MicroBatching(4, module=model, loss_weight="samples").apply(
            lambda batch: model(batch["x"]).square().sum()
        )
        with pytest.raises(IncompatibleError, match="`loss_weight='samples'`"):
            step.target(batch)

    def test_without_the_module_the_weight_has_to_be_given(self):
        with pytest.raises(
            IncompatibleError, match='or what it is, such as `loss_weight="samples"'
        ):
            MicroBatching(4).apply(lambda batch: batch.sum())
