"""Training with and without OptimizerInBackward, and what must be the same."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memsave import OptimizerInBackward
from lightning_memsave.techniques.optimizer_in_backward.technique import InBackwardHandle
from tests.cases import make_batch
from tests.helpers import assert_same

WIDTH = 64

MakeOptimizer = Callable[[Any], Optimizer]


def apply(optimizer: Optimizer, **settings: Any) -> InBackwardHandle:
    return OptimizerInBackward(**settings).apply(optimizer)


def adamw(params: Any, **settings: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, **settings)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


Loop = Callable[[Any, Optimizer, InBackwardHandle | None], object]


def steps(net: nn.Module, optimizer: Optimizer, _: object = None) -> None:
    for number in range(3):
        step(net, optimizer, number)


def run_both(
    model: nn.Module, make_optimizer: MakeOptimizer, loop: Loop = steps, **settings: Any
) -> tuple[nn.Module, nn.Module]:
    """Run a loop with two copies of a model, one with the technique; both are the same then."""
    ours, theirs = nets = loops(model)
    optimizers = [make_optimizer(trained(net)) for net in nets]
    handle = apply(optimizers[0], **settings)
    for net, optimizer, own in zip(nets, optimizers, (handle, None), strict=True):
        torch.manual_seed(0)
        loop(net, optimizer, own)
    assert_same(ours, theirs)
    assert_same(*optimizers)
    with pytest.raises(AssertionError):  # it has trained
        assert_same(model, ours)
    return ours, theirs


def train_both(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    clip: Callable[[nn.Module], object] | None = None,
    **settings: Any,
) -> tuple[nn.Module, nn.Module]:
    """Train two copies in four steps, the other one clipped by hand."""

    def loop(net: nn.Module, optimizer: Optimizer, handle: InBackwardHandle | None) -> None:
        for number in range(4):
            net(make_batch(number)).backward()
            if handle is not None:
                assert all(p.grad is None for p in net.parameters())
            elif clip is not None:
                clip(net)
            optimizer.step()
            optimizer.zero_grad()

    return run_both(model, make_optimizer, loop, **settings)


def loops(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return copy.deepcopy(model).train(), copy.deepcopy(model).train()


def step(model: nn.Module, optimizer: Optimizer, number: int = 0) -> None:
    model(make_batch(number)).backward()
    optimizer.step()
    optimizer.zero_grad()
