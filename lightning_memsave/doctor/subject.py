"""What is checked: a model, its training and the environment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_memsave.errors import Problem


@dataclass(frozen=True)
class Subject:
    module: nn.Module
    precision: str = "32-true"
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    optimizers: Sequence[Optimizer] = ()
    conflicts: Sequence[Problem] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
