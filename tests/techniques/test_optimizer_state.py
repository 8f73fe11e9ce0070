import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_memsave import IncompatibleError, LowBitOptimizer, LowPrecisionWeights
from lightning_memsave.techniques.low_bit_optimizer.checkpoint import convert_optimizer_states
from lightning_memsave.techniques.low_bit_optimizer.state import convert_state_dict
from tests.helpers import assert_same

FAMILIES = {
    "adamw": lambda m: optim.AdamW(m.parameters(), lr=3e-3),
    "adam": lambda m: optim.Adam(m.parameters(), lr=3e-3, weight_decay=0.1),
    "sgd": lambda m: optim.SGD(m.parameters(), lr=1e-2, momentum=0.9),
    "rmsprop": lambda m: optim.RMSprop(m.parameters(), lr=1e-3),
}


def make_model():
    torch.manual_seed(0)
    # 70 x 65 is not a whole number of blocks of 256; the second weight stays 32-bit.
    return nn.Sequential(nn.Linear(70, 65), nn.Tanh(), nn.Linear(65, 3))


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        torch.manual_seed(step)
        x = torch.randn(16, 70)
        loss = (model(x) - x[:, :3].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def low_bit(model, make, technique=LowBitOptimizer()):  # noqa: B008
    return technique.apply(make(model)).target


def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def continue_with(model, old, make, steps=10):
    """Go on from a checkpoint with another optimizer; the file must stay as it is."""
    model = copy.deepcopy(model)
    saved = copy.deepcopy(old.state_dict())
    before = copy.deepcopy(saved)
    new = make(model)
    new.load_state_dict(convert_state_dict(saved, new))
    assert_same(saved, before)
    return train(model, new, steps, start=100), model, new


@pytest.mark.parametrize("is_8bit_first", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_goes_on_in_the_other_width_as_it_would_have_in_its_own(name, is_8bit_first):
    makes = [functools.partial(low_bit, make=FAMILIES[name]), FAMILIES[name]]
    own, other = makes if is_8bit_first else makes[::-1]
    model = make_model()
    old = own(model)
    train(model, old, 20)
    saved = old.state_dict()
    assert convert_state_dict(saved, own(make_model())) is saved
    expected, kept, _ = continue_with(model, old, own)
    loss, moved, new = continue_with(model, old, other)
    if is_8bit_first:
        assert type(new).__module__.startswith("torch.optim")
    else:
        states = [new.state[param]["state1"].dtype for param in moved.parameters()]
        assert states[:2] == [torch.uint8, torch.float32]
    assert loss == pytest.approx(expected, rel=0.02)
    forgetful = copy.deepcopy(model)
    train(forgetful, FAMILIES[name](forgetful), 10, start=100)
    forgotten = (parameters(forgetful) - parameters(kept)).abs().mean()
    error = (parameters(moved) - parameters(kept)).abs().mean()
    assert error < 0.1 * forgotten  # the state has really arrived


@pytest.mark.parametrize("name", ["adamw_8bit", "lion_8bit", "sgd_8bit"])
def test_width_follows_the_target_and_the_rest_is_bit_identical(name):
    make, model = FAMILIES["adamw"], make_model()
    wide = LowBitOptimizer(name, keep_32bit=("*",))
    narrow = LowBitOptimizer(name)
    old = low_bit(model, make, wide)
    train(model, old, 20)
    expected, kept, _ = continue_with(model, old, lambda m: low_bit(m, make, wide))
    loss, moved, new = continue_with(model, old, lambda m: low_bit(m, make, narrow))
    assert new.state[next(moved.parameters())]["state1"].dtype == torch.uint8
    assert loss == pytest.approx(expected, rel=0.02)

    saved = old.state_dict()
    there = convert_state_dict(saved, low_bit(model, make, narrow))
    assert there["state"][0] is not saved["state"][0]
    assert all(there["state"][i] is saved["state"][i] for i in (1, 2, 3))  # these stay 32-bit
    back = convert_state_dict(there, low_bit(model, make, wide))
    state = saved["state"][0]["__bnb_optimizer_quant_state__"]["state1"]
    assert back["state"][0]["state1"].dtype == torch.float32
    assert back["state"][0]["state1"].shape == state.shape
    error = (back["state"][0]["state1"] - state).abs().max()
    assert 0 < error < 0.02 * state.abs().max()
    assert kept is not moved


def test_checkpoints_of_bitsandbytes_own_classes_load():
    from bitsandbytes.optim.adamw import AdamW8bit
    from bitsandbytes.optim.rmsprop import RMSprop8bit
    from bitsandbytes.optim.sgd import SGD8bit

    model = make_model()
    for own, make in (
        (AdamW8bit(model.parameters()), FAMILIES["adamw"]),
        (SGD8bit(model.parameters(), lr=0.1, momentum=0.7), FAMILIES["sgd"]),
        (RMSprop8bit(model.parameters(), alpha=0.8), FAMILIES["rmsprop"]),
    ):
        train(model, own, 5)
        for target in (make(model), low_bit(model, make)):
            target.load_state_dict(convert_state_dict(own.state_dict(), target))
            train(model, target, 1)
        group = target.param_groups[0]
        assert group.get("momentum", 0.7) in {0.7, 0}
        assert group.get("alpha", 0.8) in {0.8, 0.0}


def test_our_checkpoints_load_into_bitsandbytes_own_classes():
    from bitsandbytes.optim.sgd import SGD8bit

    model = make_model()
    old = low_bit(model, FAMILIES["sgd"])
    train(model, old, 5)
    plain = SGD8bit(model.parameters(), lr=0.1, momentum=0.5)
    saved = convert_state_dict(old.state_dict(), plain)
    assert saved["param_groups"][0]["betas"] == (0.9, 0)
    plain.load_state_dict(saved)
    train(model, plain, 1)


@pytest.mark.parametrize("base", FAMILIES)
@pytest.mark.parametrize("name", ["lion_8bit", "sgd_8bit", "adamw_8bit"])
def test_an_optimizer_chosen_by_name_resumes_over_the_groups_of_another_class(base, name):
    make, model, technique = FAMILIES[base], make_model(), LowBitOptimizer(name)
    old = low_bit(model, make, technique)
    train(model, old, 3)
    saved = copy.deepcopy(old.state_dict())
    assert convert_state_dict(saved, low_bit(make_model(), make, technique)) is saved


def test_amsgrad_starts_from_the_second_moment():
    model = make_model()
    old = low_bit(model, FAMILIES["adamw"])
    train(model, old, 5)
    loss, _, _ = continue_with(model, old, lambda m: optim.AdamW(m.parameters(), amsgrad=True))
    assert loss < 1


def test_parameters_without_state_stay_without():
    model = make_model()
    model[2].requires_grad_(False)
    make = FAMILIES["adamw"]
    old = make(model)
    train(model, old, 2)
    there = convert_state_dict(old.state_dict(), low_bit(model, make))
    assert there["state"].keys() == {0, 1}
    plain = optim.SGD(model.parameters(), lr=0.1)
    train(model, plain, 1)
    narrow = low_bit(model, FAMILIES["sgd"])
    narrow.load_state_dict(convert_state_dict(plain.state_dict(), narrow))
    train(model, narrow, 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sgd", "adamw", "written by SGD with momentum, and this run uses AdamW"),
        ("adamw", "sgd", "written by Adam or AdamW, and this run uses SGD"),
        ("rmsprop", "sgd", "written by RMSprop, and this run uses SGD"),
    ],
)
@pytest.mark.parametrize("narrow_first", [True, False])
def test_state_of_another_optimizer_is_refused(old, new, message, narrow_first):
    model = make_model()
    first = low_bit(model, FAMILIES[old]) if narrow_first else FAMILIES[old](model)
    second = FAMILIES[new](model) if narrow_first else low_bit(model, FAMILIES[new])
    train(model, first, 1)
    with pytest.raises(IncompatibleError, match=f"{message}.*load its weights only"):
        convert_state_dict(first.state_dict(), second)


def test_unknown_state_is_refused():
    model = make_model()
    first = optim.Adadelta(model.parameters())
    train(model, first, 1)
    with pytest.raises(IncompatibleError, match="keeps acc_delta, square_avg"):
        convert_state_dict(first.state_dict(), low_bit(model, FAMILIES["adamw"]))


def test_other_groups_are_left_to_torch():
    model = make_model()
    narrow = low_bit(model, FAMILIES["adamw"])
    saved = optim.AdamW([{"params": [p]} for p in model.parameters()]).state_dict()
    assert convert_state_dict(saved, narrow) is saved
    with pytest.raises(ValueError, match="different number of parameter groups"):
        narrow.load_state_dict(saved)


def test_channels_last_state_is_converted_by_value():
    weight = nn.Parameter(torch.randn(16, 16, 4, 4).contiguous(memory_format=torch.channels_last))
    old = optim.AdamW([weight])
    weight.square().sum().backward()
    old.step()
    narrow = LowBitOptimizer().apply(optim.AdamW([weight])).target
    there = convert_state_dict(old.state_dict(), narrow)
    back = convert_state_dict(there, old)
    error = (back["state"][0]["exp_avg"] - old.state[weight]["exp_avg"]).abs().max()
    assert error < 0.02 * old.state[weight]["exp_avg"].abs().max()


@pytest.mark.parametrize("way", ["stochastic", "kahan"])
@pytest.mark.parametrize("is_8bit", [False, True])
def test_what_rounding_keeps_stays_with_the_state(way, is_8bit):
    module = torch.nn.Linear(64, 64)
    technique = LowPrecisionWeights(way)
    technique.apply(module)
    optimizers = []
    for low in (is_8bit, not is_8bit):
        optimizer: Any = torch.optim.AdamW(module.parameters())
        if low:
            optimizer = LowBitOptimizer(module=module).apply(optimizer).target
        technique.round_updates(optimizer)
        optimizers.append(optimizer)
    old, new = optimizers
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    old.step()
    new.load_state_dict(convert_state_dict(old.state_dict(), new))
    key = {"stochastic": "rounding_seed", "kahan": "compensation"}[way]
    before, after = old.state[module.weight][key], new.state[module.weight][key]
    assert torch.equal(torch.as_tensor(before), torch.as_tensor(after))
    new.step()


def other_model(kind):
    """The same parameters in another order, or another width."""
    torch.manual_seed(0)
    if kind == "order":
        return nn.ParameterList(reversed(list(make_model().parameters())))
    return nn.Sequential(nn.Linear(70, 66), nn.Tanh(), nn.Linear(66, 3))


@pytest.mark.parametrize("kind", ["order", "size"])
@pytest.mark.parametrize(
    ("name", "old", "new"), [("adamw", 8, 8), ("adamw", 8, 32), ("adamw", 32, 8)]
)
def test_state_of_parameters_of_other_shapes_is_refused(name, old, new, kind):
    """bitsandbytes' kernels take pointers: they would read and write beyond the end of it."""
    technique = LowBitOptimizer("8bit" if name == "adamw" else name, min_8bit_size=1)
    model, make = make_model(), FAMILIES["adamw"]
    first = make(model) if old == 32 else low_bit(model, make, technique)
    train(model, first, 1)
    other = other_model(kind)
    second = make(other) if new == 32 else low_bit(other, make, technique)
    with pytest.raises(IncompatibleError, match=r"of shape \(65, 70\), .*in the order"):
        convert_state_dict(first.state_dict(), second)
    if old == new == 8:
        with pytest.raises(IncompatibleError, match=r"of shape \(65, 70\), .*in the order"):
            second.load_state_dict(first.state_dict())


def spoil(path, value):
    """Write a value, or take it away, somewhere in the state dict of an optimizer."""

    def change(saved):
        for key in path[:-1]:
            saved = saved[key]
        if value is KeyError:
            del saved[path[-1]]
        else:
            saved[path[-1]] = value

    return change


NESTED = "__bnb_optimizer_quant_state__"
UNREADABLE = "it cannot be read"
SPOILED = {
    "a list": (lambda saved: [saved], UNREADABLE),
    "none": (lambda _: None, UNREADABLE),
    "no groups": (spoil(["param_groups"], KeyError), UNREADABLE),
    "a group is a text": (spoil(["param_groups", 0], "x"), UNREADABLE),
    "params is a number": (spoil(["param_groups", 0, "params"], 4), UNREADABLE),
    "a list for a parameter": (spoil(["state", 0], [1]), UNREADABLE),
    "nested text": (spoil(["state", 0, NESTED], "x"), UNREADABLE),
    "no step": (spoil(["state", 0, "step"], KeyError), UNREADABLE),
    "several steps": (spoil(["state", 0, "step"], torch.ones(3)), "`step` is not one number"),
    "no scales": (spoil(["state", 0, NESTED, "absmax1"], KeyError), UNREADABLE),
    "half of the scales": (
        spoil(["state", 0, NESTED, "absmax1"], torch.zeros(9)),
        r"`absmax1` has 9 values, not 18",
    ),
    "a short table": (spoil(["state", 0, NESTED, "qmap1"], torch.zeros(16)), "`qmap1` has 16"),
    "a number for a moment": (spoil(["state", 0, NESTED, "state1"], 1.0), UNREADABLE),
    "no second moment": (
        spoil(["state", 0, NESTED, "state2"], KeyError),
        r"written by Lion|kinds \(adam, lion\)",
    ),
    "a type of its own": (
        spoil(["state", 0, NESTED, "state1"], torch.zeros(65, 70, dtype=torch.int64)),
        "`state1` is torch.int64",
    ),
    "a rest": (spoil(["state", 0, "compensation"], 1.0), UNREADABLE),
    "a short rest": (
        spoil(["state", 0, "compensation"], torch.zeros(3)),
        r"`compensation` has shape \(3,\)",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
@pytest.mark.parametrize("width", [8, 32])
def test_a_state_that_is_none_is_refused_in_words(case, width):
    change, message = SPOILED[case]
    model, make = make_model(), FAMILIES["adamw"]
    old = low_bit(model, make)
    train(model, old, 1)
    saved = copy.deepcopy(old.state_dict())
    changed = change(saved)
    new = low_bit(make_model(), make) if width == 8 else make(make_model())
    spoiled = saved if changed is None and case != "none" else changed
    with pytest.raises(IncompatibleError, match=message) as caught:
        convert_state_dict(spoiled, new)
    assert "without `ckpt_path`" in str(caught.value)
    assert not any(new.state.values())
    with pytest.raises(IncompatibleError, match=message):
        convert_optimizer_states({"state_dict": {}, "optimizer_states": [spoiled]}, "32bit")


@pytest.mark.parametrize("case", ["a short rest", "no groups", "a list for a parameter"])
def test_a_32bit_state_with_nonsense_is_refused_by_a_32bit_run(case):
    change, message = SPOILED[case]
    model, make = make_model(), FAMILIES["adamw"]
    old = make(model)
    train(model, old, 1)
    saved = copy.deepcopy(old.state_dict())
    change(saved)
    with pytest.raises(IncompatibleError, match=message):
        convert_state_dict(saved, make(make_model()))


def test_state_under_the_names_of_torch_says_what_to_type():
    param = nn.Parameter(torch.ones(64, 64))
    optimizer = LowBitOptimizer().apply(torch.optim.AdamW([param])).target
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    for one in optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)):
        (state,) = one.state.values()
        with pytest.raises(IncompatibleError, match=r"`exp_avg`.*Set `optimizer=None` where"):
            state["exp_avg"][0] = 0
    assert {type(state) for state in optimizer.state_dict()["state"].values()} == {dict}
