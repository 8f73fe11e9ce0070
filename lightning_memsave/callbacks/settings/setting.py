"""The protocol of a setting: read, check, apply, start, yield, undo."""

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from lightning_memsave.core.technique import Handle, Row, undo_all
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.trainer.failures import describe
from lightning_memsave.units import format_bytes

UNCHANGED = "`None` was given"
SMALLEST_SAVING_BYTES = 20 * 2**20
"""In the preset "classic" state stays in 32 bits if 8 bits save less: CUDA's allocator reserves
memory in segments of 20 MiB, so that less may not change whether a run fits. Savings of a preset
for the least memory add up: none of them is left out."""


def saves(num_bytes: int, what: str) -> str:
    """Say what a setting that has yielded would save; nothing for nothing."""
    return f"it would save up to {format_bytes(num_bytes)} of {what}" if num_bytes else ""


def warn(trainer: Any, message: str, category: type[Warning]) -> None:
    """Give a warning on rank zero."""
    if trainer.is_global_zero:
        warnings.warn(message, category, stacklevel=3)


class Setting(ABC):
    """One thing that the callback sets in a Trainer or a module, and takes back."""

    name: str
    value: str
    """What the user, or the preset, wrote for it."""
    is_for_evaluation: ClassVar[bool] = False
    """It matters in validation, test and prediction too."""
    is_asked = True
    """The user wrote it by name: a conflict is an error. Otherwise it yields, with the reason."""
    off_reason = ""
    """Why it is off from the start: a limit of the user's, or a preset that is without it."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.has_yielded = False
        self._undo: list[Callable[[], None]] = []

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find every conflict with this Trainer and module; changes nothing."""
        return []

    @abstractmethod
    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Make the changes, in ``setup`` of a fit, after every ``check`` was empty."""

    def yield_to(self, problems: Sequence[Problem], trainer: Any, pl_module: Any) -> None:
        """Stay off, and show why and what it would have saved."""
        self.undo()
        self.has_yielded = True
        own = f"`{self.name}="
        reasons = (p.why if p.what.startswith(own) else f"{p.what}: {p.why}" for p in problems)
        details = [*dict.fromkeys(reasons), self.savings(pl_module)]
        self.rows = [Row(self.name, self.value, "off", tuple(filter(None, details)))]

    def savings(self, pl_module: Any) -> str:
        """Say what it would have saved."""
        return ""

    def start(self, trainer: Any, pl_module: Any) -> None:  # noqa: B027 - most have nothing to do
        """Apply what needs the set-up model, in ``on_fit_start``."""

    def undo(self) -> None:
        """Restore what was there before; a second call does nothing."""
        undo_all(self._undo)


def off_rows(setting: Setting) -> list[Row]:
    """Write why a setting does nothing: a limit, or the user's ``None``; none for a preset's."""
    if setting.off_reason:
        return [Row(setting.name, "auto", "off", (setting.off_reason,))]
    return [Row(setting.name, "None", "unchanged", (UNCHANGED,))] if setting.is_asked else []


def row_of(name: str, value: str, handle: Handle[Any], exactness: str) -> Row:
    """Make the table row of a technique."""
    if not handle.changes:
        return Row(name, value, "off", handle.skipped)
    return Row(name, value, "on", (handle.summary, *handle.skipped), exactness)


SettingT = TypeVar("SettingT", bound=Setting)


class Settings:
    """All settings of a callback."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        self._settings = settings

    @property
    def rows(self) -> list[Row]:
        """The lines of the table at the start of fit."""
        return [row for setting in self._settings for row in setting.rows]

    def find(self, kind: type[SettingT]) -> SettingT:
        """Give the setting of a class."""
        return next(setting for setting in self._settings if isinstance(setting, kind))

    def conflicts_of(self, name: str, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find what conflicts with a setting; changes nothing."""
        chosen = [setting for setting in self._settings if setting.name == name]
        return [problem for s in chosen for problem in s.check(trainer, pl_module)]

    def apply(self, trainer: Any, pl_module: Any, is_fit: bool) -> list[Problem]:
        """Apply every setting, or none."""
        chosen = [s for s in self._settings if is_fit or s.is_for_evaluation]
        problems = [p for s in chosen if s.is_asked for p in s.check(trainer, pl_module)]
        if problems:
            return problems
        # What finds nothing to change is known only when it is applied.
        with self.undone_on_error():
            for setting in chosen:
                setting.has_yielded = False
                # Only now: those before it decide what it finds, as the precision does.
                against = [] if setting.is_asked else setting.check(trainer, pl_module)
                if against:
                    setting.yield_to(against, trainer, pl_module)
                    continue
                try:
                    setting.apply(trainer, pl_module)
                except IncompatibleError as error:
                    problems += error.problems
        if problems:
            self.undo()
        return problems

    def start(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Apply what needs the set-up model, in ``on_fit_start``."""
        problems: list[Problem] = []
        with self.undone_on_error():
            for setting in self._settings:
                try:
                    if not setting.has_yielded:
                        setting.start(trainer, pl_module)
                except IncompatibleError as error:
                    problems += error.problems
        if problems:
            self.undo()
        return problems

    def undo(self) -> list[str]:
        """Restore everything; a second call does nothing."""
        failures = []
        for setting in reversed(self._settings):
            try:
                setting.undo()
            except Exception as failure:
                failures.append(f"`{setting.name}` is not restored: {describe(failure)}")
        return failures

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Restore everything if what is done inside fails."""
        try:
            yield
        except BaseException as error:
            for failure in self.undo():
                error.add_note(failure)
            raise
