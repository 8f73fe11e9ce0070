"""Subclass CheckpointedTransformer with your own network and training step.

A byte-level language model is trained on the source code of Python's standard library. Optimizer,
warm-up, schedule and memory saving come from `CheckpointedTransformer`, so the Trainer needs no
callback.
"""

import argparse
import math
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import CheckpointedTransformer

NUM_BYTES = 256


class ByteNetwork(nn.Module):
    """A causal transformer."""

    def __init__(self, width: int, num_layers: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.position_embedding = nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits (B, T, 256) for B rows of T bytes."""
        num = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(num, device=text.device)
        hidden = self.embedding(text) + self.position_embedding.weight[:num]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class ByteModel(CheckpointedTransformer):
    """The network with its own steps."""

    def __init__(
        self, width: int = 128, num_layers: int = 6, length: int = 256, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.save_hyperparameters()
        self.model = ByteNetwork(width, num_layers, length)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch, and log it in bits per byte."""
        loss = self._loss(batch)
        self.log("bits_per_byte", loss / math.log(2), prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the loss of held-out text."""
        self.log("val_bits_per_byte", self._loss(batch) / math.log(2), prog_bar=True)

    def _loss(self, batch: list[Tensor]) -> Tensor:
        text = batch[0].long()
        return nn.functional.cross_entropy(self.model(text[:, :-1]).mT, text[:, 1:])


def make_loaders(num_batches: int, length: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Read source code for training, and a tenth of that from other files for validation."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))
    train = _read(paths[10:], num_batches * 16, length)
    held_out = _read(paths[:10], num_batches * 16 // 10, length)
    return DataLoader(train, 16, shuffle=True), DataLoader(held_out, 16)


def _read(paths: list[Path], num_rows: int, length: int) -> TensorDataset:
    text = b"".join(path.read_bytes() for path in paths)
    num_rows = min(num_rows, len(text) // (length + 1))
    count = num_rows * (length + 1)  # one more than is read: the last one is only asked for
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8, count=count)
    return TensorDataset(rows.view(num_rows, length + 1))


def main() -> None:
    """Train, and load the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few steps of a small model")
    is_small = parser.parse_args().small

    seed_everything(0)
    length, num_batches = (32, 4) if is_small else (256, 300)
    sizes = {"width": 64, "num_layers": 2} if is_small else {"width": 128, "num_layers": 6}
    memsave = {"activation_checkpointing": "all", "micro_batch_size": 8}
    lit = ByteModel(length=length, **sizes, learning_rate=1e-3, memsave=memsave)
    trainer = Trainer(max_epochs=1, logger=False)
    trainer.fit(lit, *make_loaders(num_batches, length))
    bits = trainer.callback_metrics["val_bits_per_byte"]
    print(f"bits per byte of held-out text: {bits:.2f}")

    path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    loaded = ByteModel.load_from_checkpoint(path)
    same = all(torch.equal(a, b.cpu()) for a, b in _pairs(loaded.cpu(), lit))
    print(f"loaded from {Path(path).name}: the same weights: {same}")


def _pairs(one: nn.Module, other: nn.Module) -> Any:
    return zip(one.state_dict().values(), other.state_dict().values(), strict=True)


if __name__ == "__main__":
    main()
