"""Offloaded weights of heads whose logits are used after the model has returned."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memsave import ChunkedCrossEntropy, Offloading
from lightning_memsave.core.memory import is_host
from tests.helpers import seed_torch
from tests.techniques.races import Races

LABELS = torch.zeros(4, dtype=torch.long)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(8, 8), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(x).tanh()
        return x, self.head(x)


class Heads(nn.Module):
    """Gives the logits of each block, and of a last head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 32)

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for block in self.blocks:
            x, logits = block(x)
            outputs.append(logits)
        return [*outputs, self.head(x)]


def batch(number: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def loss_of(outputs: list[Tensor]) -> Tensor:
    losses = [nn.functional.cross_entropy(logits, LABELS) for logits in outputs]
    return torch.stack(losses).sum()


def run(what: str | None) -> list[Tensor]:
    """Evaluate, two batches at a time; train; evaluate again."""
    seed_torch(0)
    model = Heads()
    names = [name for name, m in model.named_modules() if name.endswith("head")]
    handles: list[Any] = [ChunkedCrossEntropy(heads=tuple(names)).apply(model)]
    if what is not None:
        handles.append(Offloading(what).apply(model))
    found = []
    for _ in range(2):
        with torch.no_grad():
            two = [model(batch(number)) for number in (1, 2)]
            found += [loss_of(two[0]), loss_of(two[1])]
        loss = loss_of(model(batch(3)))
        loss.backward()
        found.append(loss.detach())
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
    for handle in reversed(handles):
        handle.undo()
    return [*found, *(p.detach() for p in model.parameters())]


# Backward watches what blocks return, for which their logits have to be there.
@pytest.mark.filterwarnings("ignore:.chunked_cross_entropy. saves nothing")
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("what", ["optimizer", "parameters"])
def test_losses_are_those_without_offloading(what, is_late):
    """But for the rounding of logits that are there against that of chunks."""
    expected = run(None)
    with Races(is_late=is_late).running():
        found = run(what)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("what", ["optimizer", "parameters"])
def test_weights_leave_when_nothing_uses_them(what):
    model = Heads()
    ChunkedCrossEntropy(heads="head").apply(model)
    Offloading(what).apply(model)
    weight = model.head.weight
    with torch.no_grad():
        *_, logits = model(batch(0))
        assert not is_host(weight.untyped_storage())
        assert all(is_host(p.untyped_storage()) for p in model.blocks.parameters())
        loss = nn.functional.cross_entropy(logits, LABELS)
        assert not is_host(weight.untyped_storage())
        del logits
    assert is_host(weight.untyped_storage())
    assert loss.isfinite()


def test_logits_from_before_a_change_are_refused():
    model = Heads()
    ChunkedCrossEntropy(heads="head").apply(model)
    Offloading("optimizer").apply(model)
    with torch.no_grad():
        *_, logits = model(batch(0))
        model.load_state_dict(model.state_dict())
        with pytest.raises(RuntimeError, match="the weights have changed since"):
            nn.functional.cross_entropy(logits, LABELS)
