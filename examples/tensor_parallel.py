"""Two processes (gloo) on the CPU that split the layers of a Hugging Face model by its own plan.

The Trainer starts the second process itself. Four GPUs, of which each two share layers:
`FSDP2Strategy(tensor_parallel_size=2)` with `Trainer(accelerator="gpu", devices=4, ...)`.
"""

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memsave import FSDP2Strategy, LowBitOptimizer, MemSaveCallback


class Lit(LightningModule):
    """Learns to copy the word before."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            vocab_size=96,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss of a batch."""
        (tokens,) = batch
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train, save, and load the checkpoint without the strategy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few steps only")
    num_batches = 4 if parser.parse_args().small else 200

    seed_everything(0)
    module = Lit()
    tokens = torch.randint(96, (num_batches * 8, 1)).expand(-1, 16)
    strategy: Any = FSDP2Strategy(tensor_parallel_size=2)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        callbacks=[
            MemSaveCallback(
                preset="off", activation_checkpointing="all", optimizer=LowBitOptimizer("8bit")
            )
        ],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        module, DataLoader(TensorDataset(tokens), batch_size=8)
    )  # both have the same batches
    trainer.save_checkpoint("llama.ckpt")  # one file, gathered from both
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps in {trainer.world_size} processes")
        checkpoint = torch.load("llama.ckpt", weights_only=True)
        Lit().load_state_dict(checkpoint["state_dict"])
        print("the checkpoint loads in one process")


if __name__ == "__main__":
    main()
