"""Training with parameters updated in backward, beside the same loop without."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memsave import IncompatibleError, LowBitOptimizer
from lightning_memsave.techniques.optimizer_in_backward.technique import InBackwardHandle
from lightning_memsave.techniques.optimizer_step import ACTIVE_UPDATES
from tests.cases import make_batch, make_model
from tests.helpers import assert_same
from tests.techniques.in_backward import (
    WIDTH,
    MakeOptimizer,
    adamw,
    apply,
    loops,
    run_both,
    step,
    train_both,
    trained,
)


def bitsandbytes_optimizer(name: str, **settings: Any) -> MakeOptimizer:
    def make(params: Any) -> Optimizer:
        from lightning_memsave.techniques.low_bit_optimizer.package import (
            import_bitsandbytes,
        )

        made: Optimizer = getattr(import_bitsandbytes("test").optim, name)(params, **settings)
        return made

    return make


def low_bit(params: Any) -> Optimizer:
    return LowBitOptimizer().apply(adamw(params)).target


def matrices_only(params: Any) -> Optimizer:
    return torch.optim.Muon([p for p in params if p.ndim == 2], lr=1e-2)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, maximize=True),
    "adamw": adamw,
    "adamw_groups": lambda p: adamw(
        [
            {"params": [each for each in p if each.ndim > 1], "weight_decay": 0.3},
            *({"params": each, "weight_decay": 0.0} for each in p if each.ndim < 2),
        ]
    ),
    "adamw_foreach": lambda p: adamw(p, foreach=True),
    "adamw_fused": lambda p: adamw(p, fused=True),
    "adamw_capturable_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr_decay=0.1),
    "adagrad_foreach": lambda p: torch.optim.Adagrad(p, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "rmsprop_foreach": lambda p: torch.optim.RMSprop(p, centered=True, foreach=True),
    "nadam": torch.optim.NAdam,
    "nadam_foreach": lambda p: torch.optim.NAdam(p, foreach=True),
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
    "adafactor_foreach": lambda p: torch.optim.Adafactor(p, foreach=True),
    "muon": matrices_only,
    "low_bit": low_bit,
    "lion": bitsandbytes_optimizer("Lion", lr=1e-3),
    "lion_8bit": bitsandbytes_optimizer("Lion8bit", lr=1e-3),
    "bnb_adamw": bitsandbytes_optimizer("AdamW8bit", lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_gives_the_same_bits(name):
    model = make_model("dropout")
    if name == "muon":
        for key, param in model.named_parameters():
            param.requires_grad_(param.ndim == 2 and "head" not in key)
    train_both(model, OPTIMIZERS[name])


def test_gradients_add_up_until_the_last_backward():
    """One parameter has no gradient in the last part, another none at all."""
    ours, theirs = loops(SometimesUnused())
    optimizers = [torch.optim.Adam(net.parameters()) for net in (ours, theirs)]
    handle = apply(optimizers[0])
    for number in range(3):
        with handle.accumulating():
            ours(make_batch(number), both=True).backward()
            assert ours.b.weight.grad is not None
        before = ACTIVE_UPDATES[optimizers[0]].has_updated
        ours(make_batch(number + 10)).backward()
        assert ours.a.weight.grad is None
        assert ours.b.weight.grad is not None
        assert (before, ACTIVE_UPDATES[optimizers[0]].has_updated) == (False, True)
        optimizers[0].step()
        assert ours.b.weight.grad is None
        theirs(make_batch(number), both=True).backward()
        theirs(make_batch(number + 10)).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert_same(ours, theirs)
    assert_same(*optimizers)


class SometimesUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = (nn.Linear(WIDTH, 1) for _ in range(3))

    def forward(self, x: Tensor, *, both: bool = False) -> Tensor:
        return (self.a(x) + (self.b(x) if both else 0.0)).square().mean()


def test_a_second_backward_in_a_step_is_an_error():
    model = make_model("dropout")
    optimizer = adamw(model.parameters())
    apply(optimizer)
    model(make_batch(0)).backward()
    with pytest.raises(IncompatibleError, match=r"with handle\.accumulating\(\)"):
        model(make_batch(1)).backward()


def test_a_gradient_that_comes_after_the_update_is_an_error():
    """So does DistributedDataParallel put them."""
    model = make_model("dropout")
    optimizer = adamw(model.parameters())
    apply(optimizer)
    model(make_batch(0)).backward()
    model.head.weight.grad = torch.zeros(WIDTH, WIDTH)
    with pytest.raises(IncompatibleError, match=r"train in one process"):
        optimizer.step()


@pytest.mark.parametrize("by_keyword", [True, False])
@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.01}])
def test_backward_may_run_in_the_closure_of_the_step(by_keyword, settings):
    def loop(net: nn.Module, optimizer: Any, handle: InBackwardHandle | None) -> None:
        for number in range(3):
            # An earlier part of the batch: its gradients are there when the step begins.
            with contextlib.nullcontext() if handle is None else handle.accumulating():
                net(make_batch(10 + number)).backward()

            def closure(number: int = number) -> Any:
                loss = net(make_batch(number))
                loss.backward()
                if handle is None and settings:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
                return loss

            loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
            assert loss is not None
            optimizer.zero_grad()

    run_both(make_model("tied"), adamw, loop, **settings)


def test_groups_and_parameters_that_come_later():
    """A new group, a parameter that thaws, one that is taken out."""
    ours, theirs = loops(make_model("dropout"))
    for net in (ours, theirs):
        net.blocks[3].requires_grad_(False)
        optimizer = torch.optim.AdamW(
            [
                {"params": net.blocks.parameters(), "weight_decay": 0.5},
                {"params": [net.head.bias], "lr": 0.1},
            ]
        )
        if net is ours:
            apply(optimizer)
        torch.manual_seed(0)
        step(net, optimizer)
        net.zero_grad()
        optimizer.add_param_group({"params": [net.head.weight], "lr": 0.2})
        net.blocks[3].requires_grad_(True)
        for number in (1, 2):
            step(net, optimizer, number)
        net(make_batch(3)).backward()
        assert all(p.grad is None for p in net.parameters()) == (net is ours)
        optimizer.step()
        net.zero_grad()
        del optimizer.param_groups[1]
        step(net, optimizer, 4)
        assert net.head.bias.grad is not None
    assert_same(ours, theirs)


def test_two_optimizers_of_one_model():
    ours, theirs = loops(make_model("dropout"))
    for net in (ours, theirs):
        body, head = adamw(net.blocks.parameters()), torch.optim.SGD(net.head.parameters(), 0.1)
        handles = [apply(body), apply(head)] if net is ours else []
        torch.manual_seed(0)
        for number in range(4):
            net(make_batch(number)).backward()
            body.step()
            head.step()
            net.zero_grad()
        for handle in handles:
            handle.undo()
    assert_same(ours, theirs)


def test_gradients_for_another_optimizer_are_let_go():
    """A discriminator must not learn from the loss of its generator."""
    ours, theirs = (nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)]) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    for net in (ours, theirs):
        generator, discriminator = net
        optimizers = [adamw(generator.parameters()), adamw(discriminator.parameters())]
        handles = [apply(o) for o in optimizers] if net is ours else []
        for number in range(3):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))
            fake = generator(x)
            discriminator(fake.detach()).mean().backward()
            optimizers[1].step()
            loss = -discriminator(fake).mean()
            if handles:
                with handles[1].accumulating():
                    loss.backward()
            else:
                loss.backward()
            optimizers[0].step()
            net.zero_grad()
    assert_same(ours, theirs)


class Clipped:
    """What the settings stand for, done by hand after backward."""

    @staticmethod
    def value(net: nn.Module) -> None:
        torch.nn.utils.clip_grad_value_(net.parameters(), 1e-4)

    @staticmethod
    def param_norm(net: nn.Module) -> None:
        for param in net.parameters():
            torch.nn.utils.clip_grad_norm_(param, 1e-3)

    @staticmethod
    def norm(net: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)


@pytest.mark.parametrize("make_optimizer", [adamw, low_bit])
@pytest.mark.parametrize(
    ("clip", "settings"),
    [
        (Clipped.value, {"clip_value": 1e-4}),
        (Clipped.param_norm, {"clip_param_norm": 1e-3}),
        (Clipped.norm, {"clip_norm": 1e-3}),
        (Clipped.norm, {"clip_norm": 1e-3, "kept_bytes": 0}),
        (Clipped.norm, {"clip_norm": 1e-3, "kept_bytes": 2**13}),  # some stay on the device
    ],
)
def test_clips_as_by_hand(clip, settings, make_optimizer):
    clipped, _ = train_both(make_model("dropout"), make_optimizer, clip=clip, **settings)
    plain, _ = train_both(make_model("dropout"), make_optimizer)
    with pytest.raises(AssertionError):
        assert_same(clipped, plain)


class Foreach(TorchDispatchMode):
    """Counts calls of a kernel over many parameters that AdamW runs once in a step."""

    num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += func is torch.ops.aten._foreach_lerp_.Scalar
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("clip_norm", [None, 1e-3])
def test_parameters_are_updated_in_groups(clip_norm):
    num_params = len(trained(make_model("dropout")))
    found = {}
    for group_bytes in (0, 2**11, 2**25):
        settings = {"group_bytes": group_bytes, "clip_norm": clip_norm}
        with Foreach() as counted:
            train_both(
                make_model("dropout"),
                lambda params: adamw(params, foreach=True),
                clip=Clipped.norm if clip_norm else None,
                **settings,
            )
        found[group_bytes] = (counted.num_calls - 4) / 4  # four steps, the other model's too
    # Nine weights are larger than the lower bound, and eight as large as the largest of them.
    assert found == {0: num_params, 2**11: 9 + 3, 2**25: 8 + 1}


def test_clips_what_only_an_earlier_part_gave_a_gradient():
    def loop(net: nn.Module, optimizer: Optimizer, handle: InBackwardHandle | None) -> None:
        with contextlib.nullcontext() if handle is None else handle.accumulating():
            net(make_batch(0), both=True).backward()
        net(make_batch(1)).backward()
        if handle is None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            torch.nn.utils.clip_grad_value_(net.parameters(), 0.01)
        optimizer.step()

    def sgd(params: Any) -> Optimizer:
        return torch.optim.SGD(params, lr=1.0)

    run_both(SometimesUnused(), sgd, loop, clip_norm=0.1, clip_value=0.01)
