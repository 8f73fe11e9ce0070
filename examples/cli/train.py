"""A command line with MemSaveCLI in place of LightningCLI.

    python train.py fit --config config.yaml
    python train.py fit --config config.yaml --memsave.optimizer=lion_8bit
    python train.py fit --config config.yaml --memsave.enabled=false
    python train.py fit --help

Module and data are an ordinary project.
"""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_memsave import MemSaveCLI


class ByteModel(LightningModule):
    """A GPT-2 over bytes.

    Args:
        width: Size of the hidden states.
        num_layers: Number of blocks.
        learning_rate: Learning rate of AdamW.
    """

    def __init__(self, width: int = 128, num_layers: int = 6, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        config = GPT2Config(
            vocab_size=256,
            n_embd=width,
            n_layer=num_layers,
            n_head=4,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss of a batch."""
        text = batch[0].long()
        loss: Tensor = self.model(input_ids=text, labels=text).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class SourceCode(LightningDataModule):
    """The source code of Python's standard library.

    Args:
        length: Bytes in a sample.
        batch_size: Samples in a batch.
    """

    def __init__(self, length: int = 256, batch_size: int = 16) -> None:
        super().__init__()
        self.length = length
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the files, split into samples."""
        paths = sorted(Path(os.__file__).parent.glob("*.py"))
        text = bytearray(b"".join(path.read_bytes() for path in paths))
        num_samples = len(text) // self.length
        rows = torch.frombuffer(text, dtype=torch.uint8, count=num_samples * self.length)
        data = TensorDataset(rows.view(num_samples, self.length))
        return DataLoader(data, self.batch_size, shuffle=True)


if __name__ == "__main__":
    MemSaveCLI(ByteModel, SourceCode)
