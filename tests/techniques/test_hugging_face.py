"""Every architecture family of transformers trains with the bare callback and `stack="bitwise"`."""

import datetime
import math
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memsave import MemSaveCallback
from lightning_memsave.errors import NoEffectWarning
from lightning_memsave.techniques.activation_checkpointing import ActivationCheckpointing
from tests.helpers import assert_bitwise_equal, seed_all, train
from tests.techniques.hugging_face import CLASSES, FAMILIES, NOT_TRAINED, Tiny
from tests.techniques.hugging_face_inputs import make_inputs

# What models and torch say of themselves is no matter here.
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 3
# They crashed in the first step once: layers of the first three keep a state that a cache would
# hold, and the last reads a cache that it asks an inner model for.
ALWAYS = ("bamba", "lfm2", "recurrent_gemma", "pi0")
# `make test` tries some of the others, other ones each day.
NUM_SLICES = math.ceil(len(FAMILIES) / 10)
TODAY = FAMILIES[datetime.date.today().toordinal() % NUM_SLICES :: NUM_SLICES]
PARAMS = [
    pytest.param(family, marks=() if family in (*ALWAYS, *TODAY) else pytest.mark.exhaustive)
    for family in FAMILIES
]


class Lit(LightningModule):
    def __init__(self, family: str) -> None:
        super().__init__()
        self.tiny = Tiny(family)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any) -> Tensor:
        loss = self.tiny(batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def fit(family: str, callback: MemSaveCallback | None) -> Lit:
    lit = Lit(family)
    batches: Any = [make_inputs(lit.tiny.model, step) for step in range(STEPS)]
    trainer = Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if callback is None else [callback],
    )
    seed_all(7)
    trainer.fit(lit, DataLoader(batches, batch_size=None))
    return lit


@pytest.mark.parametrize("family", PARAMS)
def test_checkpointing_trains_bitwise_equal(family):
    model = Tiny(family)

    def batch(step: int) -> Any:
        return make_inputs(model.model, step)

    plain = train(model, batch, make_optimizer=sgd)
    assert all(loss.isfinite() for loss in plain.losses)
    assert_bitwise_equal(plain, train(model, batch, ActivationCheckpointing(), make_optimizer=sgd))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)


@pytest.mark.predicts
@pytest.mark.parametrize("family", PARAMS)
def test_the_bare_callback_trains(family):
    losses = fit(family, MemSaveCallback(report=False)).losses
    assert len(losses) == STEPS
    assert all(loss.isfinite() for loss in losses)


@pytest.mark.parametrize("family", PARAMS)
def test_the_bitwise_stack_trains_bitwise_equal(family):
    plain, saving = (fit(family, None), fit(family, MemSaveCallback(stack="bitwise", report=False)))
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, saving.state_dict()[name]), name


def test_blocks_whose_cache_the_model_around_them_reads_run_plainly():
    model = Tiny("pi0").train()
    batch = make_inputs(model.model)
    with ActivationCheckpointing().apply(model) as handle:
        assert "6 x GemmaDecoderLayer" in handle.summary
        with pytest.warns(NoEffectWarning, match="another part of the model reads"):
            model(batch).backward()


def test_every_family_is_trained_or_in_the_table():
    assert sorted([*FAMILIES, *NOT_TRAINED]) == sorted(CLASSES)
    assert all(NOT_TRAINED.values())
