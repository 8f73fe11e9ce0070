"""Updates of parameters during the backward pass, as a setting."""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from lightning_memsave import host
from lightning_memsave.callbacks import _configure_optimizers as configure_optimizers
from lightning_memsave.callbacks._module_techniques import off_row, row_of
from lightning_memsave.callbacks._settings import Row, Setting
from lightning_memsave.errors import Problem
from lightning_memsave.techniques.optimizer_in_backward import OptimizerInBackward

SHARDED = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
"""Strategies that cut parameters into shares."""


class BackwardUpdates(Setting):
    """Each parameter is updated as soon as its gradient is complete.

    Args:
        technique: The settings, or ``None`` to update all parameters after backward.
        value: What the user wrote for it.
        is_of_stack: The user did not ask for it by itself: no line for ``None``.
    """

    name = "optimizer_in_backward"

    def __init__(
        self, technique: OptimizerInBackward | None, value: str, is_of_stack: bool = False
    ) -> None:
        super().__init__()
        self.is_of_stack = is_of_stack
        self.technique = technique
        self.value = value
        self.in_force = technique
        """The settings with what the Trainer clips."""
        self._state: Any = None

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find what stands against it in the Trainer; the optimizer does not exist yet.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.

        Returns:
            All problems.
        """
        if self.technique is None:
            return []
        what = f"`{self.name}={self.value}`"
        problems = []
        if not pl_module.automatic_optimization:
            problems.append(
                Problem(
                    what,
                    f"`{type(pl_module).__name__}.automatic_optimization=False`: only the module "
                    "knows which of its backward passes completes the gradients",
                    f"Set `{self.name}=None` and use `OptimizerInBackward` in `training_step`.",
                )
            )
        if _has_own_clipping(pl_module):
            problems.append(
                Problem(
                    what,
                    f"`{type(pl_module).__name__}.configure_gradient_clipping` would find no "
                    "gradients",
                    f"Remove that method, or set `{self.name}=None`.",
                )
            )
        strategy = type(trainer.strategy).__name__
        if trainer.world_size > 1 or host.is_strategy(trainer, *SHARDED):
            problems.append(
                Problem(
                    what,
                    f"`{strategy}` shares gradients between processes after they are complete",
                    f"Set `{self.name}=None`, or train in one process.",
                )
            )
        return problems

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Wrap ``configure_optimizers`` and the backward passes.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
        """
        if self.technique is None:
            self.rows = [] if self.is_of_stack else [off_row(self.name)]
            return
        self.in_force = dataclasses.replace(self.technique, **_clipping_of(trainer))
        if trainer.gradient_clip_val:
            # Done where the gradients are; afterwards torch would not find one that it could clip.
            clip_val, trainer.gradient_clip_val = trainer.gradient_clip_val, None
            self._undo.append(lambda: setattr(trainer, "gradient_clip_val", clip_val))
        technique = dataclasses.replace(self.in_force, scaler=host.gradient_scaler(trainer))
        self._state, undo = configure_optimizers.enable(pl_module, technique)
        self._undo += [
            undo,
            host.around_backward(trainer, self._around_backward),
            # A backward pass inside of it is none that updates: Lightning zeroes what it leaves.
            host.around_step(trainer, self._accumulating),
        ]

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Say what became of each optimizer.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
        """
        if self._state is not None and self.technique is not None:
            exactness = self.technique.exactness.value
            self.rows = [
                row_of(self.name, self.value, handle, exactness) for handle in self._state.handles
            ] or [Row(self.name, self.value, "off", ("the module configures no optimizer",))]

    def undo(self) -> None:
        """Restore everything, and let go of the optimizers; a second call does nothing."""
        super().undo()
        self._state = None

    def _around_backward(self, is_last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if is_last else self._accumulating()

    @contextlib.contextmanager
    def _accumulating(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for handle in self._state.handles:
                stack.enter_context(handle.accumulating())
            yield


def _clipping_of(trainer: Any) -> dict[str, Any]:
    if not trainer.gradient_clip_val:
        return {}
    algorithm = getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)
    # Without an algorithm, Lightning clips the norm.
    return {"clip_value" if algorithm == "value" else "clip_norm": trainer.gradient_clip_val}


def _has_own_clipping(pl_module: Any) -> bool:
    name = "configure_gradient_clipping"
    base = next((c for c in type(pl_module).__mro__ if c.__name__ == "LightningModule"), None)
    return name in vars(pl_module) or getattr(type(pl_module), name) is not getattr(base, name)
