"""Masked sequences of real text: the King James Bible, in byte pairs of its own."""

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

# The examples are scripts, not a package.
sys.path.append(str(Path(__file__).parents[2] / "examples"))
from _verses import load_passages

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
"""With the numbers that RoBERTa gives them."""
_MASK = SPECIAL_TOKENS.index("<mask>")
_SEQUENCES_PER_PASSAGE = 2  # of 110 words and more


def load_text(
    num_train: int, num_validation: int, num_tokens: int, vocab_size: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Read text and mask 15 % of it; the same each time.

    Args:
        num_train: Sequences to train on; at most a few thousand.
        num_validation: Sequences from other chapters.
        num_tokens: In each sequence; at most 64.
        vocab_size: Of the tokenizer.

    Returns:
        For training and for validation ``input_ids``, ``attention_mask`` and ``labels``, each
        (sequences, tokens).
    """
    train, validation = load_tokens(num_train, num_validation, num_tokens, vocab_size)
    return _mask(train, 0), _mask(validation, 1)


def load_tokens(
    num_train: int, num_validation: int, num_tokens: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Read text as it is; the same each time.

    Args:
        num_train: Sequences to train on; at most a few thousand.
        num_validation: Sequences from other chapters.
        num_tokens: In each sequence; at most 64.
        vocab_size: Of the tokenizer.

    Returns:
        Token ids for training and for validation, each (sequences, tokens).
    """
    passages = load_passages(
        -(-num_train // _SEQUENCES_PER_PASSAGE), -(-num_validation // _SEQUENCES_PER_PASSAGE)
    )
    texts = [[passage.text for passage in part] for part in passages]
    tokenizer = _train_tokenizer(texts[0], vocab_size)
    train, validation = (_encode(tokenizer, part, num_tokens) for part in texts)
    return train[:num_train], validation[:num_validation]


def _train_tokenizer(texts: list[str], vocab_size: int) -> Any:
    # Not WordPiece: its trainer gives another vocabulary each time.
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _encode(tokenizer: Any, texts: list[str], num_tokens: int) -> Tensor:
    # Without padding: passages are long enough, and what is too short at the end is dropped.
    sequences: list[list[int]] = []
    for text in texts:
        ids = tokenizer.encode(text).ids
        starts = range(0, _SEQUENCES_PER_PASSAGE * num_tokens, num_tokens)
        sequences += [ids[start : start + num_tokens] for start in starts]
    return torch.tensor([ids for ids in sequences if len(ids) == num_tokens])


def _mask(tokens: Tensor, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    is_masked = torch.rand(tokens.shape, generator=generator) < 0.15
    return {
        "input_ids": tokens.masked_fill(is_masked, _MASK),
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(~is_masked, -100),
    }
