"""How often a step waits for the device: on a GPU each wait empties its queue."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memsave.techniques.activation_checkpointing.technique import (
    ActivationCheckpointing,
)
from lightning_memsave.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.low_precision_weights.technique import LowPrecisionWeights
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.techniques.optimizer_in_backward.technique import OptimizerInBackward
from tests.cases import make_batch, make_model
from tests.helpers import for_model, switch_on

# What gives a number to Python, or a tensor whose size depends on values.
OPERATORS = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select")
# Those do it too, and without an operator where the tensor is on the CPU.
METHODS = (Tensor.tolist, Tensor.cpu, Tensor.numpy)


class CountedWaits(TorchDispatchMode):
    """Counts what would wait if the tensors were on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self._methods = _CountedMethods(self.waits)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        has_mask = name == "index" and any(
            index is not None and index.dtype is torch.bool for index in args[1]
        )
        if name in OPERATORS or has_mask:
            self.waits[name] += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> "CountedWaits":
        self._methods.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._methods.__exit__(*error)


class _CountedMethods(TorchFunctionMode):
    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METHODS:
            self.waits[func.__name__] += 1
        return func(*args, **(kwargs or {}))


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
        (MicroBatching(6), "dropout", {}),
        # The rows that count, and for a tied embedding the words that came.
        (ChunkedCrossEntropy(heads="head"), "classifier", {"nonzero": 1}),
        (ChunkedCrossEntropy(heads="head"), "tied", {"nonzero": 1, "_unique2": 1}),
    ],
    ids=repr,
)
def test_a_step_waits_this_often(technique, name, expected):
    model = make_model(name).train()
    technique = None if technique is None else for_model(technique, model)
    step, optimizer, _ = switch_on(technique, model, momentum(model))
    for index in range(2):
        optimizer.zero_grad()
        with CountedWaits() as counted:
            step(make_batch(index))
            optimizer.step()
    assert counted.waits == expected


@pytest.mark.parametrize(
    ("loss_weight", "expected"),
    [
        ("samples", {}),
        ("tokens", {"tolist": 1}),
        (lambda part: (part["labels"] != -100).sum(), {"tolist": 1}),
        # Nothing is proven in a plain loop: whether labels are left out at all comes first.
        ("auto", {"_local_scalar_dense": 1, "tolist": 1}),
    ],
    ids=["samples", "tokens", "function", "auto"],
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
    with CountedWaits() as counted:
        run(batch)
    assert counted.waits == expected
