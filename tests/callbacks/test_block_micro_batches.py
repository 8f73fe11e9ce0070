"""Blocks on a few samples at a time in a Trainer: what it says, and memory to the byte."""

from typing import Any

import pytest
import torch

from lightning_memsave import BlockMicroBatching, MemSaveCallback
from lightning_memsave.errors import ConfigurationError, IncompatibleError
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.techniques.offloading.technique import Offloading
from tests.callbacks.lit import fit, make_lit, peak_of, quiet, rows_of
from tests.callbacks.test_offload import silent_lit

pytestmark = pytest.mark.usefixtures("no_prediction")


def only(**settings: Any) -> MemSaveCallback:
    given: dict[str, Any] = {"preset": "off", "activation_checkpointing": "all"}
    given |= {"micro_batch_size": MicroBatching(1, of="blocks")}
    return quiet(**(given | settings))


def test_trains_and_validates_as_without(package):
    lit, callback = make_lit(package, "still"), only(blocks="Block")
    how: dict[str, Any] = {"package": package, "val_check_interval": 2}
    plain, saving = fit(lit, **how), fit(lit, callback, **how)
    assert saving[0] == pytest.approx(plain[0], rel=1e-5)
    row = rows_of(callback)["micro_batch_size"]
    assert (row.status, row.exactness) == ("on", "rounding")
    assert row.details == ("4 blocks run on 1 sample at a time",)
    names = [row.name for row in callback.rows]
    assert names.count("micro_batch_size") == 1
    assert "evaluation" not in names


@pytest.mark.parametrize("offload", [None, "parameters", True])
@pytest.mark.parametrize("kind", ["all", "nested"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_is_predicted_to_the_byte(offload, kind, precision):
    callback = only(
        offload=Offloading(offload, min_bytes=1) if offload else None,
        activation_checkpointing=kind,
        predict=60,
    )
    fit(silent_lit("dropout"), callback, precision=precision)
    assert callback.prediction is not None
    assert callback.prediction.peak_bytes == peak_of(callback)


def test_details_that_do_not_go_with_blocks_are_refused_together():
    with pytest.raises(ConfigurationError, match="4 problems") as refusal:
        MicroBatching(of="blocks", loss_weight="tokens", split_batch=torch.split, evaluation=False)
    for name in ("micro_batch_size='halve'", "loss_weight='tokens'", "split_batch=", "evaluation="):
        assert f"`{name}" in str(refusal.value)
    with pytest.raises(ConfigurationError, match=r'Did you mean `blocks`.*`of="blocks"`'):
        MicroBatching(1, of="block")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r'`blocks=.Block.`: .*Write `of="blocks"` too'):
        MicroBatching(1, blocks="Block")
    with pytest.raises(ConfigurationError, match=r"Write `micro_batch_size=MicroBatching\(2, of"):
        only(micro_batch_size=BlockMicroBatching(2))


def test_blocks_are_those_of_the_technique_or_of_the_callback():
    lit = make_lit(model="still")
    callback = only(activation_checkpointing=None, blocks="Block")
    fit(lit, callback)
    assert rows_of(callback)["micro_batch_size"].details == ("4 blocks run on 1 sample at a time",)
    assert callback.effective_arguments()["blocks"] == "Block"
    own = only(micro_batch_size=MicroBatching(1, of="blocks", blocks=".*"), blocks="Block")
    with pytest.raises(IncompatibleError, match="no repeated block"):
        fit(lit, own)


def test_mixing_blocks_are_refused_by_name():
    named = r'`MicroBatching\(1, of="blocks"\)` with `model\.b'
    with pytest.raises(IncompatibleError, match=named):
        fit(make_lit(model="batch_norm"), only())
    with pytest.raises(ConfigurationError, match="is rounding, which `exactness='bitwise'`"):
        only(exactness="bitwise")
    with pytest.raises(ConfigurationError, match="`micro_batch_size=0` is not a batch size"):
        MicroBatching(0, of="blocks")
    with pytest.raises(ConfigurationError, match=r'MicroBatching\(8, of="blocks"\)'):
        only(block_micro_batch_size=1)
