"""Training with it needs less memory than without, and no logits are kept for metrics."""

from typing import Any

import pytest
import torch
from transformers import BertConfig

from lightning_memsave import MemSaveCallback
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.modules.lightning_pytorch import CheckpointedTransformer
from lightning_memsave.units import MIB
from tests.callbacks.lit import make_trainer
from tests.modules.tiny import SIZES, VOCAB, loader

DEEP = BertConfig(**SIZES | {"num_hidden_layers": 12, "intermediate_size": 256})
OFF = {"activation_checkpointing": None, "optimizer": None, "precision": None}


def peak_of_fit(**memsave: Any) -> Any:
    """What the callback of the module measured in a short fit."""
    torch.manual_seed(1)
    lit: Any = CheckpointedTransformer(DEEP, task="masked_lm", memsave={"report": False} | memsave)
    data = loader("masked_lm", length=32, batch_size=16, num_tokens=64)
    trainer = make_trainer(max_epochs=1, limit_val_batches=0)
    trainer.fit(lit, data, data)
    [callback] = [c for c in trainer.callbacks if isinstance(c, MemSaveCallback)]
    assert callback.monitor is not None
    return callback.monitor.summary


@pytest.mark.slow
@pytest.mark.usefixtures("any_saving_counts")
def test_a_fit_needs_less_memory_with_it_than_without():
    plain, checkpointed = (
        peak_of_fit(**OFF),
        peak_of_fit(**OFF | {"activation_checkpointing": "all"}),
    )
    everything = peak_of_fit(precision=None)
    assert plain.by_category["activation"] > 0.5 * plain.peak_bytes
    # Of 12 blocks, what is inside one of them and the inputs of all remain.
    assert checkpointed.by_category["activation"] < 0.25 * plain.by_category["activation"]
    assert checkpointed.peak_bytes < 0.4 * plain.peak_bytes
    assert everything.by_category["optimizer_state"] < (
        0.5 * checkpointed.by_category["optimizer_state"]
    )
    assert everything.peak_bytes < checkpointed.peak_bytes


@pytest.mark.parametrize("memsave", [None, {"report": False}], ids=["plain", "memsave"])
def test_nothing_of_a_training_batch_is_alive_after_its_step(memsave):
    lit: Any = CheckpointedTransformer(DEEP, task="masked_lm", memsave=memsave)
    batch = next(iter(loader("masked_lm", batch_size=16)))
    lit.log = lambda *_, **__: None
    with LiveTensors(lit) as live:
        before_bytes = live.live_bytes
        loss = lit.training_step(batch, 0)
        assert live.live_bytes > before_bytes + MIB
        del loss
        logits_bytes = 16 * 12 * VOCAB * 4
        assert live.live_bytes < before_bytes + logits_bytes / 8  # sums of the metric and the like
