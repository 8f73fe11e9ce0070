"""One process of several is predicted without the others; DDP, compared with two that train."""

import gc
from typing import Any

import pytest
import torch

from lightning_memsave import (
    FSDP2Strategy,
    MemoryPrediction,
    MemSaveCallback,
    predict_memory,
)
from lightning_memsave.errors import IncompatibleError
from tests.callbacks.lit import summary_of
from tests.callbacks.ranks import RANKS, Notes, make_report
from tests.trainer.test_fsdp2 import Tied, batches, lit, off, train, without_validation

pytestmark = pytest.mark.slow

BUDGET = "1350KiB"  # of 1,408 KiB
PLANNED = ("activation_checkpointing", "optimizer_in_backward")
# With accumulation the counter, which begins anew in each batch, does not know the buckets:
# tests/virtual_gpu/test_ddp_prediction.py has it.
MEASURED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "8bit": {"optimizer": "8bit"},
    "activation_checkpointing": {"activation_checkpointing": "all"},
    "micro_batch_size": {"micro_batch_size": 1},
}


def of_peaks() -> Notes:
    notes: Notes = {}
    for name, settings in MEASURED.items():
        callback = off(**settings)
        gc.collect()  # what earlier fits have left
        train(without_validation(), callback, strategy="ddp", limit_val_batches=0)
        found = callback.prediction
        notes[name] = [summary_of(callback).peak_bytes, found and found.peak_bytes]
    return notes


def of_budgets() -> Notes:
    """A plan of FSDP2 beside the process group that trains, and a fit with its settings."""
    notes: Notes = {}
    for reshard in (True, False):
        for name in ("planned", "written"):
            strategy = FSDP2Strategy(reshard_after_forward=reshard)
            settings = {"budget": BUDGET} if name == "planned" else notes["settings"]
            callback = MemSaveCallback(report=False, exactness="bitwise", **settings)
            gc.collect()
            module = lit()
            module.log = lambda *args, **kwargs: None
            found, _ = train(module, callback, strategy=strategy, limit_val_batches=0)
            notes[f"{name} {reshard}"] = found
            if name == "planned":
                assert callback.plan is not None
                plan = callback.plan.plan
                peak_bytes = summary_of(callback).peak_bytes
                notes[f"plan {reshard}"] = [plan.how, plan.device_bytes, peak_bytes]
                notes["settings"] = {n: plan.settings[n] for n in PLANNED} | {"preset": "off"}
    return notes


SCENARIOS = {"peaks": of_peaks, "budgets": of_budgets}


@pytest.fixture(scope="module")
def report(request):
    return make_report(request)


def predicted(settings: dict[str, Any], world_size: int) -> MemoryPrediction:
    return predict_memory(
        without_validation(),
        batches(0)[0],
        settings={"preset": "off", **settings},
        device="cpu",
        strategy="ddp",
        world_size=world_size,
    )


@pytest.mark.parametrize("name", MEASURED)
def test_a_process_of_ddp_is_predicted_without_the_others(report, name):
    found = predicted(MEASURED[name], RANKS)
    assert not torch.distributed.is_initialized()
    (first, of_fit), (second, _) = (notes[name] for notes in report("peaks"))
    assert first == second == of_fit == found.peak_bytes
    assert found.settings["ddp"] == f"1 of {RANKS} processes"


def test_ddp_holds_a_copy_of_all_gradients_in_each_process():
    alone = predict_memory(
        without_validation(), batches(0)[0], settings={"preset": "off"}, device="cpu"
    )
    one, many = (predicted({}, number) for number in (1, 8))
    assert one.peak_bytes == many.peak_bytes
    assert one.peak_bytes - alone.peak_bytes == alone.peak.parameter_bytes


def test_what_ddp_refuses_is_refused_in_a_prediction():
    with pytest.raises(IncompatibleError, match="`DDPStrategy` keeps all gradients in its buckets"):
        predicted({"optimizer_in_backward": True}, RANKS)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_fit_of_fsdp2_is_planned_for_its_budget(report, reshard):
    """Also with what the strategy was given; it trains as with the plan's settings by name."""
    for notes in report("budgets"):
        how, device_bytes, peak_bytes = notes[f"plan {reshard}"]
        assert "activation_checkpointing=" in how
        assert device_bytes <= 1350 * 2**10
        # At times a thread of gloo still holds what it has sent of a block.
        block_bytes = sum(p.nbytes for p in Tied().blocks[0].parameters())
        assert 0 <= peak_bytes - device_bytes <= block_bytes
        assert notes[f"planned {reshard}"] == notes[f"written {reshard}"]
