"""Gradient accumulation set from the callback, with the last partial window scaled right."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from lightning_memsave.callbacks.settings.setting import Setting, warn
from lightning_memsave.callbacks.settings.values import Arguments, why_beyond
from lightning_memsave.core.technique import Exactness, Row
from lightning_memsave.errors import ConfigurationError, ExactnessWarning, Problem
from lightning_memsave.trainer.training_loop import adjust_losses


class AccumulationSetting(Setting):
    """Gradient accumulation over several batches.

    Lightning divides each loss by the number of batches per window, also in the last window of an
    epoch that is shorter, whose gradient is too small then (its issue 19987). Here the losses of
    that window are divided by the number of its batches.

    Args:
        num_batches: Batches per optimizer step; ``None`` leaves the Trainer's value and scaling.
    """

    name = "accumulate_grad_batches"

    def __init__(self, num_batches: int | None) -> None:
        super().__init__()
        self.num_batches = num_batches
        # Factor of the batches of this window that have passed backward already.
        self._factor = 1.0

    @classmethod
    def read(cls, arguments: Arguments) -> "AccumulationSetting":
        """Make the setting that the arguments describe."""
        wanted = arguments["accumulate_grad_batches"]
        if wanted is not None and (type(wanted) is not int or wanted < 1):
            raise ConfigurationError(
                f"`accumulate_grad_batches={wanted!r}` is not a number of batches: it must be a "
                "whole number of at least 1. Use `accumulate_grad_batches=4` for a step every four "
                "batches, or `None` to leave it to the Trainer."
            )
        if wanted is not None and wanted > 1:
            why_beyond(arguments, "accumulate_grad_batches", Exactness.ROUNDING)
        return cls(wanted)

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find conflicts with the Trainer's own value, the scheduler and manual optimization."""
        if self.num_batches is None:
            return []
        what = f"`accumulate_grad_batches={self.num_batches}`"
        own = trainer.accumulate_grad_batches
        problems = []
        if not pl_module.automatic_optimization:
            problems.append(
                Problem(
                    what,
                    f"`{type(pl_module).__name__}.automatic_optimization=False`: the module steps "
                    "its own optimizers, and Lightning would ignore this silently",
                    "Set `accumulate_grad_batches=None` and accumulate in `training_step`.",
                )
            )
        if own not in (1, self.num_batches):
            problems.append(
                Problem(
                    what,
                    f"the Trainer was given `accumulate_grad_batches={own}`",
                    f"Remove one of the two, or pass `accumulate_grad_batches={own}` here too.",
                )
            )
        if has_scheduler(trainer):
            problems.append(
                Problem(
                    what,
                    "the Trainer has a `GradientAccumulationScheduler`, which sets it per epoch",
                    "Remove that callback, or set `accumulate_grad_batches=None` here.",
                )
            )
        return problems

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Set it, or say what the Trainer does by itself."""
        if self.num_batches is None:
            self.rows = _rows_of_trainer(trainer)
            return
        own, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, self.num_batches
        self._undo.append(lambda: setattr(trainer, "accumulate_grad_batches", own))
        details = [f"one optimizer step per {self.num_batches} batches"]
        if trainer.strategy.handles_gradient_accumulation:
            details.append("the strategy scales the last window of an epoch, as it always does")
        else:
            self._undo.append(adjust_losses(trainer, self.scale))
            details.append("a shorter last window is divided by its own number of batches")
        self.rows = [Row(self.name, str(self.num_batches), "on", tuple(details), "rounding")]
        if self.num_batches > 1 and has_batch_norm(pl_module):
            warn(
                trainer,
                f"`accumulate_grad_batches={self.num_batches}` and batch normalisation: its "
                "statistics come from each batch alone, not from the whole window. Use a "
                "normalisation without batch statistics, such as `nn.GroupNorm`, if that matters.",
                ExactnessWarning,
            )

    def scale(
        self, trainer: Any, batch_idx: int, is_last: bool, parameters: Iterable[nn.Parameter]
    ) -> float:
        """Find the factor for a batch's loss, which Lightning has divided already.

        Args:
            trainer: The Trainer, whose value may change during fit (weight averaging does that).
            batch_idx: Index of the batch in its epoch.
            is_last: It is the last one of its epoch.
            parameters: Their gradients are rescaled where the window turns out shorter than
                expected, which happens with loaders of unknown length.

        Returns:
            The window's nominal number of batches over its real one; 1.0 for a full window.
        """
        nominal = trainer.accumulate_grad_batches
        start = batch_idx - batch_idx % nominal
        end = batch_idx + 1 if is_last else min(start + nominal, trainer.num_training_batches)
        factor = nominal / (end - start)
        if batch_idx == start:
            self._factor = factor
        if factor != self._factor:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor / self._factor)
            self._factor = factor
        return float(factor)


def has_scheduler(trainer: Any) -> bool:
    """Say whether the number of batches per step changes from epoch to epoch.

    Args:
        trainer: The Trainer.

    Returns:
        True if a ``GradientAccumulationScheduler`` is among its callbacks.
    """
    return any(
        base.__name__ == "GradientAccumulationScheduler"
        for callback in trainer.callbacks
        for base in type(callback).__mro__
    )


def _rows_of_trainer(trainer: Any) -> list[Row]:
    own = trainer.accumulate_grad_batches
    if has_scheduler(trainer):
        return [Row("accumulate_grad_batches", "scheduled", "unchanged", (_LIGHTNING_SCALES,))]
    if own == 1:
        return []
    return [Row("accumulate_grad_batches", str(own), "unchanged", (_LIGHTNING_SCALES,))]


_LIGHTNING_SCALES = (
    "set by the Trainer: a shorter last window of an epoch is divided by the full number of "
    "batches; pass it to `MemSaveCallback` for the right scale"
)


def has_batch_norm(module: nn.Module) -> bool:
    """Say whether a module takes statistics over the samples of a batch.

    Args:
        module: Any module.

    Returns:
        True if it has a layer of batch normalisation.
    """
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())
