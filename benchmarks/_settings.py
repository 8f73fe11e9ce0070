"""What `MemSaveCallback` is told in the benchmarks: each setting written once."""

from typing import Any

NOTHING: dict[str, Any] = {
    "preset": "off",
    "predict": False,
}
"""Arguments that switch everything off."""

CHECKPOINTING: dict[str, Any] = {"activation_checkpointing": "all"}
MIXED_PRECISION: dict[str, Any] = {"precision": "bf16-mixed"}
LOW_BIT_OPTIMIZER: dict[str, Any] = {"optimizer": "8bit"}
