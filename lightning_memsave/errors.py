"""Exceptions and warnings of this package.

MemsaveError
├── ConfigurationError(ValueError)        an argument is invalid
├── IncompatibleError(RuntimeError)       a technique conflicts with model, Trainer or machine
├── MissingDependencyError(ImportError)   a required package is missing or too old
├── MemoryExhaustedError(RuntimeError)    memory ran out, and nothing is left to reduce
└── InfeasiblePlanError(RuntimeError)     no settings fit the budget

MemsaveWarning(UserWarning)
├── NoEffectWarning                       a technique has no effect
└── ExactnessWarning                      results will differ more than the technique declares
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why something cannot be done."""

    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}. {self.fix}"


def _listed(head: str, problems: Sequence[Problem | str]) -> str:
    problems = _grouped(problems)
    if len(problems) == 1:
        return f"{head}: {problems[0]}"
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return f"{head} ({len(problems)} problems):{lines}"


# Group equal problems, such as those of many equal blocks.
def _grouped(problems: Sequence[Problem | str]) -> list[Problem | str]:
    groups: dict[Any, list[Any]] = {}
    for problem in problems:
        key = (problem.why, problem.fix) if isinstance(problem, Problem) else problem
        groups.setdefault(key, []).append(problem)
    grouped: list[Problem | str] = []
    for first, *others in groups.values():
        if others and isinstance(first, Problem):
            grouped.append(Problem(f"{first.what} and {len(others)} more", first.why, first.fix))
        else:
            grouped.append(first)
    return grouped


class MemsaveError(Exception):
    """Base of every error that this package raises."""


class ConfigurationError(MemsaveError, ValueError):
    """An argument is invalid; raised by constructors."""

    problems: Sequence[Problem | str] = ()
    """All problems, if there may be several."""

    @classmethod
    def from_problems(cls, owner: str, problems: Sequence[Problem | str]) -> Self:
        """Make one error that lists every problem.

        Args:
            owner: Name of the class whose arguments are invalid.
            problems: At least one problem, or its message.

        Returns:
            The error, for the caller to raise.
        """
        error = cls(_listed(f"{owner} cannot be created", problems))
        error.problems = tuple(problems)
        return error


class IncompatibleError(MemsaveError, RuntimeError):
    """A technique conflicts with its target; nothing has been changed.

    Args:
        owner: Name of the technique or callback.
        problems: Every reason, not only the first one.
    """

    def __init__(self, owner: str, problems: Sequence[Problem]) -> None:
        self.owner = owner
        self.problems = tuple(problems)
        super().__init__(_listed(f"{owner} cannot be applied", self.problems))

    def __reduce__(self) -> tuple[type[Self], tuple[str, tuple[Problem, ...]]]:
        return type(self), (self.owner, self.problems)


class MissingDependencyError(MemsaveError, ImportError):
    """A package that a setting needs is missing or too old."""


class MemoryExhaustedError(MemsaveError, RuntimeError):
    """Memory ran out, and nothing is left to reduce; the message lists the attempts.

    Args:
        message: What was tried, the first line of the original error, and what to do.
        phase: Where memory ran out, as `OutOfMemory.phase` names it; empty if that is not known.
            The traceback does not tell: it is that of the optimizer's step, whose closure runs
            forward and backward.
    """

    def __init__(self, message: str, phase: str = "") -> None:
        super().__init__(message)
        self.phase = phase


class InfeasiblePlanError(MemsaveError, RuntimeError):
    """No settings fit a budget; the message says what the smallest peak is made of.

    Args:
        message: What was asked for, what the smallest peak is made of, and what would fit.
        smallest: The `Plan` with the smallest peak.
    """

    def __init__(self, message: str, smallest: Any = None) -> None:
        super().__init__(message)
        self.smallest = smallest


class MemsaveWarning(UserWarning):
    """Base of every warning of this package."""


class NoEffectWarning(MemsaveWarning):
    """A technique has no effect."""


class ExactnessWarning(MemsaveWarning):
    """Results will differ from unmodified training by more than the technique declares."""
