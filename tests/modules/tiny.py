"""Tiny Hugging Face configs, batches for them, and how to train them."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BertConfig, GPT2Config, LlamaConfig, RobertaConfig

from lightning_memsave.modules import lightning_pytorch, pytorch_lightning

VOCAB = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,  # 64 x 64 weights have 4,096 elements, so that their state can be 8-bit
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
}
CONFIGS: dict[str, tuple[Any, Any]] = {
    "bert": (BertConfig(**SIZES), "masked_lm"),
    "roberta": (RobertaConfig(**SIZES), "masked_lm"),
    "gpt2": (GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=2), "causal_lm"),
    "llama": (LlamaConfig(**SIZES, attention_dropout=0.1), "causal_lm"),
    "classifier": (BertConfig(**SIZES | {"num_labels": 3}), "sequence_classification"),
}
VARIANTS: dict[str, Any] = {
    "lightning": lightning_pytorch.CheckpointedTransformer,
    "pytorch_lightning": pytorch_lightning.CheckpointedTransformer,
}
ONLY_CHECKPOINTING = {
    "activation_checkpointing": "all",
    "optimizer": None,
    "precision": None,
    "report": False,
}


def make_lit(name: str = "bert", package: str = "lightning", **settings: Any) -> Any:
    config, task = CONFIGS[name]
    torch.manual_seed(1)
    lit = VARIANTS[package](config, task=task, **settings)
    lit.train_dataloader = lit.val_dataloader = functools.partial(loader, task)
    return lit


def loader(task: str, length: int = 16, batch_size: int = 4, num_tokens: int = 12) -> Any:
    """Random tokens with padding; labels for a part of them, another part in each sample."""
    generator = torch.Generator().manual_seed(3)
    samples: Any = []
    for index in range(length):
        tokens = torch.randint(5, VOCAB, (num_tokens,), generator=generator)
        attended = torch.arange(num_tokens) < num_tokens - index % 3
        labels = tokens.masked_fill(~attended, -100)
        if task == "masked_lm":
            labels = labels.masked_fill(torch.rand(num_tokens, generator=generator) < 0.6, -100)
        samples.append(
            {
                "input_ids": tokens,
                "attention_mask": attended.long(),
                "labels": torch.tensor(index % 3) if "classification" in task else labels,
            }
        )
    return DataLoader(samples, batch_size=batch_size)


def batch_of(lit: Any) -> dict[str, Tensor]:
    return next(iter(loader(lit.task)))


@torch.no_grad()
def predict(lit: Any) -> Tensor:
    """Logits without dropout; the mode of the module stays as it is."""
    modes = {module: module.training for module in lit.modules()}
    lit.eval()
    logits: Tensor = lit.predict_step(batch_of(lit), 0)
    for module, mode in modes.items():
        module.training = mode
    return logits


class Regression(nn.Module):
    """A model that is not from Hugging Face, with blocks of its own."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)]
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean((1, 2))
