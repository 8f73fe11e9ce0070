"""Lightning's loop of automatic optimization, with our own way to pass a batch."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

Adjust = Callable[[Any, int, bool, Iterable[Any]], float]
"""Gives the factor of a loss, from Trainer, batch index, whether it is the last, and parameters."""


def adjust_losses(trainer: Any, adjust: Adjust) -> Callable[[], None]:
    """Multiply the loss of each training batch before its backward pass.

    Args:
        trainer: A Trainer in ``setup``, with automatic optimization.
        adjust: Gives the factor; 1.0 leaves a batch exactly as it is.

    Returns:
        A function that puts Lightning's own loop back.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    original = epoch_loop.automatic_optimization
    loop_class: Any = _adjusting_loop_class(cast(Any, type(original)))
    replacement = loop_class(trainer)
    # Progress objects are shared, so loop state in checkpoints is as without us.
    vars(replacement).update(vars(original))
    replacement.adjust = adjust
    epoch_loop.automatic_optimization = replacement

    def undo() -> None:
        if epoch_loop.automatic_optimization is replacement:
            vars(original).update({k: v for k, v in vars(replacement).items() if k != "adjust"})
            epoch_loop.automatic_optimization = original

    return undo


@functools.cache
def _adjusting_loop_class(base: Any) -> type[Any]:
    class AdjustingAutomaticOptimization(base):  # type: ignore[misc] # known at run time only
        adjust: Adjust

        def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
            closure = super()._make_closure(kwargs, optimizer, batch_idx)
            if self._skip_backward:  # stochastic weight averaging updates batch norm, nothing else
                return closure
            is_last = self.trainer.fit_loop.epoch_loop._num_ready_batches_reached()
            parameters = self.trainer.lightning_module.parameters()
            factor = self.adjust(self.trainer, batch_idx, is_last, parameters)
            if factor != 1.0:
                closure._step_fn = functools.partial(_scaled_step, closure._step_fn, factor)
            return closure

    return AdjustingAutomaticOptimization


def _scaled_step(step: Callable[[], Any], factor: float) -> Any:
    result = step()
    if result.closure_loss is None:
        return result
    return type(result)(result.closure_loss * factor, extra=result.extra)
