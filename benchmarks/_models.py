"""The RoBERTa masked language models that the benchmarks train, made from a config."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import RobertaConfig, RobertaForMaskedLM


@dataclass(frozen=True, slots=True)
class MaskedLM:
    """Sizes of a RoBERTa with a language-model head.

    Args:
        vocab_size: Tokens in the vocabulary.
        hidden_size: Width.
        num_layers: Blocks.
        num_heads: Attention heads.
        intermediate_size: Width inside the feed-forward part.
        dropout: Probability for hidden states and attention.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    dropout: float = 0.1

    def build(self, seed: int = 0) -> nn.Module:
        """Make the model with random weights.

        Args:
            seed: For the weights; the same seed gives the same model.

        Returns:
            A Hugging Face ``RobertaForMaskedLM`` in training mode.
        """
        torch.manual_seed(seed)
        config: Any = RobertaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            intermediate_size=self.intermediate_size,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            max_position_embeddings=514,
        )
        model: nn.Module = RobertaForMaskedLM(config)
        return model.train()


SMALL = MaskedLM(8_000, 256, 6, 4, 1024, dropout=0.0)
"""7 million parameters."""
DEEP = MaskedLM(500, 256, 24, 4, 1024, dropout=0.0)
"""The same width, 24 blocks, and next to no vocabulary."""
BASE = MaskedLM(52_000, 768, 6, 12, 3072)
"""84 million parameters."""
TINY = MaskedLM(500, 64, 2, 2, 128)
"""For dry runs."""


def masked_batch(
    vocab_size: int, batch_size: int, num_tokens: int, *, seed: int = 0
) -> dict[str, Tensor]:
    """Make a batch of random tokens of which 15 % are masked and asked for.

    Args:
        vocab_size: Of the model; token 4 is the mask, those below are special.
        batch_size: Sequences.
        num_tokens: Tokens in each.
        seed: The same seed gives the same batch.

    Returns:
        ``input_ids``, ``attention_mask`` and ``labels``, each (batch, tokens).
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (batch_size, num_tokens)
    tokens = torch.randint(5, vocab_size, shape, generator=generator)
    is_masked = torch.rand(shape, generator=generator) < 0.15
    return {
        "input_ids": tokens.masked_fill(is_masked, 4),
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(~is_masked, -100),
    }


@dataclass(frozen=True, slots=True)
class Other:
    """A model of another kind, on a batch that it takes by keyword.

    Args:
        name: Of a Hugging Face model, as in the name of its config.
        config: Arguments of the config.
        task: The rest of the name of its class, such as ``ForCausalLM``.
        batch: Shapes of its floating-point inputs by name, and of token ids; the first dimension is
            that of the samples.
    """

    name: str
    config: dict[str, Any]
    task: str
    batch: dict[str, tuple[int, ...]]

    def build(self, seed: int = 0) -> nn.Module:
        """Make the model with random weights.

        Args:
            seed: For the weights.

        Returns:
            The model in training mode.
        """
        torch.manual_seed(seed)
        config = getattr(transformers, f"{self.name}Config")(**self.config)
        model: nn.Module = getattr(transformers, f"{self.name}{self.task}")(config)
        return model.train()

    def make_batch(self, *, seed: int = 0) -> dict[str, Tensor]:
        """Make a batch of random numbers with labels.

        Args:
            seed: The same seed gives the same batch.

        Returns:
            The inputs and ``labels``.
        """
        generator = torch.Generator().manual_seed(seed)
        batch = {}
        for name, shape in self.batch.items():
            if name == "input_ids":
                batch[name] = torch.randint(self.config["vocab_size"], shape, generator=generator)
                batch["labels"] = batch[name].clone()
            else:
                batch[name] = torch.randn(shape, generator=generator)
                batch["labels"] = torch.randint(2, shape[:1], generator=generator)
        return batch


OTHERS = {
    "Llama": Other(
        "Llama",
        {
            "vocab_size": 32_000,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
        },
        "ForCausalLM",
        {"input_ids": (8, 512)},
    ),
    "ViT": Other("ViT", {}, "ForImageClassification", {"pixel_values": (32, 3, 224, 224)}),
    "ResNet": Other("ResNet", {}, "ForImageClassification", {"pixel_values": (32, 3, 224, 224)}),
}
"""134 million, 86 million and 24 million parameters."""
