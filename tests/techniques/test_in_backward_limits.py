"""What OptimizerInBackward refuses, what it leaves behind, and what it saves."""

import copy
import gc
import pickle
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from lightning_memsave import LowBitOptimizer, OptimizerInBackward
from lightning_memsave.errors import ConfigurationError, IncompatibleError, NoEffectWarning
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.techniques.optimizer_in_backward.held_gradients import HeldGradients
from tests.cases import make_batch, make_model
from tests.helpers import assert_same
from tests.techniques.in_backward import adamw, apply, loops, run_both, step


class Rule(Optimizer):
    """Gradient descent; subclasses spoil it."""

    def __init__(self, params: Any) -> None:
        self.count = 0
        super().__init__(params, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self.change(param), alpha=-group["lr"])

    def change(self, param: Tensor) -> Tensor:
        assert param.grad is not None
        return param.grad


class CommonNorm(Rule):
    """As LAMB with a norm over everything."""

    def change(self, param: Tensor) -> Tensor:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        assert param.grad is not None
        return param.grad / torch.nn.utils.get_total_norm(grads)


class OwnAdamW(torch.optim.AdamW):
    """A subclass may compute something else."""


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (CommonNorm, r"`CommonNorm`: it is not known.*or, if it does so, pass `Opt.*\(trust_"),
        (Rule, r"`Rule`: it is not known to update each parameter on its own"),
        (OwnAdamW, r"`OwnAdamW`: it is not known.*set `optimizer_in_backward=None`"),
        (torch.optim.LBFGS, r"`LBFGS`: it is not known.*Use an optimizer of torch such as AdamW"),
        (lambda p: torch.optim.Adam(p, differentiable=True), r"Set `differentiable=False`"),
    ],
)
def test_refuses_optimizers_that_may_couple_parameters(cls, why):
    model = make_model("dropout")
    with pytest.raises(IncompatibleError, match=why):
        apply(cls(list(model.parameters())))
    model(make_batch(0)).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("cls", [Rule, OwnAdamW])
def test_uses_what_the_user_vouches_for(cls):
    run_both(make_model("dropout"), cls, trust_optimizer=True)


@pytest.mark.parametrize("value", [None, 1, "AdamW"])
def test_refuses_a_vouching_that_is_no_truth_value(value):
    with pytest.raises(ConfigurationError, match="Use True or False"):
        OptimizerInBackward(trust_optimizer=value)


def test_check_copies_no_weights():
    """A trial on a copy of the optimizer once copied the frozen model that its bits name."""
    model = nn.Sequential(nn.Linear(512, 512).requires_grad_(False), nn.Linear(512, 512))
    low_bit = LowBitOptimizer(module=model)
    optimizer = low_bit.apply(torch.optim.AdamW(model[1].parameters())).target
    with LiveTensors(model, [optimizer]) as live:
        before = live.peak.total_bytes
        assert OptimizerInBackward().check(optimizer) == []
        assert live.peak.total_bytes == before


@pytest.mark.parametrize("name", ["LAMB", "LARS", "AdEMAMix", "Adagrad8bit", "RMSprop8bit"])
def test_takes_optimizers_of_bitsandbytes(name):
    from lightning_memsave.techniques.low_bit_optimizer.package import (
        import_bitsandbytes,
    )

    settings: Any = {"momentum": 0.9} if name == "LARS" else {}
    make = getattr(import_bitsandbytes("test").optim, name)
    optimizer = make(nn.Linear(64, 64).parameters(), lr=1e-3, **settings)
    assert OptimizerInBackward().check(optimizer) == []


def test_takes_adafactor_of_transformers():
    optimizer = pytest.importorskip("transformers").Adafactor(nn.Linear(64, 64).parameters())
    assert OptimizerInBackward().check(optimizer) == []


def test_sparse_gradients():
    def loop(net: nn.Module, optimizer: Optimizer, _: object) -> None:
        for number in range(3):
            net(torch.tensor([number, 3, 3])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    run_both(nn.Embedding(20, 4, sparse=True), torch.optim.SparseAdam, loop)


def test_check_touches_nothing():
    model = make_model("dropout")
    optimizer = adamw(model.parameters())
    step(model, optimizer)
    model(make_batch(1)).backward()
    before = copy.deepcopy((optimizer.state_dict(), [p.grad for p in model.parameters()]))
    state, python = torch.get_rng_state(), random.getstate()
    keys = sorted(vars(optimizer))
    OptimizerInBackward().check(optimizer)
    after = optimizer.state_dict(), [p.grad for p in model.parameters()]
    assert str(before) == str(after)
    assert torch.equal(state, torch.get_rng_state())
    assert python == random.getstate()
    assert sorted(vars(optimizer)) == keys


def test_a_scaler_that_the_technique_was_not_given_ends_training():
    model, scaler = make_model("dropout"), torch.amp.GradScaler("cpu")
    optimizer = adamw(model.parameters())
    apply(optimizer)
    scaler.scale(model(make_batch(0))).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)


def test_refuses_several_processes():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        optimizer = adamw(make_model("dropout").parameters())
        with pytest.raises(IncompatibleError, match=r"2 processes: .* Train on one device, or set"):
            apply(optimizer)
    finally:
        dist.destroy_process_group()


def test_refuses_to_be_applied_twice():
    model = make_model("dropout")
    optimizer = adamw(model.parameters())
    handle = apply(optimizer)
    with pytest.raises(IncompatibleError, match=r"handle\.undo\(\)"):
        apply(optimizer)
    with pytest.raises(IncompatibleError, match=r"Give each parameter to one optimizer"):
        apply(adamw(model.head.parameters()))
    handle.undo()
    apply(optimizer)


def test_says_when_nothing_is_trained():
    model = make_model("dropout").requires_grad_(False)
    with pytest.warns(NoEffectWarning, match="no parameter is trained"):
        apply(adamw(model.parameters()))


@pytest.mark.parametrize("name", ["clip_value", "clip_param_norm", "clip_norm"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), True, "1"])
def test_refuses_bounds_that_are_none(name, value):
    with pytest.raises(ConfigurationError, match=rf"Use `{name}=1.0`"):
        OptimizerInBackward(**{name: value})


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 1.0}])
def test_undo_lets_gradients_stay(settings):
    ours, theirs = loops(make_model("dropout"))
    for net in (ours, theirs):
        optimizer = adamw(net.parameters())
        handle = apply(optimizer, **settings) if net is ours else None
        torch.manual_seed(0)
        step(net, optimizer)
        if handle is not None:
            handle.undo()
            handle.undo()
        step(net, optimizer, 1)
        net(make_batch(2)).backward()
        assert all(p.grad is not None for p in net.parameters())
    if not settings:
        assert_same(ours, theirs)


def test_undo_gives_held_gradients_back():
    model = make_model("dropout")
    optimizer = adamw(model.parameters())
    model(make_batch(0)).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    handle = apply(optimizer, clip_norm=1e-3)
    torch.manual_seed(0)
    model.eval()(make_batch(0)).backward()
    assert all(p.grad is None for p in model.parameters())
    handle.undo()
    assert [p.grad.shape for p in model.parameters()] == [g.shape for g in expected]


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 1.0}])
def test_copies_train_on_their_own(settings):
    model = make_model("tied").train()
    optimizer = adamw(model.parameters())
    apply(optimizer, **settings)
    step(model, optimizer)
    model(make_batch(1)).backward()
    before = copy.deepcopy(model.state_dict())
    loaded = pickle.loads(pickle.dumps((model, optimizer)))
    for twin, twin_optimizer in (copy.deepcopy((model, optimizer)), loaded):
        start = copy.deepcopy(twin.state_dict())
        twin(make_batch(0)).backward()
        assert all(p.grad is not None for p in twin.parameters())
        assert all(torch.equal(start[k], v) for k, v in twin.state_dict().items())
        twin_optimizer.step()
        twin_optimizer.zero_grad()
        assert not torch.equal(start["head.weight"], twin.state_dict()["head.weight"])
        apply(twin_optimizer)
        twin(make_batch(0)).backward()
        assert all(p.grad is None for p in twin.parameters())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_nothing_keeps_the_optimizer_alive():
    model = make_model("dropout")
    optimizer = adamw(model.parameters())
    apply(optimizer, clip_norm=1.0)
    step(model, optimizer)
    refs = [weakref.ref(optimizer), weakref.ref(model)]
    del optimizer
    gc.collect()
    assert refs[0]() is None
    model(make_batch(0)).backward()  # nobody updates, so gradients stay
    assert model.head.weight.grad is not None
    del model
    gc.collect()
    assert refs[1]() is None


def reentrant(net: Any, times: int = 1) -> Tensor:
    x = make_batch(0).requires_grad_()
    for _ in range(times):
        for block in net.blocks:
            x = checkpoint(block, x, use_reentrant=True)
    loss: Tensor = net.head(x).square().mean()
    return loss


def halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 1.0}])
def test_hooks_that_were_there_before_see_gradients(settings):
    ours, theirs = loops(make_model("dropout"))
    for net in (ours, theirs):
        for param in net.parameters():
            param.register_post_accumulate_grad_hook(halve)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        if net is ours:
            apply(optimizer, **settings)
        torch.manual_seed(0)
        net(make_batch(0)).backward()
        if net is theirs and settings:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    assert_same(ours, theirs)


def test_under_reentrant_checkpointing():
    def loop(net: nn.Module, optimizer: Optimizer, _: object) -> None:
        for _ in range(3):
            reentrant(net).backward()
            optimizer.step()
            optimizer.zero_grad()

    run_both(make_model("dropout"), adamw, loop)


def test_a_block_that_is_recomputed_twice_by_reentrant_checkpointing_is_an_error():
    model = make_model("dropout")
    optimizer = adamw(model.parameters())
    apply(optimizer)
    with pytest.raises(IncompatibleError, match=r"checkpoint with `use_reentrant=False`"):
        reentrant(model, times=2).backward()


def test_torch_sees_a_weight_that_is_read_again_after_its_update():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(second.parameters(), 0.1)
    apply(optimizer)
    x = first(torch.ones(2, 4))
    loss = second(x @ second.weight.detach()).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("is_first_step_done", [False, True])
def test_overrides_of_bitsandbytes_are_refused(is_first_step_done):
    from lightning_memsave.techniques.low_bit_optimizer.package import (
        import_bitsandbytes,
    )

    bnb = import_bitsandbytes("test")
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    try:
        net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
        manager.register_module_override(net[1], "weight", {"lr": 0.5, "optim_bits": 32})
        optimizer = bnb.optim.AdamW8bit(net.parameters())
        if is_first_step_done:
            net(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(IncompatibleError, match=r"keep_32bit=\.\.\.\)`, or set"):
            apply(optimizer)
        ours = LowBitOptimizer().apply(torch.optim.AdamW(net.parameters())).target
        assert OptimizerInBackward().check(ours) == []  # they are not for it
    finally:
        manager.initialize()


NUM_LAYERS = 12


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(NUM_LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


UNIT = 256 * 256 * 4  # bytes of one weight
BATCH = 2 * 256 * 4  # bytes of one input or output of a layer


def peak_of_a_step(model: nn.Module, optimizer: Optimizer, **settings: Any) -> Any:
    x = torch.ones(2, 256)
    with LiveTensors(model, [optimizer]) as live:
        handle = apply(optimizer, **settings)
        for _ in range(2):
            live.reset_peak()
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.undo()
        return live.peak


def test_one_gradient_at_a_time():
    model = Chain()
    peak = peak_of_a_step(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    assert peak.parameter_bytes == peak.optimizer_state_bytes == NUM_LAYERS * UNIT
    assert peak.gradient_bytes == UNIT
    # Beside them the outputs of the layers, and what backward hands on.
    small = peak.total_bytes - (2 * NUM_LAYERS + 1) * UNIT
    assert 0 < small < (NUM_LAYERS + 4) * BATCH + 100


def test_adamw_adds_the_temporaries_of_one_parameter():
    model = Chain()
    peak = peak_of_a_step(model, torch.optim.AdamW(model.parameters()))
    assert peak.gradient_bytes == UNIT
    assert UNIT * (3 * NUM_LAYERS + 3) < peak.total_bytes < UNIT * (3 * NUM_LAYERS + 3.2)


@pytest.mark.parametrize("num_kept", [0, 8, NUM_LAYERS])
def test_the_last_gradients_may_wait_on_the_device(num_kept):
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    peak = peak_of_a_step(model, optimizer, clip_norm=1.0, kept_bytes=num_kept * UNIT)
    assert peak.gradient_bytes == max(num_kept, 1) * UNIT
    # In chunks of 1, 2, ... MiB, each of four gradients.
    assert peak.host_bytes == {0: 12, 8: 4, NUM_LAYERS: 0}[num_kept] * UNIT


def test_memory_of_waiting_gradients_is_the_hosts_in_later_steps_too():
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    apply(optimizer, clip_norm=1.0)
    for _ in range(2):  # it is allocated in the first step, before the second counting begins
        with LiveTensors(model, [optimizer]) as live:
            model(torch.ones(2, 256)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert live.peak.other_bytes == 0
        assert live.peak.host_bytes == NUM_LAYERS * UNIT


@pytest.mark.parametrize(
    "settings",
    [{}, {"clip_norm": 1.0, "clip_value": 0.5}, {"clip_norm": 1.0, "kept_bytes": 5 * UNIT}],
    ids=repr,
)
def test_predicts_on_fake_tensors_what_is_counted(settings):
    def peak(net: nn.Module) -> Any:
        return peak_of_a_step(net, torch.optim.AdamW(net.parameters()), **settings)

    real = Chain()
    counted = peak(real)
    with fake_tensors() as fake:
        predicted = peak(fake.copy_module(real))
    assert predicted.by_category() == counted.by_category()
    assert predicted.host_bytes == counted.host_bytes


@pytest.mark.parametrize(
    "grad",
    [
        torch.randn(3, 5, 7, 2).to(memory_format=torch.channels_last),
        torch.randn(1000, 1500, dtype=torch.bfloat16),
        torch.randn(8, 4)[2:],
        torch.randn(6, 10)[:, ::2],
        torch.randn(5, 1).expand(5, 4),
        torch.tensor(3.0),
        torch.randn(0, 4),
    ],
    ids=["channels last", "several chunks", "offset", "gaps", "expanded", "scalar", "empty"],
)
def test_held_gradients_come_back_as_they_were(grad):
    held, parameter = HeldGradients(1.0), nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    for factor in (1, 2):
        parameter.grad = grad.detach() if factor == 1 else grad * factor
        held.take([parameter])
        assert parameter.grad is None
        assert list(held.give_back([[parameter]])) == [[parameter]]
        found: Any = parameter.grad
        assert torch.equal(found, grad * factor)
        assert found.stride() == torch.empty_like(grad).stride()
