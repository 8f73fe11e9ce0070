"""Weights in bfloat16, as a setting."""

import contextlib
import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch.optim import Optimizer

from lightning_memsave import host
from lightning_memsave.callbacks import _configure_optimizers as configure_optimizers
from lightning_memsave.callbacks._backward_conflicts import SHARDED
from lightning_memsave.callbacks._module_techniques import ModuleTechnique
from lightning_memsave.core.technique import Handle, Technique
from lightning_memsave.errors import Problem
from lightning_memsave.techniques.low_precision_weights import LowPrecisionWeights


class WeightPrecision(ModuleTechnique):
    """Weights are kept in bfloat16, and the optimizer rounds its updates.

    Args:
        technique: The settings, or ``None`` to leave weights as they are.
        value: What the user wrote for it.
        brings_precision: The Trainer is given bf16 autocast at the same time.
        is_of_stack: The user did not ask for it by itself: no line for ``None``.
    """

    technique: LowPrecisionWeights | None

    def __init__(
        self,
        technique: LowPrecisionWeights | None,
        value: str,
        brings_precision: bool,
        is_of_stack: bool = False,
    ) -> None:
        name = LowPrecisionWeights.name
        super().__init__(name, technique, value, is_auto=False, is_of_stack=is_of_stack)
        self.brings_precision = brings_precision
        self._optimizers: Any = None
        self._sums_in_fp32 = False

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Convert the weights, unless they are made later, and wrap ``configure_optimizers``.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
        """
        super().apply(trainer, pl_module)
        if self.technique is None:
            return
        updates = _RoundedUpdates(self.technique)
        self._optimizers, undo = configure_optimizers.enable(pl_module, updates)
        context = functools.partial(self._around_backward, pl_module)
        self._undo += [undo, host.around_backward(trainer, context)]

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Say how the updates are rounded.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
        """
        super().start(trainer, pl_module)
        if self._optimizers is not None and self.rows[0].status == "on":
            row = self.rows[0]
            rounded = [handle.summary for handle in self._optimizers.handles]
            self.rows = [replace(row, details=(*row.details, *rounded))]

    def undo(self) -> None:
        """Restore module and optimizers; a second call does nothing."""
        super().undo()
        self._optimizers = None
        self._sums_in_fp32 = False

    # On from the first batch in parts to the end of the fit: others will come.
    def _around_backward(self, pl_module: Any, is_last: bool) -> AbstractContextManager[None]:
        if not is_last and not self._sums_in_fp32 and self.technique is not None:
            self._sums_in_fp32 = True
            self._undo.append(self.technique.sum_gradients_in_fp32(pl_module).undo)
        return contextlib.nullcontext()

    def _conflicts(self, trainer: Any) -> list[Problem]:
        what, problems = f"`{self.name}={self.value}`", []
        # Ours comes with it; another one has been chosen by the user.
        if not self.brings_precision and str(trainer.precision) != "bf16-mixed":
            problems.append(
                Problem(
                    what,
                    f"the Trainer computes in {trainer.precision}, which does not take weights of "
                    "several types",
                    'Use `precision="bf16-mixed"`.',
                )
            )
        if host.is_strategy(trainer, *SHARDED):
            problems.append(
                Problem(
                    what,
                    f"`{type(trainer.strategy).__name__}` decides itself in which type it keeps "
                    "and gathers weights",
                    f"Set `{self.name}=None`, and use the strategy's own mixed precision.",
                )
            )
        return problems


@dataclass(frozen=True)
class _RoundedUpdates(Technique[Optimizer]):
    """The part of `LowPrecisionWeights` that is about optimizers.

    Args:
        technique: The settings.
    """

    name: ClassVar[str] = LowPrecisionWeights.name
    exactness = LowPrecisionWeights.exactness
    source = LowPrecisionWeights.source

    technique: LowPrecisionWeights

    def check(self, target: Optimizer) -> list[Problem]:
        """Find nothing: what can be known is known before there are optimizers.

        Args:
            target: Not used.

        Returns:
            An empty list.
        """
        return []

    def _apply(self, target: Optimizer) -> Handle[Optimizer]:
        return self.technique.round_updates(target)
