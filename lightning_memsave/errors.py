"""What can go wrong, as a tree: catch at any height.

MemsaveError
├── ConfigurationError(ValueError)        an argument is wrong on its own
├── IncompatibleError(RuntimeError)       a technique does not fit model, Trainer or machine
├── MissingDependencyError(ImportError)   a package that a setting needs is not installed
└── MemoryExhaustedError(RuntimeError)    memory ran out, and nothing smaller is left to try

MemsaveWarning(UserWarning)
├── NoEffectWarning                       a technique was applied and changed nothing
└── ExactnessWarning                      results will differ more than the technique promises
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why something cannot be done.

    Args:
        what: The object and the value that are wrong, as the user wrote them.
        why: The reason, as a clause.
        fix: What to type instead, as a full sentence.
    """

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


# A model with many equal blocks has the same problem in each.
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
    """An argument is wrong on its own; raised by constructors."""

    problems: Sequence[Problem | str] = ()
    """Each of them, where there may be several."""

    @classmethod
    def from_problems(cls, owner: str, problems: Sequence[Problem | str]) -> Self:
        """Make one error that lists every problem.

        Args:
            owner: Name of the class whose arguments are wrong.
            problems: At least one problem, or its message.

        Returns:
            The error, to be raised by the caller.
        """
        error = cls(_listed(f"{owner} cannot be created", problems))
        error.problems = tuple(problems)
        return error


class IncompatibleError(MemsaveError, RuntimeError):
    """A technique does not fit what it is applied to; nothing has been changed.

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
    """A package that a setting needs is not installed."""


class MemoryExhaustedError(MemsaveError, RuntimeError):
    """Memory ran out, and nothing smaller is left to try; the message says what was tried."""


class MemsaveWarning(UserWarning):
    """Base of every warning that this package gives."""


class NoEffectWarning(MemsaveWarning):
    """A technique was applied and changed nothing."""


class ExactnessWarning(MemsaveWarning):
    """Results will differ from unmodified training by more than the technique promises."""
