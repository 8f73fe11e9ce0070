"""What a check is: its name, what it looks at, and the problems that it finds."""

import ast
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_memsave.doctor.source import (
    EVALUATION_HOOKS,
    STEP_HOOKS,
    Method,
    Reached,
    reached_from,
)
from lightning_memsave.doctor.values import StepValues
from lightning_memsave.errors import Problem


@dataclass(frozen=True, slots=True)
class LocatedProblem(Problem):
    """A problem that a check found, and where."""

    check: str = ""
    file: str | None = None
    line: int | None = None

    @property
    def place(self) -> str:
        """File and line, such as ``train.py:12``; empty without them."""
        return "" if self.file is None else f"{self.file}:{self.line}"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, for JSON."""
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

    @cached_property
    def step(self) -> list[Reached]:
        """The user's methods that training steps call."""
        return reached_from(self.module, STEP_HOOKS)

    @cached_property
    def values(self) -> StepValues:
        """What is known of the values in training steps."""
        return StepValues(self.module, STEP_HOOKS, has_grad=True)

    @cached_property
    def evaluation(self) -> list[Reached]:
        """The user's methods that validation and test call for each batch."""
        return reached_from(self.module, EVALUATION_HOOKS)

    @cached_property
    def evaluation_values(self) -> StepValues:
        """What is known of the values in validation and test."""
        return StepValues(self.module, EVALUATION_HOOKS, has_grad=False)

    @property
    def automatic_optimization(self) -> bool:
        """Whether Lightning calls backward and the optimizer."""
        return bool(getattr(self.module, "automatic_optimization", True))


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str
    finds: str
    find: Callable[[Subject], Iterable[LocatedProblem]]


def problem_in(method: Method, node: ast.AST, why: str, fix: str) -> LocatedProblem:
    """Build the problem of a line of code."""
    line: int = node.lineno  # type: ignore[attr-defined]
    what = f"`{_shortened(ast.unparse(node))}` in `{method.function.__qualname__}`"
    return LocatedProblem(what, why, fix, file=_relative(method.file), line=line)


_MAX_CODE = 60


def _shortened(code: str) -> str:
    code = " ".join(code.split())
    return code if len(code) <= _MAX_CODE else f"{code[:_MAX_CODE]}..."


def _relative(file: str) -> str:
    is_inside = Path(file).is_relative_to(Path.cwd())
    return os.path.relpath(file) if is_inside else file
