"""The registry of techniques, in the order in which they are applied and undone in reverse."""

from typing import Any

from lightning_memsave.core.technique import Technique
from lightning_memsave.techniques.activation_checkpointing.technique import (
    ActivationCheckpointing,
)
from lightning_memsave.techniques.attention_kernel.technique import AttentionKernel
from lightning_memsave.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.low_precision_weights.technique import LowPrecisionWeights
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.techniques.optimizer_in_backward.technique import OptimizerInBackward

TECHNIQUES: tuple[type[Technique[Any]], ...] = (
    AttentionKernel,  # docs/techniques/attention_kernel.md
    ChunkedCrossEntropy,  # docs/techniques/chunked_cross_entropy.md
    ActivationCheckpointing,  # docs/techniques/activation_checkpointing.md
    LowBitOptimizer,  # docs/techniques/low_bit_optimizer.md
    LowPrecisionWeights,  # docs/techniques/low_precision_weights.md
    OptimizerInBackward,  # docs/techniques/optimizer_in_backward.md
    MicroBatching,  # docs/techniques/micro_batching.md
)
