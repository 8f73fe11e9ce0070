"""Batches of validation, test and prediction in parts, in a Trainer."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning_memsave import host
from lightning_memsave.callbacks._evaluation_proof import EvaluationStep
from lightning_memsave.callbacks._micro_batching import warn_of_retry
from lightning_memsave.callbacks._settings import Setting, off_rows
from lightning_memsave.core.batches import find_shared_leaves, merge_outputs
from lightning_memsave.core.technique import Row
from lightning_memsave.errors import IncompatibleError, MemoryExhaustedError, Problem
from lightning_memsave.techniques._micro_batches.loss_proof import Proof, Question, prove
from lightning_memsave.techniques._micro_batches.runner import MicroBatchRunner
from lightning_memsave.techniques._micro_batches.splitting import samples_of
from lightning_memsave.techniques._micro_batches.training_state import TrainingState
from lightning_memsave.techniques.micro_batching import MicroBatching

_FIX = (
    "Log metrics of torchmetrics instead of their values; pass `loss_weight=`, a function of a "
    "micro-batch that gives what the mean is over; or use a smaller batch in that DataLoader and "
    "`eval_micro_batch_size=None`."
)
# There is no backward pass whose memory could be saved.
_ADVICE = (
    'Use `precision="bf16-mixed"`, shorter samples or a smaller model, or return less from the '
    "step, such as no logits."
)


class EvaluationMicroBatches(Setting):
    """Batches of validation, test and prediction pass in parts.

    Args:
        technique: The settings, or ``None`` to leave batches as they are.
        is_asked: The user set it.
        off_reason: Why there is no technique, where it is not the user's ``None``.
    """

    name = "eval_micro_batch_size"
    is_for_evaluation = True

    def __init__(
        self, technique: MicroBatching | None, is_asked: bool, off_reason: str = ""
    ) -> None:
        super().__init__()
        self.technique, self.is_asked, self.off_reason = technique, is_asked, off_reason
        self.value = "None" if technique is None else repr(technique.micro_batch_size)
        self._runner: MicroBatchRunner | None = None
        # Of each step and DataLoader whose batches have been split.
        self._proofs: dict[tuple[Any, ...], Proof] = {}

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find what stands against it.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.

        Returns:
            All problems.
        """
        if self.technique is None:
            return []
        what = f"`{self.name}={self.value}`"
        if host.is_strategy(trainer, *host.SHARDED):
            why = "all processes communicate in every forward pass"
            fix = f"Set `{self.name}=None` and use a smaller batch in that DataLoader."
            return [Problem(what, f"under `{type(trainer.strategy).__name__}` {why}", fix)]
        if trainer.world_size > 1 and not self.is_asked:
            why = (
                "each of several processes splits its own batches, which cannot be where a step "
                f'communicates; where none does, `{self.name}=MicroBatching("auto")` is right'
            )
            return [Problem(what, why, f"Set `{self.name}=None`.")]
        return []

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Let batches pass in parts.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
        """
        self.rows = off_rows(self)
        if self.technique is None:
            return
        self._runner, self._proofs = self.technique.make_runner(), {}
        self._runner.advice = _ADVICE
        self._undo.append(host.split_evaluation_batches(trainer, self._run_batch))
        self._show(self._runner)

    def _show(self, runner: MicroBatchRunner) -> None:
        how, exactness = "outputs are put together", "rounding"
        if runner.is_auto and runner.size is None:
            how = "whole batches; halved when memory runs out, if two samples prove that it may be"
            exactness = "bitwise"
        elif runner.is_auto:
            how = f"in parts of {runner.size} samples, as memory ran out with more"
        self.rows = [Row(self.name, self.value, "on", (how,), exactness)]

    def undo(self) -> None:
        """Restore the steps; a second call does nothing."""
        self._runner = None
        super().undo()

    def _run_batch(
        self,
        trainer: Any,
        batch: Any,
        step: Callable[[Any], Any],
        logged: host.LoggedValues,
        which: tuple[Any, ...],
    ) -> Any:
        runner = self._runner
        assert runner is not None, "batches run between `apply` and `undo`"
        passed: list[tuple[Any, int, float]] = []

        def pass_part(part: Any, weight: float, num_samples: int | None, is_last: bool) -> None:
            logged.start_part(weight, num_samples)
            passed.append((step(part), -1 if num_samples is None else num_samples, weight))

        def forget() -> None:
            passed.clear()
            logged.clear()

        def prove_with(batch: Any, known: Proof | None) -> None:
            self._proofs[which] = self._prove(
                trainer, batch, EvaluationStep(step, logged), which[0], known
            )
            self._use(self._proofs[which], tell_apart)

        def prove_first(batch: Any) -> None:
            num_samples = samples_of(batch, find_shared_leaves(batch)[0])
            is_small = num_samples is not None and num_samples <= (runner.size or 0)
            if which not in self._proofs and not is_small:
                prove_with(batch, None)

        def tell_apart(batch: Any, differ: bool) -> bool:
            if differ:
                prove_with(batch, self._proofs[which])
            return True

        runner.prove = prove_first
        self._use(self._proofs.get(which, Proof()), tell_apart)
        size = runner.size
        runner.run(
            batch,
            pass_part,
            take_down=lambda: TrainingState(trainer.lightning_module, gradients="leave"),
            forget=forget,
        )
        if runner.size != size:
            warn_of_retry(trainer, runner, self.name, "")
            self._show(runner)
        outputs, sizes, weights = zip(*passed, strict=True)
        return outputs[0] if len(outputs) == 1 else _merged(outputs, sizes, weights)

    def _prove(
        self, trainer: Any, batch: Any, step: EvaluationStep, name: str, known: Proof | None
    ) -> Proof:
        assert self._runner is not None, "batches run between `apply` and `undo`"
        assert self.technique is not None, "there is something to run"
        question = Question(
            step.numbers,
            batch,
            trainer.lightning_module,
            loss_weight=self.technique.loss_weight,
            split_batch=self.technique.split_batch,
            known=known,
            needs_split=True,
            subject="the sum of what it logs and returns (and 1)",
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(host.alone(trainer))
            if trainer.world_size == 1:
                stack.enter_context(host.quiet())
            proof = prove(question)
            reason = proof.reason or step.difference(proof)
        if not reason:
            return proof if step.has_numbers else replace(proof, weightings=())
        problem = Problem(f"`{name}` with `{self.name}={self.value}`", reason, proof.fix or _FIX)
        if self._runner.is_auto:
            raise MemoryExhaustedError(f"A whole batch was too large, and {problem}")
        raise IncompatibleError(self.name, [problem])

    def _use(self, proof: Proof, tell_apart: Callable[[Any, bool], bool]) -> None:
        runner = self._runner
        assert runner is not None, "batches run between `apply` and `undo`"
        runner.weightings, runner.whole = proof.weightings, proof.whole
        runner.tell_apart = tell_apart if len(proof.weightings) > 1 else None


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
