"""The loss without logits, held against 64-bit arithmetic and against the ordinary computation."""

from dataclasses import dataclass

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.launches._count import StepCounter
from lightning_memsave.errors import IncompatibleError
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.techniques.chunked_cross_entropy import call, chunks, wide_products
from lightning_memsave.techniques.chunked_cross_entropy.call import LossSettings, Operands
from lightning_memsave.techniques.chunked_cross_entropy.kernel import linear_cross_entropy
from tests.helpers import in_pairs, nothing_waits

ROWS, WIDTH, CLASSES = 150, 24, 67
EPSILON = {torch.float32: 2e-7, torch.float64: 1e-15, torch.bfloat16: 1e-3, torch.float16: 1e-4}
DTYPES = list(EPSILON)


@dataclass
class Problem:
    """Tensors of a loss: ``leaves`` have gradients."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None = None

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.x, self.weight, self.bias) if t is not None and t.requires_grad]

    def to(self, dtype: torch.dtype) -> "Problem":
        def converted(tensor: Tensor) -> Tensor:
            return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)

        bias = None if self.bias is None else converted(self.bias)
        weight = None if self.class_weight is None else self.class_weight.to(dtype)
        return Problem(converted(self.x), converted(self.weight), bias, self.target, weight)


def make(
    dtype: torch.dtype, *, bias: bool = True, weights: bool = False, labelled: float = 1.0
) -> Problem:
    x = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    weight = (torch.randn(CLASSES, WIDTH) / 4).to(dtype).requires_grad_()
    b = torch.randn(CLASSES).to(dtype).requires_grad_() if bias else None
    target = torch.randint(0, CLASSES, (ROWS,))
    target[torch.rand(ROWS) > labelled] = -100
    return Problem(x, weight, b, target, torch.rand(CLASSES) if weights else None)


def chunked(p: Problem, settings: LossSettings, autocast: torch.dtype | None = None) -> Tensor:
    operands = Operands((p.x,), (p.weight,), p.bias, autocast)
    return linear_cross_entropy(operands, p.target, class_weight=p.class_weight, settings=settings)


def ordinary(p: Problem, settings: LossSettings) -> Tensor:
    logits = functional.linear(p.x, p.weight, p.bias)
    wide = torch.promote_types(torch.float32, logits.dtype)
    return functional.cross_entropy(
        logits.to(wide),
        p.target,
        None if p.class_weight is None else p.class_weight.to(wide),
        ignore_index=settings.ignore_index,
        reduction=settings.reduction,
        label_smoothing=settings.label_smoothing,
    )


def gradients(loss: Tensor, p: Problem, seed: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, p.leaves, seed.to(loss.dtype), retain_graph=True))


DEVICES = ["cpu", "as on CUDA"]
LABELLED = [1.0, 0.95, 0.3]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen by device, as on each of them; the products are those of the CPU."""
    if request.param == "as on CUDA":
        for module in (call, chunks, wide_products):
            monkeypatch.setattr(module, "on_cuda", lambda tensor: True)


def error(value: Tensor, truth: Tensor) -> float:
    return ((value.double() - truth).norm() / truth.norm().clamp(min=1e-30)).item()


def assert_no_worse(
    mine: list[Tensor],
    theirs: list[Tensor],
    truth: list[Tensor],
    computed_in: torch.dtype | None = None,
) -> None:
    """At most the error of the ordinary computation in the same type, and a little."""
    for m, t, exact in zip(mine, theirs, truth, strict=True):
        assert m.dtype == t.dtype
        allowed = 1.1 * error(t, exact) + EPSILON[computed_in or m.dtype]
        assert error(m, exact) <= allowed, (error(m, exact), error(t, exact))


def compare(p: Problem, settings: LossSettings, autocast: torch.dtype | None = None) -> None:
    seed = torch.tensor(1.0)
    if settings.reduction == "none":
        seed = torch.rand(ROWS)
    exact, truth = p.to(torch.float64), None
    truth = ordinary(exact, settings)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        theirs = ordinary(p, settings)
    mine = chunked(p, settings, autocast)
    of_truth = gradients(truth, exact, seed.double())
    of_theirs = gradients(theirs, p, seed)
    # Once from what is ready, once computed again.
    assert_no_worse(gradients(mine, p, seed), of_theirs, of_truth)
    assert_no_worse(gradients(mine, p, seed), of_theirs, of_truth)
    # One number may be right by luck.
    assert_no_worse([mine], [theirs], [truth], autocast or p.x.dtype)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("device", "dtype", "reduction", "smoothing", "weights", "labelled"),
    in_pairs(DEVICES, DTYPES, ["mean", "sum", "none"], [0.0, 0.1], [False, True], LABELLED),
    indirect=["device"],
)
def test_is_as_exact_as_the_ordinary_loss(dtype, reduction, smoothing, weights, labelled):
    p = make(dtype, weights=weights, labelled=labelled)
    compare(p, LossSettings(reduction, -100, smoothing, chunk_size=40))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("device", "dtype", "labelled", "chunk_size"),
    in_pairs(DEVICES, DTYPES, LABELLED, [None, 1, 7, ROWS, 10 * ROWS]),
    indirect=["device"],
)
def test_any_size_of_a_chunk(dtype, labelled, chunk_size):
    compare(make(dtype, labelled=labelled), LossSettings(chunk_size=chunk_size))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("device", "dtype", "labelled", "bias"),
    in_pairs(DEVICES, [torch.bfloat16, torch.float16], LABELLED, [True, False]),
    indirect=["device"],
)
def test_is_as_exact_under_autocast(dtype, labelled, bias):
    compare(make(torch.float32, bias=bias, labelled=labelled), LossSettings(), dtype)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("device", "frozen", "dtype", "labelled"),
    in_pairs(DEVICES, ["x", "weight", "bias"], [torch.float32, torch.bfloat16], LABELLED),
    indirect=["device"],
)
def test_leaves_out_what_is_frozen(frozen, dtype, labelled):
    p = make(dtype, labelled=labelled)
    getattr(p, frozen).requires_grad_(False)
    compare(p, LossSettings())


def test_other_ignored_index():
    p = make(torch.float32)
    compare(p, LossSettings(ignore_index=int(p.target[0])))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_label_at_all(reduction, dtype):
    p = make(dtype, labelled=-1.0)
    mine, theirs = (f(p, LossSettings(reduction)) for f in (chunked, ordinary))
    assert torch.equal(mine, theirs) or (mine.isnan() and theirs.isnan())
    for gradient in gradients(mine, p, torch.ones_like(mine)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("wrong", [CLASSES, -1])
def test_targets_out_of_range_are_an_error(wrong):
    p = make(torch.float32)
    p.target[3] = wrong
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked(p, LossSettings())


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_scaled_and_shifted_logits(dtype, smoothing):
    p, shift = make(dtype, labelled=0.5), torch.randn(CLASSES)
    settings = LossSettings(label_smoothing=smoothing)

    def loss_of(q: Problem) -> Tensor:
        logits = functional.linear(q.x, q.weight, q.bias) * 0.3 + shift.to(q.x.dtype)
        wide = torch.promote_types(torch.float32, logits.dtype)
        return functional.cross_entropy(logits.to(wide), p.target, label_smoothing=smoothing)

    operands = Operands((p.x,), (p.weight,), p.bias, None, 0.3, shift)
    mine = linear_cross_entropy(operands, p.target, settings=settings)
    exact, one = p.to(torch.float64), torch.tensor(1.0)
    truth, theirs = loss_of(exact), loss_of(p)
    of_truth, of_theirs = gradients(truth, exact, one), gradients(theirs, p, one)
    for _ in range(2):
        assert_no_worse(gradients(mine, p, one), of_theirs, of_truth)
    assert_no_worse([mine], [theirs], [truth], dtype)


def test_gradient_of_the_gradient_is_refused():
    """A penalty on gradients would lack what goes through the head."""
    p = make(torch.float32)
    for leaves in (p.leaves, [p.x]):
        with pytest.raises(IncompatibleError, match="Set `chunked_cross_entropy=None`"):
            torch.autograd.grad(chunked(p, LossSettings()), leaves, create_graph=True)


def test_many_gradients_at_once_are_refused():
    p = make(torch.float32)
    losses = chunked(p, LossSettings(reduction="none"))
    with pytest.raises(RuntimeError, match="vmap"):
        torch.autograd.grad(losses, [p.weight], torch.eye(len(losses)), is_grads_batched=True)


@pytest.mark.usefixtures("device")
def test_half_precision_survives_a_loss_scale():
    """Probabilities of many classes, and gradients divided by many rows, are below its range."""
    num_classes = 5000
    x = torch.randn(64, WIDTH).half().requires_grad_()
    weight = (torch.randn(num_classes, WIDTH) / 100).half().requires_grad_()
    target = torch.randint(0, num_classes, (64,))
    p = Problem(x, weight, None, target)
    exact, scale = p.to(torch.float64), torch.tensor(2.0**16)
    truth = gradients(ordinary(exact, LossSettings()), exact, scale)
    mine = gradients(chunked(p, LossSettings()), p, scale)
    theirs = gradients(ordinary(p, LossSettings()), p, scale)
    assert_no_worse(mine, theirs, truth)
    unscaled = gradients(chunked(p, LossSettings()), p, torch.tensor(1.0))
    for a, b in zip(unscaled, truth, strict=True):
        assert error(a, b / scale) < 0.3  # the ordinary one has lost all: 1.0


def test_a_second_loss_does_not_hold_a_second_gradient():
    """Nor does a third: each would be as large as the weight."""
    p = make(torch.float32)
    weight = nn.Parameter(torch.randn(4000, WIDTH))
    target = torch.randint(0, 4000, (ROWS,))
    unit = weight.numel() * weight.element_size()

    def losses(num: int) -> int:
        with LiveTensors(device="cpu") as live:
            total = torch.zeros(())
            for _ in range(num):
                operands = Operands((p.x,), (weight,), None, None)
                total = total + linear_cross_entropy(operands, target, settings=LossSettings())
            held = live.live_bytes
            total.backward()
        return held

    assert losses(3) < losses(1) + unit / 4
    theirs = torch.autograd.grad(
        functional.cross_entropy(functional.linear(p.x, weight), target), weight
    )[0]
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, 4 * theirs)


class TestRows:
    """Whether all rows are taken, with weight 0 for the ignored ones, or those that count alone."""

    def waits(self, p: Problem, settings: LossSettings) -> int:
        """Hold a loss against the ordinary one, and count its waits."""
        with StepCounter() as counted:
            mine = chunked(p, settings)
        theirs, seed = ordinary(p, settings), torch.tensor(1.0)
        torch.testing.assert_close(mine, theirs, equal_nan=True)
        for a, b in zip(gradients(mine, p, seed), gradients(theirs, p, seed), strict=True):
            torch.testing.assert_close(a, b)
        return sum(counted.counts.waits.values())

    @pytest.mark.parametrize("weights", [False, True])
    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @pytest.mark.parametrize("ignored", [-100, 5])
    def test_a_loss_does_not_wait_while_nearly_all_rows_count(self, weights, smoothing, ignored):
        p = make(torch.float32, weights=weights)
        settings = LossSettings("mean", ignored, smoothing)
        shares = [1.0, 1.0, 0.95, 0.2, 0.2, 0.2, 1.0, 1.0, 0.0, 0.0]
        found = []
        for share in shares:
            p.target = torch.arange(ROWS) % 5
            p.target[int(share * ROWS) :] = ignored
            found.append(self.waits(p, settings))
        # At first, for the numbers of rows, and after a loss that had fewer.
        assert found == [1, 0, 0, 0, 1, 1, 1, 0, 0, 1]

    def test_more_rows_than_ever_are_counted(self):
        p = make(torch.float32)
        q = Problem(torch.cat([p.x, p.x]).detach(), p.weight, p.bias, p.target.repeat(2))
        found = [self.waits(each, LossSettings()) for each in (p, p, q, q, p)]
        assert found == [1, 0, 1, 0, 0]

    def test_evaluation_does_not_decide_for_training(self):
        """It needs less memory, so it may take all rows where training may not."""
        p = make(torch.float32)
        with torch.no_grad():
            for _ in range(2):
                chunked(p, LossSettings())
        p.target[20:] = -100
        assert self.waits(p, LossSettings()) == 1

    def test_ignored_rows_may_hold_anything(self):
        """As in the ordinary loss; gradients of the weight are not finite in either."""
        p = make(torch.float32)
        p.target[7] = -100
        with torch.no_grad():
            p.x[7] = float("nan")
        for reduction in ("mean", "sum", "none"):
            settings = LossSettings(reduction)
            torch.testing.assert_close(chunked(p, settings), ordinary(p, settings))

    def test_what_is_repeated_in_backward_takes_the_same_rows(self):
        """A checkpoint around the loss finds tensors of the same shapes."""
        p = make(torch.float32)
        self.waits(p, LossSettings())
        p.target[20:] = -100
        mine, theirs = (
            torch.utils.checkpoint.checkpoint(
                lambda loss: loss(p, LossSettings()).square(), loss, use_reentrant=False
            )
            for loss in (chunked, ordinary)
        )
        one = torch.tensor(1.0)
        for a, b in zip(gradients(mine, p, one), gradients(theirs, p, one), strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_on_cuda_nothing_waits(self, dtype):
        p = make(dtype, labelled=0.95)
        x, weight = (t.detach().cuda().requires_grad_() for t in (p.x, p.weight))
        p = Problem(x, weight, None, p.target.cuda())
        for _ in range(3):
            chunked(p, LossSettings()).backward()
        with nothing_waits():
            chunked(p, LossSettings()).backward()


class TestMemory:
    """In units of the weight, of 32 bits."""

    num_rows, width, num_classes = 512, 128, 8_000

    def peak(self, dtype: torch.dtype, labelled: float, autocast: torch.dtype | None) -> float:
        weight = nn.Parameter(torch.randn(self.num_classes, self.width).to(dtype))
        x = torch.randn(self.num_rows, self.width).to(dtype).requires_grad_()
        target = torch.randint(0, self.num_classes, (self.num_rows,))
        target[: int((1 - labelled) * self.num_rows)] = -100
        module = nn.Module()
        module.weight = weight
        with LiveTensors(module) as live:
            operands = Operands((x,), (weight,), None, autocast)
            linear_cross_entropy(operands, target, settings=LossSettings()).backward()
        num_bytes = live.peak.total_bytes - weight.numel() * weight.element_size()
        return num_bytes / (weight.numel() * 4)

    def test_32_bits(self):
        assert self.peak(torch.float32, 1.0, None) < 1.45  # the gradient and a quarter

    def test_few_labels_in_low_precision(self):
        """The gradient in its own type, of which each number is rounded once."""
        assert self.peak(torch.bfloat16, 0.15, None) < 0.5 + 0.25
        assert self.peak(torch.float32, 0.15, torch.bfloat16) < 1.0 + 0.25

    def test_all_labels_in_low_precision(self):
        """The gradient in 32 bits, and then in its own type."""
        assert self.peak(torch.bfloat16, 1.0, None) < 1.0 + 0.65
