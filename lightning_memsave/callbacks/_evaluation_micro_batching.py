"""Batches of validation, test and prediction in parts, in a Trainer."""

from collections.abc import Callable, Sequence
from typing import Any

from lightning_memsave import host
from lightning_memsave.callbacks._micro_batching import warn_of_retry
from lightning_memsave.callbacks._settings import Row, Setting
from lightning_memsave.core.batches import merge_outputs
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques._micro_batches.runner import MicroBatchRunner
from lightning_memsave.techniques._micro_batches.training_state import TrainingState
from lightning_memsave.techniques.micro_batching import MicroBatching


class EvaluationMicroBatches(Setting):
    """Batches of validation, test and prediction pass in parts.

    Args:
        technique: The settings, or ``None`` to leave batches as they are.
    """

    name = "eval_micro_batch_size"
    is_for_evaluation = True

    def __init__(self, technique: MicroBatching | None) -> None:
        super().__init__()
        self.technique = technique
        self._runner: MicroBatchRunner | None = None

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find what stands against it.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.

        Returns:
            All problems.
        """
        names = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
        if self.technique is None or not host.is_strategy(trainer, *names):
            return []
        return [
            Problem(
                f"`eval_micro_batch_size={self.technique.micro_batch_size!r}`",
                f"under `{type(trainer.strategy).__name__}` all processes communicate in every "
                "forward pass",
                "Set `eval_micro_batch_size=None` and use a smaller batch in that DataLoader.",
            )
        ]

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Let batches pass in parts.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
        """
        self.rows = []
        if self.technique is None:
            return
        self._runner = self.technique.make_runner()
        self._undo.append(host.split_evaluation_batches(trainer, self._run_batch))
        value = repr(self.technique.micro_batch_size)
        self.rows = [Row(self.name, value, "on", ("outputs are put together",), "rounding")]

    def undo(self) -> None:
        """Restore the steps; a second call does nothing."""
        self._runner = None
        super().undo()

    def _run_batch(
        self, trainer: Any, batch: Any, step: Callable[[Any], Any], logged: host.LoggedValues
    ) -> Any:
        assert self._runner is not None, "batches run between `apply` and `undo`"
        passed: list[tuple[Any, int, float]] = []

        def pass_part(part: Any, weight: float, num_samples: int | None, is_last: bool) -> None:
            logged.start_part(weight, num_samples)
            passed.append((step(part), -1 if num_samples is None else num_samples, weight))

        def forget() -> None:
            passed.clear()
            logged.clear()

        size = self._runner.size
        self._runner.run(
            batch,
            pass_part,
            take_down=lambda: TrainingState(trainer.lightning_module, gradients="leave"),
            forget=forget,
        )
        if self._runner.size != size:
            warn_of_retry(trainer, self._runner, self.name, "")
        outputs, sizes, weights = zip(*passed, strict=True)
        return outputs[0] if len(outputs) == 1 else _merged(outputs, sizes, weights)


def _merged(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    try:
        return merge_outputs(outputs, sizes, weights)
    except ValueError as error:
        problem = Problem(
            "what the step returned for the parts of a batch",
            f"it cannot be put together: {error}",
            "Return tensors or lists with one entry per sample, or nothing; or set "
            "`eval_micro_batch_size=None`.",
        )
        raise IncompatibleError("eval_micro_batch_size", [problem]) from None
