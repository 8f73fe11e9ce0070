"""`accumulate_grad_batches` of `MemSaveCallback`, with the last partial window scaled right."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_memsave.callbacks.settings.micro_batch_size import MicroBatchSetting
from lightning_memsave.callbacks.settings.micro_batches import is_among, warn_of_batch_norm
from lightning_memsave.callbacks.settings.setting import Arguments, Setting, warn, why_beyond
from lightning_memsave.core.technique import Exactness
from lightning_memsave.errors import ConfigurationError, ExactnessWarning
from lightning_memsave.techniques.micro_batching.loss_weights import Weighting, read_weights
from lightning_memsave.trainer.batch_parts import BatchParts
from lightning_memsave.trainer.distributed import all_reduce_min
from lightning_memsave.trainer.training_loop import adjust_losses


class AccumulationSetting(Setting):
    """Gradient accumulation over several batches.

    Lightning divides each loss by the number of batches per window, also in the last window of an
    epoch that is shorter, whose gradient is too small then (its issue 19987). Here the losses of
    that window are divided by the number of its batches. A loss that is a mean over tokens or
    samples counts as often as its batch has of them, so that the gradient of a window is that of
    the mean over it.
    """

    name = "accumulate_grad_batches"

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        wanted = self.num_batches = arguments[self.name]
        if wanted is not None and (type(wanted) is not int or wanted < 1):
            raise ConfigurationError(
                f"`accumulate_grad_batches={wanted!r}` is not a number of batches: it must be a "
                "whole number of at least 1. Use `accumulate_grad_batches=4` for a step every four "
                "batches, or `None` to leave it to the Trainer."
            )
        if wanted is not None and wanted > 1:
            why_beyond(arguments, self.name, Exactness.ROUNDING)
        self.value, self.is_on = str(wanted), wanted is not None
        self.micro_batches: MicroBatchSetting | None = None
        """What proves how losses are weighted, where it is on."""
        # Factor of the batches of this window that have passed backward already.
        self._factor = 1.0
        self._window = _Window()
        self._is_equal = False  # batches weigh the same, as a proof has failed

    def reasons(self, trainer: Any, pl_module: Any) -> Iterator[tuple[str, str]]:
        own = trainer.accumulate_grad_batches
        if not pl_module.automatic_optimization:
            name = f"`{type(pl_module).__name__}.automatic_optimization=False`"
            why = "the module steps its own optimizers, and Lightning would ignore this silently"
            fix = "Set `accumulate_grad_batches=None` and accumulate in `training_step`."
            yield f"{name}: {why}", fix
        if own not in (1, self.num_batches):
            why = f"the Trainer was given `accumulate_grad_batches={own}`"
            yield why, f"Remove one of the two, or pass `accumulate_grad_batches={own}` here too."
        if has_scheduler(trainer):
            why = "the Trainer has a `GradientAccumulationScheduler`, which sets it per epoch"
            yield why, "Remove that callback, or set `accumulate_grad_batches=None` here."

    def apply(self, trainer: Any, pl_module: Any) -> None:
        own, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, self.num_batches
        self._undo.append(lambda: setattr(trainer, "accumulate_grad_batches", own))
        details = [f"one optimizer step per {self.num_batches} batches"]
        if trainer.strategy.handles_gradient_accumulation:
            details.append("the strategy scales the last window of an epoch, as it always does")
        else:
            self._undo.append(adjust_losses(trainer, self.scale))
            details.append("a shorter last window is divided by its own number of batches")
            is_proven = self.micro_batches is not None and self.micro_batches.is_passing
            details.append(_WEIGHTED if is_proven else _EQUAL)
        self.show("on", *details, exactness="rounding")
        if self.num_batches > 1:
            alone = "batch alone, not from the whole window"
            warn_of_batch_norm(trainer, pl_module, self.written, alone)

    def stay_off(self, trainer: Any, pl_module: Any) -> None:
        """Say what the Trainer does by itself."""
        own = trainer.accumulate_grad_batches
        if has_scheduler(trainer) or own != 1:
            self.value = "scheduled" if has_scheduler(trainer) else str(own)
            self.show("unchanged", _LIGHTNING_SCALES)

    def scale(
        self, trainer: Any, batch_idx: int, is_last: bool, parameters: Any, parts: BatchParts | None
    ) -> float:
        """Find the factor for a batch's loss, which Lightning has divided already."""
        nominal = trainer.accumulate_grad_batches
        start = batch_idx - batch_idx % nominal
        end = batch_idx + 1 if is_last else min(start + nominal, trainer.num_training_batches)
        if batch_idx == start:
            self._window = _Window()
        share = self._share(trainer, parts) if end - start > 1 else 1.0
        # Until the window is complete, its other batches are taken to weigh what the first does.
        self._window.total += share
        total = self._window.total if batch_idx == end - 1 else end - start
        factor = nominal / (total or 1.0)
        if batch_idx == start:
            self._factor = factor
        if factor != self._factor:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor / self._factor)
            self._factor = factor
        return float(factor * share)

    def _share(self, trainer: Any, parts: BatchParts | None) -> float:
        """Return the weight of a batch, in weights of the first one of its window."""
        micro_batches, window = self.micro_batches, self._window
        if micro_batches is None or not micro_batches.is_passing or parts is None or self._is_equal:
            return 1.0
        with parts.before_start():
            runner = micro_batches.prove_once(trainer, parts)
            if micro_batches.proof.reason:
                return 1.0
            shares = window.shares_of(runner.weightings_for(parts.batch), parts.batch)
            differ = any(not math.isclose(share, shares[0]) for share in shares)
            if len(runner.weightings) > 1 and not all_reduce_min(trainer, int(not differ)):
                proof = micro_batches.settle_weightings(trainer, parts)
                if proof.reason:
                    self._is_equal = True
                    warn(trainer, f"{_ALIKE}: {proof.reason}.", ExactnessWarning)
                shares = window.shares_of(proof.weightings, parts.batch)
        return shares[0] if shares else 1.0


@dataclass
class _Window:
    total: float = 0.0
    """Sum of the weights, in weights of the first batch."""
    first: dict[str, float] = field(default_factory=dict)
    """Weight of the first batch, by weighting."""

    def shares_of(self, weightings: Sequence[Weighting], batch: Any) -> list[float]:
        """Return the weights of a batch, in weights of the first one."""
        means = [weighting for weighting in weightings if weighting.weigh is not None]
        weights = [row[0] for row in read_weights(means, [batch])] if means else []
        pairs = [*zip(means, weights, strict=True)]
        # A batch without a token weighs nothing, and cannot be the unit.
        return [weight / self.first.setdefault(one.text, weight or 1.0) for one, weight in pairs]


_WEIGHTED = (
    "each batch weighs what its loss is proven to be a mean over, such as its tokens, or the same "
    "where that is not known"
)
_EQUAL = 'all batches weigh the same: `micro_batch_size="halve"` proves what they should weigh'
_ALIKE = (
    "`accumulate_grad_batches`: from here on all batches weigh the same, as it is not known what "
    "the loss is a mean over"
)


def has_scheduler(trainer: Any) -> bool:
    return is_among(trainer, "GradientAccumulationScheduler")


_LIGHTNING_SCALES = (
    "set by the Trainer: a shorter last window of an epoch is divided by the full number of "
    "batches; pass it to `MemSaveCallback` for the right scale"
)
