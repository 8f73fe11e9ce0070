"""Embedding tables on the host: the same training, and only the rows of a batch on the device."""

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_memsave import ChunkedCrossEntropy, IncompatibleError, Offloading
from lightning_memsave.core.memory import is_host
from lightning_memsave.core.technique import Handle
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.techniques import host_weight
from lightning_memsave.techniques.host_weight import host_weight_of, set_host_weight
from tests.helpers import assert_same, clones, seed_torch
from tests.techniques.offloaded_loops import HostOperators
from tests.techniques.races import Races

WORDS, WIDTH = 60, 32
Make = Callable[[Any], Optimizer]


class Model(nn.Module):
    """It uses its table twice in each pass."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, **settings)
        self.body = nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids).tanh() + self.table(ids.flip(0))
        return self.body(hidden).square().mean()


class TiedModel(nn.Module):
    """A language model; its head also serves as a classifier of some words."""

    def __init__(self, ranges: Sequence[slice] = (slice(None),)) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=3)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.table.weight
        self.ranges = ranges
        nn.init.normal_(self.table.weight, std=WIDTH**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.body(self.table(ids)).tanh())
        loss = torch.zeros(())
        for some in self.ranges:
            chosen = logits[..., some].flatten(0, 1)
            target = ids.flatten() % chosen.shape[1]
            loss = loss + nn.functional.cross_entropy(chosen, target)
        return loss


class UntiedModel(TiedModel):
    """Its head has a weight of its own."""

    def __init__(self, ranges: Sequence[slice] = (slice(None),)) -> None:
        super().__init__(ranges)
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


class OnDevice:
    """A head's weight on the device, which is used in the tiles of one on the host."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight

    def tiles(self, places: Sequence[slice], _: torch.device) -> Iterator[Tensor]:
        return (self.weight.detach()[place] for place in places)

    def add_gradient(self, place: slice, gradient: Tensor) -> None:
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        self.weight.grad[place] += gradient


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True, foreach=False),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, betas=(0.8, 0.95)),
    "coupled decay": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1),
    "nesterov": lambda params: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True
    ),
    "dampening": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
}


def on_host(model: nn.Module, *optimizers: Optimizer) -> Callable[[], None]:
    """Move the table of a model to the host; gives what takes it back."""
    technique = Offloading("embeddings", min_table_bytes=1)
    handles: list[Handle[Any]] = [technique.apply(model)]
    handles += [technique.update_in_background(each) for each in optimizers]

    def take_back() -> None:
        for handle in reversed(handles):
            handle.undo()

    return take_back


def pair(make: Make, model: nn.Module | None = None) -> Iterator[tuple[Any, Optimizer]]:
    """A model with its optimizer, and the same again with its table on the host."""
    seed_torch(0)
    plain = Model() if model is None else model
    other = copy.deepcopy(plain)
    yield plain, make(plain.parameters())
    optimizer = make(other.parameters())
    on_host(other, optimizer)
    yield other, optimizer


def batch(step: int, part: int = 0) -> Tensor:
    """Few words often, many now and then."""
    made = torch.Generator().manual_seed(10 * step + part)
    return (torch.rand(3, 4, generator=made) ** 3 * WORDS).long()


def train(model: nn.Module, optimizer: Optimizer, steps: range = range(40)) -> list[float]:
    """Two batches for each step, and another learning rate in each."""
    losses = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 5) * 0.98**step
        for part in range(2):
            loss = model(batch(step, part)) / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of the weights and of the optimizer's state."""
    found = dict(model.state_dict())
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{k}": v for k, v in state.items() if isinstance(v, Tensor)}
    return clones(found)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_the_same_bits(name):
    (plain, optimizer), (ours, other) = pair(OPTIMIZERS[name])
    assert train(plain, optimizer) == train(ours, other)
    assert_same(everything(plain, optimizer), everything(ours, other))


@pytest.mark.parametrize("name", ["adamw", "amsgrad", "nesterov", "adafactor"])
def test_updates_of_large_tables_in_tiles_have_the_same_bits(name):
    """Tiles have at least 2**20 elements."""
    model = nn.Sequential()
    model.table, model.body = nn.Embedding(33001, 33), nn.Linear(33, 4)
    runs = []
    for each, optimizer in pair(OPTIMIZERS[name], model):
        for step in range(2):
            each.body(each.table(batch(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(everything(each, optimizer))
    assert_same(*runs)


@pytest.mark.parametrize(
    "settings",
    [{"padding_idx": 3}, {"scale_grad_by_freq": True}, {"max_norm": 1.0, "norm_type": 1.5}],
    ids=str,
)
def test_settings_of_the_embedding(settings):
    (plain, optimizer), (ours, other) = pair(OPTIMIZERS["adamw"], Model(**settings))
    assert train(plain, optimizer) == train(ours, other)
    assert_same(everything(plain, optimizer), everything(ours, other))


@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.SGD])
def test_sparse_gradients(make):
    results = []
    for model, _ in pair(OPTIMIZERS["sgd"], Model(sparse=True)):
        optimizers = [
            make([model.table.weight], lr=0.1),
            OPTIMIZERS["adamw"](model.body.parameters()),
        ]
        results.append((model, optimizers))
    for model, optimizers in results:
        is_ours = model is results[1][0]
        if is_ours:
            offloading = Offloading("embeddings", min_table_bytes=1)
            offloading.update_in_background(optimizers[0])
        for step in range(6):
            model(batch(step)).backward()
            assert model.table.weight.grad.is_sparse
            for each in optimizers:
                each.step()
                each.zero_grad()
    (plain, (one, _)), (ours, (other, _)) = results
    assert_same(everything(plain, one), everything(ours, other))


def test_hooks_see_and_change_the_same_gradients():
    seen: list[list[Tensor]] = [[], []]
    results = []
    for own, (model, optimizer) in zip(seen, pair(OPTIMIZERS["adamw"]), strict=True):
        model.table.weight.register_hook(lambda grad: grad * 0.5)
        register: Any = model.table.weight.register_post_accumulate_grad_hook
        register(lambda param, own=own: own.append(param.grad.clone()))
        results.append([train(model, optimizer), everything(model, optimizer)])
    assert len(seen[0]) == 80
    assert all(map(torch.equal, *seen))
    assert_same(*results)


def test_gradients_of_gradients():
    """A penalty on the gradient of what was looked up."""
    found = []
    for model, _ in pair(OPTIMIZERS["adamw"]):
        (grad,) = torch.autograd.grad(
            model(batch(0)), [model.table.weight], create_graph=True, materialize_grads=True
        )
        grad.square().sum().backward()
        found.append([param.grad for param in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("starts_on_host", [True, False])
def test_resumes_from_either_kind_of_checkpoint(starts_on_host):
    (plain, optimizer), (ours, other) = pair(OPTIMIZERS["adamw"])
    reference = copy.deepcopy(plain), OPTIMIZERS["adamw"]
    whole = reference[0]
    whole_optimizer = reference[1](whole.parameters())
    train(whole, whole_optimizer)
    (first, before), (second, after) = (plain, optimizer), (ours, other)
    if starts_on_host:
        (first, before), (second, after) = (second, after), (first, before)
    train(first, before, range(15))
    train(second, after, range(3))  # it has a state to replace
    checkpoint = pickle.loads(pickle.dumps((first.state_dict(), before.state_dict())))
    second.load_state_dict(checkpoint[0])
    after.load_state_dict(checkpoint[1])
    train(second, after, range(15, 40))
    assert_same(everything(whole, whole_optimizer), everything(second, after))


def test_undo_gives_an_ordinary_model_that_trains_on():
    (plain, optimizer), _ = pair(OPTIMIZERS["adamw"])
    ours = copy.deepcopy(plain)
    other = OPTIMIZERS["adamw"](ours.parameters())
    weight, attributes = ours.table.weight, set(vars(ours.table))
    take_back = on_host(ours, other)
    train(plain, optimizer, range(10))
    train(ours, other, range(10))
    take_back()
    take_back()
    assert ours.table.weight is weight
    assert set(vars(ours.table)) == attributes
    assert not is_host(weight.untyped_storage())
    assert train(plain, optimizer, range(10, 20)) == train(ours, other, range(10, 20))
    assert_same(everything(plain, optimizer), everything(ours, other))


def test_copies_have_tables_of_their_own():
    (plain, _), (ours, _) = pair(OPTIMIZERS["adamw"])
    for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        made(batch(0)).backward()
        assert type(made.table.weight.grad) is Tensor
        assert ours.table.weight.grad is None
        assert torch.equal(made.table.weight, plain.table.weight)


@pytest.mark.parametrize("make", [Model, TiedModel, UntiedModel])
def test_the_device_computes_with_no_host_memory(make):
    model: Any = make()
    with chunked_if(model, make is not Model):
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        take_back = on_host(model, optimizer)
        with HostOperators() as operators:
            for step in range(3):
                model(batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        take_back()
    assert operators.mixed == []


@contextmanager
def chunked_if(model: nn.Module, has_head: bool) -> Iterator[None]:
    """Chunked cross-entropy on a head."""
    if not has_head:
        yield
        return
    with ChunkedCrossEntropy(heads="head").apply(model):
        yield


def test_device_bytes_are_those_of_the_rows():
    model = Model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    on_host(model, optimizer)
    body = 4 * (4 * WIDTH + 4)
    ids = batch(0)
    with LiveTensors(model, [optimizer]) as live:
        assert live.breakdown.total_bytes == body
        rows = model.table(ids)
        # The vectors, and the ids themselves.
        kept = ids.numel() * (4 * WIDTH + 8)
        assert live.breakdown.total_bytes == body + kept
        assert live.peak.total_bytes == body + kept
        live.reset_peak()
        rows.sum().backward()
        del rows
        optimizer.step()
        optimizer.zero_grad()
        assert live.breakdown.total_bytes == body + 8 * ids.numel()
        # The gradient of the sum is one number, expanded and then written out.
        assert live.peak.gradient_bytes == live.peak.optimizer_state_bytes == 0
        table_bytes = 4 * WORDS * WIDTH
        assert live.peak.host_bytes >= 3 * table_bytes


def assert_same_gradients(plain: nn.Module, ours: nn.Module) -> None:
    grads = [[param.grad for param in model.parameters()] for model in (plain, ours)]
    torch.testing.assert_close(*grads)


@pytest.fixture(params=[TiedModel, UntiedModel])
def models(request: pytest.FixtureRequest) -> Iterator[tuple[TiedModel, TiedModel]]:
    """A model, and the same again without logits and with what has rows of words on the host."""
    seed_torch(0)
    plain = request.param()
    ours = copy.deepcopy(plain)
    with ChunkedCrossEntropy(heads="head").apply(ours):
        on_host(ours)
        assert host_weight_of(ours.head.weight) is not None
        yield plain, ours


def trained_in(places: tuple[bool, bool], make: Make) -> tuple[list[float], dict[str, Tensor]]:
    """Train with many tiles on the host or on the device, and go on in the other place."""
    seed_torch(0)
    losses, state = list[float](), list[Any]()
    for number, is_on_host in enumerate(places):
        model = UntiedModel()
        optimizer = make(model.parameters())
        if state:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        ChunkedCrossEntropy(heads="head", chunk_size=1).apply(model)
        if is_on_host:
            on_host(model, optimizer)
        else:
            set_host_weight(OnDevice(model.get_parameter("head.weight")))
        losses += train(model, optimizer, range(4 * number, 4 * number + 4))
        state = pickle.loads(pickle.dumps([model.state_dict(), optimizer.state_dict()]))
    return losses, everything(model, optimizer)


class TestHead:
    """The head's loss runs over tiles of its weight, which may be the table."""

    @pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.1}, {"reduction": "none"}])
    def test_is_the_usual_loss(self, settings, models):
        target = torch.arange(24) % 7
        target[:5] = -100
        weights, hidden, losses = torch.rand(WORDS), torch.randn(24, WIDTH), []
        for model in models:
            logits = model.head(model.body(hidden))
            loss = nn.functional.cross_entropy(logits, target, weights, **settings)
            loss.sum().backward()
            losses.append(loss)
        torch.testing.assert_close(*losses)
        assert_same_gradients(*models)

    def test_a_target_that_is_no_class_gives_nan(self, models):
        logits = models[1].head(torch.ones(2, WIDTH))
        assert nn.functional.cross_entropy(logits, torch.tensor([0, WORDS])).isnan()

    def test_rows_only_after_whole_gradients(self):
        """A step without the head has rows only; one with both adds to them."""
        seed_torch(0)
        plain = TiedModel()
        ours = copy.deepcopy(plain)
        optimizer, other = (OPTIMIZERS["adamw"](m.parameters()) for m in (plain, ours))
        with ChunkedCrossEntropy(heads="head").apply(ours):
            on_host(ours, other)
            for model, each in ((plain, optimizer), (ours, other)):
                for step in range(12):
                    if step % 3:
                        model.body(model.table(batch(step))).sum().backward()
                    if step % 2:
                        model(batch(step, 1)).backward()
                    each.step()
                    each.zero_grad()
            torch.testing.assert_close(plain.state_dict(), ours.state_dict(), atol=2e-6, rtol=1e-4)

    def test_argmax_and_other_uses_of_the_logits(self, models):
        logits = [model.head(model.body(model.table(batch(0)))) for model in models]
        assert torch.equal(logits[0].argmax(-1), logits[1].argmax(-1))
        assert torch.equal(logits[0][..., 7:20].argmax(-1), logits[1][..., 7:20].argmax(-1))
        with pytest.warns(match="needs its full logits"):
            sums = [each.log_softmax(-1)[..., 0].sum() for each in logits]
        torch.testing.assert_close(*sums)
        for each in sums:
            each.backward()
        assert_same_gradients(*models)

    @pytest.mark.filterwarnings("ignore:.*needs its full logits")
    def test_logits_of_many_tiles_in_bfloat16(self, models, monkeypatch):
        """The same bits; gradients are rounded twice, as products of tiles and as their sum."""
        monkeypatch.setattr(host_weight, "_TILE_BYTES", 4 * WIDTH)
        hidden, outer = torch.randn(64, WIDTH), torch.randn(64, WORDS).bfloat16()
        found = list[Any]()
        for model in models:
            own = hidden.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                logits = model.head(own).clone()
            torch.autograd.backward(logits, outer, inputs=[own])
            found.append((logits, own.grad))
        (plain, plain_grad), (ours, our_grad) = found
        assert torch.equal(ours, plain)
        truth = outer.double() @ models[0].head.weight.bfloat16().double()
        errors = [float((grad - truth).detach().norm()) for grad in (our_grad, plain_grad)]
        assert errors[0] <= 1.5 * errors[1]

    def test_gradients_of_gradients_of_logits_are_refused(self, models):
        model = models[1]
        hidden = torch.randn(2, WIDTH, requires_grad=True)
        with pytest.warns(match="needs its full logits"):
            loss = model.head(hidden).square().sum()
        with pytest.raises(IncompatibleError, match="only have a first derivative"):
            torch.autograd.grad(loss, [hidden], create_graph=True)

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_has_the_bits_of_the_same_tiles_on_the_device(self, name):
        """Also if training begins in one place and is resumed in the other."""
        losses, state = trained_in((False, False), OPTIMIZERS[name])
        for places in ((True, True), (True, False), (False, True)):
            own_losses, own_state = trained_in(places, OPTIMIZERS[name])
            assert own_losses == losses
            assert_same(own_state, state)

    def test_device_bytes(self):
        """Two tiles of the table and one of its gradient, for any number of words."""
        peaks = []
        for num_words in (2000, 8000):
            model = nn.Sequential(nn.Embedding(num_words, WIDTH), nn.Linear(WIDTH, num_words))
            model[1].weight = model[0].weight
            with ChunkedCrossEntropy(heads="1", chunk_size=1).apply(model):
                Offloading("embeddings", min_table_bytes=1).apply(model)
                ids = torch.arange(40)
                with LiveTensors(model) as live:
                    before = live.breakdown.total_bytes
                    nn.functional.cross_entropy(model(ids), ids).backward()
                peaks.append(live.peak.total_bytes - before)
                assert live.peak.gradient_bytes == 4 * num_words  # of the bias
        assert peaks[1] - peaks[0] < 4 * WIDTH * 6000 / 8


@pytest.mark.parametrize("make", [Model, TiedModel, UntiedModel])
def test_prediction_of_a_step_counts_the_same_bytes(make):
    """Ids of a batch are known, and rows that come twice count once."""
    model: Any = make()
    has_head = make is not Model
    ids = torch.arange(24).view(2, 12) % 7

    def peak(model: nn.Module, ids: Tensor) -> tuple[int, int]:
        with chunked_if(model, has_head):
            take_back = on_host(model)
            with LiveTensors(model) as live:
                live.track_input(ids)
                model.zero_grad()
                loss = model.body(model.table(ids)).sum()
                loss = loss + model(ids) if has_head else loss
                loss.backward()
            take_back()
        return live.peak.total_bytes, live.breakdown.total_bytes

    with fake_tensors() as fakes:
        predicted = peak(fakes.copy_module(model), fakes.copy_batch(ids))
        assert fakes.guesses == ()
    assert predicted == peak(model, ids)


class Renamed(nn.Embedding):
    """An embedding of another class."""


def of_another_class() -> nn.Module:
    model = Model()
    model.table = Renamed(WORDS, WIDTH)
    return model


def hooked() -> nn.Module:
    model = TiedModel()
    model.table.weight.register_hook(lambda grad: grad)
    return model


@pytest.mark.parametrize(
    ("make", "is_chunked", "remedy"),
    [
        (of_another_class, False, "a `Renamed` with the table is not supported"),
        (hooked, True, "Remove it from the weight"),
        (TiedModel, False, "Set `chunked_cross_entropy=True`; in a plain loop apply"),
    ],
)
def test_refuses(make, is_chunked, remedy):
    model = make()
    with chunked_if(model, is_chunked), pytest.raises(IncompatibleError, match=remedy):
        on_host(model)
    assert not any(is_host(param.untyped_storage()) for param in model.parameters())


def test_autograd_grad_beside_tiles(models):
    """Of other weights it is as usual, that of the head is refused."""
    grads = [torch.autograd.grad(m(batch(0)), [m.body.weight]) for m in models]
    torch.testing.assert_close(*grads)
    ours = models[1]
    ours(batch(0)).backward(inputs=[ours.body.weight])
    assert ours.head.weight.grad is None
    with pytest.raises(IncompatibleError, match="Use `backward`"):
        torch.autograd.grad(ours(batch(0)), [ours.head.weight])


def test_a_head_that_is_frozen_since_forward_keeps_its_gradient(models):
    for model in models:
        model(batch(0)).backward()
        loss = model(batch(1))
        model.head.weight.requires_grad_(False)
        loss.backward()
    assert_same_gradients(*models)


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_later_hook_of_a_head_is_refused(models, name):
    """It would get no gradient, or that of the look-ups alone."""
    ours = models[1]
    ours(batch(0)).backward()
    getattr(ours.head.weight, name)(lambda _: None)
    with pytest.raises(IncompatibleError, match="a hook of the weight of a head"):
        ours(batch(0)).backward()


def hooked_head() -> UntiedModel:
    model = UntiedModel()
    model.head.weight.register_hook(lambda grad: 2 * grad)
    return model


def frozen_head() -> UntiedModel:
    model = UntiedModel()
    model.head.weight.requires_grad_(False)
    return model


def twice() -> UntiedModel:
    """Another layer computes with the head's weight."""
    model = UntiedModel()
    model.other = nn.Linear(WIDTH, WORDS)
    model.other.weight = model.head.weight
    return model


def shared() -> UntiedModel:
    """Two parameters have the same memory."""
    model = UntiedModel()
    model.head.weight.data = model.table.weight.data
    return model


@pytest.mark.parametrize("make", [hooked_head, frozen_head, twice, shared, UntiedModel])
def test_heads_that_cannot_wait_on_the_host_are_weights_as_all_others(make):
    """Without chunked cross-entropy, too."""
    results = []
    for what in (None, "optimizer+embeddings"):
        seed_torch(0)
        model = make()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        with chunked_if(model, make is not UntiedModel):
            if what is not None:
                technique = Offloading(what, min_table_bytes=1)
                technique.apply(model)
                technique.update_in_background(optimizer)
                assert host_weight_of(model.head.weight) is None
            losses = train(model, optimizer, range(4))
            results.append([losses, everything(model, optimizer)])
    assert_same(*results)


def test_stays_on_the_host_when_the_model_moves():
    model = Model()
    on_host(model)
    data = model.table.weight.data_ptr()
    model.to("meta")
    assert model.body.weight.is_meta
    assert model.table.weight.data_ptr() == data
    with pytest.raises(IncompatibleError, match="bf16-mixed"):
        model.to(torch.bfloat16)


def test_unknown_words_are_an_error():
    model = Model()
    on_host(model)
    for wrong in (-1, WORDS):
        with pytest.raises(IndexError, match="out of range"):
            model(torch.tensor([[wrong]]))


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("make", [Model, TiedModel, UntiedModel])
def test_recomputed_look_ups_and_losses_have_the_same_gradients(make, is_reentrant):
    seed_torch(0)
    plain: Any = make()
    ours = copy.deepcopy(plain)
    if make is not Model:
        ChunkedCrossEntropy(heads="head").apply(ours)
    on_host(ours)
    for model in (plain, ours):
        for part in range(2):
            start = torch.ones((), requires_grad=True)

            loss = checkpoint(
                lambda _, model, ids: model(ids),
                start,
                model,
                batch(part),
                use_reentrant=is_reentrant,
            )
            (loss + model(batch(5))).backward()
    assert_same_gradients(plain, ours)


def test_state_that_lightning_moves_is_on_the_host_again():
    model = Model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    on_host(model, optimizer)
    train(model, optimizer, range(2))
    state = optimizer.state[model.table.weight]
    state["exp_avg"] = state["exp_avg"].clone()  # as for another device
    assert not is_host(state["exp_avg"].untyped_storage())
    train(model, optimizer, range(2))
    assert all(is_host(tensor.untyped_storage()) for tensor in state.values())


@pytest.mark.parametrize("is_read", [True, False])
def test_tiles_that_nobody_reads_have_come_before_their_memory_goes(is_read):
    """As after running out of memory, which a repetition follows."""
    model = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 4))
    with Races().running():
        handle = Offloading("embeddings", min_table_bytes=1).apply(model)
        table = host_weight_of(model.get_parameter("0.weight"))
        assert table is not None
        with contextlib.suppress(ZeroDivisionError):
            for tile in table.tiles([slice(0, 32), slice(32, 64)], torch.device("cpu")):
                assert tile.isfinite().all()
                del tile
                assert is_read or 1 / 0
        handle.undo()
