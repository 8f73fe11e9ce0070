"""The protocol that every technique follows: check, apply, undo."""

import contextlib
import enum
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

from lightning_memsave.core.trainer_facts import TrainerFacts
from lightning_memsave.errors import ConfigurationError, IncompatibleError, NoEffectWarning, Problem

TargetT = TypeVar("TargetT")


class Exactness(enum.Enum):
    """How far a technique may move the numbers of training."""

    BITWISE = "bitwise"
    """Same losses, gradients and parameters, bit for bit, on the same device."""
    ROUNDING = "rounding"
    """Same mathematics in another order of operations."""
    APPROXIMATE = "approximate"
    """Other mathematics, judged by convergence."""

    def allows(self, other: "Exactness") -> bool:
        """Say whether something of exactness ``other`` may run under this limit.

        Args:
            other: The exactness that a technique declares.

        Returns:
            True if ``other`` moves the numbers no further than this.

        Example:
            >>> Exactness.ROUNDING.allows(Exactness.BITWISE)
            True
        """
        order = list(Exactness)
        return order.index(other) <= order.index(self)


def undo_all(functions: list[Callable[[], None]]) -> None:
    """Call functions that take something back, the last one first, whatever others of them raise.

    Args:
        functions: Each is called once: the list is empty afterwards.
    """
    with contextlib.ExitStack() as stack:
        while functions:
            stack.callback(functions.pop(0))


class Handle(Generic[TargetT]):
    """What ``Technique.apply`` did, and the way back; also a context manager.

    Args:
        target: What to use from now on: the object that was given, unless it had to be replaced.
        changes: What was changed, one line each, for people.
        skipped: What was left as it was and why, one line each.
        undo: Functions that restore the state before, run last to first.
        summary: The changes in one line; without it, the lines joined.
    """

    def __init__(
        self,
        target: TargetT,
        changes: Iterable[str],
        skipped: Iterable[str] = (),
        undo: Iterable[Callable[[], None]] = (),
        summary: str | None = None,
    ) -> None:
        self.target = target
        self.changes = tuple(changes)
        self.skipped = tuple(skipped)
        self.summary = "; ".join(self.changes) if summary is None else summary
        self._undo = list(undo)

    def undo(self) -> None:
        """Restore what was there before; a second call does nothing."""
        undo_all(self._undo)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.undo()
        except Exception as failure:
            if exc is None:
                raise
            # What was raised first must be seen.
            exc.add_note(f"Not all of it is undone: {type(failure).__name__}: {failure}")


@dataclass(frozen=True, slots=True)
class Offer:
    """A value of an argument that may lower the peak, for `memsave explain` and the like.

    Args:
        name: Such as ``"recompute all blocks"``.
        value: Of the argument.
        cost: Roughly what it costs, in words: counted in passes, not measured.
        slowdown: The same as a share of a step, by which offers are put in order.
    """

    name: str
    value: Any
    cost: str = "nothing"
    slowdown: float = 0.0


class Technique(ABC, Generic[TargetT]):
    """One way to save memory, usable without Lightning.

    Subclasses are frozen dataclasses whose fields are the settings, validated in ``__post_init__``.
    """

    name: ClassVar[str]
    """Registry key, word on the command line and anchor in the docs."""
    exactness: ClassVar[Exactness]
    source: ClassVar[str]
    """The paper or project where it comes from."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Packages that are imported when it is applied."""
    argument: ClassVar[str]
    """What `MemSaveCallback` calls it."""
    offers: ClassVar[tuple[Offer, ...]] = ()
    """What would be switched on to lower the peak, the cheapest first."""
    examples: ClassVar[str] = "True"
    """What may be written for the argument beside an instance, for messages."""

    @classmethod
    def from_value(cls, value: Any) -> Self | None:
        """Read what a user may write for the argument.

        Args:
            value: Such as True, ``None``, or an instance.

        Returns:
            The technique; ``None`` where it is not wanted.

        Raises:
            ConfigurationError: If it is something else.
        """
        is_switch = cls.examples.startswith("True")
        if value is None or (value is False and is_switch):
            return None
        if isinstance(value, cls):
            return value
        if value is True and is_switch:
            return cls()
        raise cls.not_a_choice(value)

    @classmethod
    def not_a_choice(cls, value: object) -> ConfigurationError:
        """Say what may be written instead."""
        name = cls.argument
        choices = "`, `".join(f"{name}={example}" for example in cls.examples.split(", "))
        return ConfigurationError(
            f"`{name}={value!r}` is not a choice. Use `{choices}`, "
            f"`{name}={cls.__name__}(...)`, or `None`."
        )

    @abstractmethod
    def check(self, target: TargetT) -> list[Problem]:
        """Find every reason why ``apply`` would be refused; changes nothing.

        Args:
            target: What ``apply`` would be given.

        Returns:
            All problems, empty if there are none.
        """

    def conflicts(self, facts: TrainerFacts, written: str) -> list[Problem]:
        """Find every conflict with a Trainer, before the model or the optimizer is changed.

        Args:
            facts: About the Trainer.
            written: The argument as the user wrote it, for messages.

        Returns:
            All problems; none of a technique that works with every Trainer.
        """
        return []

    def apply(self, target: TargetT) -> Handle[TargetT]:
        """Switch the technique on.

        Args:
            target: A module or an optimizer, as the technique needs.

        Returns:
            What was changed, and ``undo``.

        Raises:
            IncompatibleError: If ``check`` finds a problem; nothing has been changed then.
        """
        problems = self.check(target)
        if problems:
            raise IncompatibleError(self.name, problems)
        handle = self._apply(target)
        if not handle.changes:
            reasons = "; ".join(handle.skipped) or "there was nothing to do"
            warnings.warn(f"{self.name} changed nothing: {reasons}.", NoEffectWarning, stacklevel=2)
        return handle

    @abstractmethod
    def _apply(self, target: TargetT) -> Handle[TargetT]:
        """Make the changes; the target has passed ``check``."""


Status = Literal["on", "off", "unchanged"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table at the start of fit.

    Args:
        name: Name of the setting.
        value: The value in force, as it would be written.
        status: ``"on"``, ``"off"``, or ``"unchanged"`` where the user's own choice is kept.
        details: What was done, or why nothing was done, one line each.
        exactness: How far the numbers may move, in one word; empty where nothing moves.
    """

    name: str
    value: str
    status: Status
    details: tuple[str, ...] = ()
    exactness: str = ""
