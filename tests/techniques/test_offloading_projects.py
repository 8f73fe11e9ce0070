"""Streamed weights in projects of all kinds: bit for bit as without."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave import ActivationCheckpointing, Offloading
from lightning_memsave.core.memory import is_host
from lightning_memsave.measure.live_tensors import LiveTensors
from tests.cases import WIDTH, Block, make_batch, make_model
from tests.helpers import adamw

WHAT = ["parameters", "parameters+activations"]


@dataclass
class Project:
    """Makes a model and its optimizers, and trains a step."""

    make: Callable[[], nn.Module]
    optimizers: Callable[[Any], Sequence[Optimizer]] = lambda model: [adamw(model)]
    step: Callable[[Any, Sequence[Optimizer], int], list[Tensor]] = field(
        default=lambda model, optimizers, number: [_step(model, optimizers, number)]
    )


def _step(model: Any, optimizers: Sequence[Optimizer], number: int) -> Tensor:
    loss: Tensor = model(make_batch(number))
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


class Adversaries(nn.Module):
    """Two networks of the same kind of blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.ModuleList([Block(nn.LayerNorm(WIDTH)) for _ in range(3)])
        self.discriminator = nn.ModuleList([Block(nn.LayerNorm(WIDTH)) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, *, is_real: bool) -> Tensor:
        for block in [] if is_real else self.generator:
            x = block(x)
        for block in self.discriminator:
            x = block(x)
        return nn.functional.softplus(self.head(x) * (-1 if is_real else 1)).mean()


def adversaries_step(model: Any, optimizers: Sequence[Optimizer], number: int) -> list[Tensor]:
    """As in manual optimization: each optimizer's networks in turn, the others are frozen."""
    first, second = optimizers
    model.discriminator.requires_grad_(False)
    deceived = -model(make_batch(number), is_real=False)
    deceived.backward()
    first.step()
    first.zero_grad()
    model.discriminator.requires_grad_(True)
    found = model(make_batch(number), is_real=True)
    found.backward()
    model(make_batch(number + 10), is_real=False).backward()
    torch.nn.utils.clip_grad_norm_(model.discriminator.parameters(), 0.1)
    second.step()
    model.zero_grad()
    return [deceived.detach(), found.detach()]


def with_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = make_model("dropout")
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["up", "down"], r=4, lora_dropout=0.1)
    adapted: nn.Module = get_peft_model(model, config)
    return adapted


def unfrozen_step(model: Any, optimizers: Sequence[Optimizer], number: int) -> list[Tensor]:
    model.requires_grad_(number > 0)
    model.head.requires_grad_(True)
    return [_step(model, optimizers, number)]


def trained(model: nn.Module) -> Sequence[Optimizer]:
    return [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)]


PROJECTS = {
    "adversaries": Project(
        Adversaries,
        lambda m: [
            torch.optim.AdamW(m.generator.parameters(), lr=1e-3),
            torch.optim.AdamW([*m.discriminator.parameters(), *m.head.parameters()], lr=1e-3),
        ],
        adversaries_step,
    ),
    "lora": Project(with_lora, trained),
    "unfrozen later": Project(lambda: make_model("dropout"), step=unfrozen_step),
}


def trained_state(name: str, what: str | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    project = PROJECTS[name]
    model = project.make().train()
    ActivationCheckpointing(blocks="Block").apply(model)
    optimizers = project.optimizers(model)
    handles = []
    if what is not None:
        technique = Offloading(what, blocks="Block", min_bytes=1)
        handles = [technique.apply(model)]
        handles += [technique.update_in_background(optimizer) for optimizer in optimizers]  # type: ignore[misc]
    losses = []
    torch.manual_seed(3)
    for number in range(3):
        losses += project.step(model, optimizers, number)
    for handle in reversed(handles):
        handle.undo()
    return losses, {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("name", PROJECTS)
def test_as_without(name, what):
    plain, saving = trained_state(name, None), trained_state(name, what)
    assert [*map(torch.equal, plain[0], saving[0])] == [True] * len(plain[0])
    assert plain[1].keys() == saving[1].keys()
    assert [key for key in plain[1] if not torch.equal(plain[1][key], saving[1][key])] == []


class TestFrozenBase:
    """Weights only: no gradient, no state."""

    def test_two_blocks_of_it_are_on_the_device(self, monkeypatch):
        model = with_lora().train()
        ActivationCheckpointing(blocks="Block").apply(model)
        optimizer = trained(model)[0]
        technique = Offloading("parameters", blocks="Block")
        handle = technique.apply(model)
        blocks = [m for m in model.modules() if isinstance(m, Block)]
        sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks]
        outside = sum(p.nbytes for p in model.parameters()) - sum(sizes)
        updates = technique.update_in_background(optimizer)
        _step(model, [optimizer], 0)
        with LiveTensors(model, [optimizer]) as counter:
            _step(model, [optimizer], 1)
            handle.wait()
            assert counter.breakdown.parameter_bytes == outside  # the head's, which is frozen
        assert counter.peak.parameter_bytes <= outside + 2 * sizes[0]
        adapters = [p for p in model.parameters() if p.requires_grad]
        state = 3 * sum(p.nbytes for p in adapters) + 4 * len(adapters)
        assert counter.peak.host_bytes == sum(sizes) + state
        assert handle.changes[0].startswith("16 weights, their gradients and optimizer state, and ")
        frozen = [p for block in blocks for p in block.parameters() if not p.requires_grad]
        assert all(is_host(p.untyped_storage()) and p.grad is None for p in frozen)
        updates.undo()
        handle.undo()
        assert not any(is_host(p.untyped_storage()) for p in model.parameters())

    def test_stays_with_optimizer_alone(self):
        model = make_model("frozen")
        with Offloading("optimizer").apply(model) as handle:
            assert handle.skipped == ("weights on the device: 12 frozen",)
        with Offloading("parameters").apply(model) as handle:
            assert handle.skipped == ()

    def test_of_a_model_that_is_only_evaluated(self):
        model = make_model("dropout").eval().requires_grad_(False)
        plain = model(make_batch(0))
        with Offloading("parameters").apply(model):
            assert torch.equal(model(make_batch(0)), plain)


class KnowsItsDevice(Adversaries):
    """Reads its device from its first parameter, as models of Hugging Face do."""

    @property
    def device(self) -> torch.device:
        return next(param.device for param in self.parameters())


def test_the_device_of_a_model_is_where_it_computes():
    plain, model, other = vars(KnowsItsDevice)["device"], KnowsItsDevice(), KnowsItsDevice()
    with Offloading("parameters").apply(model) as handle:
        assert handle.residence is not None
        handle.residence.device = torch.device("meta")
        assert model.device.type == "meta"
        assert other.device.type == "cpu"
        with Offloading("optimizer").apply(other):
            assert other.device.type == "cpu"
        assert model.device.type == "meta"
        handle.residence.device = torch.device("cpu")
    assert model.device.type == "cpu"
    assert vars(KnowsItsDevice)["device"] is plain
