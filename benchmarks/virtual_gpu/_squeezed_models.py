"""The models that run out of memory: small ones whose values count, large ones for their sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, RobertaConfig, RobertaForMaskedLM

from benchmarks._models import masked_batch
from benchmarks.presets._run import gpt2


@dataclass(frozen=True)
class Model:
    """A language model and its batches."""

    build: Callable[[], nn.Module]
    vocab_size: int
    batch_size: int
    num_tokens: int
    is_masked: bool = False
    is_small: bool = True

    def batch(self, seed: int, length: int = 1) -> dict[str, Tensor]:
        """Make a batch, so many times as long."""
        tokens = self.num_tokens * length
        batch = masked_batch(self.vocab_size, self.batch_size, tokens, seed=seed)
        if self.is_masked:
            return batch
        return {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}


def _roberta(vocab_size: int, width: int, num_layers: int, num_heads: int) -> nn.Module:
    config: Any = RobertaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        intermediate_size=4 * width,
        max_position_embeddings=514,
    )
    model: nn.Module = RobertaForMaskedLM(config)
    return model.train()


def _llama(vocab_size: int, width: int, num_layers: int, num_heads: int) -> nn.Module:
    config: Any = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


class _Words(nn.Module):
    """Blocks of torch between an embedding and a head that share their weight."""

    def __init__(self, vocab_size: int, width: int, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits, following = self.head(x[:, :-1]), labels[:, 1:]
        return _Output(nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten()))


@dataclass
class _Output:
    loss: Tensor


def _empty(build: Callable[[], Any]) -> Callable[[], nn.Module]:
    """Leave weights as they are in memory: no kernel reads them."""

    def make() -> nn.Module:
        with torch.device("meta"):
            model = build()
        model.to_empty(device="cpu")
        model.tie_weights()
        made: nn.Module = model
        return made

    return make


MODELS = {
    "GPT-2": Model(gpt2(6000, 128, 2, 4), 6000, 8, 32),
    "RoBERTa": Model(lambda: _roberta(6000, 128, 2, 4), 6000, 8, 32, is_masked=True),
    "Llama": Model(lambda: _llama(6000, 128, 2, 4), 6000, 8, 32),
    "own": Model(lambda: _Words(6000, 128, 2), 6000, 8, 32),
    "GPT-2 of 4 blocks": Model(_empty(gpt2(50_257, 768, 4, 12)), 50_257, 8, 512, is_small=False),
    "RoBERTa of 4 blocks": Model(
        _empty(lambda: _roberta(52_000, 768, 4, 12)), 52_000, 64, 128, True, is_small=False
    ),
    "Llama of 4 blocks": Model(
        _empty(lambda: _llama(32_000, 1024, 4, 16)), 32_000, 16, 512, is_small=False
    ),
}
