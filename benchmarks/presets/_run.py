"""Predict or train one model with one preset in this process, and print bytes as JSON."""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks._models import BASE, SMALL, MaskedLM, masked_batch
from benchmarks._training import LanguageModel, fit
from lightning_memsave import MemSaveCallback, predict_memory


@dataclass(frozen=True)
class Model:
    """A language model and its batch.

    Args:
        build: Makes the model.
        vocab_size: Its words.
        batch_size: Sequences.
        num_tokens: Tokens in each.
        is_masked: Whether it is asked for masked tokens, or for the next one of each.
    """

    build: Callable[[], nn.Module]
    vocab_size: int
    batch_size: int
    num_tokens: int
    is_masked: bool

    def batch(self) -> dict[str, Tensor]:
        """Make a batch of random tokens."""
        batch = masked_batch(self.vocab_size, self.batch_size, self.num_tokens)
        if self.is_masked:
            return batch
        return {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}


def gpt2(vocab_size: int, width: int, num_layers: int, num_heads: int) -> Callable[[], nn.Module]:
    config: Any = GPT2Config(
        vocab_size=vocab_size,
        n_embd=width,
        n_layer=num_layers,
        n_head=num_heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    return lambda: GPT2LMHeadModel(config).train()


MODELS = {
    "RoBERTa 84M, 64 x 128": Model(BASE.build, 52_000, 64, 128, is_masked=True),
    "RoBERTa 1.1B, 64 x 128": Model(
        MaskedLM(52_000, 1500, 48, 25, 4096).build, 52_000, 64, 128, is_masked=True
    ),
    "GPT-2 XL, 8 x 1024": Model(gpt2(50_257, 1600, 48, 25), 50_257, 8, 1024, is_masked=False),
    # The same shapes in small: an eighth of the width, six blocks.
    "RoBERTa 1.1B in small": Model(
        MaskedLM(6_500, 200, 6, 5, 512).build, 6_500, 16, 128, is_masked=True
    ),
    "GPT-2 XL in small": Model(gpt2(6_282, 200, 6, 5), 6_282, 2, 512, is_masked=False),
    "RoBERTa 7M, 16 x 128": Model(SMALL.build, SMALL.vocab_size, 16, 128, is_masked=True),
}
"""By name."""

SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {"preset": "off"},
    **{preset: {"preset": preset} for preset in ("classic", "bitwise", "single_gpu", "offload")},
}
"""What `MemSaveCallback` is told, by name."""


class Losses(Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep it."""
        self.found.append(outputs["loss"].item())


def predict(model: str, setting: str) -> dict[str, Any]:
    """Predict a step on CUDA.

    Args:
        model: Name of the model.
        setting: Name of the settings.

    Returns:
        ``peak_bytes`` of tensors and cuBLAS's workspace, and ``reserved_bytes`` of the allocator.
    """
    chosen = MODELS[model]
    found = predict_memory(chosen.build, chosen.batch(), settings=SETTINGS[setting])
    return {
        "peak_bytes": found.peak_bytes,
        "reserved_bytes": found.reserved_bytes,
        "by_category": found.peak.by_category(),
        "seconds": found.seconds,
    }


def train(model: str, setting: str, **beside: Any) -> dict[str, Any]:
    """Train two steps on the CPU, predicted and counted.

    Args:
        model: Name of the model.
        setting: Name of the settings.
        beside: Further arguments of `MemSaveCallback`.

    Returns:
        ``predicted_bytes``, ``counted_bytes`` and the losses.
    """
    chosen = MODELS[model]
    callback = MemSaveCallback(**SETTINGS[setting], **beside, predict=300, report=False)
    batch = chosen.batch()
    module = LanguageModel(chosen.build())
    losses = Losses()
    fit(module, [batch, batch], [callback, losses])
    assert callback.prediction is not None, "there is time enough for it"
    assert callback.monitor is not None, "it is on by default"
    summary = callback.monitor.summary
    assert summary is not None, "the fit is over"
    return {
        "predicted_bytes": callback.prediction.peak_bytes,
        "counted_bytes": summary.peak_bytes,
        "by_category": dict(summary.by_category),
        "losses": losses.found,
        "seconds": summary.seconds,
    }


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.presets._run", description=__doc__)
    parser.add_argument("what", choices=("predict", "train"))
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("setting", choices=SETTINGS)
    options = parser.parse_args()
    torch.set_num_threads(2)
    run = predict if options.what == "predict" else train
    print(json.dumps(run(options.model, options.setting)))


if __name__ == "__main__":
    main()
