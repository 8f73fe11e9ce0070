"""How often a step waits for the device: on a GPU each wait empties its queue."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.launches._count import StepCounter
from lightning_memsave import ActivationCheckpointing, ChunkedCrossEntropy, LowBitOptimizer
from lightning_memsave.techniques.low_precision_weights.technique import LowPrecisionWeights
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.techniques.optimizer_in_backward.technique import OptimizerInBackward
from tests.cases import make_batch, make_model
from tests.helpers import for_model, switch_on
from tests.techniques.test_chunked_cross_entropy import WORDS, Model


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW counts its steps in tensors, on the CPU, which it reads."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("technique", "name", "expected"),
    [
        (None, "classifier", {}),
        (ActivationCheckpointing(), "dropout", {}),
        (ActivationCheckpointing("selective"), "dropout", {}),
        (LowBitOptimizer(), "dropout", {}),
        (LowPrecisionWeights(), "dropout", {}),
        (OptimizerInBackward(), "dropout", {}),
        # Its samples cannot tell whether the loss would leave out entries that are NaN: it looks.
        (MicroBatching(6), "dropout", {"tolist": 1}),
        # The rows that count, unless all do. Nothing for the embedding that is tied to the head.
        (ChunkedCrossEntropy(heads="head"), "classifier", {"nonzero": 1}),
        (ChunkedCrossEntropy(heads="head"), "tied", {}),
    ],
    ids=repr,
)
def test_a_step_waits_this_often(technique, name, expected):
    model = make_model(name).train()
    technique = None if technique is None else for_model(technique, model)
    step, optimizer, _ = switch_on(technique, model, momentum(model))
    # The first one may wait for what it cannot know; blocks look at values in four.
    num_first = 4 if isinstance(technique, ActivationCheckpointing) else 1
    for index in range(num_first + 3):
        optimizer.zero_grad()
        with StepCounter() as counted:
            step(make_batch(index))
            optimizer.step()
        if index >= num_first:
            assert counted.counts.waits == expected


@pytest.mark.parametrize(
    ("loss_weight", "expected"),
    [
        ("samples", {}),
        ("tokens", {"tolist": 1}),
        (lambda part: (part["labels"] != -100).sum(), {"tolist": 1}),
    ],
    ids=["samples", "tokens", "function"],
)
@pytest.mark.parametrize("size", [4, 1])
def test_weights_of_all_parts_are_read_at_once(loss_weight, expected, size):
    model = nn.Linear(4, 4)
    labels = torch.ones(8, 5, dtype=torch.long)
    labels[:, 3:] = -100
    batch = {"x": torch.randn(8, 4), "labels": labels}

    def step(batch: Any) -> Tensor:
        loss: Tensor = model(batch["x"]).square().mean()
        return loss

    run = MicroBatching(size, loss_weight=loss_weight).apply(step).target
    with StepCounter() as counted:
        run(batch)
    assert counted.counts.waits == expected


@pytest.mark.parametrize(
    ("loss_weight", "labelled"), [("tokens", 0.15), ("tokens", 1.0), ("samples", 1.0)]
)
@pytest.mark.parametrize("size", [4, 1])
def test_losses_of_all_parts_wait_once(loss_weight, labelled, size):
    """For the counts of their labels, which weigh the parts and give each loss its rows."""
    model = Model()
    plain = copy.deepcopy(model)
    ChunkedCrossEntropy().apply(model)
    run = MicroBatching(size, loss_weight=loss_weight).apply(lambda batch: model(**batch)).target
    for index in range(3):
        torch.manual_seed(index)
        ids = torch.randint(WORDS, (8, 20))
        labels = ids.masked_fill(torch.rand(ids.shape) > labelled, -100)
        labels[:, 0] = ids[:, 0]
        batch = {"input_ids": ids, "labels": labels}
        with StepCounter() as counted:
            loss = run(batch)
        torch.testing.assert_close(loss, plain(**batch).detach())
        if index:
            assert counted.counts.waits == ({"tolist": 1} if loss_weight == "tokens" else {})
