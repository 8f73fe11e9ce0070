import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_memsave.core.patching import (
    has_foreign_method,
    is_patched_with,
    keep_copies_plain,
    named,
    patch_method,
    previous_method,
    set_own,
)
from lightning_memsave.core.technique import undo_all


class Counter:
    def __init__(self, start: int) -> None:
        self.start = start

    def add(self, amount: int) -> int:
        return self.start + amount


def add(self: Counter, amount: int) -> int:
    return 100 * previous_method(self, "add")(amount)


def test_patch_calls_what_was_there_and_undo_restores_it():
    counter = Counter(1)
    undo = patch_method(counter, add)
    assert counter.add(2) == 300
    assert is_patched_with(counter, add)
    undo()
    undo()
    assert counter.add(2) == 3
    assert vars(counter) == {"start": 1}


def test_copy_is_bound_to_the_copy():
    counter = Counter(1)
    patch_method(counter, add)
    twin = copy.deepcopy(counter)
    twin.start = 5
    assert twin.add(0) == 500
    assert counter.add(0) == 100


def test_pickle_loads_without_the_patch_and_can_be_patched_again():
    counter = Counter(1)
    patch_method(counter, add)
    loaded = pickle.loads(pickle.dumps(counter))
    assert loaded.add(2) == 3
    patch_method(loaded, add)
    assert loaded.add(2) == 300


def test_patch_of_an_instance_keeps_an_earlier_patch_inside():
    counter = Counter(1)
    counter.add = lambda amount: -amount  # type: ignore[method-assign]
    earlier = counter.add
    undo = patch_method(counter, add)
    assert counter.add(2) == -200
    undo()
    assert counter.add is earlier


def pass_on(owner: Counter, name: str, *args: Any) -> Any:
    return previous_method(owner, name)(*args)


def test_what_this_package_replaces_is_not_foreign():
    counter, of_package = Counter(1), named("add", pass_on)
    undo = patch_method(counter, of_package)
    assert not has_foreign_method(counter, "add")
    undo()
    counter.add = lambda amount: -amount  # type: ignore[method-assign]
    patch_method(counter, of_package)
    assert counter.add(2) == -2
    assert has_foreign_method(counter, "add")


def test_refuses_closures_and_double_patches():
    counter = Counter(1)
    offset = 3

    def closure(self: Counter, amount: int) -> int:
        return offset

    closure.__name__ = "add"
    with pytest.raises(ValueError, match="closure"):
        patch_method(counter, closure)
    patch_method(counter, add)
    with pytest.raises(ValueError, match="patched already"):
        patch_method(counter, add)


def test_a_method_put_over_the_patch_stays_and_calls_it():
    counter = Counter(1)
    undo = patch_method(counter, add)
    inner = counter.add
    counter.add = lambda amount: -inner(amount)  # type: ignore[method-assign]
    over = counter.add
    undo()
    assert counter.add(2) == -300
    again = patch_method(counter, add)
    assert counter.add(2) == -300
    again()
    assert counter.add is over


class Static:
    @staticmethod
    def add(amount: int) -> int:
        return amount


def test_static_methods_are_called_without_the_object():
    static = Static()
    undo = patch_method(static, add)
    assert static.add(2) == 200
    undo()
    assert vars(static) == {}


class Doubled(nn.Linear):
    @staticmethod
    def scale(amount: int) -> int:
        return amount


class Twice:
    """Functions that are named as the methods."""

    @staticmethod
    def forward(layer: nn.Linear, x: Tensor) -> Tensor:
        return 2 * previous_method(layer, "forward")(x)

    @staticmethod
    def scale(layer: nn.Linear, amount: int) -> int:
        return 2 * previous_method(layer, "scale")(amount)


def of_the_user(*_: object) -> None:
    pass


def double(module: nn.Module, input: object, output: Tensor) -> Tensor:
    return 2 * output


double.__module__ = "lightning_memsave.some_technique"


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "copy", "deepcopy of its own"])
def test_copies_have_no_patch_hook_or_attribute_of_this_package(how):
    layer, x = Doubled(2, 2), torch.ones(1, 2)
    if how == "deepcopy of its own":  # the class that torch makes has `__deepcopy__`
        parametrizations.weight_norm(layer)
    layer.register_forward_hook(of_the_user)
    expected = layer(x)
    before = dict(vars(layer))
    undo = [patch_method(layer, Twice.forward), patch_method(layer, Twice.scale)]
    undo += [set_own(layer, "_memsave_own", 1)]
    undo += [layer.register_forward_hook(double).remove]
    undo += [keep_copies_plain(layer), keep_copies_plain(layer)]
    for undone_first in (undo.pop(), None):
        copied: Any = {
            "deepcopy": copy.deepcopy,
            "deepcopy of its own": copy.deepcopy,
            "copy": copy.copy,
            "pickle": lambda module: pickle.loads(pickle.dumps(module)),
        }[how](layer)
        assert vars(copied).keys() == before.keys()
        assert torch.equal(copied(x), expected)
        assert copied.scale(1) == 1
        assert torch.equal(layer(x), 4 * expected)
        if undone_first is not None:
            undone_first()
    undo_all(undo)
    assert vars(layer) == before


def test_copies_keep_methods_that_a_user_has_replaced():
    layer, x = Doubled(2, 2), torch.ones(1, 2)
    layer.forward = lambda x: -x  # type: ignore[method-assign, assignment]
    patch_method(layer, Twice.forward)
    keep_copies_plain(layer)
    assert torch.equal(copy.deepcopy(layer)(x), -x)


class Outer:
    """Its function must be named as the method."""

    @staticmethod
    def add(counter: Counter, amount: int) -> int:
        return -previous_method(counter, "add", is_outer=True)(amount)


class TestOuter:
    @pytest.mark.parametrize("is_outer_first", [True, False])
    @pytest.mark.parametrize("is_outer_undone_first", [True, False])
    def test_is_around_the_other_in_any_order(self, is_outer_first, is_outer_undone_first):
        counter, undo = Counter(1), {}
        for is_outer in (is_outer_first, not is_outer_first):
            function = Outer.add if is_outer else add
            undo[is_outer] = patch_method(counter, function, is_outer=is_outer)
        assert counter.add(2) == -300
        assert copy.deepcopy(counter).add(2) == -300
        assert is_patched_with(counter, add)
        assert is_patched_with(counter, Outer.add)
        undo[is_outer_undone_first]()
        assert counter.add(2) == (300 if is_outer_undone_first else -3)
        undo[not is_outer_undone_first]()
        assert vars(counter) == {"start": 1}

    def test_pickles_and_unpatches(self):
        counter = Counter(1)
        patch_method(counter, add)
        patch_method(counter, Outer.add, is_outer=True)
        loaded = pickle.loads(pickle.dumps(counter))
        assert loaded.add(2) == 3
        patch_method(loaded, Outer.add, is_outer=True)
        patch_method(loaded, add)
        assert loaded.add(2) == -300

    def test_copies_of_modules_have_neither(self):
        class Inner:
            forward = staticmethod(lambda layer, x: -previous_method(layer, "forward")(x))

        Inner.forward.__name__ = "forward"
        layer, x = Doubled(2, 2), torch.ones(1, 2)
        expected = layer(x)
        patch_method(layer, Inner.forward)
        patch_method(layer, Twice.forward, is_outer=True)
        keep_copies_plain(layer)
        assert torch.equal(copy.deepcopy(layer)(x), expected)
        assert not torch.equal(layer(x), expected)
