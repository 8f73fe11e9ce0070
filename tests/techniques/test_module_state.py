"""What code may change in a module comes back to its very bytes, whichever way it was changed."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_memsave.techniques.micro_batching.loss_probe import SavesBeforeWrites
from lightning_memsave.techniques.micro_batching.module_state import ModuleState

NUM_VALUES, NUM_LARGE = 6, 2**19


@dataclass
class Box:
    value: Tensor


@dataclass(slots=True)
class SlotBox:
    value: Tensor
    inner: Any = field(default_factory=dict)


class Holder(nn.Module):
    """Holds a tensor in every place."""

    def __init__(self, number: int = NUM_VALUES) -> None:
        super().__init__()
        make = functools.partial(torch.ones, number)
        self.weight = nn.Parameter(make())
        self.frozen = nn.Parameter(make(), requires_grad=False)
        self.register_buffer("buffer", make())
        self.attribute = make()
        self.items = [make(), {"key": make()}, (make(),)]
        self.box, self.slots = Box(make()), SlotBox(make(), {"deep": [Box(make())]})
        self.names = SimpleNamespace(value=make())
        kept = make()
        self.register_forward_hook(lambda *_: kept)
        self.get = functools.partial(lambda tensor: tensor, make())


PLACES: dict[str, Callable[[Any], Tensor]] = {
    "parameter": lambda m: m.weight,
    "frozen": lambda m: m.frozen,
    "buffer": lambda m: m.buffer,
    "attribute": lambda m: m.attribute,
    "list": lambda m: m.items[0],
    "dict in a list": lambda m: m.items[1]["key"],
    "tuple in a list": lambda m: m.items[2][0],
    "dataclass": lambda m: m.box.value,
    "dataclass with slots": lambda m: m.slots.value,
    "deep inside": lambda m: m.slots.inner["deep"][0].value,
    "namespace": lambda m: m.names.value,
    "closure of a hook": lambda m: next(iter(m._forward_hooks.values()))(),
    "partial": lambda m: m.get(),
}


def write_storage(tensor: Tensor) -> None:
    tensor.untyped_storage()[0] = 7


def replace_data(tensor: Tensor) -> None:
    tensor.data = torch.full((3,), 2.0)


def write_with_numpy(tensor: Tensor) -> None:
    tensor.detach().numpy()[0] = 5.0


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "copy_": lambda t: t.copy_(torch.zeros(())),
    "data.copy_": lambda t: t.data.copy_(torch.zeros(())),
    "foreach": lambda t: torch._foreach_mul_([t], 2.0),
    "numpy": write_with_numpy,
    "storage": write_storage,
    "data =": replace_data,
    "set_": lambda t: t.set_(torch.zeros(NUM_VALUES).untyped_storage()),
    "resize_": lambda t: t.resize_(4 * NUM_VALUES).fill_(3.0),
    "resize_ to nothing": lambda t: t.resize_(0),
    "as_strided_": lambda t: t.as_strided_((2,), (2,)),
}


# Torch refuses to resize a parameter.
@pytest.mark.parametrize(
    ("place", "way"),
    [(p, w) for p in PLACES for w in WAYS if p != "parameter" or not w.startswith("resize_")],
)
def test_tensors(place, way):
    module = Holder()
    tensor, bits = PLACES[place](module), PLACES[place](module).detach().clone()
    memory = tensor.untyped_storage().data_ptr()
    state = ModuleState(module, {})
    with torch.no_grad(), SavesBeforeWrites(state):
        WAYS[way](tensor)
    assert state.has_changed()
    assert state.left()
    state.restore()
    assert PLACES[place](module) is tensor
    assert torch.equal(tensor.detach(), bits)
    assert tensor.untyped_storage().data_ptr() == memory or "resize_" in way
    assert not state.has_changed()
    assert state.left() == {}


@pytest.mark.parametrize("way", WAYS)
def test_large_tensors_come_back_or_are_named(way):
    module: Any = Holder(NUM_LARGE)
    state = ModuleState(module, {}, is_checked=True)
    with torch.no_grad(), SavesBeforeWrites(state):
        WAYS[way](module.buffer)
    state.restore()
    is_seen = way != "numpy"
    assert state.damaged() == ([] if is_seen else ["buffer"])
    assert not is_seen or module.buffer.tolist() == [1.0] * NUM_LARGE


def test_bindings():
    module: Any = Holder()
    module.scores, module.counts = np.zeros(3), {1}
    before = {name: dict(vars(module)[name]) for name in ("_parameters", "_buffers")}
    state = ModuleState(module, {})
    weight, module.weight = module.weight, nn.Parameter(torch.zeros(2))
    module.buffer = torch.zeros(2)
    module.frozen.requires_grad = True
    module.new, module.attribute = 1, None
    module.items.append(2)
    module.slots.inner["more"] = module.box.value = torch.zeros(1)
    module.scores[1] = 1.0
    module.counts.add(2)
    weight.grad = torch.ones(NUM_VALUES)
    state.restore()
    state.restore_gradients()
    assert {name: dict(vars(module)[name]) for name in before} == before
    assert not module.frozen.requires_grad
    assert not hasattr(module, "new")
    assert module.attribute.tolist() == module.box.value.tolist() == [1.0] * NUM_VALUES
    assert len(module.items) == 3
    assert list(module.slots.inner) == ["deep"]
    assert module.scores.tolist() == [0.0] * 3
    assert module.counts == {1}
    assert module.weight.grad is None


def test_lazy_layers_are_lazy_again():
    lazy: Any = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    state = ModuleState(lazy, {})
    first = lazy(torch.ones(2, 4)).detach()
    state.restore()
    assert is_lazy(lazy[0].weight)
    assert type(lazy[0]) is nn.LazyLinear
    assert torch.equal(lazy(torch.ones(2, 4)).detach(), first)
    assert type(lazy[0]) is nn.Linear
