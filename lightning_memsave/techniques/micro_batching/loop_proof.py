"""Prove how losses of micro-batches are weighted in a plain loop, as a Trainer does."""

from typing import Any

from torch import nn

from lightning_memsave.core.memory import is_fake
from lightning_memsave.errors import IncompatibleError, MemoryExhaustedError, Problem
from lightning_memsave.techniques.micro_batching.loss_proof import (
    ComputeLoss,
    LossCheck,
    Proof,
    prove,
)
from lightning_memsave.techniques.micro_batching.loss_weights import LossWeight, Weighting
from lightning_memsave.techniques.micro_batching.runner import MicroBatchRunner, SplitBatch

_FIX = (
    "Pass `loss_weight=`, a function of a micro-batch that gives what its loss is divided by; or "
    "use smaller batches, and several of them for each step of the optimizer."
)


class LoopProof:
    """Tests the loss with the first batch that is split, and again where weightings differ."""

    def __init__(
        self,
        runner: MicroBatchRunner,
        compute_loss: ComputeLoss,
        module: nn.Module,
        loss_weight: LossWeight,
        split_batch: SplitBatch | None,
    ) -> None:
        self._runner, self._compute_loss, self._module = runner, compute_loss, module
        self._loss_weight, self._split_batch = loss_weight, split_batch
        runner.require_proof()
        runner.prove, runner.tell_apart = self._prove, self._tell_apart

    def _prove(self, batch: Any) -> None:
        if any(map(is_fake, self._module.parameters())):  # for a prediction
            equal = [Weighting("weighted equally", lambda part: 1.0)]
            self._runner.use(equal, self._runner.whole)
            self._runner.tell_apart = None
            return
        self._use(batch, None)

    def _tell_apart(self, batch: Any, differ: bool) -> bool:
        if differ:
            known = Proof(tuple(self._runner.weightings), self._runner.whole)
            self._use(batch, known)
        return bool(self._runner.weightings)

    def _use(self, batch: Any, known: Proof | None) -> None:
        runner = self._runner
        check = LossCheck(
            *(self._compute_loss, batch, self._module),
            loss_weight=self._loss_weight,
            split_batch=self._split_batch,
            known=known,
            needs_split=True,
        )
        proof = prove(check)
        if proof.reason:
            size = '"auto"' if runner.is_auto else runner.size
            problem = Problem(f"`MicroBatching({size})`", proof.reason, proof.fix or _FIX)
            if runner.is_auto:
                raise MemoryExhaustedError(f"A whole batch was too large, and {problem}")
            raise IncompatibleError("micro_batching", [problem])
        runner.use(proof.weightings, proof.whole)
        if proof.is_settled:
            runner.tell_apart = None
