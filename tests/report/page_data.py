"""Predictions to draw: a GPT-2 in the settings that someone tries one after another."""

import functools
from typing import Any

import torch

from lightning_memsave import MemoryPrediction, predict_memory

NUM_BLOCKS = 2
RUNGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "+ checkpointing": {"activation_checkpointing": "all"},
    "+ chunked loss": {"chunked_cross_entropy": True},
    "+ bfloat16": {"precision": "bf16-true"},
    "+ optimizer in backward": {"optimizer_in_backward": True},
}


@functools.cache
def ladder() -> list[tuple[str, MemoryPrediction]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=1600, n_layer=NUM_BLOCKS, n_head=25)
    ids = torch.zeros(2, 1024, dtype=torch.long)
    batch, found = {"input_ids": ids, "labels": ids}, []
    settings: dict[str, Any] = {}
    for name, changes in RUNGS.items():
        settings |= changes
        found.append(
            (name, predict_memory(lambda: GPT2LMHeadModel(config), batch, settings=settings))
        )
    return found
