"""The protocol that every technique follows: check, apply, undo."""

import contextlib
import enum
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

from torch import nn
from torch.optim import Optimizer

from lightning_memsave.core.patching import keep_copies_plain
from lightning_memsave.core.trainer_facts import TrainerFacts
from lightning_memsave.errors import ConfigurationError, IncompatibleError, NoEffectWarning, Problem

TargetT = TypeVar("TargetT")


class Exactness(enum.Enum):
    """How far a technique may change the values of training."""

    BITWISE = "bitwise"
    """Same losses, gradients and parameters, bit for bit, on the same device."""
    ROUNDING = "rounding"
    """Same mathematics in another order of operations."""
    APPROXIMATE = "approximate"
    """Other mathematics, judged by convergence."""

    def allows(self, other: "Exactness") -> bool:
        """Return whether ``other``, that of a technique, is at least as exact as this limit.

        Example:
            >>> Exactness.ROUNDING.allows(Exactness.BITWISE)
            True
        """
        return other.rank <= self.rank

    @property
    def rank(self) -> int:
        """A number that is higher the less exact it is."""
        return list(Exactness).index(self)


def undo_all(functions: list[Callable[[], None]]) -> None:
    """Call undo functions, last one first, all of them even if some raise."""
    with contextlib.ExitStack() as stack:
        while functions:
            stack.callback(functions.pop(0))


@contextlib.contextmanager
def undone_on_error(functions: list[Callable[[], None]]) -> Iterator[None]:
    """Call undo functions, those added inside included, if what follows fails."""
    try:
        yield
    except BaseException:
        undo_all(functions)
        raise


class Handle(Generic[TargetT]):
    """Result of ``Technique.apply``, with ``undo``; also a context manager.

    Args:
        target: The object to use from now on: the given one, unless it had to be replaced.
        changes: Description of each change, one line each.
        skipped: Description of everything that stays unchanged, with the reason, one line each.
        undo: Functions that restore the former state, run last to first.
        summary: The changes in one line; ``None`` joins ``changes``.
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
        """Restore the former state; a second call does nothing."""
        undo_all(self._undo)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        try:
            self.undo()
        except Exception as error:
            if failure[1] is None:
                raise
            # The first exception must not be hidden.
            failure[1].add_note(f"Undoing it failed in part: {type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class Offer:
    """A value of an argument that may lower the peak, for `memsave explain` and the planner."""

    name: str
    value: Any
    cost: str = "nothing"
    slowdown: float = 0.0


@contextlib.contextmanager
def _restored_on_error(target: object) -> Iterator[None]:
    """Restore attributes and hooks of an optimizer or of all modules of a model."""
    is_optimizer = isinstance(target, Optimizer)
    owners = [*target.modules()] if isinstance(target, nn.Module) else [target] * is_optimizer
    before = []
    for own in map(vars, owners):
        tables = [v for k, v in own.items() if k.startswith("_") and isinstance(v, dict)]
        before += [(each, {**each}) for each in (own, *tables)]
    try:
        yield
    except BaseException:
        for changed, former in before:
            changed.clear()
            changed.update(former)
        raise


class Technique(ABC, Generic[TargetT]):
    """One way to save memory, usable without Lightning.

    Subclasses are frozen dataclasses whose fields are the settings, validated in ``__post_init__``.
    """

    name: ClassVar[str]
    """Registry key, name on the command line and anchor in the docs."""
    exactness: ClassVar[Exactness]
    requires: ClassVar[tuple[str, ...]] = ()
    """Packages that are imported when it is applied."""
    argument: ClassVar[str]
    """Its argument of `MemSaveCallback`."""
    offers: ClassVar[tuple[Offer, ...]] = ()
    """Values that lower the peak, the cheapest first."""
    examples: ClassVar[str] = "True"
    """Valid values of the argument other than an instance, for messages; empty: the class itself
    reads and refuses them."""
    why_not_compiled: ClassVar[str] = ""
    """Why modules that are compiled are refused; empty: they are not."""
    remedy: ClassVar[str] = ""
    """What to write where nothing is found to change."""

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in settings_of(self).items())
        return f"{type(self).__name__}({given})"

    @classmethod
    def from_value(cls, value: Any) -> Self | None:
        """Convert a value of the argument to the technique.

        Args:
            value: Such as True, ``None``, or an instance.

        Returns:
            The technique; ``None`` if it is disabled.

        Raises:
            ConfigurationError: If the value is invalid.
        """
        is_switch = cls.examples.startswith("True")
        if value is None or (value is False and is_switch):
            return None
        if isinstance(value, cls):
            return value
        if value is True and is_switch:
            return cls()
        is_class = isinstance(value, type) and issubclass(value, Technique)
        if not (cls.examples or is_class or isinstance(value, Technique)):
            return cls(value)  # type: ignore[call-arg]
        raise cls.not_a_choice(value)

    @classmethod
    def not_a_choice(cls, value: object) -> ConfigurationError:
        """Return the error for an invalid value, with the valid ones."""
        name = cls.argument
        if not cls.examples:
            return ConfigurationError(
                f"`{name}={value!r}` is not an instance of `{cls.__name__}`. Use "
                f"`{name}={cls.__name__}()`."
            )
        choices = "`, `".join(f"{name}={example}" for example in cls.examples.split(", "))
        return ConfigurationError(
            f"`{name}={value!r}` is not a valid value. Use `{choices}`, "
            f"`{name}={cls.__name__}(...)`, or `None`."
        )

    @abstractmethod
    def check(self, target: TargetT) -> list[Problem]:
        """Find every reason why ``apply`` would be refused; changes nothing.

        Args:
            target: The target of ``apply``.

        Returns:
            All problems, empty if there are none.
        """

    def conflicts(self, facts: TrainerFacts, written: str) -> list[Problem]:
        """Find every conflict of an argument, as it is written, with a Trainer; changes nothing."""
        return self.problems_of_compiled(facts.compiled)

    def problems_of_compiled(self, name: str) -> list[Problem]:
        """Refuse a module that is compiled, by its name; empty for none."""
        if not (name and self.why_not_compiled):
            return []
        fix = f"Do not compile it, or set `{self.argument}=None`."
        return [Problem(f"`{name}`", f"it is compiled, {self.why_not_compiled}", fix)]

    def is_served(self, target: TargetT) -> bool:
        """Return whether a target has what is asked for without any change."""
        return False

    def apply(self, target: TargetT) -> Handle[TargetT]:
        """Apply the technique.

        Args:
            target: A module, an optimizer or a step, depending on the technique.

        Returns:
            A handle with the changes and ``undo``.

        Raises:
            IncompatibleError: If ``check`` finds a problem; nothing has been changed then.
        """
        problems = self.check(target)
        if problems:
            raise IncompatibleError(self.name, problems)
        with _restored_on_error(target):
            handle = self._apply(target)
        if isinstance(target, nn.Module) and handle.changes:
            handle._undo.append(keep_copies_plain(target))
        if not handle.changes:
            reasons = "; ".join(handle.skipped) or "there was nothing to do"
            warnings.warn(f"{self.name} changed nothing: {reasons}.", NoEffectWarning, stacklevel=2)
        return handle

    @abstractmethod
    def _apply(self, target: TargetT) -> Handle[TargetT]:
        """Make the changes; the target has passed ``check``."""


def settings_of(technique: Technique[Any]) -> dict[str, Any]:
    own = {f.name: f.default for f in fields(technique) if f.repr}  # type: ignore[arg-type]
    values = {name: getattr(technique, name) for name in own}
    return {name: value for name, value in values.items() if value != own[name]}


def as_config(technique: Technique[Any]) -> dict[str, Any]:
    settings = settings_of(technique)
    plain = {n: list(v) if isinstance(v, tuple) else v for n, v in settings.items()}
    return {"class_path": f"lightning_memsave.{type(technique).__name__}", "init_args": plain}


Status = Literal["on", "off", "unchanged"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table at the start of fit."""

    name: str
    value: str
    status: Status
    details: tuple[str, ...] = ()
    exactness: str = ""
