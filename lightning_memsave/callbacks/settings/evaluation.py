"""Micro-batches in validation, test and prediction, which follow `micro_batch_size`."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_memsave.callbacks.settings.micro_batches import (
    BatchProbe,
    read_micro_batching,
    unnoticed,
    warn_of_retry,
)
from lightning_memsave.callbacks.settings.setting import Arguments, Setting, why_beyond
from lightning_memsave.core.nested import find_shared_leaves, items_of, merge_outputs, parts_of
from lightning_memsave.core.trainer_facts import SHARDED
from lightning_memsave.errors import (
    ConfigurationError,
    IncompatibleError,
    MemoryExhaustedError,
    Problem,
)
from lightning_memsave.techniques.micro_batching.loss_observed import LossCheck, Proof
from lightning_memsave.techniques.micro_batching.loss_proof import prove
from lightning_memsave.techniques.micro_batching.loss_weights import read_weights, shares_of
from lightning_memsave.techniques.micro_batching.runner import MicroBatchRunner, samples_of
from lightning_memsave.techniques.micro_batching.training_state import KnownChanges
from lightning_memsave.trainer.batch_parts import RunStep, split_evaluation_batches
from lightning_memsave.trainer.logged_values import LoggedValues, combined
from lightning_memsave.trainer.trainer import is_strategy

# Kernels for one sample and for two round differently, and deep models add that up.
_TOLERANCE = 1e-3


class _Seen(NamedTuple):
    part: Any
    logged: dict[str, tuple[Any, Tensor]]
    output: Any


class SeenStep:
    """A step that is looked at with some samples together and with each of two parts of them."""

    def __init__(self, run: RunStep, logged: LoggedValues) -> None:
        self._run, self._logged = run, logged
        self._seen: list[_Seen] = []
        self.has_numbers = False
        """Whether it logged or returned any."""

    def numbers(self, part: Any) -> Tensor:
        """Run the step for what would be averaged over the parts of a batch; nothing is logged."""
        with self._logged.forgotten():
            self._logged.start_part(1.0, None)
            output = self._run(part)
            logged = self._logged.tensors()
        self._seen.append(_Seen(part, logged, output))
        numbers = [value for meta, value in logged.values() if meta.is_mean_reduction]
        numbers += _numbers_of(output)
        self.has_numbers = self.has_numbers or bool(numbers)
        is_double = all(number.dtype == torch.float64 for number in numbers)
        total = 1 + sum(number.double().cpu() for number in numbers)
        return torch.as_tensor(total, dtype=torch.float64 if is_double else torch.float32)

    def difference(self, proof: Proof) -> str:
        """Compare what was seen last: some samples together, and put together from two parts."""
        if len(self._seen) < 3:  # a batch of one sample
            return ""
        both, *alone = self._seen[-3:]
        weights = [0.5, 0.5]
        if proof.weightings:
            rows = read_weights(proof.weightings[:1], [seen.part for seen in alone])
            weights = shares_of(proof.weightings[0], rows[0]) or weights
        # A sample without a label has no loss, and passes in no part.
        parts = [(seen, weight) for seen, weight in zip(alone, weights, strict=True) if weight]
        for name, (meta, value) in both.logged.items():
            values = [seen.logged[name][1] for seen, _ in parts if name in seen.logged]
            if len(values) < len(parts) or not _agree(
                value, combined(meta, values, [weight for _, weight in parts])
            ):
                return f"`{name}`, which it logs, is not a mean over samples or tokens"
        try:
            sizes = [samples_of(seen.part, proof.whole) or -1 for seen, _ in parts]
            merged = merge_outputs([s.output for s, _ in parts], sizes, [w for _, w in parts])
        except ValueError as error:
            return f"what it returns cannot be put together: {error}"
        same = len(parts) < 2 or _agree(both.output, merged)
        return "" if same else "what it returns for a sample depends on the others in its batch"


def _numbers_of(output: Any) -> Iterator[Tensor]:
    if isinstance(output, float):
        yield torch.tensor(output)
    elif isinstance(output, Tensor):
        if output.ndim == 0 and output.is_floating_point():
            yield output.detach()
    else:
        for _, item in items_of(output):
            yield from _numbers_of(item)


def _agree(whole: Any, merged: Any) -> bool:
    if isinstance(whole, Tensor):
        if not whole.is_floating_point() or not whole.numel():
            return True  # a class that was chosen may be another one after rounding
        atol = _TOLERANCE * float(whole.nan_to_num(0.0, 0.0, 0.0).abs().max())
        return whole.shape == merged.shape and torch.allclose(
            merged.to(whole), whole, rtol=_TOLERANCE, atol=atol, equal_nan=True
        )
    if isinstance(whole, float):
        return math.isclose(whole, merged, rel_tol=_TOLERANCE) or math.isnan(whole)
    items = dict(items_of(merged))
    return all(_agree(item, items.get(name)) for name, item in items_of(whole))


_FIX = (
    "Log metrics of torchmetrics instead of their values; pass `MicroBatching(loss_weight=...)`, a "
    "function of a micro-batch that gives what the mean is over; or use a smaller batch in that "
    "DataLoader and `MicroBatching(..., evaluation=False)`."
)
_ADVICE = "Use shorter samples or a smaller model, or return less from the step, such as no logits."


class _StaysWholeError(Exception):
    """A step cannot be split, and need not be."""


@dataclass
class _Known:
    name: str
    changes: KnownChanges
    probe: BatchProbe = field(default_factory=BatchProbe)
    proof: Proof | None = None
    why_whole: str = ""

    def use(self, runner: MicroBatchRunner, prove_it: Callable[..., bool]) -> None:
        """Split by what is proven; ask where nothing is yet, or weightings do not agree."""
        proof = self.proof or Proof()
        runner.use(proof.weightings, proof.whole)
        runner.prove = prove_it if self.proof is None else None
        runner.tell_apart = prove_it if len(proof.weightings) > 1 else None


class EvaluationSetting(Setting):
    name = "evaluation"
    is_for_evaluation = True

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        technique = read_micro_batching(arguments)
        if technique is not None:
            self.off_reason = why_beyond(arguments, technique.argument, technique.exactness)
            if technique.evaluation is False:
                self.off_reason = "`evaluation=False` was given"
            self.value = repr(technique.micro_batch_size)
        self.technique, self.is_on = technique, technique is not None and not self.off_reason
        self.is_asked = technique is not None and technique.evaluation is True
        self._runner: MicroBatchRunner | None = None
        self._steps: dict[tuple[Any, ...], _Known] = {}

    @property
    def written(self) -> str:
        return f"`micro_batch_size={self.value}` in evaluation"

    def reasons(self, trainer: Any, pl_module: Any) -> Iterator[tuple[str, str]]:
        off = "`MicroBatching(..., evaluation=False)`"
        if is_strategy(trainer, *SHARDED):
            why = "all processes communicate in every forward pass"
            fix = f"Use {off} and a smaller batch in that DataLoader."
            yield f"under `{type(trainer.strategy).__name__}` {why}", fix
        elif trainer.world_size > 1 and not self.is_asked:
            why = (
                "each of several processes splits its own batches, which cannot be where a step "
                "communicates; where none does, `MicroBatching(..., evaluation=True)` is right"
            )
            yield why, f"Use {off}."

    def apply(self, trainer: Any, pl_module: Any) -> None:
        self._runner = self.technique.make_runner()
        self._runner.advice = _ADVICE
        self._undo.append(split_evaluation_batches(trainer, self._run_batch))
        self._show(self._runner)

    def _show(self, runner: MicroBatchRunner) -> None:
        if runner.failure:
            self.show("off", f"a batch that runs out of memory is not repeated: {runner.failure}")
            return
        how, exactness = "outputs are put together", "rounding"
        if runner.is_auto and runner.size is None:
            how = "whole batches; halved when memory runs out, if samples prove that this is exact"
            exactness = "bitwise"
        elif runner.is_auto:
            how = f"in micro-batches of {runner.size} samples, as memory ran out with more"
        known = self._steps.values()
        whole = [f"`{one.name}` passes whole: {one.why_whole}" for one in known if one.why_whole]
        self.show("on", how, *dict.fromkeys(whole), exactness=exactness)

    def undo(self) -> None:
        self._runner = None
        self._steps.clear()
        super().undo()

    def _run_batch(
        self, trainer: Any, batch: Any, step: RunStep, logged: LoggedValues, which: tuple[Any, ...]
    ) -> Any:
        runner = self._runner
        assert runner is not None, "batches run between `apply` and `undo`"
        which = (*which, parts_of(batch))  # without one of its parts a batch has another loss
        new = self._steps.get(which) or _Known(which[0], KnownChanges(trainer.lightning_module))
        known = self._steps.setdefault(which, new)
        passed: list[tuple[Any, int, float]] = []

        def pass_part(part: Any, weight: float, num_samples: int | None, is_last: bool) -> None:
            logged.start_part(weight, num_samples)
            passed.append((step(part), -1 if num_samples is None else num_samples, weight))

        def forget() -> None:
            passed.clear()
            logged.clear()

        def prove_it(batch: Any, differ: bool = True) -> bool:
            num_samples = samples_of(batch, find_shared_leaves(batch)[0])
            is_small = num_samples is not None and num_samples <= (runner.size or 0)
            if differ and not (known.proof is None and is_small):
                seen = SeenStep(step, logged)
                known.proof = self._prove(trainer, batch, seen, known, runner)
                known.use(runner, prove_it)
            return True

        known.use(runner, prove_it)
        is_first = known.probe.is_first_of(trainer.global_step)
        is_watched = is_first or known.probe.is_open(batch, is_fresh=True)
        size = runner.size
        try:
            if known.why_whole:
                raise _StaysWholeError
            runner.run(
                batch,
                pass_part,
                save_state=lambda: known.changes.save("leave", is_watched),
                forget=forget,
            )
        except (_StaysWholeError, ConfigurationError) as error:
            if isinstance(error, ConfigurationError):
                self._leave_whole(known, error, runner, is_possible=not passed)
            self._show(runner)
            forget()
            pass_part(batch, 1.0, None, True)
        runner.record(known.changes.learn)
        known.probe.passed(batch, is_fresh=True, has_stepped=True)
        if runner.size != size:
            warn_of_retry(trainer, runner)
        if runner.failure or runner.size != size:
            self._show(runner)
        outputs, sizes, weights = zip(*passed, strict=True)
        return outputs[0] if len(outputs) == 1 else _merged(outputs, sizes, weights)

    def _leave_whole(
        self, known: _Known, error: Exception, runner: MicroBatchRunner, *, is_possible: bool
    ) -> None:
        if runner.is_auto or self.is_asked or not is_possible:
            raise error
        known.why_whole = str(error).partition(". ")[0]  # `loss_weight` is made for other batches

    def _prove(
        self,
        trainer: Any,
        batch: Any,
        step: SeenStep,
        known: _Known,
        runner: MicroBatchRunner,
    ) -> Proof:
        check = LossCheck(
            *(step.numbers, batch, trainer.lightning_module),
            loss_weight=self.technique.loss_weight,
            split_batch=self.technique.split_batch,
            known=known.proof,
            needs_split=True,
            optimizers=trainer.optimizers,
            subject="the sum of what it logs and returns (and 1)",
        )
        with unnoticed(trainer):
            proof = prove(check)
            reason = proof.reason or step.difference(proof)
        if not reason:
            return proof if step.has_numbers else replace(proof, weightings=proof.weightings[:1])
        if not (runner.is_auto or self.is_asked):
            known.why_whole = reason
            raise _StaysWholeError
        what = f"`{known.name}` with `micro_batch_size={self.value}`"
        problem = Problem(what, reason, proof.fix or _FIX)
        if runner.is_auto:
            raise MemoryExhaustedError(f"A whole batch was too large, and {problem}")
        raise IncompatibleError(self.name, [problem])


def _merged(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    try:
        return merge_outputs(outputs, sizes, weights)
    except ValueError as error:
        problem = Problem(
            "what the step returned for the micro-batches of a batch",
            f"it cannot be put together: {error}",
            "Return tensors or lists with one entry per sample, or nothing; or use "
            "`MicroBatching(..., evaluation=False)`.",
        )
        raise IncompatibleError("micro_batch_size", [problem]) from None
