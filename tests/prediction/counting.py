"""Predict and count the same two steps."""

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_memsave import (
    ActivationCheckpointing,
    AttentionKernel,
    ChunkedCrossEntropy,
    MemSaveCallback,
)
from lightning_memsave.api import predict_memory
from lightning_memsave.callbacks.settings.micro_batch_size import MicroBatchSetting
from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.core.technique import Technique
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.techniques.micro_batching.loss_observed import Proof
from lightning_memsave.techniques.micro_batching.loss_weights import Weighting
from lightning_memsave.trainer.nested_fit import quiet
from tests.callbacks.lit import make_trainer
from tests.prediction.architectures import SETTINGS, Architecture


class _Batches(Dataset[Any]):
    """Makes each batch anew, as a DataLoader does."""

    def __init__(self, make: Any, length: int) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make()


class _Counter(pl.Callback):
    """Counts live tensors without a break from the first batch to the last."""

    live: LiveTensors | None = None

    def __init__(self, until_end: contextlib.ExitStack) -> None:
        self.until_end = until_end

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.live is None:
            counted = LiveTensors(pl_module, trainer.optimizers, "cpu")
            self.live = self.until_end.enter_context(counted)
        self.live.track_input(batch)

    def on_train_end(self, trainer, pl_module):
        self.until_end.close()


def settings_for(architecture: Architecture, name: str) -> dict[str, Any] | None:
    """What of a setting the architecture takes; none if nothing is left of it."""
    settings = {
        k: v
        for k, v in SETTINGS[name].items()
        if k not in architecture.without and _finds_something(architecture, k, v)
    }
    return settings if settings or not SETTINGS[name] else None


# A value that finds nothing to change is refused.
def _finds_something(architecture: Architecture, name: str, value: Any) -> bool:
    makers: dict[str, Callable[[], Technique[nn.Module]]] = {
        "activation_checkpointing": lambda: ActivationCheckpointing(value),
        "chunked_cross_entropy": ChunkedCrossEntropy,
        "attention": lambda: AttentionKernel(value),
    }
    if name not in makers:
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(makers[name]().apply(architecture.make()).changes)


def count(architecture: Architecture, settings: Mapping[str, Any]) -> int:
    """Bytes at the peak of two real optimizer steps."""
    return count_by_category(architecture, settings).total_bytes


def count_by_category(architecture: Architecture, settings: Mapping[str, Any]) -> MemoryBreakdown:
    """What there is at that peak."""
    num_batches = 2 * settings.get("accumulate_grad_batches", 1)
    proven = Proof((Weighting("weighted equally", lambda part: 1.0),), is_settled=True)
    with quiet(), contextlib.ExitStack() as until_end:  # closed whatever the fit raises
        # A prediction is of the training steps, without the proof before the first one.
        patch = until_end.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(MicroBatchSetting, "prove", lambda *_: proven)
        counter = _Counter(until_end)
        off: dict[str, Any] = {"preset": "off", "report": False, "predict": False}
        callbacks = MemSaveCallback(**off | dict(settings)), counter
        trainer = make_trainer(pl, *callbacks, **dict(architecture.trainer_arguments))
        torch.manual_seed(0)
        batches = _Batches(architecture.batch, num_batches)
        trainer.fit(architecture.make(), DataLoader(batches, batch_size=None))
    return counter.live.peak


def predict(architecture: Architecture, settings: Mapping[str, Any]) -> MemoryPrediction:
    return predict_memory(
        architecture.make,
        architecture.batch,
        settings=settings,
        device="cpu",
        trainer_arguments=dict(architecture.trainer_arguments),
    )
