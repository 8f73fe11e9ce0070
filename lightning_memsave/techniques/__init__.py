"""The registry of techniques, in the order in which they are applied and undone in reverse."""

from typing import Any

from lightning_memsave.core.technique import Technique
from lightning_memsave.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memsave.techniques.low_bit_optimizer import LowBitOptimizer
from lightning_memsave.techniques.micro_batching import MicroBatching

TECHNIQUES: tuple[type[Technique[Any]], ...] = (
    ActivationCheckpointing,  # docs/techniques.md#activation_checkpointing
    LowBitOptimizer,  # docs/techniques.md#low_bit_optimizer
    MicroBatching,  # docs/techniques.md#micro_batching
)
