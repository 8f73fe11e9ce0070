"""What a technique may ask about a Trainer, without Lightning."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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
    precision: str = ""
    compiled: str = ""
    """Class of a LightningModule that is compiled as a whole."""
    module: str = ""
    """Class of the LightningModule."""
    is_manual: bool = False
    """The module runs its own steps."""
    clipping: Mapping[str, float] = field(default_factory=dict)
    """Bound of ``"clip_value"`` or ``"clip_norm"``."""
    scales_losses: bool = False
    overridden: Callable[[str], Sequence[str]] = lambda hook: ()
    """Overrides of a hook in the module and in callbacks."""
    gradient_readers: Callable[[str], Sequence[str]] = lambda hook: ()
    """Overrides of a hook whose code reads gradients."""

    @property
    def strategy(self) -> str:
        """Class name of the strategy."""
        return self.strategies[0]

    def is_strategy(self, *names: str) -> bool:
        """Return whether the strategy is of one of these classes or of a subclass."""
        return any(name in names for name in self.strategies)
