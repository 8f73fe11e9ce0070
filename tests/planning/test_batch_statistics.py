"""Micro-batches of a network with batch normalisation: approximate, and where nothing else fits."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_memsave import InfeasiblePlanError, MemSaveCallback, plan_memory
from lightning_memsave.api import check_training, explain_memory
from lightning_memsave.errors import ExactnessWarning
from lightning_memsave.techniques.micro_batching.technique import BATCH_STATISTICS
from tests.callbacks.lit import fit, make_lit, rows_of
from tests.planning.plans import ConvBlock

CHANNELS = 8


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(ConvBlock(CHANNELS, CHANNELS) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x.reshape(len(x), -1)[:, :CHANNELS, None, None].expand(-1, -1, 32, 32)
        return self.net(images).square().mean()


BATCH = torch.ones(16, CHANNELS)
EXACT = {"activation_checkpointing": None, "optimizer": None, "low_precision_weights": None}
ONLY_PARTS = {**EXACT, "precision": "32-true", "offload": None, "optimizer_in_backward": None}


def plan(budget, **arguments):
    options = {"settings": ONLY_PARTS} | arguments
    return plan_memory(Images, BATCH, budget=budget, device="cpu", **options)


@pytest.fixture(scope="module")
def whole():
    return plan("1GiB").plan


@pytest.mark.slow
def test_a_plan_with_them_is_approximate_and_says_why(whole):
    found = plan(whole.device_bytes // 2)
    assert isinstance(found.plan.micro_batch_size, int)
    assert found.plan.exactness == "approximate"
    text = " ".join(str(found).split())
    assert BATCH_STATISTICS in text
    assert "not advised" in text


@pytest.mark.slow
def test_a_given_size_is_approximate_and_named():
    settings = {**ONLY_PARTS, "micro_batch_size": 4}
    found = plan("1GiB", settings=settings)
    assert found.plan.exactness == "approximate"
    assert BATCH_STATISTICS in " ".join(str(found).split())


@pytest.mark.slow
def test_nothing_that_only_rounds_has_them(whole):
    with pytest.raises(InfeasiblePlanError, match='`exactness="approximate"`'):
        plan(whole.device_bytes // 2, exactness="rounding")


@pytest.mark.slow
def test_they_are_no_rival_of_what_is_exact(whole):
    settings = {n: v for n, v in ONLY_PARTS.items() if n != "activation_checkpointing"}
    found = plan(int(0.9 * whole.device_bytes), settings=settings)
    assert found.plan.micro_batch_size == "auto"
    assert found.plan.exactness == "bitwise"
    assert not any(isinstance(other.micro_batch_size, int) for other in found.frontier[:2])


def test_explain_offers_them_last_and_as_approximate():
    remedies = explain_memory(Images, BATCH, gpu="T4").remedies
    parts = [remedy for remedy in remedies if remedy.name.startswith("micro-batches")]
    assert parts
    assert [*remedies[-len(parts) :]] == parts
    assert {remedy.exactness for remedy in parts} == {"approximate"}
    assert all(BATCH_STATISTICS in remedy.cost for remedy in parts)


def test_doctor_says_the_same():
    found = check_training(Images, settings={"micro_batch_size": 4}, environment={})
    (why,) = (p.why for p in found.problems if p.check == "batch_statistics")
    assert BATCH_STATISTICS in why


@pytest.mark.slow
def test_a_fit_with_such_a_plan_warns_as_one_with_a_size(whole):
    # A quarter of the samples.
    arguments: Any = {**ONLY_PARTS, "budget": whole.device_bytes // 8}
    callback = MemSaveCallback(**arguments)
    with pytest.warns(ExactnessWarning, match=r"micro_batch_size=\d.*batch normalisation"):
        fit(make_lit(model=Images()), callback, limit_train_batches=1)
    rows = rows_of(callback)
    assert rows["micro_batch_size"].exactness == rows["budget"].exactness == "approximate"
