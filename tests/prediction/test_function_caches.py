"""No fake tensor of a prediction is met by training."""

import copy
import functools
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSaveCallback, predict_memory
from tests.callbacks.lit import LIGHTNING, make_trainer


def kept(maxsize: int) -> Any:
    """Wrap as transformers does: the function with a cache is in a closure."""

    def decorator(function: Any) -> Any:
        cached = functools.lru_cache(maxsize)(function)

        @functools.wraps(function)
        def wrapper(*arguments: Any) -> Any:
            return cached(*arguments)

        return wrapper

    return decorator


@kept(4)  # type: ignore[untyped-decorator]
def positions(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.arange(length, device=device) / length, torch.ones(length, device=device)


KEPT: dict[str, Tensor] = {}


class Lit(LightningModule):
    def __init__(self, *, in_global: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1)
        self.in_global = in_global
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor) -> Tensor:
        if self.in_global:
            found = KEPT.setdefault("positions", torch.ones(8))
        else:
            found = positions(8, batch.device)[0]
        loss = self.head(batch + found).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(lit: Lit, *callbacks: MemSaveCallback) -> list[float]:
    trainer = make_trainer(LIGHTNING, *callbacks, max_steps=2)
    torch.manual_seed(0)
    trainer.fit(lit, DataLoader(torch.ones(8, 8), batch_size=4))  # type: ignore[arg-type]
    return [loss.item() for loss in lit.losses]


def test_functions_forget_what_they_returned_for_a_prediction() -> None:
    lit = Lit()
    other = copy.deepcopy(lit)
    saving = fit(lit, MemSaveCallback(report=False))
    assert saving == fit(other)


def test_functions_keep_what_they_returned_for_training() -> None:
    lit = Lit()
    real = positions(8, lit.device)[0]
    predict_memory(lit, torch.ones(4, 8))
    assert positions(8, lit.device)[0] is real


def test_training_that_meets_a_fake_tensor_fails() -> None:
    KEPT.clear()
    with pytest.raises(AssertionError) as failure:
        fit(Lit(in_global=True), MemSaveCallback(report=False))
    assert "one of them is in a global variable" in " ".join(failure.value.__notes__)
    KEPT.clear()
    fit(Lit(in_global=True), MemSaveCallback(report=False, predict=False, micro_batch_size=None))
    KEPT.clear()
