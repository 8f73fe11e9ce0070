"""Updates of parameters during the backward pass, as a setting."""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch.nn.parameter import is_lazy

from lightning_memsave import host
from lightning_memsave.callbacks import _configure_optimizers as configure_optimizers
from lightning_memsave.callbacks._accumulation import has_scheduler
from lightning_memsave.callbacks._backward_conflicts import (
    advice_for,
    clipping_of,
    find_conflicts,
    find_risks,
    find_scaler,
)
from lightning_memsave.callbacks._settings import Setting, off_rows, saves
from lightning_memsave.core.technique import Handle, Row
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques._updates.gradient_updates import IN_BACKWARD
from lightning_memsave.techniques.optimizer_in_backward import (
    OptimizerInBackward,
    describe_updates,
)


class BackwardUpdates(Setting):
    """Each parameter is updated as soon as its gradient is complete.

    Args:
        technique: The settings, or ``None`` to update all parameters after backward.
        value: What the user wrote for it.
        is_asked: The user wrote it by name: it is set, or refused.
        halves_batches: Batches pass whole until memory runs out.
        off_reason: Why there is no technique, where it is not the user's ``None``.
    """

    name = "optimizer_in_backward"

    def __init__(
        self,
        technique: OptimizerInBackward | None,
        value: str,
        is_asked: bool = True,
        halves_batches: bool = False,
        off_reason: str = "",
    ) -> None:
        super().__init__()
        self.is_asked = is_asked
        self.off_reason = off_reason
        self.halves_batches = halves_batches
        self.technique = technique
        self.value = value
        self.in_force = technique
        """The settings with what the Trainer clips."""
        self._state: Any = None
        self._clipping = ""

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
        problems = find_conflicts(trainer, pl_module, self.technique, what)
        return problems if self.is_asked else problems + find_risks(pl_module, what)

    def savings(self, pl_module: Any) -> str:
        """Say how large the gradients are."""
        sizes = [
            p.numel() * p.element_size()
            for p in pl_module.parameters()
            if p.requires_grad and not is_lazy(p)
        ]
        return saves(sum(sizes) - max(sizes, default=0), "gradients")

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Wrap ``configure_optimizers`` and the backward passes."""
        if self.technique is None:
            self.rows = off_rows(self)
            return
        # Of the precision that this callback has set; of the Trainer's own, `check` says it.
        if problems := find_scaler(trainer, f"`{self.name}={self.value}`"):
            if self.is_asked:
                raise IncompatibleError("MemSaveCallback", problems)
            self.yield_to(problems, trainer, pl_module)
            return
        clipping, self._clipping = clipping_of(trainer), ""
        self.in_force = dataclasses.replace(self.technique, **clipping)
        if clipping:
            # Done where the gradients are; afterwards torch would not find one that it could clip.
            clip_val, trainer.gradient_clip_val = trainer.gradient_clip_val, None
            self._undo.append(lambda: setattr(trainer, "gradient_clip_val", clip_val))
            kind = "all values" if "clip_value" in clipping else "the norm of all gradients"
            self._clipping = f"clips {kind} at {clip_val} before the updates, for the Trainer"
        self._state, undo = configure_optimizers.enable(pl_module, self.in_force, not self.is_asked)
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
        if self._state is None:
            return
        if self._state.problems:
            self.yield_to(self._state.problems, trainer, pl_module)
            return
        self.rows = [self._row_of(trainer, handle) for handle in self._state.handles] or [
            Row(self.name, self.value, "off", ("the module configures no optimizer",))
        ]
        for handle in self._state.handles:
            if handle.target in IN_BACKWARD:
                IN_BACKWARD[handle.target].advice = advice_for(pl_module)

    def undo(self) -> None:
        """Restore everything, and let go of the optimizers; a second call does nothing."""
        handles = [] if self._state is None else self._state.handles
        for handle in handles:  # the step that they wait for will not come
            if handle.target in IN_BACKWARD:
                IN_BACKWARD[handle.target].forget()
        self._state = None
        super().undo()

    def _row_of(self, trainer: Any, handle: Handle[Any]) -> Row:
        if not handle.changes:
            return Row(self.name, self.value, "off", handle.skipped)
        splits = host.may_split_batches(trainer)
        adding_up = ""
        if has_scheduler(trainer):
            adding_up = "several batches"
        elif trainer.accumulate_grad_batches > 1:
            adding_up = f"{trainer.accumulate_grad_batches} batches"
        elif splits and not self.halves_batches:
            adding_up = "the parts of a batch"
        # Not what the handle says: weights may have got another type since it was made.
        details = [describe_updates(handle.target, adding_up)]
        if splits and self.halves_batches and not adding_up:
            details.append("all gradients are alive while the parts of a halved batch add up")
        if self._clipping:
            details.append(self._clipping)
        exactness = OptimizerInBackward.exactness.value
        return Row(self.name, self.value, "on", tuple(details), exactness)

    def _around_backward(self, is_last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if is_last else self._accumulating()

    @contextlib.contextmanager
    def _accumulating(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for handle in self._state.handles:
                stack.enter_context(handle.accumulating())
            yield
