"""What a step asks of a device: each figure counted by hand."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_memsave import predict_memory
from lightning_memsave.core.memory import host_copies, mark_as_host
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.prediction.cuda.gpus import parse_gpu
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.prediction.work import Kernel, Work, WorkCounter
from lightning_memsave.techniques.chunked_cross_entropy.call import LossSettings, Operands
from lightning_memsave.techniques.chunked_cross_entropy.kernel import linear_cross_entropy


class Counting(LiveTensors):
    """Counts the work of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = WorkCounter()

    def _note_call(self, func, args, kwargs, result) -> None:
        self.counter.add(func, args, kwargs, result, in_step=False)


def kernels_of(function) -> list[Kernel]:
    with Counting() as counting:
        function()
    return [kernel for kernel, count in counting.counter.work() for _ in range(int(count))]


def test_a_product():
    a, b = torch.randn(2, 3), torch.randn(3, 5)
    (kernel,) = kernels_of(lambda: a @ b)
    assert kernel == Kernel("forward", "product", "float32", 2 * 2 * 3 * 5, 4 * (6 + 15 + 10))


def test_a_product_in_place_and_in_low_precision():
    total, a, b = torch.zeros(2, 5), torch.randn(2, 3), torch.randn(3, 5)
    (kernel,) = kernels_of(lambda: total.addmm_(a, b))
    assert (kernel.kind, kernel.flop, kernel.num_bytes) == ("product", 60, 4 * (6 + 15 + 2 * 10))
    half = a.bfloat16(), b.bfloat16()
    (kernel,) = kernels_of(lambda: half[0] @ half[1])
    assert (kernel.dtype, kernel.num_bytes) == ("bfloat16", 2 * (6 + 15 + 10))


@pytest.mark.parametrize(
    ("function", "num_bytes"),
    [
        (lambda x: x + x, 3 * 40),
        (lambda x: x.mul_(2), 2 * 40),
        (lambda x: x.copy_(torch.ones(()).expand(10)), 40 + 4),
        (lambda x: x.zero_(), 40),
        (lambda x: torch.add(x, x, out=x), 3 * 40),
        (lambda x: x.expand(100, 10) * 1, 40 + 4000),
    ],
)
def test_bytes_that_move(function, num_bytes):
    x = torch.ones(10)
    kernel = kernels_of(lambda: function(x))[-1]
    assert (kernel.kind, kernel.flop, kernel.num_bytes) == ("elementwise", 0, num_bytes)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention(key_heads):
    query = torch.randn(1, 4, 32, 8, requires_grad=True)
    key, value = (torch.randn(1, key_heads, 32, 8, requires_grad=True) for _ in range(2))

    def attend() -> None:
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=key_heads != 4
        )
        attended.sum().backward()

    found = [k for k in kernels_of(attend) if k.kind in ("attention", "product")]
    # Two products forward; backward five, one of them again.
    product = 2 * 4 * 32 * 32 * 8
    assert sum(k.flop for k in found if k.phase == "forward") == 2 * product
    assert sum(k.flop for k in found if k.phase == "backward") in (4 * product, 5 * product)


def test_sparse_gradients_count_what_they_hold():
    table = nn.Embedding(1000, 4, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    gradient = table.weight.grad
    assert gradient is not None
    found = kernels_of(lambda: gradient * 2)
    assert sum(kernel.num_bytes for kernel in found) < 1000


def test_views_and_empty_tensors_are_no_kernels():
    x = torch.ones(10)
    assert kernels_of(lambda: (x.view(2, 5).t(), torch.empty(3), x.detach())) == []


def test_lists_are_launched_in_parts():
    tensors = [torch.ones(4) for _ in range(70)]
    (kernel,) = kernels_of(lambda: torch._foreach_mul_(tensors, 2.0))
    assert (kernel.num_launches, kernel.num_bytes) == (70 / 30, 2 * 70 * 16)


def test_copies_to_and_from_the_host():
    device, host = torch.ones(8), torch.empty(8)
    mark_as_host(host)
    found = kernels_of(lambda: (host.copy_(device), device.copy_(host)))
    assert [(kernel.kind, kernel.num_bytes) for kernel in found] == [
        ("to_host", 32),
        ("from_host", 32),
    ]


def test_copies_of_lists_to_and_from_the_host():
    device, host = [torch.ones(8), torch.ones(4)], [torch.empty(8), torch.empty(4)]
    for tensor in host:
        mark_as_host(tensor)

    def copy() -> None:
        torch._foreach_copy_(host, device)
        torch._foreach_copy_(device, host)

    found = kernels_of(copy)
    assert [(k.kind, k.num_bytes, k.num_launches) for k in found] == [
        ("to_host", 48, 2),
        ("from_host", 48, 2),
    ]


def test_updates_on_the_host():
    weight = nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    for held in (weight.data, weight.grad, *optimizer.state[weight].values()):
        mark_as_host(held)
    (kernel,) = [k for k in kernels_of(optimizer.step) if k.num_bytes > 100]
    # Each of the weights, gradients and two moments is read, and may be written.
    assert kernel.kind == "host"
    assert kernel.num_bytes == pytest.approx(8 * weight.nbytes, rel=0.01)
    with host_copies():
        assert [k.kind for k in kernels_of(lambda: torch.ones(8) + 1)] == ["host", "host"]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def flop_by_phase(**settings) -> dict[str, float]:
    prediction = predict_memory(_Net(), torch.randn(8, 16), settings=settings, device="cpu")
    found: dict[str, float] = {}
    for kernel, count in prediction.work:
        found[kernel.phase] = found.get(kernel.phase, 0) + kernel.flop * count
    return found


PRODUCT = 2 * 8 * 16 * 16


def test_a_step_by_phase():
    found = flop_by_phase(activation_checkpointing="all", blocks="Sequential")
    assert found["forward"] == 6 * PRODUCT
    # Backward reads no result of the second layer of a block, so torch stops before it.
    assert found["recomputation"] == 3 * PRODUCT
    # The first layer needs no gradient of its input.
    assert found["backward"] == (2 * 6 - 1) * PRODUCT
    assert found["optimizer"] == 0


@pytest.mark.parametrize(
    "settings", [{"micro_batch_size": 1}, {"micro_batch_size": 2}, {"accumulate_grad_batches": 6}]
)
def test_all_batches_count_though_few_are_simulated(settings):
    whole = 6 if "accumulate_grad_batches" in settings else 1
    found = flop_by_phase(**settings)
    assert found["forward"] == pytest.approx(whole * 6 * PRODUCT)
    assert found["backward"] == pytest.approx(whole * 11 * PRODUCT)


T4 = parse_gpu("T4").throughput  # 8.1 TFLOP/s in float32 and bfloat16, 65 in float16
IDS = torch.zeros(4, 32, dtype=torch.long)


class _OfIds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 16), nn.Linear(16, 16)

    def forward(self, ids: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.head(self.table(ids)).sum()


@pytest.mark.parametrize(
    ("model", "batch", "num_samples", "num_tokens"),
    [
        (_Net, torch.randn(8, 16), 8, 0),
        (_OfIds, IDS, 4, 4 * 32),
        (_OfIds, {"ids": IDS, "weights": torch.ones(4)}, 4, 4 * 32),
        (_OfIds, IDS[:, :1], 4, 0),  # one class index each
        (_OfIds, IDS[0], 32, 0),
        (_OfIds, {"ids": IDS, "weights": torch.ones(3)}, 0, 0),
    ],
    ids=range(6),
)
def test_samples_and_tokens_are_those_of_the_batches_of_a_step(
    model, batch, num_samples, num_tokens
):
    for settings, factor in (({}, 1), ({"accumulate_grad_batches": 3}, 3)):
        work = predict_memory(model(), batch, settings=settings, device="cpu").work
        assert (work.num_samples, work.num_tokens) == (factor * num_samples, factor * num_tokens)


def test_micro_batches_leave_the_numbers_of_the_batch():
    work = predict_memory(_OfIds(), IDS, settings={"micro_batch_size": 1}, device="cpu").work
    assert (work.num_samples, work.num_tokens) == (4, 4 * 32)


class TestSpeed:
    """A second at the dense peak of a T4: 8.1 TFLOP in float32, or 65 in float16."""

    work = Work(
        (
            (Kernel("forward", "product", "float32", 8_100, 1), 0.25e9),
            (Kernel("backward", "product", "float16", 65_000, 1), 0.75e9),
            (Kernel("recomputation", "product", "float32", 8_100, 1), 1e9),
            (Kernel("optimizer", "product", "float32", 8_100, 1), 1e9),
        ),
        num_samples=8,
        num_tokens=4096,
    )

    def test_one_time_gives_numbers_of_it(self):
        assert (
            self.work.speed([1.0], T4) == "4,096 tokens per second, 100 % of the GPU's dense peak"
        )
        assert self.work.speed([2.5], T4) == "1,638 tokens per second, 40 % of the GPU's dense peak"

    def test_a_range_gives_two_figures_of_each_end(self):
        found = self.work.speed((1.5, 6.0), T4)
        assert found == "680 to 2,700 tokens per second, 17 to 67 % of the GPU's dense peak"

    def test_without_tokens_it_counts_samples_unless_somebody_else_does(self):
        work = replace(self.work, num_tokens=0)
        assert work.speed([2.0], None) == "4 samples per second"
        assert work.speed([2.0], T4, in_samples=False) == "50 % of the GPU's dense peak"

    def test_nothing_is_said_of_what_is_not_known(self):
        assert Work(self.work.kernels).speed([2.0], None) == ""
        assert self.work.speed([0.0], T4) == ""

    def test_a_prediction_knows_the_gpu_it_is_for(self):
        prediction = predict_memory(_OfIds(), IDS, gpu="T4")
        assert prediction.work.throughput == T4
        assert predict_memory(_OfIds(), IDS, gpu="12GiB").work.throughput is None
        # Of float32, the head's forward product and its two backward ones.
        flop = 3 * 2 * IDS.numel() * 16 * 16
        seconds = flop / 8.1e12
        assert prediction.work.speed([seconds], T4).endswith(", 100 % of the GPU's dense peak")


def test_products_of_low_precision_with_sums_in_float32():
    """Those of the chunked loss, for which fake tensors have no kernel."""
    model = nn.Sequential(nn.Embedding(3000, 8), nn.Linear(8, 3000, bias=False))
    tokens = torch.arange(16).view(2, 8)

    def loss(logits: Tensor, batch: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), batch.flatten())

    prediction = predict_memory(
        model,
        tokens,
        loss=loss,
        settings={"chunked_cross_entropy": True, "precision": "bf16-mixed"},
        device="cuda",
    )
    products = [(kernel, count) for kernel, count in prediction.work if kernel.flop]
    assert {kernel.dtype for kernel, _ in products} == {"bfloat16"}
    # Logits, and the gradients of inputs and weight.
    assert sum(kernel.flop * count for kernel, count in products) == 3 * 2 * 16 * 8 * 3000


@pytest.mark.parametrize("in_backward", [None, True])
def test_updates_count_once_wherever_they_run(in_backward):
    def updates(**settings):
        prediction = predict_memory(
            _Net(),
            torch.randn(8, 16),
            settings={"optimizer_in_backward": in_backward} | settings,
            device="cpu",
        )
        kernels = [(k, n) for k, n in prediction.work if k.phase == "optimizer"]
        return sum(k.num_bytes * n for k, n in kernels)

    # At least parameters, gradients and both moments are read.
    assert updates() >= 4 * 4 * 6 * (16 * 16 + 16)
    assert updates(micro_batch_size=1) == updates()


@pytest.mark.parametrize("width", [2**12, 2**12 + 64])
def test_all_tiles_of_an_update_count(width):
    """On fake tensors equal ones run once."""
    settings = {"low_precision_weights": "stochastic", "precision": "bf16-mixed"}

    def moved(num_rows):
        prediction = predict_memory(
            lambda: nn.Linear(width, num_rows, bias=False), torch.ones(1, width), settings=settings
        )
        kernels = [(k, n) for k, n in prediction.work if k.phase == "optimizer"]
        return sum(n * kernel.num_bytes for kernel, n in kernels), prediction.peak_bytes

    (half, half_peak), (whole, whole_peak) = moved(2**14), moved(2**15)
    assert whole == pytest.approx(2 * half, rel=1e-4)
    assert half_peak < whole_peak < 2 * half_peak


@pytest.mark.parametrize("num_rows", [40, 4 * 64, 4 * 64 + 40])
def test_all_chunks_of_a_loss_count(num_rows):
    """On fake tensors equal ones run once; they count as all of them do on real ones."""
    tensors = torch.randn(num_rows, 8), torch.randn(500, 8), torch.arange(num_rows)

    def counted(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[dict[Kernel, float], int]:
        operands = Operands((hidden.requires_grad_(),), (weight.requires_grad_(),), None, None)
        with Counting() as counting:
            settings = LossSettings(chunk_size=64)
            linear_cross_entropy(operands, labels, settings=settings).backward()
        return dict(counting.counter.work()), counting.peak.total_bytes

    expected = counted(*tensors)
    with fake_tensors() as fakes:
        assert counted(*(fakes.copy_batch(t.detach()) for t in tensors)) == expected


@pytest.fixture
def four_processes():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_a_process_does_not_send_itself_what_it_has(four_processes):
    shard, whole = torch.ones(3), torch.ones(12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames them
        found = kernels_of(lambda: dist.all_gather_into_tensor(whole, shard))
        found += kernels_of(lambda: dist.reduce_scatter_tensor(shard, whole))
    assert [(k.kind, k.num_bytes) for k in found] == [("network", 4 * 9)] * 2


@pytest.mark.parametrize(("strategy", "shares"), [("ddp", 2), ("fsdp2", 3)])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_what_processes_share_in_a_step(strategy, shares, accumulated):
    """DDP sums gradients once per step; FSDP2 gathers weights twice and sums in each batch."""
    model = nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in "12"])
    found = predict_memory(
        model,
        torch.ones(2, 3, 8),
        trainer_arguments={"accumulate_grad_batches": accumulated},
        device="cpu",
        strategy=strategy,
        world_size=4,
    )
    num_bytes = sum(p.nbytes for p in model.parameters())
    sent = sum(count * k.num_bytes for k, count in found.work if k.kind == "network")
    times = 1 if strategy == "ddp" else accumulated
    assert sent == pytest.approx(times * shares * 3 / 4 * num_bytes, rel=0.05)
