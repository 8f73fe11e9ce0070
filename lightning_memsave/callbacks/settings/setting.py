"""The protocol of a setting (read, check, apply, start, yield, undo), and the kinds of them."""

import contextlib
import dataclasses
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_memsave.core.technique import Exactness, Handle, Row, Technique, undo_all
from lightning_memsave.errors import ConfigurationError, IncompatibleError, NoEffectWarning, Problem
from lightning_memsave.trainer.configure_optimizers import TechniqueState, enable
from lightning_memsave.trainer.facts import facts_of
from lightning_memsave.trainer.failures import describe
from lightning_memsave.trainer.trainer import builds_model_late, is_strategy
from lightning_memsave.units import format_bytes

Arguments = Mapping[str, Any]
"""All arguments of ``MemSaveCallback`` by name."""
UNCHANGED = "`None` was given"
SMALLEST_SAVING_BYTES = 20 * 2**20
"""In the preset "classic" state stays in 32 bits if 8 bits save less: CUDA's allocator reserves
memory in segments of 20 MiB, so that less may not change whether a run fits. Savings of a preset
for the least memory add up: none of them is left out."""

_STAGES = "PipelineStrategyMixin"


def exactness_limit(arguments: Arguments) -> Exactness:
    try:
        return Exactness(arguments["exactness"])
    except ValueError as error:
        raise ConfigurationError(
            f"`exactness={arguments['exactness']!r}` is not a valid exactness. Use "
            f"{' or '.join(repr(e.value) for e in Exactness)}."
        ) from error


def is_asked(arguments: Arguments, name: str) -> bool:
    """Say whether the user wrote an argument by name, and not the preset."""
    return name not in arguments["from_preset"] and arguments[name] != "auto"


def why_beyond(arguments: Arguments, name: str, exactness: Exactness) -> str:
    """Say why the limit switches off what is left to a preset; refuse what the user wrote."""
    limit = exactness_limit(arguments)
    if limit.allows(exactness):
        return ""
    why = f"{exactness.value}, which `exactness={limit.value!r}` does not allow"
    if not is_asked(arguments, name):
        return f"it is {why}"
    fix = f"Use `exactness={exactness.value!r}`, or `{name}=None`."
    raise ConfigurationError(f"{as_given(arguments, name)} is {why}. {fix}")


def as_given(arguments: Arguments, name: str) -> str:
    """Write an argument, with the preset that it comes from if the user has not given it."""
    from_preset = arguments["preset"] is not None and name in arguments["from_preset"]
    of_preset = f" of `preset={arguments['preset']!r}`" if from_preset else ""
    return f"`{name}={arguments[name]!r}`{of_preset}"


def saves(num_bytes: int, what: str) -> str:
    return f"it would save up to {format_bytes(num_bytes)} of {what}" if num_bytes else ""


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have a size and get gradients."""
    return [p for p in module.parameters() if p.requires_grad and not is_lazy(p)]


def warn(trainer: Any, message: str, category: type[Warning]) -> None:
    if trainer.is_global_zero:
        warnings.warn(message, category, stacklevel=3)


class Setting(ABC):
    """One thing that the callback sets in a Trainer or a module, and takes back."""

    name: ClassVar[str]
    """The argument, and the name of its row."""
    kind: ClassVar[type[Technique[Any]] | None] = None
    shown: ClassVar[str] = ""
    """The setting of the technique that the table shows; the value of the argument without."""
    is_for_evaluation: ClassVar[bool] = False
    """It matters in validation, test and prediction too."""
    runs_in_stages: ClassVar[bool] = False
    """It was tested with `PipelineStrategy`."""

    def __init_subclass__(cls) -> None:
        if cls.kind is not None:
            cls.name = cls.kind.argument

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.is_asked = is_asked(arguments, self.name) if self.name in arguments else True
        """The user wrote it by name: a conflict is an error. Otherwise it yields."""
        self.off_reason = ""
        """Why it is off from the start: a limit of the user's, or a preset that is without it."""
        self.rows: list[Row] = []
        self.has_yielded = False
        self._undo: list[Callable[[], None]] = []
        self.technique: Any = self.read()
        if self.technique is not None:
            self.off_reason = why_beyond(arguments, self.name, self.technique.exactness)
        elif not self.is_asked:
            self.off_reason = arguments["from_preset"].get(self.name, "")
        self.is_on = self.technique is not None and not self.off_reason
        """There is something to apply: what is off has no conflicts, and at most a row."""
        given = getattr(self.technique, self.shown) if self.is_on and self.shown else None
        self.value = repr(arguments[self.name] if self.is_on and not self.shown else given)
        """What the user, or the preset, wrote for it."""

    def read(self) -> Any:
        """Make the technique that the arguments describe; ``None`` where it is off."""
        value = self.arguments.get(self.name)
        technique: Any = None if value is None or self.kind is None else self.kind.from_value(value)
        if getattr(technique, "blocks", "none") is None:
            return dataclasses.replace(technique, blocks=self.arguments["blocks"])
        return technique

    @property
    def written(self) -> str:
        """The argument as the user would write it, for messages."""
        return f"`{self.name}={self.value}`"

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find every conflict with this Trainer and module; changes nothing."""
        if self.is_on and not self.runs_in_stages and is_strategy(trainer, _STAGES):
            why = f"`{type(trainer.strategy).__name__}` runs forward and backward itself"
            return [Problem(self.written, why, f"Set `{self.name}=None`.")]
        return list(self.conflicts(trainer, pl_module)) if self.is_on else []

    def conflicts(self, trainer: Any, pl_module: Any) -> Iterable[Problem]:
        """Find the conflicts of what is on; the technique knows its own."""
        if self.technique is not None:
            yield from self.technique.conflicts(facts_of(trainer, pl_module), self.written)
        for why, fix in self.reasons(trainer, pl_module):
            yield Problem(self.written, why, fix)

    def reasons(self, trainer: Any, pl_module: Any) -> Iterable[tuple[str, str]]:
        """Find other reasons why it cannot be as it was written, and what to do."""
        return ()

    @abstractmethod
    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Make the changes of what is on, in ``setup``, after every ``check`` was empty."""

    def start(self, trainer: Any, pl_module: Any) -> None:  # noqa: B027 - most have nothing to do
        """Apply of what is on what needs the set-up model, in ``on_fit_start``."""

    def watch(self, trainer: Any, *, is_start: bool) -> None:  # noqa: B027 - as above
        """Look at memory before each training batch, and after it."""

    def show(self, status: Any, *details: str, exactness: str = "") -> None:
        self.rows = [Row(self.name, self.value, status, tuple(filter(None, details)), exactness)]

    def stay_off(self, trainer: Any, pl_module: Any) -> None:
        """Write why it does nothing: a limit, or the user's ``None``; no row for a preset's."""
        if self.off_reason:
            self.rows = [Row(self.name, "auto", "off", (self.off_reason,))]
        elif self.is_asked:
            self.rows = [Row(self.name, "None", "unchanged", (UNCHANGED,))]

    def show_handle(self, handle: Handle[Any]) -> Row:
        if not handle.changes:
            return Row(self.name, self.value, "off", handle.skipped)
        details, exactness = (handle.summary, *handle.skipped), self.technique.exactness.value
        return Row(self.name, self.value, "on", details, exactness)

    def add_details(self, *details: str) -> None:
        more = tuple(filter(None, details))
        self.rows = [dataclasses.replace(row, details=row.details + more) for row in self.rows]

    def settle(self, trainer: Any, pl_module: Any) -> None:
        """Apply it, or show why it is off or yields."""
        self.has_yielded, self.rows = False, []
        # Only now: those before it decide what it finds, as the precision does.
        if against := [] if self.is_asked else self.check(trainer, pl_module):
            self.yield_to(against, trainer, pl_module)
        elif self.is_on:
            self.apply(trainer, pl_module)
        else:
            self.stay_off(trainer, pl_module)

    def yield_to(self, problems: Sequence[Problem], trainer: Any, pl_module: Any) -> None:
        """Stay off, and show why and what it would have saved."""
        self.undo()
        self.has_yielded = True
        own = f"`{self.name}="
        reasons = (p.why if p.what.startswith(own) else f"{p.what}: {p.why}" for p in problems)
        self.show("off", *dict.fromkeys(reasons), self.savings(pl_module))

    def savings(self, pl_module: Any) -> str:
        """Say what it would have saved, where it yields."""
        return ""

    def undo(self) -> None:
        undo_all(self._undo)


class ModuleSetting(Setting):
    _handle: Handle[nn.Module] | None = None

    def conflicts(self, trainer: Any, pl_module: Any) -> Iterable[Problem]:
        return [*self.technique.check(pl_module), *super().conflicts(trainer, pl_module)]

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Change the module, unless it makes its layers later."""
        if not builds_model_late(pl_module):
            self.use(self.technique, pl_module)

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Change a module that made its layers after ``setup``."""
        if self._handle is not None and self._handle.changes:
            return
        if not self.is_asked and (problems := self.technique.check(pl_module)):
            self.yield_to(problems, trainer, pl_module)
            return
        self.use(self.technique, pl_module)

    def use(self, technique: Technique[nn.Module], pl_module: nn.Module) -> Handle[nn.Module]:
        """Apply a technique; refuse what was asked for and finds nothing to change."""
        with warnings.catch_warnings():
            # What is left to a preset has a line in the table; what is not is refused.
            warnings.simplefilter("ignore", NoEffectWarning)
            handle = self._handle = technique.apply(pl_module)
        self._undo.append(handle.undo)
        if not handle.changes and self.is_asked and not technique.is_served(pl_module):
            self.refuse(handle.skipped)
        self.rows = [self.show_handle(handle)]
        return handle

    def refuse(self, reasons: Sequence[str]) -> None:
        remedy = self.technique.remedy
        fix = f"{remedy}, or set `{self.name}=None`." if remedy else f"Set `{self.name}=None`."
        problem = Problem(self.written, "; ".join(reasons), fix)
        raise IncompatibleError("MemSaveCallback", [problem])

    def undo(self) -> None:
        self._handle = None
        super().undo()


class OptimizerTechniqueSetting(Setting):
    """A technique on what ``configure_optimizers`` gives."""

    _state: TechniqueState | None = None

    def enable(self, pl_module: Any, technique: Technique[Any], method: str = "apply") -> None:
        self._state, undo = enable(pl_module, technique, not self.is_asked, method)
        self._undo.append(undo)

    @property
    def handles(self) -> list[Handle[Optimizer]]:
        return [] if self._state is None else self._state.handles

    def start(self, trainer: Any, pl_module: Any) -> None:
        if self._state is not None and self._state.problems:
            self.yield_to(self._state.problems, trainer, pl_module)
            return
        self.show("off", "the module configures no optimizer")
        self.rows = [self.show_handle(handle) for handle in self.handles] or self.rows

    def undo(self) -> None:
        self._state = None
        super().undo()


SettingT = TypeVar("SettingT", bound=Setting)


class Settings:
    def __init__(self, settings: Sequence[Setting]) -> None:
        self._settings = settings

    @property
    def rows(self) -> list[Row]:
        return [row for setting in self._settings for row in setting.rows]

    def find(self, kind: type[SettingT]) -> SettingT:
        return next(setting for setting in self._settings if isinstance(setting, kind))

    def conflicts_of(self, name: str, trainer: Any, pl_module: Any) -> list[Problem]:
        chosen = [setting for setting in self._settings if setting.name == name]
        return [problem for s in chosen for problem in s.check(trainer, pl_module)]

    def apply(self, trainer: Any, pl_module: Any, is_fit: bool) -> list[Problem]:
        """Apply every setting, or none."""
        chosen = [s for s in self._settings if is_fit or s.is_for_evaluation]
        problems = [p for s in chosen if s.is_asked for p in s.check(trainer, pl_module)]
        # What finds nothing to change is known only when it is applied.
        return problems or self._do(lambda s: s.settle(trainer, pl_module), chosen)

    def start(self, trainer: Any, pl_module: Any) -> list[Problem]:
        chosen = [s for s in self._settings if s.is_on and not s.has_yielded]
        return self._do(lambda s: s.start(trainer, pl_module), chosen)

    def watch(self, trainer: Any, *, is_start: bool) -> None:
        for setting in self._settings:
            if setting.is_on:
                setting.watch(trainer, is_start=is_start)

    def _do(self, function: Callable[[Setting], None], chosen: Iterable[Setting]) -> list[Problem]:
        problems: list[Problem] = []
        with self.undone_on_error():
            for setting in chosen:
                try:
                    function(setting)
                except IncompatibleError as error:
                    problems += error.problems
        if problems:
            self.undo()
        return problems

    def undo(self) -> list[str]:
        """Restore everything, and say what could not be; a second call does nothing."""
        failures = []
        for setting in reversed([s for s in self._settings if s.is_on or s._undo]):
            try:
                setting.undo()
            except Exception as failure:
                failures.append(f"`{setting.name}` is not restored: {describe(failure)}")
        return failures

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            for failure in self.undo():
                error.add_note(failure)
            raise
