"""Weights of scripted modules stay on the device, and what fails half way leaves nothing behind."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memsave import Offloading
from lightning_memsave.core.memory import is_host
from tests.cases import WIDTH, make_batch
from tests.helpers import adamw, seed_torch, snapshot

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Blocks, some or parts of them scripted, and a head."""

    def __init__(self, scripted: str) -> None:
        super().__init__()
        script: Any = torch.jit.script
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if scripted == "head":
            self.head = script(self.head)
        for index, block in enumerate(self.blocks):
            if scripted == "in blocks":
                block.up = script(block.up)
            elif scripted == "blocks":
                self.blocks[index] = script(block)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def train(model: Any) -> list[Tensor]:
    optimizer, losses = adamw(model), []
    for number in range(3):
        loss = model(make_batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("scripted", ["head", "in blocks", "blocks"])
@pytest.mark.parametrize("what", ["optimizer", "parameters", "parameters+activations"])
def test_scripted_weights_stay_on_the_device(what, scripted):
    found = []
    for is_offloaded in (False, True):
        seed_torch(1)
        model = Net(scripted)
        if is_offloaded:
            before = snapshot(model)
            handle = Offloading(what).apply(model)
            assert "of scripted modules" in " ".join(handle.skipped)
            inside = [m for m in model.modules() if isinstance(m, torch.jit.ScriptModule)]
            homes = {is_host(p.untyped_storage()) for m in inside for p in m.parameters()}
            assert homes == {False}
        seed_torch(2)
        found.append([*train(model), *copy.deepcopy(model.state_dict()).values()])
        if is_offloaded:
            handle.undo()
            assert snapshot(model) == before
    assert all(map(torch.equal, *found))


class Refusing(nn.Linear):
    def register_load_state_dict_pre_hook(self, hook: Any) -> Any:
        raise RuntimeError("no hooks here")


@pytest.mark.parametrize("what", ["optimizer", "parameters"])
def test_offloading_that_fails_half_way_leaves_nothing(what):
    model = nn.Sequential(*[Block() for _ in range(3)], Refusing(WIDTH, WIDTH))
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="no hooks here"):
        Offloading(what).apply(model)
    assert snapshot(model) == before
    assert not any(is_host(p.untyped_storage()) for p in model.parameters())
    model(make_batch(0)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
