"""Blocks on a few samples at a time in a Trainer: what it says, and memory to the byte."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memsave import MemSaveCallback
from lightning_memsave.errors import ConfigurationError, IncompatibleError
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.techniques.offloading.technique import Offloading
from tests.callbacks.lit import PACKAGES, fit, make_lit, rows_of
from tests.callbacks.test_offload import peak_of, silent_lit

pytestmark = pytest.mark.usefixtures("no_prediction")


def only(**settings: Any) -> MemSaveCallback:
    quiet: dict[str, Any] = {"predict": False, "report": False}
    given: dict[str, Any] = {
        "preset": "off",
        "block_micro_batch_size": 1,
        "activation_checkpointing": "all",
    }
    return MemSaveCallback(**(given | {"block_micro_batch_size": 1} | quiet | settings))


@pytest.mark.parametrize("package", PACKAGES)
def test_trains_and_validates_as_without(package):
    lit, callback = make_lit(PACKAGES[package], "still"), only(blocks="Block")
    how: dict[str, Any] = {"package": PACKAGES[package], "val_check_interval": 2}
    plain, saving = fit(lit, **how), fit(lit, callback, **how)
    assert saving[0] == pytest.approx(plain[0], rel=1e-5)
    row = rows_of(callback)["block_micro_batch_size"]
    assert (row.status, row.exactness) == ("on", "rounding")
    assert row.details == ("4 blocks run on 1 sample at a time",)


@pytest.mark.parametrize("offload", [None, "parameters", True])
@pytest.mark.parametrize("kind", ["all", "nested"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.turns(3)
def test_is_predicted_to_the_byte(offload, kind, precision):
    callback = only(
        offload=Offloading(offload, min_bytes=1) if offload else None,
        activation_checkpointing=kind,
        predict=60,
    )
    fit(silent_lit("dropout"), callback, precision=precision)
    assert callback.prediction is not None
    assert callback.prediction.peak_bytes == peak_of(callback)


def test_prediction_beside_micro_batches():
    """Micro-batches of the model, each of which passes blocks in parts."""
    callback = only(micro_batch_size=2, offload="parameters", predict=60)
    fit(silent_lit("dropout"), callback)
    assert callback.prediction is not None
    assert callback.prediction.peak_bytes == peak_of(callback)


@pytest.mark.filterwarnings("ignore:Out of memory with 4 samples")
def test_a_batch_that_ran_out_of_memory_is_repeated():
    lit = make_lit(model="still")
    failed: list[int] = []

    def fail(module: Any, args: Any, output: Tensor) -> None:
        if module.training and len(args[0]) == 2 and not failed:
            failed.append(len(args[0]))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    plain = fit(lit)
    lit.model.blocks[2].up.register_forward_hook(fail)
    callback = only(block_micro_batch_size=2, micro_batch_size=MicroBatching("auto"), offload=True)
    saving = fit(lit, callback)
    assert saving[0] == pytest.approx(plain[0], rel=1e-5)
    assert rows_of(callback)["block_micro_batch_size"].status == "on"


def test_mixing_blocks_are_refused_by_name():
    with pytest.raises(IncompatibleError, match=r"`block_micro_batch_size=1` with `model\.blocks"):
        fit(make_lit(model="batch_norm"), only())
    with pytest.raises(ConfigurationError, match="is rounding, which `exactness='bitwise'`"):
        only(exactness="bitwise")
    with pytest.raises(ConfigurationError, match="`block_micro_batch_size=0` is not a number"):
        only(block_micro_batch_size=0)
