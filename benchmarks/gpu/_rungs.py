"""The rungs of the ladder, as data."""

from typing import Any

from benchmarks._models import OTHERS
from benchmarks._settings import CHECKPOINTING, LOW_BIT_OPTIMIZER, MIXED_PRECISION, NOTHING

MODELS = {
    f"{model}, {name}": (model, settings)
    for model in OTHERS
    for name, settings in {"all None": NOTHING, "all": {}}.items()
}
"""Name of the model and settings of the rungs that train another model than RoBERTa."""

RUNGS: dict[str, dict[str, Any] | None] = {
    "nothing": None,
    "nothing, again": None,
    "all None": NOTHING,
    "checkpointing all": {**NOTHING, **CHECKPOINTING},
    "checkpointing half": {**NOTHING, "activation_checkpointing": 0.5},
    "checkpointing selective": {**NOTHING, "activation_checkpointing": "selective"},
    "optimizer 8bit": {**NOTHING, **LOW_BIT_OPTIMIZER},
    "optimizer paged_8bit": {**NOTHING, "optimizer": "paged_8bit"},
    "precision bf16-mixed": {**NOTHING, **MIXED_PRECISION},
    "precision 16-mixed": {**NOTHING, "precision": "16-mixed"},
    "precision bf16-true": {**NOTHING, "precision": "bf16-true"},
    "tf32": {**NOTHING, "tf32": True},
    "micro-batches of 4": {**NOTHING, "micro_batch_size": 4},
    "micro-batches, out of memory": {**NOTHING, "micro_batch_size": "auto"},
    "all": {},
    "all, selective": {"activation_checkpointing": "selective"},
    **{name: settings for name, (_, settings) in MODELS.items()},
}
"""Arguments of `MemSaveCallback` by name of the rung; ``None`` is training without it."""

MEMORY_LIMITS = {"micro-batches, out of memory": 5 * 2**30}
"""Bytes that a process may have of the GPU by name of the rung; about 8 GiB are needed without
anything."""

BITWISE = ("all None", "checkpointing all", "checkpointing half", "checkpointing selective")
"""Rungs whose losses must be those of ``"nothing"`` bit for bit, where a second run of that has
them too: some CUDA kernels add in no fixed order."""
