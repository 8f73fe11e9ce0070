"""Train all weights of a model as large as Llama 3.1 8B on the GPU of a desktop.

With ``preset="offload"`` weights, gradients, optimizer state and what blocks save for backward wait
in the memory of the host. First a step on a GPU with 12 GB is predicted, and the fastest settings
for one with 24 GB are planned, which needs neither. Then a Llama of 1/16 of the width is trained
twice on the CPU, without the preset and with it: losses and weights must be the same, bit for bit.
"""

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memsave import MemSaveCallback, plan_memory, predict_memory

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
NARROW: dict[str, Any] = LLAMA_8B | {
    "vocab_size": 128256 // 16,
    "hidden_size": 4096 // 16,
    "intermediate_size": 14336 // 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
"""1/16 of the width, with all 32 blocks."""
SETTINGS: dict[str, Any] = {
    "preset": "offload",
    "precision": "32-true",
    "low_precision_weights": None,
    "chunked_cross_entropy": None,
}
"""What of the preset moves no bit: weights in 16 bits and a loss in chunks round elsewhere."""


class LanguageModel(pl.LightningModule):
    """An ordinary module.

    Args:
        sizes: Of the model, as in ``LlamaConfig``.
    """

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
        self.losses: list[Tensor] = []

    def training_step(self, tokens: Tensor) -> Tensor:
        """Predict each next token."""
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use the ordinary optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def predict_and_plan() -> None:
    """Print what a step of the 8B model needs with 2 x 2,048 tokens."""
    tokens = torch.zeros(2, 2048, dtype=torch.int64)
    settings = {"preset": "offload", "host_budget": "56GiB"}
    gpu, larger = "RTX-3060-12GB", "RTX-4090"
    print(predict_memory(lambda: LanguageModel(LLAMA_8B), tokens, settings=settings, gpu=gpu))
    settings = {"host_budget": "120GiB"}
    print(plan_memory(lambda: LanguageModel(LLAMA_8B), tokens, settings=settings, gpu=larger))


def train(num_steps: int, sizes: dict[str, Any], length: int, **settings: Any) -> LanguageModel:
    """Train a model from the same start, with the same batches.

    Args:
        num_steps: How many.
        sizes: Of the model.
        length: Tokens of a sequence.
        settings: Of `MemSaveCallback`; without any, the Trainer is the ordinary one.

    Returns:
        The trained module.
    """
    pl.seed_everything(0, verbose=False)
    module = LanguageModel(sizes)
    tokens: Any = torch.randint(sizes["vocab_size"], (2 * num_steps, length))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[MemSaveCallback(**settings)] if settings else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(tokens, batch_size=2))
    return module


def main() -> int:
    """Predict, plan, train twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="train a few blocks and steps only")
    is_small = parser.parse_args().small
    if not is_small:
        predict_and_plan()
    sizes = NARROW | ({"num_hidden_layers": 3, "vocab_size": 1024} if is_small else {})
    how = (2, sizes, 32) if is_small else (4, sizes, 128)
    plain, saving = train(*how), train(*how, **SETTINGS)
    losses = [[float(loss) for loss in module.losses] for module in (plain, saving)]
    weights = saving.state_dict()
    is_same = all(torch.equal(value, weights[name]) for name, value in plain.state_dict().items())
    num_weights = sum(weight.numel() for weight in plain.parameters())
    print(f"losses of {len(losses[0])} steps: {', '.join(f'{loss:.4f}' for loss in losses[0])}")
    print(f"the same losses with the preset, bit for bit: {losses[0] == losses[1]}")
    print(f"the same {num_weights:,} weights, bit for bit: {is_same}")
    return 0 if is_same and losses[0] == losses[1] else 1


if __name__ == "__main__":
    raise SystemExit(main())
