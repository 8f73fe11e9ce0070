"""Training batches in parts, in a Trainer."""

import functools
from typing import Any

import torch
from torch import nn

from lightning_memsave import host
from lightning_memsave.callbacks._accumulation import has_batch_norm
from lightning_memsave.callbacks._base import inform
from lightning_memsave.callbacks._foreign_hooks import who_zeroes
from lightning_memsave.callbacks._micro_batch_conflicts import find_conflicts
from lightning_memsave.callbacks._settings import AS_IT_IS, Row, Setting, warn
from lightning_memsave.core.out_of_memory import first_line
from lightning_memsave.errors import (
    ExactnessWarning,
    IncompatibleError,
    MemoryExhaustedError,
    MemsaveWarning,
    Problem,
)
from lightning_memsave.techniques._micro_batches.runner import MicroBatchRunner
from lightning_memsave.techniques._micro_batches.training_state import TrainingState
from lightning_memsave.techniques._optimizers.memory import allocate_state
from lightning_memsave.techniques.micro_batching import MicroBatching, check_repeatable


class MicroBatches(Setting):
    """Training batches pass in parts.

    Args:
        technique: The settings, or ``None`` to leave batches as they are.
        value: What the user wrote for it.
        takes_half: Gradients of half-precision parameters are summed in float32 by somebody else.
    """

    name = "micro_batch_size"

    def __init__(
        self, technique: MicroBatching | None, value: str, takes_half: bool = False
    ) -> None:
        super().__init__()
        self.takes_half = takes_half
        self.technique = technique
        self.value = value
        self.size: int | None = None
        """The size that memory was enough for, if it had to shrink; kept in checkpoints."""
        self.runner: MicroBatchRunner | None = None

    @property
    def is_auto(self) -> bool:
        """Whether it gives way to what stands against it."""
        return self.technique is not None and self.technique.micro_batch_size == "auto"

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find what stands against it; ``"auto"`` gives way.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.

        Returns:
            All problems.
        """
        if self.technique is None or self.is_auto:
            return []
        return self._problems(trainer, pl_module)

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Let batches pass in parts, or say why not.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
        """
        if self.technique is None:
            given = [row for row in self.rows if row.status == "off"]
            self.rows = given or [Row(self.name, "None", "unchanged", (AS_IT_IS,))]
            return
        problems = self._problems(trainer, pl_module)
        if problems:
            self.rows = [Row(self.name, self.value, "off", (problems[0].why,))]
            return
        self._undo.append(
            host.pass_batches(
                trainer,
                functools.partial(self._pass_batch, trainer, pl_module),
                frees_gradients=not who_zeroes(trainer, pl_module),
                before_step=allocate_state,
                on_out_of_memory=_exhausted_in_step,
            )
        )
        self._undo.append(self._forget_runner)
        self._show(trainer)
        if not self.is_auto:
            _warn_of_batch_norm(trainer, pl_module, self.value)

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Find half-precision parameters of modules that are built after ``setup``.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.

        Raises:
            IncompatibleError: If there are any and a size was asked for.
        """
        if self.technique is None or not self._undo:
            return
        self.runner = self._make_runner(trainer, pl_module)
        problems = [] if self.takes_half else self.technique.check_module(pl_module)
        if problems and not self.is_auto:
            raise IncompatibleError(self.name, problems)
        if problems:
            self.undo()
            self.rows = [Row(self.name, self.value, "off", (problems[0].why,))]

    def _make_runner(self, trainer: Any, pl_module: Any) -> MicroBatchRunner:
        assert self.technique is not None, "there is something to run"
        runner = self.technique.make_runner(functools.partial(host.smallest, trainer), pl_module)
        runner.size = self.size if self.is_auto else runner.size
        return runner

    def _forget_runner(self) -> None:
        self.runner = None

    def _problems(self, trainer: Any, pl_module: Any) -> list[Problem]:
        assert self.technique is not None, "called with a technique only"
        return find_conflicts(trainer, pl_module, self.technique, takes_half=self.takes_half)

    def _pass_batch(
        self, trainer: Any, pl_module: Any, batch: Any, parts: host.BatchParts, is_fresh: bool
    ) -> None:
        if self.runner is None:
            self.runner = self._make_runner(trainer, pl_module)
        runner, weighted_by = self.runner, self.runner.weighted_by
        is_safe = self.is_auto and trainer.world_size > 1
        # A process that runs out of memory must not leave the others waiting in their passes.
        context = host.alone if is_safe else host.without_sync
        if is_safe:
            host.share_buffers(trainer)
        meets = "" if self.is_auto else host.meets_in_forward(trainer, pl_module)
        if meets:
            self._check_counts(trainer, batch, meets)

        def pass_part(part: Any, weight: float, num_samples: int | None, is_last: bool) -> None:
            if is_safe or not is_last:
                with context(trainer):
                    parts(part, weight, num_samples, is_last)
            else:
                parts(part, weight, num_samples)

        def forget() -> None:
            check_repeatable(pl_module)
            parts.forget()

        runner.run(
            batch,
            pass_part,
            take_down=lambda: TrainingState(pl_module, gradients="drop" if is_fresh else "keep"),
            forget=forget,
        )
        if is_safe and host.will_step(trainer):
            host.average_gradients(trainer, pl_module)
        if runner.weighted_by != weighted_by and self._is_guess(runner):
            inform(
                trainer,
                f"Losses of micro-batches are weighted by {runner.weighted_by!r}, since `labels` "
                "has -100 in it. Pass `loss_weight=` if the loss is the mean over something else.",
            )
        if self.is_auto and runner.size != self.size:
            self.size = runner.size
            warn_of_retry(trainer, runner)
            _warn_of_batch_norm(trainer, pl_module, str(self.size))
            self._show(trainer)

    def _is_guess(self, runner: MicroBatchRunner) -> bool:
        assert self.technique is not None, "there is something to run"
        return self.technique.loss_weight == "auto" and runner.weighted_by != "samples"

    def _check_counts(self, trainer: Any, batch: Any, meets: str) -> None:
        assert self.runner is not None, "batches pass with a runner"
        num_parts = len(self.runner.split(batch)[0])
        if -host.smallest(trainer, -num_parts) != host.smallest(trainer, num_parts):
            raise IncompatibleError(
                self.name,
                [
                    Problem(
                        f"`micro_batch_size={self.value}`",
                        f"{meets}, and batches of different lengths came, of which some have more "
                        "parts than others",
                        "Use `drop_last=True` in the DataLoader.",
                    )
                ],
            )

    def _show(self, trainer: Any) -> None:
        details = ["batches pass in parts of this size"]
        if self.is_auto:
            details = [
                "whole batches; halved when memory runs out"
                if self.size is None
                else f"in parts of {self.size} samples, as memory ran out with more"
            ]
        if self.is_auto and trainer.world_size > 1:
            details.append("gradients are shared once per step, after backward")
        # More than two processes can sum in an order that is not DDP's.
        is_bitwise = self.is_auto and self.size is None and trainer.world_size <= 2
        exactness = "bitwise" if is_bitwise else "rounding"
        self.rows = [Row(self.name, self.value, "on", tuple(details), exactness)]


def warn_of_retry(trainer: Any, runner: MicroBatchRunner) -> None:
    """Say that memory ran out and that the batch was repeated.

    Args:
        trainer: The Trainer.
        runner: What repeated it.
    """
    warn(
        trainer,
        f"{runner.retries[-1].capitalize()}, which is kept from now on; nothing was lost. Begin "
        "with it next time by giving it as the size.",
        MemsaveWarning,
    )


def _warn_of_batch_norm(trainer: Any, pl_module: nn.Module, value: str) -> None:
    if not has_batch_norm(pl_module):
        return
    warn(
        trainer,
        f"`micro_batch_size={value}` and batch normalisation: its statistics come from each "
        "micro-batch alone. Use a normalisation without batch statistics, such as "
        "`nn.GroupNorm`, if that matters.",
        ExactnessWarning,
    )


def _exhausted_in_step(optimizer: torch.optim.Optimizer, error: BaseException) -> BaseException:
    return MemoryExhaustedError(
        f"Out of memory in the step of `{type(optimizer).__name__}`, after the gradients were "
        f"complete: {first_line(error)}\n"
        'Its state needs less with `optimizer="8bit"`, or host memory with '
        '`optimizer="paged_8bit"`; micro-batches do not help here.'
    )
