"""Plans with long sequences: feed-forward parts in tiles, where nothing more exact fits."""

import functools
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memsave import plan_memory, predict_memory
from lightning_memsave.core.technique import Exactness
from lightning_memsave.errors import InfeasiblePlanError
from lightning_memsave.planning.recorded_blocks import RecordedBlocks
from lightning_memsave.techniques.registry import entries
from tests.planning.plans import what_if_of

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
}
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
pytestmark = pytest.mark.slow

OFF = dict.fromkeys(e.argument for e in entries() if e.argument != "activation_checkpointing")


class LanguageModel(pl.LightningModule):
    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.model: nn.Module = LlamaForCausalLM(
            LlamaConfig(**sizes, max_position_embeddings=32768, use_cache=False)
        )

    def training_step(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


def one_sequence(length: int) -> Tensor:
    return torch.zeros(1, length, dtype=torch.int64)


def test_is_planned_where_nothing_more_exact_fits():
    make, tokens = functools.partial(LanguageModel, SMALL), one_sequence(16384)
    how: dict[str, Any] = {"settings": OFF, "device": "cpu"}
    least = {
        which: predict_memory(
            make, tokens, settings=OFF | {"activation_checkpointing": which}, device="cpu"
        ).device_bytes
        for which in ("nested", "tiled")
    }
    assert least["tiled"] < 0.8 * least["nested"]

    between = (least["nested"] + least["tiled"]) // 2
    found = plan_memory(make, tokens, budget=between, exactness="rounding", **how).plan
    assert found.settings["activation_checkpointing"].startswith("tiled")
    assert (found.exactness, found.device_bytes <= between) == ("rounding", True)

    roomy = plan_memory(make, tokens, budget=2 * least["nested"], exactness="rounding", **how).plan
    assert "tiled" not in str(roomy.settings["activation_checkpointing"])
    assert roomy.exactness == "bitwise"
    with pytest.raises(InfeasiblePlanError):
        plan_memory(make, tokens, budget=between, exactness="bitwise", **how)


def test_is_recorded_for_long_sequences_only():
    def kinds(tokens: Tensor, exactness: Exactness) -> tuple[str, ...]:
        what_if = what_if_of("gpt2")
        what_if.step = replace(what_if.step, batch=tokens)
        return RecordedBlocks.of(what_if, None, exactness).kinds

    tokens = one_sequence(4097)
    assert kinds(tokens, Exactness.ROUNDING) == ("tiled", "nested", "full", "selective")
    assert "tiled" not in kinds(tokens, Exactness.BITWISE)
    assert "tiled" not in kinds(tokens[:, 1:], Exactness.ROUNDING)
    assert "tiled" not in kinds(tokens.T, Exactness.ROUNDING)  # samples, for micro-batches


def test_8b_with_a_sequence_of_32k_tokens_is_predicted_for_24_gb():
    make, tokens = functools.partial(LanguageModel, LLAMA_8B), one_sequence(32768)
    found = [
        predict_memory(
            make,
            tokens,
            settings={"preset": "offload", "host_budget": "400GiB"} | more,
            gpu="RTX-4090",
        )
        for more in ({}, {"activation_checkpointing": "tiled"})
    ]
    assert [prediction.peak_bytes for prediction in found] == [10_973_561_360, 6_158_254_608]
    assert found[0].peak.host_bytes == found[1].peak.host_bytes
    assert found[1].device_bytes < 7 * 2**30
