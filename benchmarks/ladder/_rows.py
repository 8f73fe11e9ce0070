"""The rows of the ladder and the workloads that they train, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks._models import BASE, SMALL, TINY, MaskedLM
from benchmarks._settings import CHECKPOINTING, LOW_BIT_OPTIMIZER, MIXED_PRECISION, NOTHING


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, its batches, and how long to measure.

    Args:
        sizes: Of the model.
        batch_size: Sequences in an optimizer step.
        num_tokens: Tokens in a sequence.
        micro_batch_size: Sequences that pass at once in rows with micro-batches.
        num_warmup: Steps before anything is measured.
        num_timed: Steps whose time counts, and whose peak on a GPU.
        num_counted: Steps in which live tensors are counted.
    """

    sizes: MaskedLM
    batch_size: int
    num_tokens: int
    micro_batch_size: int
    num_warmup: int = 3
    num_timed: int = 5
    num_counted: int = 2

    @property
    def num_steps(self) -> int:
        """Steps in all."""
        return self.num_warmup + self.num_timed + self.num_counted


WORKLOADS = {
    "84m": Workload(BASE, 64, 128, 4, num_warmup=5, num_timed=20),
    "7m": Workload(SMALL, 16, 128, 1),
    # Without dropout, so that both trainers give the same losses; and with a masked token in each
    # sequence, without which Hugging Face's micro-batches of one would give NaN.
    "dry": Workload(replace(TINY, dropout=0.0), 4, 32, 1, num_warmup=1, num_timed=2),
}
"""By name; ``"84m"`` is for a GPU."""


@dataclass(frozen=True, slots=True)
class Row:
    """Which techniques are on.

    Args:
        checkpointing: Every block is recomputed in backward.
        micro_batches: A batch passes in parts.
        mixed_precision: bfloat16 where it is safe.
        low_bit: AdamW keeps its state in 8 bits, that of embeddings in 32.
        preset: What `MemSaveCallback` is told in place of these, which are for Hugging Face then.
        beside: Settings beside the preset.
    """

    checkpointing: bool = False
    micro_batches: bool = False
    mixed_precision: bool = False
    low_bit: bool = False
    preset: str | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)

    def callback_arguments(self, workload: Workload) -> dict[str, Any] | None:
        """Say what `MemSaveCallback` is told.

        Args:
            workload: What is trained.

        Returns:
            Its arguments, or ``None`` for training without it.
        """
        if self.preset is not None:
            return {"preset": self.preset, "predict": False, **self.beside}
        chosen: dict[str, Any] = {}
        if self.checkpointing:
            chosen |= CHECKPOINTING
        if self.micro_batches:
            chosen |= {"micro_batch_size": workload.micro_batch_size}
        if self.mixed_precision:
            chosen |= MIXED_PRECISION
        if self.low_bit:
            chosen |= LOW_BIT_OPTIMIZER
        return {**NOTHING, **chosen} if chosen else None

    def call(self, workload: Workload) -> str:
        """Give what a user types for `MemSaveCallback`.

        Args:
            workload: What is trained.

        Returns:
            Code; empty without the callback.
        """
        given = self.callback_arguments(workload)
        if given is None:
            return ""
        named = [f"{name}={value!r}" for name, value in given.items() if name != "predict"]
        return f"MemSaveCallback({', '.join(named)})"

    def hugging_face_arguments(self, workload: Workload) -> dict[str, Any]:
        """Say the same to Hugging Face's Trainer.

        Args:
            workload: What is trained.

        Returns:
            Arguments of ``TrainingArguments``.
        """
        at_once = workload.micro_batch_size if self.micro_batches else workload.batch_size
        chosen: dict[str, Any] = {
            "per_device_train_batch_size": at_once,
            "gradient_accumulation_steps": workload.batch_size // at_once,
            "bf16": self.mixed_precision,
            # Their default is the fused AdamW: the same one as ours, so that the trainers differ
            # and not the optimizers.
            "optim": "adamw_bnb_8bit" if self.low_bit else "adamw_torch",
        }
        if self.checkpointing:
            chosen |= {
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs": {"use_reentrant": False},
            }
        return chosen


_ALL = Row(checkpointing=True, micro_batches=True, mixed_precision=True, low_bit=True)

ROWS = {
    "nothing": Row(),
    "checkpointing": Row(checkpointing=True),
    "micro-batches": Row(micro_batches=True),
    "mixed precision": Row(mixed_precision=True),
    "8-bit AdamW": Row(low_bit=True),
    "all but 8-bit": Row(checkpointing=True, micro_batches=True, mixed_precision=True),
    "all": _ALL,
    "bitwise": Row(checkpointing=True, preset="bitwise"),
    # On a CPU the preset would leave the precision as it is.
    "classic": replace(_ALL, preset="classic", beside=MIXED_PRECISION),
    "single_gpu": replace(_ALL, preset="single_gpu"),
    "offload": replace(_ALL, preset="offload"),
}
"""By name, in the order of the table."""
