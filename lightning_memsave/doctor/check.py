"""What a check is: its name, what it looks at, and the problems that it finds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_memsave.errors import Problem


@dataclass(frozen=True, slots=True)
class FoundProblem(Problem):
    check: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Subject:
    """What is checked: a model, its training and the environment."""

    module: nn.Module
    precision: str = "32-true"
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    optimizers: Sequence[Optimizer] = ()
    conflicts: Sequence[Problem] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    name: str
    finds: str
    find: Callable[[Subject], Iterable[Problem]]
