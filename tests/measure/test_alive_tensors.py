import weakref

import pytest
import torch
from torch import nn

from lightning_memsave.measure.alive_tensors import find_alive_tensors
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.techniques.activation_checkpointing.technique import (
    ActivationCheckpointing,
)
from lightning_memsave.techniques.offloading.technique import Offloading
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
