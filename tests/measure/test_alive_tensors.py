import functools
import gc
import weakref
from collections import deque
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memsave import ActivationCheckpointing, Offloading
from lightning_memsave.measure import alive_tensors
from lightning_memsave.measure.alive_tensors import find_alive_tensors, merge_alike
from lightning_memsave.measure.live_tensors import LiveTensors
from tests.cases import WIDTH, make_model
from tests.out_of_memory import OutOfMemoryAt

BATCH = 16


pytestmark = pytest.mark.usefixtures("only_own_tensors")


def by_category(alive):
    found = dict.fromkeys(one.category for one in alive)
    return {c: sum(one.num_bytes for one in alive if one.category == c) for c in found}


def named(alive, part):
    return [one for one in alive if part in one.name]


def step(model, optimizer, batch):
    loss = model(batch)
    loss.backward()
    optimizer.step()


def run_out_of_memory(model, place):
    """Train two steps, the second one to an operator; what was found, and what was counted."""
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(BATCH, WIDTH)
    out_of_memory = OutOfMemoryAt(place)
    found, counted, phase = [], {}, "forward"
    with LiveTensors(model, [optimizer]) as live, out_of_memory:
        live.track_input(batch)
        step(model, optimizer, batch)
        optimizer.zero_grad()
        try:
            with out_of_memory.armed():
                step(model, optimizer, batch)
        except torch.OutOfMemoryError as error:
            counted = live.breakdown.by_category()
            phase = "backward" if counted["gradient"] or counted["temporary"] else "forward"
            found = find_alive_tensors("cpu", model, [optimizer], batch, error, phase=phase)
    return found, counted


# Each third one in `make test`.
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=pytest.mark.exhaustive if number % 3 else ())
        for number, place in enumerate(range(5, 200, 13))
    ],
)
def test_finds_what_is_counted(place):
    model = make_model("dropout")
    found, counted = run_out_of_memory(model, place)
    assert counted, "the step has fewer operators"
    sizes = by_category(found)
    for category in ("parameter", "gradient", "optimizer_state", "input"):
        assert sizes.get(category, 0) == counted[category], category
    # But for a scalar that backward begins with.
    assert sizes["activation"] == pytest.approx(counted["activation"], abs=4)


@pytest.mark.parametrize("place", [30, 60, 90, 150])
def test_finds_what_is_counted_with_activation_checkpointing(place):
    model = make_model("dropout")
    with ActivationCheckpointing().apply(model):
        found, counted = run_out_of_memory(model, place)
    # Five scalars that are in no graph count as something else. A checkpoint keeps states of random
    # generators, 5 kB for each of the four blocks.
    surplus = by_category(found)["activation"] - counted["activation"]
    assert -20 <= surplus <= 4 * 5056


def test_finds_every_activation_of_a_forward_pass():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
    batch = torch.randn(4, 64)
    with LiveTensors(model) as live:
        live.track_input(batch)
        try:
            hidden = model(batch)
            raise torch.OutOfMemoryError
        except torch.OutOfMemoryError as error:
            found = find_alive_tensors("cpu", model, (), batch, error)
    assert hidden.shape == (4, 64)
    assert by_category(found)["activation"] == live.breakdown.activation_bytes
    assert len(named(found, "saved by ")) == 8  # outputs of Tanh; those of Linear are gone


def test_names_the_module_that_an_activation_was_saved_for():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def fail():
        output = model(torch.ones(4, 8))
        raise torch.OutOfMemoryError(output.shape)

    try:
        fail()
    except torch.OutOfMemoryError as error:
        found = find_alive_tensors("cpu", model, error=error)
    assert named(found, "saved by AddmmBackward0 of 0")
    (output,) = named(found, "output in ")
    assert output.category == "activation"
    assert output.name.endswith(f"fail (test_alive_tensors.py:{fail.__code__.co_firstlineno + 2})")


def test_does_not_recompute_what_a_checkpoint_left_out():
    model = make_model("dropout")
    with ActivationCheckpointing().apply(model):
        calls = []
        model.register_forward_pre_hook(lambda *_: calls.append(1))
        loss = model(torch.randn(BATCH, WIDTH))
        before = torch.get_rng_state()
        found = find_alive_tensors("cpu", model)
        assert torch.equal(torch.get_rng_state(), before)
    assert calls == [1]
    assert loss.grad_fn is not None
    assert found


def test_finds_graphs_that_a_list_of_losses_keeps_alive():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    losses = [model(torch.ones(1001, 8)).sum() for _ in range(5)]
    found = named(find_alive_tensors("cpu", model), "saved by TanhBackward0 of 0")
    assert len([one for one in found if one.shape == (1001, 8)]) == len(losses)


def test_what_backward_has_freed_is_gone():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    loss = model(torch.ones(1002, 8)).sum()
    loss.backward()
    found = named(find_alive_tensors("cpu", model), "saved by")
    assert [one for one in found if one.shape == (1002, 8)] == []


def test_counts_a_storage_once():
    big = torch.zeros(12_345)
    views = [big[:10], big.view(5, -1), big.detach()]
    found = [one for one in find_alive_tensors("cpu") if one.num_bytes == 4 * 12_345]
    assert len(found) == 1
    assert len(views) == 3


def test_looks_on_one_device_only():
    assert find_alive_tensors("meta") == [] or all(
        one.num_bytes for one in find_alive_tensors("meta")
    )


def test_keeps_nothing_alive():
    def fail():
        hidden = torch.ones(7, 7, requires_grad=True) * 2
        refs.append(weakref.ref(hidden))
        raise torch.OutOfMemoryError

    refs: list[weakref.ref[torch.Tensor]] = []
    try:
        fail()
    except torch.OutOfMemoryError as error:
        find_alive_tensors("cpu", error=error)
        assert refs[0]() is not None
    assert refs[0]() is None  # without a pass of the garbage collector


def test_looks_into_causes():
    def fail():
        early = torch.ones(4321)
        raise torch.OutOfMemoryError(early.shape)

    try:
        try:
            fail()
        except torch.OutOfMemoryError as cause:
            raise RuntimeError("step failed") from cause
    except RuntimeError as error:
        found = find_alive_tensors("cpu", error=error)
    assert named(found, "early in ")


def test_survives_objects_that_raise():
    class Broken(dict):  # type: ignore[type-arg]
        def values(self):
            raise ValueError("no values here")

    def fail():
        broken, fine = Broken(), torch.ones(4322)
        raise torch.OutOfMemoryError(f"{broken}{fine.shape}")

    with pytest.raises(torch.OutOfMemoryError) as raised:
        fail()
    assert named(find_alive_tensors("cpu", error=raised.value), "fine in ")


@pytest.mark.parametrize("settings", ["parameters", "optimizer"])
def test_weights_that_offloading_keeps_on_the_device_are_parameters(settings):
    model = make_model("dropout").train()
    optimizer = torch.optim.AdamW(model.parameters())
    technique = Offloading(settings)
    handle = technique.apply(model)
    technique.update_in_background(optimizer)
    with LiveTensors(model, [optimizer]) as live:
        model(torch.randn(BATCH, WIDTH)).backward()
        optimizer.step()
        handle.wait()  # the update of a part has tensors of its own
        found = by_category(find_alive_tensors("cpu", model, [optimizer]))
        counted = live.breakdown.by_category()
    handle.undo()
    assert found.get("parameter", 0) == counted["parameter"]
    assert "other" not in found


def owners_of(owner, *shape, **settings):
    found = find_alive_tensors("cpu", owners={"Own": owner}, **settings)
    return {one.owner for one in found if one.shape == shape}


def big(size):
    return torch.zeros(size, 3)


@dataclass(slots=True)
class WithSlots:
    kept: list[Any]
    unset: int = 0


class TestOwners:
    @pytest.mark.parametrize(
        "kept",
        [
            lambda t: t,
            lambda t: [t],
            lambda t: {"train": [{"logits": (t,)}]},
            lambda t: deque([t]),
            lambda t: {1: SimpleNamespace(x=t)},
            lambda t: functools.partial(print, t),
            lambda t: lambda: t,
            lambda t: [t].append,
        ],
        ids=["tensor", "list", "nested", "deque", "object", "partial", "closure", "bound method"],
    )
    def test_are_attributes_whatever_they_hold(self, kept):
        assert owners_of(SimpleNamespace(kept=kept(big(1111))), 1111, 3) == {"Own.kept"}

    def test_are_found_behind_objects_slots_and_modules(self):
        module: Any = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        for part in module:
            part.cache = SimpleNamespace(keys=[big(1112)])
        assert owners_of(module, 1112, 3) == {"Own[*].cache.keys"}
        slots = SimpleNamespace(a=WithSlots([big(1113)]))
        del slots.a.unset
        assert owners_of(slots, 1113, 3) == {"Own.a.kept"}

    def test_a_module_of_another_object_is_one_owner(self):
        callback = SimpleNamespace(average=nn.Sequential(nn.Linear(1114, 3), nn.Linear(1114, 3)))
        assert owners_of(callback, 3, 1114) == {"Own.average"}

    def test_have_what_their_graphs_keep(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        lit = SimpleNamespace(losses=[model(torch.ones(1115, 8)).sum() for _ in range(5)])
        found = find_alive_tensors("cpu", model, owners={"self": lit})
        graph = [one for one in found if one.owner == "self.losses" and one.shape == (1115, 8)]
        names = [one.name for one in graph]
        for what in ("saved by TanhBackward0 of 0", "saved by AddmmBackward0 of 0"):
            assert names.count(f"{what}, in a graph of self.losses") == 5

    def test_do_not_keep_what_the_step_needs(self):
        lit = SimpleNamespace(last=None, losses=[], kept=[])

        def fail():
            hidden = lit.last = torch.ones(1116, 3, requires_grad=True) * 2
            loss = hidden.exp().sum()
            lit.losses.append(loss)
            kept = lit.kept
            kept += [big(1117), big(1117)]
            raise torch.OutOfMemoryError

        with pytest.raises(torch.OutOfMemoryError) as raised:
            fail()
        found = find_alive_tensors("cpu", error=raised.value, owners={"self": lit})
        assert {one.owner for one in found if one.shape == (1116, 3)} == {""}
        assert len([one for one in found if one.owner == "self.kept"]) == 2

    def test_local_variables_of_the_user_are_looked_into(self):
        def fail():
            found = SimpleNamespace(parts=[big(1118) for _ in range(3)])
            raise torch.OutOfMemoryError(found)

        with pytest.raises(torch.OutOfMemoryError) as raised:
            fail()
        merged = merge_alike(find_alive_tensors("cpu", error=raised.value))
        (one,) = [one for one in merged if one.shape == (1118, 3)]
        assert one.count == 3
        assert one.num_bytes == 3 * 4 * 1118 * 3
        assert one.name.startswith("found in TestOwners.test_local_variables_of_the_user")

    def test_no_code_of_the_user_runs(self):
        class Meta(type):
            def __getattribute__(cls, name):
                if not name.startswith("__"):
                    raise AssertionError(name)
                return super().__getattribute__(name)

        class Odd(list, metaclass=Meta):  # type: ignore[type-arg]
            def __getattr__(self, name):
                raise AssertionError(name)

            def __getattribute__(self, name):
                raise AssertionError(name)

            @property
            def outputs(self):
                raise AssertionError

            def __iter__(self):
                raise AssertionError

            def __len__(self):
                raise AssertionError

            __hash__ = __eq__ = __bool__ = __repr__ = __len__  # type: ignore[assignment]

        class WithOwnDict:
            @property
            def __dict__(self):  # type: ignore[override]
                raise AssertionError

        odd = Odd([big(1119)])
        list.append(odd, odd)
        lit = SimpleNamespace(odd=odd, other=WithOwnDict(), after=[big(1119)])
        assert owners_of(lit, 1119, 3) == {"Own.odd", "Own.after"}

    def test_is_bounded(self, monkeypatch):
        monkeypatch.setattr(alive_tensors, "_MOST_OBJECTS", 50)
        chain: list[Any] = [big(1120)]
        for _ in range(1000):
            chain = [chain]
        many = [[i] for i in range(100_000)]
        lit = SimpleNamespace(near=[big(1121)], many=many, chain=chain)
        assert owners_of(lit, 1120, 3) == {""}
        assert owners_of(lit, 1121, 3) == {"Own.near"}

    def test_holds_on_to_nothing(self):
        tensor = big(1122)
        lit = SimpleNamespace(kept=[tensor])
        ref = weakref.ref(tensor)
        gc.disable()
        try:
            assert owners_of(lit, 1122, 3) == {"Own.kept"}
            del tensor, lit
            assert ref() is None
        finally:
            gc.enable()


def test_what_has_imported_a_module_keeps_nothing_for_it():
    """Such as pytest, whose session has the tensors of all tests."""
    project: Any = ModuleType("project")
    project.kept, project.__loader__ = [torch.ones(1000)], SimpleNamespace(items=[torch.ones(2000)])
    found = {one.num_bytes: one.owner for one in find_alive_tensors("cpu", others={"own": project})}
    assert found[4000] == "own.kept"
    assert found[8000] == ""
