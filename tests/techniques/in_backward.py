"""Training with and without OptimizerInBackward, and what must be the same."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memsave.techniques.optimizer_in_backward.technique import (
    InBackwardHandle,
    OptimizerInBackward,
)
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


def train_both(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    steps: int = 4,
    clip: Callable[[nn.Module], object] | None = None,
    **settings: Any,
) -> tuple[nn.Module, nn.Module]:
    """Train two copies, one of them with the technique; give both."""
    models, optimizers = [], []
    for is_ours in (True, False):
        net = copy.deepcopy(model).train()
        optimizer = make_optimizer(trained(net))
        if is_ours:
            apply(optimizer, **settings)
        torch.manual_seed(0)
        for step in range(steps):
            net(make_batch(step)).backward()
            if is_ours:
                assert all(p.grad is None for p in net.parameters())
            elif clip is not None:
                clip(net)
            optimizer.step()
            optimizer.zero_grad()
        models.append(net)
        optimizers.append(optimizer)
    assert_same(*models)
    assert_same(*optimizers)
    with pytest.raises(AssertionError):  # it has trained
        assert_same(model, models[0])
    return models[0], models[1]


def loops(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return copy.deepcopy(model).train(), copy.deepcopy(model).train()


def step(model: nn.Module, optimizer: Optimizer, number: int = 0) -> None:
    model(make_batch(number)).backward()
    optimizer.step()
    optimizer.zero_grad()
