import copy
import pickle

import pytest

from lightning_memsave.core.patching import is_patched_with, patch_method, previous_method, unpatch
from lightning_memsave.techniques.offloading.technique import Offloading
from tests.cases import make_batch, make_model


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


def test_unpatch_takes_the_patch_off_a_copy_alone():
    counter = Counter(1)
    patch_method(counter, add)
    twin = copy.deepcopy(counter)
    unpatch(twin)
    assert vars(twin) == {"start": 1}
    assert (twin.add(2), counter.add(2)) == (3, 300)
    unpatch(twin)
    patch_method(twin, add)
    assert twin.add(2) == 300


def test_unpatch_takes_hooks_of_this_package_off_a_copy():
    """Applied to the copy again, a technique would do everything twice."""
    seen: list[str] = []
    model = make_model("dropout")
    model.register_forward_hook(lambda *_: seen.append("of the user"))
    handle = Offloading(True, min_bytes=1).apply(model)
    twin = copy.deepcopy(model)
    for module in twin.modules():
        unpatch(module)
    before = [hook for module in twin.modules() for hook in module._forward_pre_hooks.values()]
    after = [hook for module in twin.modules() for hook in module._forward_hooks.values()]
    assert (len(before), len(after)) == (0, 1)
    twin(make_batch(0))
    assert seen == ["of the user"]
    handle.undo()


@pytest.mark.parametrize("is_over", [True, False])
@pytest.mark.parametrize("is_undone_before", [True, False])
def test_unpatch_leaves_a_method_that_was_put_there_before_or_after(is_undone_before, is_over):
    counter, static = Counter(1), Static()
    undo = patch_method(counter, add) if is_over else None
    counter.add = lambda amount: -amount  # type: ignore[method-assign]
    own = counter.add
    undo = undo or patch_method(counter, add)
    if is_undone_before:
        undo()
    unpatch(counter)
    assert counter.add is own
    assert vars(counter) == {"start": 1, "add": own}
    patch_method(static, add)
    unpatch(static)
    assert static.add(2) == 2
    assert vars(static) == {}


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
        unpatch(counter)
        assert vars(counter) == {"start": 1}
