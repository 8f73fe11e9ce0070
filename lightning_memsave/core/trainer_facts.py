"""What a technique may ask about a Trainer, without Lightning."""

from dataclasses import dataclass

import torch

SHARDED = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
"""Strategies that shard the model."""


@dataclass(frozen=True)
class TrainerFacts:
    """Facts about a Trainer by which a technique finds conflicts."""

    strategies: tuple[str, ...]
    world_size: int
    device: torch.device | None
    checkpoints_activations: bool = False

    @property
    def strategy(self) -> str:
        """Class name of the strategy."""
        return self.strategies[0]

    def is_strategy(self, *names: str) -> bool:
        """Return whether the strategy is of one of these classes or of a subclass."""
        return any(name in names for name in self.strategies)
