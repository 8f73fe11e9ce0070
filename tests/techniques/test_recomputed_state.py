"""Recomputation sees every write of a block, and every read: state of any kind, written in any way.

Each case is trained plain and recomputed in one process, from one seed, and compared bit for bit.
"""

import copy
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_memsave import ActivationCheckpointing, Offloading
from lightning_memsave.errors import ExactnessWarning, IncompatibleError

WIDTH = 6


@dataclasses.dataclass
class Box:
    value: Any


WAYS: dict[str, Callable[[Callable[[], Tensor], Callable[[Tensor], None]], Any]] = {
    "copy_": lambda get, put: get().copy_(get() * 0.5 + 0.1),
    "foreach": lambda get, put: torch._foreach_mul_([get()], 0.7),
    "data.copy_": lambda get, put: get().data.copy_(get() * 0.5 + 0.1),
    "data=": lambda get, put: setattr(get(), "data", get().detach() * 0.5 + 0.1),
    "numpy": lambda get, put: np.multiply(
        get().detach().numpy(), np.float32(0.7), out=get().detach().numpy()
    ),
    "set_": lambda get, put: cast(Any, get()).set_(get().detach() * 0.5 + 0.1),
    "assign": lambda get, put: put(get().detach() * 0.5 + 0.1),
}
KINDS = (
    *("buffer", "frozen", "trained", "attribute", "list", "dict", "dataclass", "outer"),
    "outer weight",  # of a submodule of the model that the block holds
)
PLACES = ("block", "end of block", "after the blocks", "before backward")


class Block(nn.Module):
    state: Any
    kind: str

    def __init__(self, kind: str, size: int) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind
        value = torch.linspace(-0.5, 0.5, size)
        if kind == "buffer":
            self.register_buffer("state", value)
        elif kind in ("frozen", "trained"):
            self.state = nn.Parameter(value, requires_grad=kind == "trained")
        else:
            values: dict[str, Any] = {
                "attribute": value,
                "list": [value],
                "dict": {"v": value},
                "dataclass": Box(value),
                "outer": None,
                "outer weight": None,
                "large outer weight": None,
            }
            self.state = values[kind]
        self.outer: list[Any] = []
        self.write: Callable[..., Any] | None = None
        self.place = ""

    def get(self) -> Tensor:
        if self.kind in ("list", "dict"):
            return self.state[0 if self.kind == "list" else "v"]
        if self.kind == "dataclass":
            return self.state.value
        if self.kind.endswith("outer weight"):
            return (self.outer[0].head if "large" in self.kind else self.outer[0].stem).bias
        return self.outer[0].state if self.kind == "outer" else self.state

    def put(self, value: Tensor) -> None:
        if self.kind in ("frozen", "trained"):
            self.state = nn.Parameter(value, requires_grad=self.kind == "trained")
        elif self.kind in ("list", "dict"):
            self.state[0 if self.kind == "list" else "v"] = value
        elif self.kind == "dataclass":
            self.state.value = value
        elif self.kind == "outer weight":
            self.outer[0].stem.bias = nn.Parameter(value)
        else:
            (self.outer[0] if self.kind == "outer" else self).state = value

    def change(self) -> None:
        with torch.no_grad():
            assert self.write is not None
            self.write(self.get, self.put)

    def forward(self, x: Tensor) -> Tensor:
        if self.place == "block":
            self.change()
        # Its value is not saved for backward, so that plain training may change it after its use.
        x = x + torch.tanh(self.linear(x)) * self.get().detach()[:WIDTH].clone()
        x = torch.tanh(x) + self.get()[:WIDTH]
        if self.place == "end of block":
            self.change()
        return x


class Net(nn.Module):
    blocks: Any

    def __init__(self, kind: str, size: int = WIDTH) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, size)
        self.blocks = nn.ModuleList(Block(kind, size) for _ in range(3))
        self.register_buffer("state", torch.linspace(0.5, 1.0, WIDTH))
        for block in self.blocks:
            block.outer = [self]

    def forward(self, x: Tensor, place: str) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        if place == "after the blocks":
            self.blocks[1].change()
        return x.square().mean()


def train(model: Net, place: str, steps: int = 4) -> list[Any]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    seen: list[Any] = []
    for _ in range(steps):
        loss = model(torch.randn(4, WIDTH), place)
        if place == "before backward":
            model.blocks[1].change()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
        seen += [block.get().detach().clone() for block in model.blocks]
        seen += [p.grad for p in model.parameters() if p.grad is not None]
    return [*seen, *map(torch.detach, model.parameters())]


def both(make: Callable[[], Net], place: str, which: str) -> tuple[list[Any], list[Any]]:
    plain, ours = make(), make()
    ours.load_state_dict(plain.state_dict())
    expected = train(plain, place)
    with ActivationCheckpointing(which, blocks=Block).apply(ours):
        return expected, train(ours, place)


def assert_same(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


def make_net(kind: str, way: str, place: str, size: int = WIDTH) -> Net:
    torch.manual_seed(1)
    net = Net(kind, size)
    for block in net.blocks:
        block.write, block.place = WAYS[way], place
    return net


# Each second one selectively: seven ways are an odd number, so that each kind and way meets both.
CASES = [
    (*case, ("all", "selective")[number % 2])
    for number, case in enumerate(itertools.product(KINDS, PLACES, WAYS))
]


@pytest.mark.parametrize(("kind", "place", "way", "which"), CASES)
def test_state_is_seen_as_forward_saw_it_and_changed_once(kind, place, way, which):
    is_weight = kind in ("frozen", "trained") and way != "assign"

    def make() -> Net:
        return make_net(kind, way, place)

    if is_weight and place in PLACES[2:]:
        # Only weights that forward changes are kept.
        with pytest.raises(IncompatibleError, match=r"`state` of a block of class `Block`"):
            both(make, place, which)
        return
    assert_same(*both(make, place, which))


LARGE = 5000  # elements: above the size up to which tensors are kept in every pass


@pytest.mark.parametrize("which", ["all", "nested", "selective"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES[:2])
def test_large_tensors_that_a_block_changes_are_kept(place, way, which):
    assert_same(*both(lambda: make_net("buffer", way, place, LARGE), place, which))


@pytest.mark.parametrize("way", ["copy_", "numpy"])
def test_large_tensors_that_others_change_are_refused_by_name(way):
    for place in PLACES[2:]:
        make = functools.partial(make_net, "buffer", way, place, LARGE)
        with pytest.raises(IncompatibleError, match=r"`state` of a block of class `Block`.*after"):
            both(make, place, "all")


@pytest.mark.parametrize("which", ["all", "nested", "selective"])
def test_a_large_weight_of_the_model_that_blocks_hold_is_compared_where_they_read_it(which):
    def make(kind: str, place: str) -> Net:
        model = make_net(kind, "copy_", place, LARGE)
        model.blocks[1].change = lambda: change(model.head.bias)
        return model

    def change(param: nn.Parameter) -> None:
        with torch.no_grad():
            param.mul_(0.5)

    written = functools.partial(make, "large outer weight", "block")
    assert_same(*both(written, "block", which))
    # As an update in backward does.
    unread = functools.partial(make, "outer weight", "")
    assert_same(*both(unread, "before backward", which))
    read = functools.partial(make, "large outer weight", "")
    with pytest.raises(IncompatibleError, match=r"`outer\[0\].head.bias` of a block"):
        both(read, "before backward", which)


def test_a_late_change_of_a_weight_is_warned_of_and_right_from_the_next_step_on():
    model = make_net("frozen", "copy_", "")
    with ActivationCheckpointing(blocks=Block).apply(model):
        for step in range(8):
            model.blocks[0].place = "block" if step > 4 else ""
            if step == 5:
                with pytest.warns(ExactnessWarning, match="`state` of a block of class `Block`"):
                    loss = model(torch.randn(4, WIDTH), "")
            else:
                loss = model(torch.randn(4, WIDTH), "")
            before = model.blocks[0].state.clone()
            loss.backward()
            assert torch.equal(model.blocks[0].state, before)


def test_a_late_change_by_others_is_refused():
    model = make_net("trained", "copy_", "")
    with ActivationCheckpointing(blocks=Block).apply(model):
        for _ in range(5):
            loss = model(torch.randn(4, WIDTH), "")
            loss.backward()
        loss = model(torch.randn(4, WIDTH), "")
        model.blocks[0].change()
        with pytest.raises(IncompatibleError, match="`state` of a block"):
            loss.backward()


class BatchRenorm(nn.Module):
    """Reads the running statistics of its own batch norm, before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        before = self.norm.running_mean.clone()
        y = self.norm(self.linear(x))
        shift = (self.norm.running_mean - before) / self.norm.running_var.sqrt()
        return x + torch.tanh(y * self.norm.running_var.clone() + shift)


class Counts(nn.Module):
    """Its result depends on numbers, on lists, and on random numbers outside of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count, self.history = nn.Linear(WIDTH, WIDTH), 0, [0.0]
        self.generator = torch.Generator().manual_seed(3)
        self.rng = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.history.append(self.history[-1] + 0.5)
        noise = torch.randn(WIDTH, generator=self.generator)
        factor = self.rng.random() + random.random() + np.random.random()
        return x + torch.tanh(self.linear(x)) * (self.count + self.history[-1] + factor) + noise


class Observed(nn.Module):
    """Quantisation-aware training: a fused operator moves the range in its buffers."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import default_fused_act_fake_quant

        self.linear, self.quantize = nn.Linear(WIDTH, WIDTH), default_fused_act_fake_quant()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.quantize(self.linear(x)))


class Grows(nn.Module):
    """A buffer that gets its size in the first step, and a layer that gets its weights there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(WIDTH)
        self.norm = nn.LazyBatchNorm1d()
        self.register_buffer("seen", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if not self.seen.numel():
                self.seen.resize_(WIDTH).zero_()
            self.seen.lerp_(x.detach().mean(0), 0.1)
        return x + self.norm(torch.tanh(self.linear(x))) + self.seen.clone()


class Section:
    def __init__(self, **names: Any) -> None:
        vars(self).update(names)


class HasSettings(nn.Module):
    """Holds a tree of settings, a number in which forward changes."""

    def __init__(self) -> None:
        super().__init__()
        names = {f"name_{i}": {"a": [0.1 * i], "b": i} for i in range(40)}
        self.settings: Any = Section(model=Section(**names), rate=1.0)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.settings.rate *= 1.1
        self.settings.model.name_3["a"].append(self.settings.rate)
        return x + torch.tanh(self.linear(x)) * sum(self.settings.model.name_3["a"])


class KeepsGraph(nn.Module):
    """An auxiliary loss in an attribute, with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.loss: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.loss = y.square().mean()
        return x + y


@pytest.mark.parametrize("which", ["all", "nested", "selective"])
@pytest.mark.parametrize("kind", [BatchRenorm, Counts, Observed, Grows, KeepsGraph, HasSettings])
@pytest.mark.filterwarnings("ignore:.*(Lazy|lazy|torch.ao|quantization).*")
def test_awkward_blocks_train_as_without(kind, which):
    def run(*, is_ours: bool) -> list[Any]:
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        blocks: list[Any] = [kind() for _ in range(3)]
        model = nn.Sequential(*blocks)
        handle = ActivationCheckpointing(which, blocks=kind).apply(model) if is_ours else None
        optimizer: Any = None
        seen: list[Tensor] = []
        for _ in range(5):
            loss = model(torch.randn(8, WIDTH)).square().mean()
            for block in blocks if kind is KeepsGraph else ():
                loss = loss + block.loss
            optimizer = optimizer or torch.optim.AdamW(model.parameters(), 0.01)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        if handle is not None:
            handle.undo()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        numbers = [torch.tensor([random.random(), np.random.random()])]
        if kind is Counts:
            numbers += [torch.tensor([float(b.count), *b.history]) for b in blocks]
        return [*seen, *state.values(), *numbers]

    expected, found = run(is_ours=False), run(is_ours=True)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
        assert bool(one.isfinite().all())


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_flags_that_others_change_are_those_of_forward_in_recomputation(is_offloaded):
    def run(*, is_ours: bool) -> list[Any]:
        torch.manual_seed(0)
        layers = (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.BatchNorm1d(WIDTH))
        model = nn.Sequential(*[nn.Sequential(*copy.deepcopy(layers)) for _ in range(3)])
        technique = ActivationCheckpointing(blocks=lambda name, _: name.isdecimal())
        handle = technique.apply(model) if is_ours else None
        moves = Offloading("optimizer", min_bytes=4).apply(model) if is_offloaded else None
        for step in range(6):
            model.train()
            loss = model(torch.randn(8, WIDTH)).square().mean()
            model.eval()
            model[1][1].p = 0.1 * step
            model[2][0].weight.requires_grad_(step % 2 == 0)
            loss.backward()
            assert not model.training
            assert not model[2][2].training
            assert model[1][1].p == 0.1 * step
            assert model[2][0].weight.requires_grad is (step % 2 == 0)
        for each in filter(None, (moves, handle)):
            each.undo()
        return [p.grad for p in model.parameters()] + [*model.buffers()]

    assert_same(run(is_ours=False), run(is_ours=True))


class LoadsItself(nn.Module):
    """Writes the same values into the weights of its submodules, which torch counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.load_state_dict(self.state_dict())
        return x + torch.tanh(self.inner(x))


def test_recomputation_leaves_no_mark_in_the_counters_that_autograd_looks_at():
    model = nn.Sequential(LoadsItself(), LoadsItself())
    with ActivationCheckpointing("nested", blocks=LoadsItself).apply(model):
        for _ in range(7):
            loss = model(torch.randn(4, WIDTH)).square().mean()
            versions = [p._version for p in model.parameters()]
            loss.backward()
            assert [p._version for p in model.parameters()] == versions


def test_a_second_backward_pass_finds_the_state_of_forward_again():
    model = make_net("buffer", "data.copy_", "block")
    plain = copy.deepcopy(model)
    handle = ActivationCheckpointing(blocks=Block).apply(model)
    batch = torch.randn(4, WIDTH)
    for each in (plain, model):
        loss = each(batch, "")
        loss.backward(retain_graph=True)
        with torch.no_grad():
            each.blocks[1].state.zero_()
        loss.backward()
    handle.undo()
    assert_same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])
    assert_same([*plain.buffers()], [*model.buffers()])
