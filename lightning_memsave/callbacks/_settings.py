"""What ``MemSaveCallback`` can set, each behind the same few methods."""

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch

from lightning_memsave.core.technique import undo_all
from lightning_memsave.errors import Problem

Status = Literal["on", "off", "unchanged"]


AS_IT_IS = "left as it is: `None` was asked for"


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


def warn(trainer: Any, message: str, category: type[Warning]) -> None:
    """Give a warning on rank zero.

    Args:
        trainer: The Trainer.
        message: What happens, why, and what to type instead.
        category: Class of the warning.
    """
    if trainer.is_global_zero:
        warnings.warn(message, category, stacklevel=3)


def describe(failure: BaseException) -> str:
    """Write a failure in one line.

    Args:
        failure: What was raised.

    Returns:
        Class and message.
    """
    return " ".join(f"{type(failure).__name__}: {failure}".split())


class Setting(ABC):
    """One thing that the callback sets in a Trainer or a module, and takes back."""

    name: str
    is_for_evaluation: ClassVar[bool] = False
    """It matters in validation, test and prediction too."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._undo: list[Callable[[], None]] = []

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find every conflict with this Trainer and module; changes nothing.

        Args:
            trainer: A Trainer in ``setup``.
            pl_module: Its LightningModule.

        Returns:
            All problems; none of a setting that goes with everything.
        """
        return []

    @abstractmethod
    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Make the changes, in ``setup`` of a fit, after every ``check`` was empty.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
        """

    def start(self, trainer: Any, pl_module: Any) -> None:  # noqa: B027 - most have nothing to do
        """Make what could not be done in ``setup``, in ``on_fit_start``.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
        """

    def undo(self) -> None:
        """Restore what was there before; a second call does nothing."""
        undo_all(self._undo)


SettingT = TypeVar("SettingT", bound=Setting)


class Settings:
    """All settings of a callback.

    Args:
        settings: In the order in which they are applied; they are undone in reverse.
    """

    def __init__(self, settings: Sequence[Setting]) -> None:
        self._settings = settings

    @property
    def rows(self) -> list[Row]:
        """The lines of the table at the start of fit."""
        return [row for setting in self._settings for row in setting.rows]

    def find(self, kind: type[SettingT]) -> SettingT:
        """Give the setting of a class.

        Args:
            kind: One of which there is one.

        Returns:
            The setting.
        """
        return next(setting for setting in self._settings if isinstance(setting, kind))

    def apply(self, trainer: Any, pl_module: Any, is_fit: bool) -> list[Problem]:
        """Apply every setting, or none.

        Args:
            trainer: A Trainer in ``setup``.
            pl_module: Its LightningModule.
            is_fit: Not for validation, test or prediction.

        Returns:
            Every conflict; nothing has been changed if there is one.
        """
        chosen = [s for s in self._settings if is_fit or s.is_for_evaluation]
        problems = [problem for s in chosen for problem in s.check(trainer, pl_module)]
        if not problems:
            with self.undone_on_error():
                for setting in chosen:
                    setting.apply(trainer, pl_module)
        return problems

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Make what could not be done before, in ``on_fit_start``.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
        """
        with self.undone_on_error():
            for setting in self._settings:
                setting.start(trainer, pl_module)

    def undo(self) -> list[str]:
        """Restore everything; a second call does nothing.

        Returns:
            What could not be restored, one line each; it keeps nothing else from being restored.
        """
        failures = []
        for setting in reversed(self._settings):
            try:
                setting.undo()
            except Exception as failure:
                failures.append(f"`{setting.name}` is not restored: {describe(failure)}")
        return failures

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Restore everything if what is done inside fails.

        Yields:
            Once.
        """
        try:
            yield
        except BaseException as error:
            for failure in self.undo():
                error.add_note(failure)
            raise


class TensorFloat32(Setting):
    """TF32 for float32 matrix products and convolutions on CUDA.

    Args:
        is_allowed: Whether to use it; ``None`` leaves torch's process-wide setting alone.
    """

    name = "tf32"
    is_for_evaluation = True

    def __init__(self, is_allowed: bool | None) -> None:
        super().__init__()
        self.is_allowed = is_allowed

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Set it, if asked to.

        Args:
            trainer: The Trainer.
            pl_module: Not used.
        """
        if self.is_allowed is None:
            return
        matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        self._undo.append(lambda: _set_tf32(matmul, cudnn))
        _set_tf32("high" if self.is_allowed else "highest", self.is_allowed)
        on_cuda = trainer.strategy.root_device.type == "cuda"
        status: Status = "on" if self.is_allowed and on_cuda else "off"
        details = () if on_cuda or not self.is_allowed else ("it has an effect on CUDA only",)
        exactness = "approximate" if status == "on" else ""
        self.rows = [Row(self.name, str(self.is_allowed), status, details, exactness)]


def _set_tf32(matmul: str, is_allowed_in_cudnn: bool) -> None:
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = is_allowed_in_cudnn
