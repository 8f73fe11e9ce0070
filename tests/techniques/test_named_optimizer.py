"""Optimizers by name: they train as torch's own do, and keep groups, schedulers and checkpoints."""

import copy
import importlib
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Muon, NAdam, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from lightning_memsave import (
    ConfigurationError,
    IncompatibleError,
    LowPrecisionWeights,
    NamedOptimizer,
    NoEffectWarning,
    Offloading,
    OptimizerInBackward,
)
from lightning_memsave.measure.storages import tensors_in
from lightning_memsave.techniques.low_bit_optimizer.state import convert_state_dict
from lightning_memsave.techniques.named_optimizer.optimizers import OWN
from lightning_memsave.techniques.optimizer_kinds import EACH_ALONE, OTHER_NAMES
from lightning_memsave.techniques.optimizer_step import allocate_state
from tests.cases import MODELS, make_batch, make_model
from tests.helpers import InAutocast, assert_same, clones
from tests.own_optimizers import AdaptsRate, CountsInGroups
from tests.techniques.contract import assert_one_fit_keeps_promises

NAMES = ("muon", "adamw_bf16_state", "torch.optim:NAdam", f"{__name__}:Signs")
BETAS, DECAY = (0.8, 0.95), 0.3


class Signs(Optimizer):
    """An optimizer of somebody else, with an argument and a state of its own."""

    def __init__(self, params: Any, lr: float = 0.1, *, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    mean.lerp_(param.grad, 1 - group["beta"])
                    param.add_(mean.sign(), alpha=-group["lr"])


class SignsOfLargeGradients(Signs):
    """One that has state only where a gradient is large."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if any(param.grad.norm() > 1 for group in self.param_groups for param in group["params"]):
            super().step(closure)


class SignsOfValues(Signs):
    """One that finds that there are no values, and makes no step without them."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if not any(param.is_meta for group in self.param_groups for param in group["params"]):
            super().step(closure)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, of blocks and of the head, and the rest, each with a rate of its own."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": DECAY, "mine": "kept"},
        {"params": [p for p in params if p.ndim <= 1], "lr": 3e-4},
    ]


def configured(model: nn.Module) -> Optimizer:
    return AdamW(groups_of(model), lr=1e-3, betas=BETAS)


def named(model: nn.Module, name: str, **settings: Any) -> Optimizer:
    technique = NamedOptimizer(name, module=model, **settings)
    optimizer = configured(model)
    assert technique.check(optimizer) == []
    return technique.apply(optimizer).target


class TwoOptimizers:
    """Muon for matrices of blocks and AdamW for the rest, as one writes it by hand."""

    def __init__(self, model: nn.Module) -> None:
        first, second = groups_of(model)
        in_blocks = {p for block in model.blocks for p in block.parameters()}
        settings = {"lr": 1e-3, "weight_decay": DECAY}
        own = [p for p in first["params"] if p in in_blocks]
        head = [p for p in first["params"] if p not in in_blocks]
        self.both = [
            Muon(own, **settings, adjust_lr_fn="match_rms_adamw"),  # type: ignore[arg-type]
            AdamW([{**first, "params": head}, second], lr=1e-3, betas=BETAS),
        ]

    def step(self) -> None:
        for optimizer in self.both:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.both:
            optimizer.zero_grad()


class RoundedMoments(AdamW):
    """AdamW whose moments are rounded to bfloat16 after each step: the truth, in float32."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].copy_(state[key].bfloat16())
        return loss


BY_HAND: dict[str, Callable[[nn.Module], Any]] = {
    "muon": TwoOptimizers,
    "adamw_bf16_state": lambda model: RoundedMoments(
        groups_of(model), lr=1e-3, betas=BETAS, fused=True
    ),
    "torch.optim:NAdam": lambda model: NAdam(
        # The usual weight decay of the configured AdamW stays that of its groups.
        [{"weight_decay": 0.01, **group} for group in groups_of(model)],
        lr=1e-3,
    ),
    f"{__name__}:Signs": lambda model: Signs(groups_of(model), lr=1e-3),
}


def run(model: nn.Module, optimizer: Any, numbers: range = range(3), **how: Any) -> list[Tensor]:
    """Steps of a loop; with two parts each step accumulates, with a norm it clips."""
    losses = []
    whole = InAutocast(model) if how.get("in_autocast") else model
    for number in numbers:
        torch.manual_seed(number)
        for part in range(how.get("num_parts", 1)):
            loss: Tensor = whole(make_batch(number + 10 * part))
            loss.backward()
            losses.append(loss.detach())
        if "norm" in how:
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), how["norm"]))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.fixture
def model() -> nn.Module:
    return make_model("dropout").train()


ACCUMULATED = {"num_parts": 2, "norm": 0.1}


@pytest.mark.parametrize("name", NAMES)
class TestTrainsAsByHand:
    @pytest.mark.parametrize("how", [{}, ACCUMULATED], ids=["plain", "accumulated"])
    def test_in_a_loop(self, model, name, how):
        other = copy.deepcopy(model)
        ours = run(model, named(model, name), **how)
        assert_same(ours, run(other, BY_HAND[name](other), **how))
        assert_same(model, other)

    def test_in_backward(self, model, name):
        other = copy.deepcopy(model)
        optimizer = named(model, name)
        technique = OptimizerInBackward(trust_optimizer="Signs" in name)
        with technique.apply(optimizer):
            ours = run(model, optimizer)
        assert_same(ours, run(other, BY_HAND[name](other)))
        assert_same(model, other)

    @pytest.mark.parametrize("how", [{}, ACCUMULATED, None], ids=["plain", "accumulated", "early"])
    @pytest.mark.parametrize("what", ["optimizer", "parameters"])
    def test_offloaded(self, model, name, how, what):
        """``None`` updates in backward, when there are no gradients yet to clip."""
        other = copy.deepcopy(model)
        offloading = Offloading(what)
        handle = offloading.apply(model)
        optimizer = named(model, name)
        if how is None:
            OptimizerInBackward(trust_optimizer="Signs" in name).apply(optimizer)
        with offloading.update_in_background(optimizer):
            ours = run(model, optimizer, **(how or {}))
            theirs = named(other, name)
            assert_same(ours, run(other, theirs, **(how or {})))
            assert_same(optimizer, theirs)
        handle.undo()
        assert_same(model, other)


@pytest.mark.parametrize("name", NAMES)
class TestKeeps:
    def test_groups_hooks_and_schedulers(self, model, name):
        optimizer, seen = configured(model), list[str]()
        optimizer.register_step_post_hook(lambda *_: seen.append("step"))
        groups, before = optimizer.param_groups, copy.deepcopy(optimizer.state_dict())
        handle = NamedOptimizer(name, module=model).apply(optimizer)
        new = handle.target
        assert all(a is b for a, b in zip(new.param_groups, groups, strict=True))
        assert [group["lr"] for group in groups] == [1e-3, 3e-4]
        assert groups[0]["mine"] == "kept"
        if "weight_decay" in new.defaults:
            assert [group["weight_decay"] for group in groups] == [DECAY, 0.01]
        else:
            assert handle.skipped == ("`Signs` has no weight decay",)
        run(model, new, range(1))
        assert seen == ["step"]
        handle.undo()
        assert_same(optimizer.state_dict(), before)

    def test_state_of_a_checkpoint_bit_for_bit(self, model, name):
        optimizer = named(model, name)
        run(model, optimizer, range(2))
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        straight = run(model, optimizer, range(2, 4))
        other = make_model("dropout").train()
        resumed = named(other, name)
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        other.load_state_dict(weights)
        resumed.load_state_dict(state)
        assert_same(straight, run(other, resumed, range(2, 4)))
        assert_same(optimizer, resumed)

    @pytest.mark.parametrize("form", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
    def test_what_it_does_in_copies(self, model, name, form):
        optimizer = named(model, name)
        run(model, optimizer, range(1))
        other, copied = form((model, optimizer))
        assert_same(run(model, optimizer), run(other, copied))
        assert_same(optimizer, copied)

    def test_what_is_allocated_ahead_of_a_step(self, model, name):
        """As before a step that may run out of memory."""
        other = copy.deepcopy(model)
        ours, theirs = named(model, name), named(other, name)
        torch.manual_seed(0)
        model(make_batch(0)).backward()
        allocate_state(ours)
        if "Signs" not in name:  # whose state nobody knows
            assert len(ours.state) == len(list(model.parameters()))
        ours.step()
        ours.zero_grad()
        run(other, theirs, range(1))
        assert_same(run(model, ours, range(1, 3)), run(other, theirs, range(1, 3)))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "unrepeated"])
def test_one_fit_with_muon_keeps_every_promise(name):
    assert_one_fit_keeps_promises([NamedOptimizer("muon")], name)


def held_bytes(optimizer: Optimizer) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(optimizer.state))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("muon", "AdamW -> Muon for 8 matrices of blocks, AdamW for 18 other tensors"),
        ("adamw_bf16_state", "AdamW -> AdamWBf16State"),
        ("torch.optim:NAdam", "AdamW -> NAdam"),
        ("torch.optim:Adafactor", "AdamW -> Adafactor"),  # its step needs values, its state none
        (f"{__name__}:Signs", "AdamW -> Signs"),
    ],
)
def test_says_how_large_the_state_will_be(model, name, text):
    (change,) = NamedOptimizer(name, module=model).apply(configured(model)).changes
    optimizer = named(model, name)
    run(model, optimizer, range(1))
    size = f"{held_bytes(optimizer) / 2**10:.2f} KiB"
    assert change == f"{text}: optimizer state 554.60 KiB -> {size}"


@pytest.mark.parametrize("name", ["SignsOfLargeGradients", "SignsOfValues"])
def test_says_nothing_of_a_state_that_depends_on_values(model, name):
    (change,) = NamedOptimizer(f"{__name__}:{name}").apply(configured(model)).changes
    assert change == f"AdamW -> {name}"


def test_a_step_that_needs_values_updates_as_by_hand(model):
    other = copy.deepcopy(model)
    groups = [{"weight_decay": 0.01, **group} for group in groups_of(other)]
    by_hand = run(other, Adafactor(groups, lr=1e-3))
    assert_same(run(model, named(model, "torch.optim:Adafactor")), by_hand)


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", ["muon", "adamw_bf16_state"])
def test_rounds_updates_of_bfloat16_weights(model, name, rounding, in_backward):
    technique = LowPrecisionWeights(rounding)
    technique.apply(model)
    optimizer = named(model, name)
    technique.round_updates(optimizer)
    if in_backward:
        OptimizerInBackward().apply(optimizer)
    before = clones(model.state_dict())
    run(model, optimizer, in_autocast=True)
    for own, param in model.named_parameters():
        state = optimizer.state[param]
        is_matrix = name == "muon" and param.ndim == 2 and "blocks" in own
        moments = {"momentum_buffer"} if is_matrix else {"exp_avg", "exp_avg_sq"}
        kept = torch.float32 if name == "muon" else torch.bfloat16
        assert moments == {k for k in state if k.startswith(("exp", "momentum"))}
        assert {state[key].dtype for key in moments} == {kept}
        assert not torch.equal(param, before[own])


def test_muon_updates_what_is_unfrozen_later(model):
    """Its groups may get matrices later; a table in a block is not one of them."""
    model.blocks[0].table = nn.Embedding(4, 64)
    first, *others = model.blocks
    optimizer = NamedOptimizer("muon", module=model).apply(AdamW(others[0].parameters())).target
    optimizer.add_param_group({"params": [first.up.weight, first.table.weight]})
    (model(make_batch(0)) + first.table.weight.sum()).backward()
    optimizer.step()
    assert list(optimizer.state[first.up.weight]) == ["momentum_buffer"]
    assert "exp_avg" in optimizer.state[first.table.weight]


def test_muon_takes_the_blocks_that_are_named(model):
    optimizer = named(model, "muon", blocks="re:head")
    run(model, optimizer, range(1))
    of_muon = [n for n, p in model.named_parameters() if "momentum_buffer" in optimizer.state[p]]
    assert of_muon == ["head.weight"]


class TestOtherCheckpoints:
    """A state that an optimizer cannot use is refused before the first step."""

    @pytest.mark.parametrize("has_steps", [False, True])
    def test_of_adamw_for_muon(self, model, has_steps):
        plain = configured(model)
        run(model, plain, range(int(has_steps)))
        with pytest.raises(IncompatibleError, match="written by another optimizer than Muon"):
            named(model, "muon").load_state_dict(plain.state_dict())

    def test_of_muon_for_other_blocks(self, model):
        optimizer = named(model, "muon")
        run(model, optimizer, range(1))
        other = named(make_model("dropout"), "muon", blocks="re:blocks.[01]")
        with pytest.raises(IncompatibleError, match="or with other matrices for it"):
            other.load_state_dict(optimizer.state_dict())

    def test_of_muon_for_adamw(self, model):
        optimizer = named(model, "muon")
        run(model, optimizer, range(1))
        with pytest.raises(IncompatibleError, match="written by Muon, and this run uses AdamW"):
            convert_state_dict(optimizer.state_dict(), configured(make_model("dropout")))

    def test_of_adamw_for_bfloat16_state_and_back(self, model):
        plain = configured(model)
        run(model, plain, range(1))
        small = named(copy.deepcopy(model), "adamw_bf16_state")
        small.load_state_dict(convert_state_dict(plain.state_dict(), small))
        for ours, theirs in zip(small.state.values(), plain.state.values(), strict=True):
            assert torch.equal(ours["exp_avg_sq"], theirs["exp_avg_sq"].bfloat16())
        plain.load_state_dict(convert_state_dict(small.state_dict(), plain))
        assert all(s["exp_avg"].dtype is torch.float32 for s in plain.state.values())


@pytest.mark.parametrize(
    ("name", "kwargs", "text"),
    [
        ("torch.optim:NAdm", None, "Did you mean `torch.optim:NAdam`"),
        ("no_such:Thing", None, "cannot be imported .ModuleNotFoundError"),
        ("torch:", None, "it is not the name of a package and a class in it"),
        ("torch.nn:Linear", None, "it is not a subclass of `torch.optim.Optimizer`"),
        ("nadam", None, 'Write for example `optimizer="torch.optim:NAdam"`'),
        (3, None, 'Write for example `optimizer="torch.optim:NAdam"`'),
        ("torch.optim:NAdam", {"lr": 1.0}, "Set them in `configure_optimizers`"),
        ("torch.optim:NAdam", {"bets": (0.9, 0.9)}, "Did you mean `betas`"),
        ("torch.optim:NAdam", {"betas": [2.0, 0.9]}, "Invalid beta parameter at index 0: 2.0"),
        ("torch.optim:NAdam", [1], "it must be a dict of settings"),
        ("muon", {"ns_step": 3}, "Did you mean `ns_steps`"),
        ("muon", {"adjust_lr_fn": "mine"}, "Adjust learning rate function mine is not supported"),
        ("muon", {"eps": -1.0}, "Invalid epsilon value: -1.0"),
    ],
)
def test_wrong_settings_say_what_to_type(name, kwargs, text):
    with pytest.raises(ConfigurationError, match=text):
        NamedOptimizer(name, optimizer_kwargs=kwargs)


class TestRefuses:
    def test_an_optimizer_that_has_made_steps(self, model):
        optimizer = configured(model)
        run(model, optimizer, range(1))
        with pytest.raises(IncompatibleError, match="before the first step"):
            NamedOptimizer("torch.optim:NAdam").apply(optimizer)

    @pytest.mark.parametrize("module", [None, nn.Linear(4, 4)])
    def test_muon_without_blocks(self, model, module):
        with pytest.raises(IncompatibleError, match="is a matrix of a repeated block"):
            NamedOptimizer("muon", module=module).apply(configured(model))

    def test_settings_that_the_named_ones_lack(self, model):
        optimizer = AdamW(model.parameters(), amsgrad=True, maximize=True)
        with pytest.raises(IncompatibleError, match=r"AdamW\(amsgrad=True, maximize=True\)"):
            NamedOptimizer("muon", module=model).apply(optimizer)

    def test_parameters_that_the_class_does_not_take(self, model):
        optimizer = configured(model)
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(IncompatibleError, match="Muon only supports 2D parameters"):
            NamedOptimizer("torch.optim:Muon").apply(optimizer)
        assert_same(optimizer.state_dict(), before)

    def test_nothing_to_change(self, model):
        with pytest.warns(NoEffectWarning, match="the optimizer is a `AdamW` already"):
            NamedOptimizer("torch.optim:AdamW").apply(configured(model))


def test_groups_that_come_later_are_as_those_of_the_configured_one(model):
    optimizer = (
        NamedOptimizer("muon", module=model)
        .apply(
            AdamW(
                [model.head.weight, model.blocks[0].up.weight],
                lr=0.5,
                betas=BETAS,
                weight_decay=0.2,
            )
        )
        .target
    )
    optimizer.add_param_group({"params": [model.head.bias]})
    group = optimizer.param_groups[1]
    assert [group[key] for key in ("lr", "betas", "weight_decay")] == [0.5, BETAS, 0.2]


def test_settings_reach_the_optimizer(model):
    kwargs = {"ns_steps": 3, "betas": [0.5, 0.9], "weight_decay": 0.2}
    optimizer = named(model, "muon", optimizer_kwargs=kwargs)
    first, second = optimizer.param_groups
    assert (first["ns_steps"], first["betas"], first["weight_decay"]) == (3, (0.5, 0.9), DECAY)
    assert second["weight_decay"] == 0.2
    schedule = OneCycleLR(optimizer, 1e-2, total_steps=5)
    run(model, optimizer, range(1))
    schedule.step()
    assert first["betas"][0] != 0.5, "schedulers cycle it as that of AdamW"


def test_messages_list_the_names():
    assert tuple(OWN) == OTHER_NAMES


ALONE = {
    "tests.own_optimizers:CountsInGroups": True,
    "tests.own_optimizers:StepsInTraining": True,
    "tests.own_optimizers:Preconditions": True,
    f"{__name__}:Signs": True,
    f"{__name__}:SignsOfLargeGradients": False,
    "tests.own_optimizers:ClipsTogether": False,
    "tests.own_optimizers:AdaptsRate": False,
    "tests.own_optimizers:Dithers": False,
}


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("name", ALONE)
def test_only_those_are_rounded_that_update_each_parameter_alone(model, name, is_named):
    where, _, kind = name.partition(":")
    make = getattr(importlib.import_module(where), kind)
    optimizer = named(model, name) if is_named else make(model.parameters())
    before = set(vars(optimizer))
    with nullcontext() if ALONE[name] else pytest.raises(IncompatibleError, match="alone"):
        LowPrecisionWeights("kahan").round_updates(optimizer).undo()
    assert not optimizer.state
    assert set(vars(optimizer)) == before


@pytest.mark.parametrize("name", ALONE)
def test_finds_which_optimizers_update_each_parameter_alone(model, name):
    before = torch.get_rng_state()
    optimizer = named(model, name)
    assert vars(optimizer)[EACH_ALONE] is ALONE[name]
    assert torch.equal(torch.get_rng_state(), before)
    problems = OptimizerInBackward().check(optimizer)
    assert bool(problems) is not ALONE[name]


@pytest.mark.gpu
def test_trying_leaves_random_numbers_of_the_gpu_alone(model):
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    named(model.cuda(), "tests.own_optimizers:CountsInGroups")
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_state_of_the_whole_optimizer_is_none_of_a_parameter(model):
    optimizer = named(model, "tests.own_optimizers:CountsInState")
    assert vars(optimizer)[EACH_ALONE] is False
    run(model, optimizer)
    assert optimizer.state["step"] == 2 * 3  # groups and steps


@pytest.mark.parametrize("how", ["in backward", "rounded", "rounded in backward"])
def test_counts_in_groups_count_steps_where_parameters_are_updated_one_by_one(model, how):
    """And what else changes a group between updates and the end of the step is kept."""
    found = []
    for is_in_backward in {"in backward" in how, False}:
        copied, technique = copy.deepcopy(model), LowPrecisionWeights("kahan")
        if "rounded" in how:
            technique.apply(copied)
        optimizer = named(copied, "tests.own_optimizers:CountsInGroups")
        if "rounded" in how:
            technique.round_updates(optimizer)
        if is_in_backward:
            OptimizerInBackward().apply(optimizer)
        whole = InAutocast(copied) if "rounded" in how else copied
        for number in range(4):
            torch.manual_seed(number)
            whole(make_batch(number)).backward()
            for group in optimizer.param_groups:
                group["mine"] = number
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] /= 2
        assert all(g["step"] == 4 and g["mine"] == 3 for g in optimizer.param_groups)
        found.append([clones(copied.state_dict()), optimizer.state_dict()])
    assert_same(found[0], found[-1])


def test_settings_that_depend_on_all_parameters_are_refused_where_updates_are_one_by_one(model):
    technique = LowPrecisionWeights("kahan")
    technique.apply(model)
    optimizer: Any = AdaptsRate(model.parameters())
    optimizer.seen = []  # which a try might change
    technique.round_updates(optimizer)
    InAutocast(model)(make_batch(0)).backward()
    with pytest.raises(IncompatibleError, match="`sum` in its groups"):
        optimizer.step()


class CountsUnlessTold(CountsInGroups):
    """Fails with the last matrix when it is told."""

    is_told = False

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: Any) -> None:
        if CountsUnlessTold.is_told and param.shape == (64, 64):
            raise RuntimeError("told to fail")
        super().update(group, param, grad, state)


@pytest.mark.parametrize("reloads", [False, True])
def test_a_step_that_was_interrupted_leaves_no_counts(model, reloads, monkeypatch):
    technique = LowPrecisionWeights("kahan")
    technique.apply(model)
    optimizer = named(model, f"{__name__}:CountsUnlessTold")
    technique.round_updates(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    for number in range(3):
        InAutocast(model)(make_batch(number)).backward()
        monkeypatch.setattr(CountsUnlessTold, "is_told", True)
        with pytest.raises(RuntimeError, match="told"):
            optimizer.step()
        monkeypatch.setattr(CountsUnlessTold, "is_told", False)
        if reloads:
            optimizer.load_state_dict(copy.deepcopy(saved))
        optimizer.step()
        steps = [group["step"] for group in optimizer.param_groups]
        assert steps == [1 if reloads else number + 1] * 2
