"""Train all weights of GPT-2 XL on a GPU with 12 GB, in a computer with 16 GB of memory.

Weights, optimizer state and what blocks save for backward wait in the memory of the host: float32
weights as two halves of 16 bits, state in 8 bits, and of gradients those of two blocks, as the host
updates each block while backward goes on. First both memories are predicted, which needs no GPU.
Without one, a small GPT-2 is trained in the same way.
"""

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_memsave import MemSaveCallback, predict_memory

XL: dict[str, Any] = {"n_embd": 1600, "n_layer": 48, "n_head": 25}
SMALL: dict[str, Any] = {
    "vocab_size": 2048,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
}
SETTINGS: dict[str, Any] = {
    "preset": "offload",
    "offload": "parameters+activations",
    "low_precision_weights": "split",
    "optimizer": "8bit",
    "optimizer_in_backward": True,
    "host_budget": "13GiB",
}
"""What `MemSaveCallback` is told."""


class LanguageModel(pl.LightningModule):
    """An ordinary module.

    Args:
        sizes: Of the model, as in ``GPT2Config``.
    """

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))

    def training_step(self, tokens: Tensor) -> Tensor:
        """Predict each next token."""
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use the ordinary optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def predict() -> None:
    """Print what a step of GPT-2 XL needs with 8 x 1,024 tokens."""
    tokens = torch.zeros(8, 1024, dtype=torch.int64)
    found = predict_memory(
        lambda: LanguageModel(**XL), tokens, settings=SETTINGS, gpu="RTX-3060-12GB"
    )
    print(found)
    print(f"memory of the host: {found.peak.host_bytes / 1e9:.2f} GB")


def main() -> None:
    """Predict, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="train the small model only")
    is_small = parser.parse_args().small
    if not is_small:
        predict()
    sizes = SMALL if is_small or not torch.cuda.is_available() else XL
    length = sizes.get("n_positions", 1024)
    tokens: Any = torch.randint(sizes.get("vocab_size", 50257), (32, length))
    trainer = pl.Trainer(
        max_epochs=2,
        callbacks=[MemSaveCallback(**SETTINGS)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(LanguageModel(**sizes), DataLoader(tokens, batch_size=8))
    print(f"loss of the last batch: {float(trainer.callback_metrics['loss']):.2f}")


if __name__ == "__main__":
    main()
