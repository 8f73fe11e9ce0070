"""Loops with everything that training has, with and without offloaded weights."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave.techniques.offloading.technique import Offloading, OffloadingHandle
from tests.cases import make_batch, make_model
from tests.helpers import adamw


class Offloaded:
    """A model of the contract suite with offloaded weights and an optimizer."""

    def __init__(
        self, name: str = "dropout", what: str = "optimizer", *, in_background: bool = True
    ) -> None:
        self.model = make_model(name).train()
        self.optimizer = adamw(self.model)
        technique = Offloading(what)
        self.handle: OffloadingHandle = technique.apply(self.model)
        assert self.handle.residence is not None, "there are weights"
        self.residence = self.handle.residence
        self.updates = technique.update_in_background(self.optimizer) if in_background else None

    def step(self, number: int = 0) -> Tensor:
        torch.manual_seed(number)
        loss: Tensor = self.model(make_batch(number))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def close(self) -> None:
        if self.updates is not None:
            self.updates.undo()
        self.handle.undo()


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


def run_loop(model: nn.Module, optimizer: torch.optim.Optimizer, **how: Any) -> list[Any]:
    """Four steps of a loop with everything; give losses, norms and rates."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=how.get("scales", False))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8)
    found: list[Any] = []
    for number in range(4):
        torch.manual_seed(number)
        for part in range(how.get("accumulated", 1)):
            loss = model(make_batch(10 * number + part))
            scaler.scale(loss).backward()
            found.append(loss.item())
        scaler.unscale_(optimizer)
        if "norm" in how:
            found.append(nn.utils.clip_grad_norm_(model.parameters(), how["norm"]).item())
        if "value" in how:
            nn.utils.clip_grad_value_(model.parameters(), how["value"])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        if number == 1:
            with torch.inference_mode():
                found.append(model.eval()(make_batch(99)).item())
            model.train()
    return [*found, scheduler.get_last_lr()]


LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped by norm": {"norm": 0.1},
    "clipped by value": {"value": 1e-3},
    "accumulated": {"accumulated": 4, "norm": 0.1},
    "scaled": {"scales": True, "norm": 0.1},
}
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-3),
    "two groups": lambda params: torch.optim.AdamW(
        [{"params": params[::2], "weight_decay": 0.0}, {"params": params[1::2]}], lr=1e-3
    ),
}


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for key, values in one["state"].items():
        for name, value in values.items():
            found = other["state"][key][name]
            assert torch.equal(value, found) if isinstance(value, Tensor) else value == found


@dataclass(frozen=True)
class Trained:
    """What a loop has given: losses, norms and rates, weights, and the optimizer's state."""

    found: list[Any]
    weights: dict[str, Tensor]
    state: dict[str, Any]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, loop: str) -> Trained:
    """Train in a loop, and copy what it has given."""
    found = run_loop(model, optimizer, **LOOPS[loop])
    return Trained(found, clones(model.state_dict()), optimizer.state_dict())


@functools.cache
def trained_without(name: str, loop: str) -> Trained:
    """What a loop gives without offloading."""
    model = make_model(name).train()
    return trained(model, weight_decaying(model), loop)


def weight_decaying(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW for what a model trains."""
    return OPTIMIZERS["AdamW"]([p for p in model.parameters() if p.requires_grad])


def clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors of a state, which may be those of a model."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_same_training(one: Trained, other: Trained) -> None:
    assert one.found == other.found
    assert_equal(one.weights, other.weights)
    assert_same_state(one.state, other.state)
