"""The registry of techniques, in the order in which they are applied and undone in reverse."""

from typing import Any

from lightning_memsave.core.technique import Technique
from lightning_memsave.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memsave.techniques.low_bit_optimizer import LowBitOptimizer
from lightning_memsave.techniques.micro_batching import MicroBatching

TECHNIQUES: tuple[type[Technique[Any]], ...] = (
    ActivationCheckpointing,  # docs/techniques/activation_checkpointing.md
    LowBitOptimizer,  # docs/techniques/low_bit_optimizer.md
    MicroBatching,  # docs/techniques/micro_batching.md
)
