"""What the loss does on a GPU, read from fake tensors: launches, layouts of buffers, memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.launches._count import StepCounter
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.prediction.cuda.kernels import cuda_kernels
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.techniques.chunked_cross_entropy.call import Call, LossSettings, Operands
from lightning_memsave.techniques.chunked_cross_entropy.kernel import linear_cross_entropy

WIDTH, CLASSES, CHUNK = 512, 5003, 40
BF16 = torch.bfloat16
KINDS = {"float32": (torch.float32, None), "bfloat16": (BF16, None), "bf16": (torch.float32, BF16)}
"""By precision, the type of the weights and of products in autocast."""


class Launches(StepCounter):
    """Counts operators, and keeps the results of products."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Tensor] = []
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.counts.num_operators
        result = super().__torch_dispatch__(func, types, args, kwargs)
        given = (*args, *(kwargs or {}).values())
        if self.counts.num_operators > before and isinstance(result, Tensor):
            if all(result is not value for value in given):
                self.made.append(result)
            if func.name().partition(".")[0] in ("aten::addmm", "aten::addmm_"):
                self.products.append(result)
        elif func is torch.ops.lightning_memsave.add_product.default:
            self.products.append(args[0])
        return result


class Loss:
    """A loss with its tensors, on fake tensors that count as those of a GPU."""

    def __init__(self, fakes: Any, kind: str, num_rows: int, labelled: float = 1.0) -> None:
        dtype, self.autocast = KINDS[kind]
        target = torch.arange(num_rows) % CLASSES
        target[int(labelled * num_rows) :] = -100
        self.target = fakes.copy_batch(target)
        self.module = nn.Module()
        self.weight = nn.Parameter(torch.empty(CLASSES, WIDTH, dtype=dtype))
        self.module.weight = self.weight
        self.x = torch.empty(num_rows, WIDTH, dtype=dtype, requires_grad=True)

    def __call__(self, chunk_size: int | None = None) -> Tensor:
        operands = Operands((self.x,), (self.weight,), None, self.autocast)
        settings = LossSettings(chunk_size=chunk_size)
        return linear_cross_entropy(operands, self.target, settings=settings)


def launches(kind: str, num_chunks: int) -> Launches:
    with fake_tensors() as fakes, cuda_kernels():
        loss = Loss(fakes, kind, num_chunks * CHUNK)
        with Launches() as counted:
            loss(CHUNK)
    return counted


# Autocast converts the inputs of each chunk.
@pytest.mark.parametrize(("kind", "expected"), [("float32", 12), ("bfloat16", 12), ("bf16", 13)])
def test_a_chunk_is_few_launches(kind, expected):
    few, many = (launches(kind, num_chunks).counts.operators for num_chunks in (3, 8))
    each = {name: (many[name] - few[name]) / 5 for name in many if many[name] != few[name]}
    # Targets, padding and logits; three passes over them, three over rows; two products.
    assert sum(each.values()) == expected, each


# Logits, four passes over them, five over rows; the gradients of inputs and weight. With
# weights in float32 also their cast, and a pass over their gradient.
@pytest.mark.parametrize(("kind", "expected"), [("bfloat16", 12), ("bf16", 14)])
def test_a_tile_is_few_launches(kind, expected, monkeypatch):
    counts = []
    for num_tiles in (3, 8):
        monkeypatch.setattr(Call, "tile_size", -(-CLASSES // num_tiles))
        with fake_tensors() as fakes, cuda_kernels():
            loss = Loss(fakes, kind, 400, 0.15)(None)
            with Launches() as counted:
                loss.backward()
        counts.append(counted.counts.num_operators)
    assert counts[1] - counts[0] == 5 * expected


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_logits_are_aligned_and_never_copied(kind):
    counted = launches(kind, 3)
    # Equal chunks of fake tensors run once.
    (logits,) = [product for product in counted.products if product.shape == (CHUNK, CLASSES)]
    assert logits.stride() == (5056, 1)
    copies = [made for made in counted.made if made.shape[:1] == (CHUNK,)]
    assert all(made.shape[-1] < CLASSES for made in copies)


def peak_bytes(
    kind: str, labelled: float, chunk_size: int | None = None, num_rows: int = 2000
) -> int:
    """Of the loss and its backward pass."""
    with fake_tensors() as fakes, cuda_kernels():
        loss = Loss(fakes, kind, num_rows, labelled)
        with LiveTensors(loss.module) as live:
            loss(chunk_size).backward()
    return live.peak.total_bytes


class TestSizes:
    """Chunks and tiles for a GPU, which are larger where that does not raise the peak."""

    def call(self, kind: str, num_rows: int, labelled: int) -> Call:
        dtype, autocast = KINDS[kind]
        x = torch.empty(num_rows, WIDTH, dtype=dtype)
        weight = torch.empty(50_257, WIDTH, dtype=dtype)
        target = torch.empty(labelled, dtype=torch.int64)
        return Call(Operands((x,), (weight,), None, autocast), target, None, None, LossSettings())

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("labelled", [1.0, 0.15])
    def test_the_peak_of_chunks_stays_the_same(self, kind, labelled):
        """As with those of a CPU."""
        with fake_tensors() as fakes:
            loss = Loss(fakes, kind, 2000)
            operands = Operands((loss.x,), (loss.weight,), None, loss.autocast)
            call = Call(operands, loss.target[: int(2000 * labelled)], None, None, LossSettings())
            small = call.chunk_size(has_gradients=labelled == 1.0 or kind == "float32")
        assert peak_bytes(kind, labelled) <= peak_bytes(kind, labelled, small)

    @pytest.mark.parametrize("kind", ["bfloat16", "bf16"])
    def test_the_peak_of_tiles_is_at_most_five_inputs_higher(self, kind, monkeypatch):
        num_rows = 8000
        peak = peak_bytes(kind, 0.15, num_rows=num_rows)
        monkeypatch.setattr(Call, "tile_size", 8)
        least = peak_bytes(kind, 0.15, num_rows=num_rows)
        dtype = KINDS[kind][0]
        assert least < peak <= least + 5 * num_rows * WIDTH * dtype.itemsize
