"""What stands for logits behaves as they do, and is computed once and only if it must be."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_memsave import ActivationCheckpointing, ChunkedCrossEntropy, IncompatibleError
from lightning_memsave.techniques.chunked_cross_entropy.deferred_logits import DeferredLogits
from tests.helpers import in_pairs

# What is said when logits are needed is tested in `test_logits_needed.py`.
pytestmark = pytest.mark.filterwarnings("ignore:.chunked_cross_entropy. saves nothing")

WIDTH, CLASSES = 8, 40
TOKENS = torch.randint(0, CLASSES, (4, 9), generator=torch.Generator().manual_seed(0))
VECTOR = torch.randn(CLASSES, generator=torch.Generator().manual_seed(1))
ce = functional.cross_entropy


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor = TOKENS) -> Tensor:
        return self.head(self.embedding(tokens))


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def deferring(model: Model) -> Model:
    return ChunkedCrossEntropy("head").apply(copy.deepcopy(model)).target  # type: ignore[return-value]


def train(model: Model, loss_of: Callable[[Tensor], Tensor]) -> list[Tensor]:
    model.zero_grad()
    loss = loss_of(model())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


class Doubled(torch.autograd.Function):
    """Its backward does what its forward does not say."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


def flat(logits: Tensor) -> Tensor:
    return logits.reshape(-1, CLASSES)


DEFERRED: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda z: ce(z.view(-1, CLASSES), TOKENS.view(-1)),
    "flatten": lambda z: ce(z.flatten(0, 1), TOKENS.flatten()),
    "float": lambda z: ce(z.float().view(-1, z.size(-1)), TOKENS.view(-1)),
    "double and back": lambda z: ce(flat(z.double().float()), TOKENS.view(-1)),
    "to like": lambda z: ce(flat(z.to(TOKENS.device).to(z.dtype)), TOKENS.view(-1)),
    "shift": lambda z: ce(flat(z[..., :-1, :].contiguous()), TOKENS[:, 1:].reshape(-1)),
    "shift without copy": lambda z: ce(flat(z[:, :-1].float()), TOKENS[:, 1:].reshape(-1)),
    "shift of labels": lambda z: ce(
        z.float().view(-1, CLASSES), functional.pad(TOKENS, (0, 1), value=-100)[:, 1:].reshape(-1)
    ),
    "narrow": lambda z: ce(flat(z.narrow(1, 2, 3)), TOKENS[:, 2:5].reshape(-1)),
    "step": lambda z: ce(flat(z[::2, 1::3]), TOKENS[::2, 1::3].reshape(-1)),
    "one row": lambda z: ce(z[1, 2], TOKENS[1, 2]),
    "unsqueeze": lambda z: ce(z[None].squeeze(0)[2], TOKENS[2]),
    "transpose": lambda z: ce(z.transpose(1, 2), TOKENS),
    "mT": lambda z: ce(z.mT, TOKENS),
    "permute": lambda z: ce(z.float()[:, :-1].permute(0, 2, 1), TOKENS[:, 1:], reduction="sum"),
    "copy of a slice of a copy": lambda z: ce(
        flat(z[:, 1:].contiguous()[:, :-1].float()), TOKENS[:, 2:].reshape(-1)
    ),
    "none": lambda z: ce(z.mT, TOKENS, reduction="none").square().mean(),
    "split": lambda z: torch.stack(
        [ce(flat(a), b.flatten()) for a, b in zip(z.split(3, 1), TOKENS.split(3, 1), strict=True)]
    ).sum(),
    "unbind": lambda z: torch.stack(
        [ce(a, b) for a, b in zip(z.unbind(), TOKENS, strict=True)]
    ).sum(),
    "expand": lambda z: ce(flat(z[:, :1].expand(4, 9, CLASSES)), TOKENS.view(-1)),
    "detach": lambda z: ce(flat(z), TOKENS.view(-1)) + ce(flat(z.detach()), TOKENS.view(-1)),
    "data": lambda z: ce(flat(z), TOKENS.view(-1)) + ce(flat(z.data), TOKENS.view(-1)),
    "twice": lambda z: ce(flat(z), TOKENS.view(-1)) + 2 * ce(flat(z), TOKENS.flip(0).reshape(-1)),
    "module": lambda z: nn.CrossEntropyLoss(label_smoothing=0.1)(flat(z), TOKENS.view(-1)),
    "all arguments": lambda z: ce(
        flat(z), TOKENS.view(-1), VECTOR.exp(), None, 3, None, "sum", 0.2
    ),
    "temperature": lambda z: ce(flat(z / 0.7), TOKENS.view(-1)),
    "scale": lambda z: ce(flat(z[:, 1:] * 3).float(), TOKENS[:, 1:].reshape(-1)),
    "bias": lambda z: ce(flat(0.5 * (z + VECTOR) + VECTOR[None]), TOKENS.view(-1)),
    "backward of a view in a sum": lambda z: ce(flat(z), TOKENS.view(-1)) + 0 * z.numel(),
}

COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda z: z.sum(),
    "square of a view": lambda z: z.view(-1).square().sum(),
    "softmax": lambda z: z.softmax(-1)[..., 3].log().sum(),
    "log_softmax": lambda z: functional.nll_loss(flat(z).log_softmax(-1), TOKENS.view(-1)),
    "mask": lambda z: ce(z[TOKENS > 9], TOKENS[TOKENS > 9]),
    "list of indices": lambda z: ce(flat(z[:, [0, 2]]), TOKENS[:, [0, 2]].reshape(-1)),
    "some classes": lambda z: ce(flat(z)[:, :30], TOKENS.view(-1) % 30),
    "gather": lambda z: z.gather(2, TOKENS[..., None]).sum(),
    "diagonal": lambda z: z.diagonal(0, 1, 2).sum(),
    "probabilities": lambda z: ce(z[0], torch.full((9, CLASSES), 1 / CLASSES)),
    "tensor scale": lambda z: ce(flat(z * torch.tensor(2.0)), TOKENS.view(-1)),
    "trained bias": lambda z: ce(flat(z + nn.Parameter(VECTOR)), TOKENS.view(-1)),
    "softcap": lambda z: ce(flat((z / 3).tanh() * 3), TOKENS.view(-1)),
    "cat": lambda z: ce(flat(torch.cat([z, z])), TOKENS.repeat(2, 1).view(-1)),
    "as other argument": lambda z: (torch.ones(4, 9, CLASSES) * z).square().sum(),
    "out": lambda z: torch.add(z.detach(), 1, out=torch.empty(4, 9, CLASSES)).sum() + z.sum(),
    "several uses": lambda z: ce(flat(z), TOKENS.view(-1)) + z.square().mean() + z.argmax(),
    "without torch function": lambda z: torch.ops.aten.cross_entropy_loss(flat(z), TOKENS.view(-1)),
    "old transposition": lambda z: ce(
        z.contiguous().movedim(2, 0).reshape(CLASSES, -1).T, TOKENS.view(-1)
    ),
    "transposed copy": lambda z: ce(z.mT.contiguous(), TOKENS),
    "clone": lambda z: ce(flat(z.clone()), TOKENS.view(-1)),
    "iteration": lambda z: torch.stack([row.sum() for row in z]).prod(),
}


@pytest.mark.parametrize("name", DEFERRED | COMPUTED)
def test_a_loss_needs_no_logits_and_anything_else_ordinary_ones(
    model, deferring, num_computed, name
):
    use = (DEFERRED | COMPUTED)[name]
    mine, theirs = train(deferring, use), train(model, use)
    assert num_computed == [name in COMPUTED]
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("loss_of", [
    lambda z: torch.ops.aten.cross_entropy_loss(z.flatten(0, 1), TOKENS.view(-1)),
    lambda z: ce(flat(Doubled.apply(z)), TOKENS.view(-1)),
    lambda z: ce(Doubled.apply(flat(z)), TOKENS.view(-1)),
    lambda z: Doubled.apply(z[:, 1:].float() / 2).square().sum(),
])  # fmt: skip
def test_functions_with_a_backward_of_their_own(model, loss_of, is_tied):
    if is_tied:
        model.head.weight = model.embedding.weight
    other = copy.deepcopy(model)
    ChunkedCrossEntropy("head").apply(model)
    for a, b in zip(train(model, loss_of), train(other, loss_of), strict=True):
        torch.testing.assert_close(a, b)


def test_metadata_needs_no_logits(model, deferring, num_computed):
    mine, theirs = deferring(), model()
    assert isinstance(mine, DeferredLogits)
    assert isinstance(mine, Tensor)
    for a, b in (
        (mine, theirs),
        (mine[:, 1:].double(), theirs[:, 1:].double()),
        (mine.mT, theirs.mT),
    ):
        for name in ("shape", "dtype", "device", "layout", "ndim", "nbytes", "is_cuda"):
            assert getattr(a, name) == getattr(b, name)
        for name in ("stride", "storage_offset", "numel", "is_contiguous", "is_floating_point"):
            assert getattr(a, name)() == getattr(b, name)()
        assert (a.requires_grad, a.is_leaf, a.grad_fn is None) == (True, False, False)
        assert (len(a), a.size(-1), a in {a}) == (len(b), b.size(-1), True)
    assert not mine.detach().requires_grad
    assert mine.float() is mine
    with torch.no_grad():
        assert not deferring().requires_grad
        assert not mine[0].requires_grad
    deferring.requires_grad_(False)
    assert not deferring().requires_grad
    assert num_computed == [0]


def test_metadata_of_changed_logits(deferring):
    deferring.requires_grad_(False)
    logits = deferring()
    logits[0] = torch.ones(CLASSES, requires_grad=True)
    assert logits.requires_grad
    assert ce(flat(logits), TOKENS.view(-1)).requires_grad


@pytest.mark.parametrize("use", [
    lambda z: z.numpy(),
    lambda z: z.tolist(),
    repr,
    lambda z: z[0, 0, 0].item(),
    lambda z: z.cpu().sum().item(),
    lambda z: pickle.loads(pickle.dumps(z)).tolist(),
    lambda z: copy.deepcopy(z).tolist(),
    lambda z: copy.copy(z).tolist(),
    lambda z: z.untyped_storage().tolist(),
    lambda z: bool((z == z.clone()).all()),
    lambda z: torch.equal(z, z.clone()),
    lambda z: z.to(torch.int64).tolist(),
    lambda z: torch.utils.dlpack.from_dlpack(z).tolist(),
    lambda z: list(z)[1].tolist(),
    lambda z: z.argmax().tolist(),
    lambda z: z.argmax(1).tolist(),
])  # fmt: skip
def test_data_is_that_of_ordinary_logits(model, deferring, num_computed, use):
    mine, theirs = use(deferring().detach()), use(model().detach())
    assert (mine == theirs).all() if hasattr(mine, "all") else mine == theirs
    assert num_computed == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("find", [
    lambda z: z.argmax(-1),
    lambda z: torch.argmax(z[:, 1:].float(), dim=2, keepdim=True),
    lambda z: z.mT.argmax(axis=1),
    lambda z: z.permute(0, 2, 1).argmax(-2, keepdim=True),
    lambda z: (-2 * z + VECTOR).argmax(-1),
    lambda z: z[0, 0].argmax(-1),
])  # fmt: skip
def test_classes_need_no_logits(model, deferring, num_computed, dtype, find):
    """As accuracy asks for them."""
    for m in (model, deferring):
        m.to(dtype)
    assert torch.equal(find(deferring()), find(model()))
    assert num_computed == [0]


def test_saves_as_an_ordinary_tensor(model, deferring):
    file = io.BytesIO()
    torch.save({"logits": deferring()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["logits"]
    assert type(loaded) is Tensor
    assert torch.equal(loaded, model())


def test_uses_share_what_was_computed(deferring, num_computed):
    logits = deferring()
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == TOKENS).float().mean()
    (logits.square().mean() + flat(logits)[:, 3].sum()).backward()
    assert num_computed == [1]
    assert accuracy.grad_fn is None
    assert deferring.head.weight.grad is not None


def test_hooks_and_gradients_of_logits(model, deferring):
    found = []
    for m in (deferring, model):
        logits = m()
        logits.retain_grad()
        seen: list[Tensor] = []
        logits.register_hook(seen.append)
        ce(flat(logits), TOKENS.view(-1)).backward()
        assert logits.grad is not None
        found.append([logits.grad, *seen, m.head.weight.grad])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_hooks_after_the_loss_are_an_error(deferring):
    logits = deferring()
    ce(flat(logits), TOKENS.view(-1))
    with pytest.raises(IncompatibleError, match=r"`retain_grad` before the loss"):
        logits.retain_grad()


def test_a_leaf_of_its_own(model, deferring):
    """As in loops that compute the gradient of the logits first."""
    for m in (deferring, model):
        logits = m().detach().requires_grad_()
        ce(flat(logits), TOKENS.view(-1)).backward()
        m.gradient = logits.grad
    torch.testing.assert_close(deferring.gradient, model.gradient)


def test_late_use_is_an_error_and_no_wrong_result(deferring):
    logits, kept = deferring(), deferring()
    values = kept.clone()
    with torch.no_grad():
        deferring.head.weight.add_(1.0)
    assert torch.equal(kept, values)
    with pytest.raises(IncompatibleError, match=r"`\.clone\(\)` on them, before that"):
        logits.argmax(-1)
    with pytest.raises(IncompatibleError, match="the weights have changed"):
        ce(flat(logits), TOKENS.view(-1))


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("loss_of", [lambda z: ce(flat(z), TOKENS.view(-1)), Tensor.logsumexp])
def test_who_is_trained_is_known_when_the_head_runs(model, deferring, loss_of, is_trained):
    """Not when logits are used: `toggle_optimizer` freezes the parts of a GAN in turn."""
    dims = () if loss_of is not Tensor.logsumexp else ((0, 1, 2),)
    for m in (deferring, model):
        m.head.requires_grad_(is_trained)
        logits = m()
        m.head.requires_grad_(not is_trained)
        loss = loss_of(logits, *dims)
        assert m.head.weight.requires_grad is not is_trained
        m.head.requires_grad_(True)
        loss.backward()
    found = [p.grad is not None for p in deferring.parameters()]
    assert found == [p.grad is not None for p in model.parameters()] == [True, *[is_trained] * 2]
    for ours, theirs in zip(deferring.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_use_in_another_mode_than_the_head(model, deferring):
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = deferring(), model()
    assert mine.dtype is torch.bfloat16
    with torch.inference_mode():
        assert torch.equal(mine.sum(-1), theirs.sum(-1))
    mine.float().square().sum().backward()
    theirs.float().square().sum().backward()
    torch.testing.assert_close(deferring.head.weight.grad, model.head.weight.grad)


@pytest.mark.parametrize("made_in", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("used_in", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_use_keeps_the_grad_mode(model, deferring, made_in, used_in):  # issue 53
    found = []
    for each in (deferring, model):
        with made_in():
            made = each()
        with used_in():
            made + 0
            used = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        found.append((used, torch.is_grad_enabled(), (made.sum() + each().sum()).requires_grad))
    assert found[0] == found[1]
    assert found[0][1]


def test_inference(model, deferring, num_computed):
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(
                ce(flat(deferring()), TOKENS.view(-1)), ce(flat(model()), TOKENS.view(-1))
            )
    assert num_computed == [0]
    with torch.inference_mode():
        assert torch.equal(deferring().argmax(-1), model().argmax(-1))


@pytest.mark.parametrize(
    ("autocast", "dtype", "cast"),
    in_pairs(
        [None, torch.bfloat16, torch.float16],
        [torch.float32, torch.bfloat16, torch.float16, torch.float64],
        [Tensor.contiguous, Tensor.float],
    ),
)
def test_type_of_the_loss(model, deferring, autocast, dtype, cast):
    found = []
    for m in (deferring, model):
        m.to(dtype)
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            logits = m()
            loss = ce(flat(cast(logits)), TOKENS.view(-1))
        loss.backward()
        found.append((logits.dtype, loss.dtype, m.head.weight.grad.dtype))
        m.loss = loss.detach()
    assert found[0] == found[1]
    torch.testing.assert_close(deferring.loss, model.loss, rtol=1e-2, atol=1e-2)


def head_and_loss(head: nn.Module, x: Tensor) -> Tensor:
    return ce(flat(head(x)), TOKENS.view(-1))


@pytest.mark.parametrize("run", [
    lambda head, x: checkpoint(head_and_loss, head, x, use_reentrant=False),
    lambda head, x: checkpoint(head_and_loss, head, x, use_reentrant=True),
    lambda head, x: ce(flat(checkpoint(head, x, use_reentrant=False)), TOKENS.view(-1)),
    lambda head, x: ce(flat(checkpoint(head, x, use_reentrant=True)), TOKENS.view(-1)),
    lambda head, x: checkpoint(head, x, use_reentrant=False).square().sum(),
])  # fmt: skip
def test_inside_activation_checkpointing(model, deferring, run):
    found = []
    for m in (deferring, model):
        x = m.embedding(TOKENS)
        loss = run(m.head, x)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in m.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_an_output_that_nobody_uses_costs_nothing(model, num_computed):
    """As those of models under DistributedDataParallel that looks for unused parameters."""

    class Sink(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Tensor, logits: Tensor) -> Any:
            ctx.set_materialize_grads(False)
            return loss.clone(), logits.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return gradients

    ChunkedCrossEntropy("head").apply(model)
    logits = model()
    loss, _ = Sink.apply(ce(flat(logits), TOKENS.view(-1)), logits)
    assert num_computed == [1]
    loss.backward()
    assert num_computed == [1]


def test_old_arguments(model, deferring):
    for m in (deferring, model):
        with pytest.warns(UserWarning, match="deprecated"):
            m.loss = ce(flat(m()), TOKENS.view(-1), reduce=True, size_average=False)
    assert torch.equal(deferring.loss, model.loss)


def test_several_backward_passes(model, deferring):
    for m in (deferring, model):
        loss = ce(flat(m()), TOKENS.view(-1))
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    torch.testing.assert_close(deferring.head.weight.grad, model.head.weight.grad)


def test_wrong_arguments_are_the_errors_of_torch(model, deferring):
    wrong: list[Callable[[Tensor], object]] = [
        lambda z: z.view(7, 7),
        lambda z: z[:, :-1].view(-1, CLASSES),
        lambda z: z[9],
        lambda z: ce(flat(z), TOKENS),
        lambda z: ce(flat(z), TOKENS.view(-1).float()),
        lambda z: ce(flat(z), TOKENS.view(-1), reduction="median"),
        lambda z: ce(flat(z), TOKENS.view(-1), VECTOR[:3]),
        lambda z: ce(flat(z), TOKENS.view(-1), label_smoothing=2.0),
        lambda z: z.numpy(),
        copy.deepcopy,
    ]
    for use in wrong:
        with pytest.raises(Exception) as theirs:  # noqa: PT011
            use(model())
        with pytest.raises(theirs.type) as mine:
            use(deferring())
        assert str(mine.value) == str(theirs.value)


@pytest.mark.parametrize("which", ["all", "nested", "selective"])
def test_blocks_that_are_recomputed_get_ordinary_tensors(which):
    """A wide first layer looks like a head; computed inside of a block it would be part of it."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(CLASSES, CLASSES), nn.Tanh()) for _ in range(2))
    model = nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.Sequential(*blocks))
    gradients = []
    for technique in (None, ActivationCheckpointing(which, blocks="re:1.[01]")):
        if technique is not None:
            ChunkedCrossEntropy("0").apply(model)
            technique.apply(model)
        model.zero_grad()
        model(torch.ones(3, WIDTH)).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *gradients))
