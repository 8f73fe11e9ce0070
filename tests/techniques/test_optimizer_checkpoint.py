import copy

import pytest
import torch
from torch import nn, optim

from lightning_memsave import ConfigurationError, IncompatibleError, LowBitOptimizer
from lightning_memsave.techniques.low_bit_optimizer.checkpoint import convert_optimizer_states
from lightning_memsave.techniques.low_bit_optimizer.state import convert_state_dict
from lightning_memsave.techniques.low_bit_optimizer.state_checks import flat_state
from tests.helpers import assert_same
from tests.techniques.test_optimizer_state import FAMILIES, spoil

pytestmark = pytest.mark.usefixtures("no_prediction")

GROUP, STATE = (["optimizer_states", 0, key, 0] for key in ("param_groups", "state"))


class Reader(nn.Module):
    """An embedding, two weights that get 8 bits, and what is too small for it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.body = nn.Sequential(nn.Linear(64, 65), nn.Tanh(), nn.Linear(65, 64), nn.LayerNorm(64))
        self.head = nn.Linear(64, 3)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


def make_model():
    torch.manual_seed(0)
    return Reader()


def train(model, optimizer, steps=5):
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randint(0, 100, (8, 16))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def checkpoint_of(model, *optimizers):
    states = [optimizer.state_dict() for optimizer in optimizers]
    return copy.deepcopy({"state_dict": model.state_dict(), "optimizer_states": states, "epoch": 3})


def trained(make, technique=None):
    model = make_model()
    optimizer = make(model)
    if technique is not None:
        optimizer = technique.apply(optimizer).target
    train(model, optimizer)
    return model, checkpoint_of(model, optimizer)


def low_bit(model, make, name="8bit"):
    return LowBitOptimizer(name, module=model).apply(make(model)).target


def low_bit_checkpoint(make, name="8bit"):
    model = make_model()
    optimizer = low_bit(model, make, name)
    train(model, optimizer)
    return model, checkpoint_of(model, optimizer)


@pytest.mark.parametrize("name", FAMILIES)
def test_to_32bit_gives_what_loading_into_torchs_optimizer_gives(name):
    model, checkpoint = low_bit_checkpoint(FAMILIES[name])
    before = copy.deepcopy(checkpoint)
    wide, changes = convert_optimizer_states(checkpoint, "32bit")
    plain = FAMILIES[name](model)
    expected = convert_state_dict(checkpoint["optimizer_states"][0], plain)
    assert_same(wide["optimizer_states"][0], expected)
    assert_same(checkpoint, before)
    assert wide["epoch"] == 3
    assert changes[0].is_converted
    assert changes[0].text.startswith(f"{type(plain).__name__}: 2 of 9 tensors were 8-bit, ")
    plain.load_state_dict(wide["optimizer_states"][0])
    train(model, plain, 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_to_8bit_leaves_nothing_to_convert_on_resume(name):
    """What the callback will keep in 32 bits must not lose precision here."""
    model, checkpoint = trained(FAMILIES[name])
    before = copy.deepcopy(checkpoint)
    narrow, changes = convert_optimizer_states(checkpoint, "8bit")
    assert_same(checkpoint, before)
    assert "2 of 9 tensors" in changes[0].text
    state = narrow["optimizer_states"][0]
    assert "param_names" not in state["param_groups"][0]
    target = low_bit(model, FAMILIES[name])
    assert convert_state_dict(state, target) is state
    direct = convert_state_dict(checkpoint["optimizer_states"][0], target)
    assert_same(state, direct)
    target.load_state_dict(state)
    train(model, target, 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back_again(name):
    _, checkpoint = low_bit_checkpoint(FAMILIES[name])
    wide, _ = convert_optimizer_states(checkpoint, "32bit")
    narrow, _ = convert_optimizer_states(wide, "8bit")
    first, second = (c["optimizer_states"][0] for c in (checkpoint, narrow))
    assert_same(second["param_groups"], first["param_groups"])
    for key in first["state"]:
        was, now = flat_state(first["state"][key]), flat_state(second["state"][key])
        assert was.keys() == now.keys()
        # The signed table of bitsandbytes has 1 but not -1: a block whose largest value is
        # negative is scaled anew. Everything else comes back bit by bit.
        is_signed = "absmax1" in was
        exact = was.keys() - ({"state1", "absmax1"} if is_signed else set())
        exact -= {"step"} if name == "sgd" else set()  # torch's SGD counts none
        assert_same({k: was[k] for k in exact}, {k: now[k] for k in exact}, where=key)
        if is_signed:
            a, b = (values(state) for state in (was, now))
            assert (a - b).abs().max() < 0.02 * a.abs().max()


def values(state):
    import bitsandbytes.functional as F  # noqa: N812

    return F.dequantize_blockwise(
        state["state1"], absmax=state["absmax1"], code=state["qmap1"], blocksize=256
    )


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (lambda m: optim.AdamW(m.parameters(), amsgrad=True), "has no 8-bit AMSGrad"),
        (lambda m: optim.SGD(m.parameters(), 0.1, momentum=0.9, nesterov=True), "no 8-bit Nester"),
        (lambda m: optim.SGD(m.parameters(), 0.1), "has no state, or has made no step yet"),
        (lambda m: optim.Adadelta(m.parameters()), "keeps acc_delta, square_avg"),
        (lambda m: optim.RAdam(m.parameters()), "settings are not those of torch's AdamW"),
        (lambda m: low_bit(m, FAMILIES["adamw"]), "has the 8-bit format already"),
    ],
)
def test_says_what_has_no_8bit_form(optimizer, reason):
    model = make_model()
    own = optimizer(model)
    train(model, own)
    with pytest.raises(
        IncompatibleError, match=f"optimizer 0: .*{reason}.*Resume from the original check"
    ):
        convert_optimizer_states(checkpoint_of(model, own), "8bit")


@pytest.mark.parametrize(
    ("name", "reason", "remedy"),
    [
        ("lion_8bit", "written by Lion, which torch.optim does not have", "with `MemSaveCallback`"),
        (None, "has the 32-bit format of torch already", "Resume from the original checkpoint."),
    ],
)
@pytest.mark.parametrize("base", FAMILIES)
def test_says_what_has_no_32bit_form(base, name, reason, remedy):
    _, checkpoint = low_bit_checkpoint(FAMILIES[base], name) if name else trained(FAMILIES[base])
    with pytest.raises(IncompatibleError, match=f"{reason}.*{remedy}"):
        convert_optimizer_states(checkpoint, "32bit")


def test_state_of_an_unknown_optimizer_of_bitsandbytes_is_named():
    from lightning_memsave.techniques.low_bit_optimizer.package import (
        import_bitsandbytes,
    )

    model = make_model()
    own = import_bitsandbytes("test").optim.AdEMAMix8bit(model.parameters(), min_8bit_size=1)
    train(model, own)
    with pytest.raises(
        IncompatibleError, match=r"written by AdEMAMix, which torch\.optim does not"
    ):
        convert_optimizer_states(checkpoint_of(model, own), "32bit")
    saved = own.state_dict()
    assert convert_state_dict(saved, own) is saved
    with pytest.raises(IncompatibleError, match="it was written by AdEMAMix"):
        convert_state_dict(saved, low_bit(make_model(), FAMILIES["adamw"]))


def test_an_optimizer_chosen_by_name_becomes_torchs_class_of_that_name():
    model, checkpoint = low_bit_checkpoint(FAMILIES["sgd"], "adamw_8bit")
    wide, changes = convert_optimizer_states(checkpoint, "32bit")
    assert changes[0].text.startswith("AdamW: ")
    plain = optim.AdamW(model.parameters())
    plain.load_state_dict(wide["optimizer_states"][0])
    train(model, plain, 1)


def test_several_optimizers_one_of_which_has_no_8bit_form():
    model = make_model()
    adamw = optim.AdamW(model.body.parameters())
    radam = optim.RAdam(model.head.parameters())
    unused = optim.AdamW([nn.Parameter(torch.ones(99, 99))])
    for optimizer in (adamw, radam):
        train(model, optimizer)
    checkpoint = checkpoint_of(model, adamw, radam, unused)
    narrow, changes = convert_optimizer_states(checkpoint, "8bit")
    assert [change.is_converted for change in changes] == [True, False, False]
    assert changes[2].text == "it has no state, or has made no step yet"
    assert narrow["optimizer_states"][1] is checkpoint["optimizer_states"][1]
    _, changes = convert_optimizer_states(narrow, "32bit")
    assert [change.is_converted for change in changes] == [True, False, False]
    assert "32-bit format of torch already" in changes[1].text
    lion_model = make_model()
    lion = low_bit(lion_model, FAMILIES["adamw"], "lion_8bit")
    train(lion_model, lion)
    narrow["optimizer_states"].append(copy.deepcopy(lion.state_dict()))
    with pytest.raises(
        IncompatibleError, match="applied: optimizer 3: its state was written by Lion"
    ):
        convert_optimizer_states(narrow, "32bit")


def num_8bit(checkpoint):
    return sum(
        "absmax1" in flat_state(s) for s in checkpoint["optimizer_states"][0]["state"].values()
    )


def test_patterns_choose_what_stays_32bit():
    _, checkpoint = trained(FAMILIES["adamw"])
    assert num_8bit(convert_optimizer_states(checkpoint, "8bit", [])[0]) == 3
    # body.0.weight is 65 x 64 and body.2.weight 64 x 65.
    narrow, _ = convert_optimizer_states(checkpoint, "8bit", ["body.2.*"])
    assert num_8bit(narrow) == 2
    assert "absmax1" not in flat_state(narrow["optimizer_states"][0]["state"][3])
    with pytest.raises(ConfigurationError, match=r"'\*heads\*' matches no.* such as body.0.bias"):
        convert_optimizer_states(checkpoint, "8bit", ["*body*", "*heads*"])


def test_names_in_the_groups_win_over_shapes():
    layers = nn.ModuleDict({name: nn.Linear(64, 64) for name in "ab"} | {"c": nn.Linear(64, 65)})
    for named, expected in ((False, 1), (True, 2)):
        optimizer = optim.AdamW(layers.named_parameters() if named else layers.parameters())
        sum(layer(torch.ones(1, 64)).sum() for layer in layers.values()).backward()
        optimizer.step()
        checkpoint = checkpoint_of(layers, optimizer)
        narrow, _ = convert_optimizer_states(checkpoint, "8bit", ["a.weight"])
        assert num_8bit(narrow) == expected
        group, before = (c["optimizer_states"][0]["param_groups"][0] for c in (narrow, checkpoint))
        assert_same(group, before)


def test_groups_of_an_older_torch():
    model, checkpoint = trained(FAMILIES["adamw"])
    for group in checkpoint["optimizer_states"][0]["param_groups"]:
        del group["decoupled_weight_decay"]
    narrow, _ = convert_optimizer_states(checkpoint, "8bit")
    assert num_8bit(narrow) == 2
    wide, _ = convert_optimizer_states(narrow, "32bit")
    plain = optim.AdamW(model.parameters())
    plain.load_state_dict(wide["optimizer_states"][0])
    train(model, plain, 1)


def test_half_precision_parameters():
    torch.manual_seed(0)
    model = nn.Linear(128, 128, dtype=torch.bfloat16)
    optimizer = optim.AdamW(model.parameters())
    model(torch.randn(4, 128, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    checkpoint = checkpoint_of(model, optimizer)
    narrow, changes = convert_optimizer_states(checkpoint, "8bit")
    assert "1 of 2 tensors" in changes[0].text
    wide, _ = convert_optimizer_states(narrow, "32bit")
    plain = optim.AdamW(model.parameters())
    plain.load_state_dict(wide["optimizer_states"][0])
    assert plain.state[model.weight]["exp_avg"].dtype == torch.bfloat16
    optimizer_state = optimizer.state[model.weight]["exp_avg"].float()
    error = (plain.state[model.weight]["exp_avg"].float() - optimizer_state).abs().max()
    assert error < 0.02 * optimizer_state.abs().max()


def test_one_optimizer_that_keeps_several_kinds_of_state_stays_as_it_is():
    """As optimizers do that use another rule for vectors."""
    _, checkpoint = trained(FAMILIES["adamw"])
    state = checkpoint["optimizer_states"][0]["state"]
    state[0] = {"momentum_buffer": state[0]["exp_avg"]}
    with pytest.raises(IncompatibleError, match=r"several kinds \(adam, momentum\)"):
        convert_optimizer_states(checkpoint, "8bit")


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ({0: {}}, r"it cannot be read \("),
        ([[]], r"it cannot be read \("),
        ([{"state": {}, "param_groups": [{}]}], r"it cannot be read \("),
    ],
)
@pytest.mark.parametrize("to", ["8bit", "32bit"])
def test_what_is_no_optimizer_state_is_refused_in_words(states, message, to):
    with pytest.raises(IncompatibleError, match=message):
        convert_optimizer_states({"state_dict": {}, "optimizer_states": states}, to)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["state_dict"], 3, r"it cannot be read \("),
        (["optimizer_states"], None, r"it cannot be read \("),
        ([*GROUP, "lr"], "fast", r"it cannot be read \(ValueError: .*fast"),
        ([*GROUP, "betas"], 3, r"it cannot be read \("),
        ([*GROUP, "param_names"], [], r"it cannot be read \("),
        ([*GROUP, "params"], [[0]], r"it cannot be read \("),
        ([*STATE, "exp_avg"], "x", r"it cannot be read \("),
        ([*STATE, "step"], "x", r"it cannot be read \("),
        ([*STATE, "compensation"], torch.ones(3), r"`compensation` has shape \(3,\)"),
    ],
)
def test_a_damaged_32bit_checkpoint_is_refused_in_words(path, value, message):
    _, checkpoint = trained(FAMILIES["adamw"])
    spoil(path, value)(checkpoint)
    with pytest.raises(IncompatibleError, match=f"{message}.*Use an earlier checkpoint, or load"):
        convert_optimizer_states(checkpoint, "8bit")
