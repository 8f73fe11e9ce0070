"""An ordinary project that several examples train: a transformer that learns to sort."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Sorter(LightningModule):
    """Predicts the sorted order of a row of digits."""

    def __init__(self, width: int = 64, num_layers: int = 4, length: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.digit_embedding = nn.Embedding(10, width)
        self.position_embedding = nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, digits: Tensor) -> Tensor:
        """Return logits (B, T, 10) for B rows of T digits."""
        hidden = self.digit_embedding(digits) + self.position_embedding.weight
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss of a batch."""
        (digits,) = batch
        loss = nn.functional.cross_entropy(self(digits).mT, digits.sort().values)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_loader(num_batches: int, batch_size: int = 32, length: int = 16) -> DataLoader[Any]:
    """Make rows of random digits, the same each time."""
    generator = torch.Generator().manual_seed(0)
    digits = torch.randint(10, (num_batches * batch_size, length), generator=generator)
    return DataLoader(TensorDataset(digits), batch_size)
