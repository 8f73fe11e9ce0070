"""The rungs of the ladder, as data."""

from typing import Any

_NOTHING: dict[str, Any] = {
    "activation_checkpointing": None,
    "optimizer": None,
    "precision": None,
    "monitor": False,
}

RUNGS: dict[str, dict[str, Any] | None] = {
    "nothing": None,
    "nothing, again": None,
    "all None": _NOTHING,
    "checkpointing all": {**_NOTHING, "activation_checkpointing": "all"},
    "checkpointing half": {**_NOTHING, "activation_checkpointing": 0.5},
    "checkpointing selective": {**_NOTHING, "activation_checkpointing": "selective"},
    "optimizer 8bit": {**_NOTHING, "optimizer": "8bit"},
    "optimizer paged_8bit": {**_NOTHING, "optimizer": "paged_8bit"},
    "precision bf16-mixed": {**_NOTHING, "precision": "bf16-mixed"},
    "precision 16-mixed": {**_NOTHING, "precision": "16-mixed"},
    "precision bf16-true": {**_NOTHING, "precision": "bf16-true"},
    "tf32": {**_NOTHING, "tf32": True},
    "all": {},
    "all, selective": {"activation_checkpointing": "selective"},
}
"""Arguments of `MemSaveCallback` by name of the rung; ``None`` is training without it."""

BITWISE = ("all None", "checkpointing all", "checkpointing half", "checkpointing selective")
"""Rungs whose losses must be those of ``"nothing"`` bit for bit, where a second run of that has
them too: some CUDA kernels add in no fixed order."""
