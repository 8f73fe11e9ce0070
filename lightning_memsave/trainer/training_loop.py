"""Replace Lightning's loop of automatic optimization, to control forward and backward."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor

from lightning_memsave.core.out_of_memory import find_out_of_memory, with_memory_freed
from lightning_memsave.trainer.batch_parts import BatchParts, scaled, without_outputs
from lightning_memsave.trainer.hooks import FreedGradients, without_after_backward
from lightning_memsave.trainer.logged_values import LoggedValues

Adjust = Callable[[Any, int, bool, Iterable[Any], BatchParts | None], float]
"""Returns a factor of the loss, from Trainer, batch index, whether it is last, parameters, and what
runs the batch, unless the step takes batches itself."""

Undo = Callable[[], None]

PassBatch = Callable[[Any, BatchParts, bool], None]
"""Runs a batch by calling ``BatchParts`` for each micro-batch; the third argument is whether
gradients are zeroed before this batch."""


def adjust_losses(trainer: Any, adjust: Adjust) -> Undo:
    """Multiply the loss of each training batch before its backward pass."""
    return _set(trainer, adjust=adjust)


def pass_batches(
    trainer: Any,
    pass_batch: PassBatch,
    *,
    frees_gradients: bool,
    on_out_of_memory: Callable[[Any, BaseException], BaseException],
) -> Undo:
    """Replace the function that runs forward and backward of a training batch.

    Hooks around zeroing run between the first forward and the first backward pass, as usual. Logged
    values are buffered until the end of the batch.
    """
    return _set(
        trainer,
        pass_batch=pass_batch,
        frees_before_parts=frees_gradients,
        on_out_of_memory=on_out_of_memory,
    )


def around_backward(trainer: Any, context: Callable[[bool], AbstractContextManager[Any]]) -> Undo:
    epoch_loop = trainer.fit_loop.epoch_loop
    given = vars(epoch_loop.automatic_optimization).get("around_backward", ())
    undo = _set(trainer, around_backward=(*given, context))

    def undo_context() -> None:
        loop = vars(epoch_loop.automatic_optimization)
        left = tuple(c for c in loop.get("around_backward", ()) if c is not context)
        if left:
            loop["around_backward"] = left
        else:
            undo()

    return undo_context


def around_step(trainer: Any, context: Callable[[], AbstractContextManager[Any]]) -> Undo:
    return _set(trainer, around_step=context)


def release_early(trainer: Any, *, gradients: bool, outputs: bool) -> Undo:
    return _set(trainer, frees_gradients=gradients, drops_outputs=outputs)


def will_step(trainer: Any) -> bool:
    """Return whether the optimizer steps after the current batch, not accumulating gradients."""
    return not trainer.fit_loop._should_accumulate()


def phase_of(trainer: Any) -> tuple[int, int]:
    """Return a pair that changes with each epoch, and with each validation inside it."""
    epoch_loop = trainer.fit_loop.epoch_loop
    return trainer.current_epoch, epoch_loop.val_loop.batch_progress.total.ready


def has_open_window(trainer: Any) -> bool:
    """Return whether there are accumulated gradients that no optimizer step has used yet."""
    if trainer.state.fn != "fit" or trainer.accumulate_grad_batches == 1:
        return False
    is_automatic = trainer.lightning_module.automatic_optimization
    has_batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0
    return bool(is_automatic and has_batches and not will_step(trainer))


def may_split_batches(trainer: Any) -> bool:
    """Return whether `pass_batches` is active, so that batches may be split."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    return getattr(loop, "pass_batch", None) is not None


_HOOKS = ("adjust", "pass_batch", "on_out_of_memory", "around_backward")
_FLAGS = ("frees_gradients", "frees_before_parts", "drops_outputs", "around_step")


def _set(trainer: Any, **hooks: Any) -> Undo:
    epoch_loop = trainer.fit_loop.epoch_loop
    loop = epoch_loop.automatic_optimization
    if not hasattr(loop, "replaced"):
        original = loop
        loop = _loop_class(cast(Any, type(original)))(trainer)
        # Progress objects are shared, so that loop state in checkpoints is unchanged.
        vars(loop).update(vars(original))
        # In a tuple: Lightning saves the state of every loop in an attribute.
        loop.replaced = (original,)
        epoch_loop.automatic_optimization = loop
    vars(loop).update(hooks)

    def undo() -> None:
        for name in hooks:
            vars(loop).pop(name, None)
        is_unused = not any(name in vars(loop) for name in (*_HOOKS, *_FLAGS))
        if is_unused and epoch_loop.automatic_optimization is loop:
            own = {name: value for name, value in vars(loop).items() if name != "replaced"}
            (original,) = loop.replaced
            vars(original).update(own)
            epoch_loop.automatic_optimization = original

    return undo


# Mixed into `_AutomaticOptimization` of either package at run time.
class _Loop:
    trainer: Any
    _skip_backward: bool
    replaced: tuple[Any]
    is_in_step = False  # forward and backward are done, and the optimizer steps
    adjust: Adjust | None = None
    pass_batch: PassBatch | None = None
    on_out_of_memory: Callable[[Any, BaseException], BaseException] | None = None
    around_backward: tuple[Callable[[bool], AbstractContextManager[Any]], ...] = ()
    around_step: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    frees_gradients = False
    frees_before_parts = False
    drops_outputs = False

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        closure = super()._make_closure(kwargs, optimizer, batch_idx)  # type: ignore[misc]
        if self._skip_backward:  # stochastic weight averaging updates BatchNorm only
            return closure
        # If the step takes the dataloader iterator itself, there is no batch to split.
        parts = BatchParts(self, closure, kwargs, optimizer) if "batch" in kwargs else None
        factor = 1.0
        if self.adjust is not None:
            is_last = self.trainer.fit_loop.epoch_loop._num_ready_batches_reached()
            parameters = self.trainer.lightning_module.parameters()
            factor = self.adjust(self.trainer, batch_idx, is_last, parameters, parts)
        if self.pass_batch is not None and parts is not None:
            parts.factor = factor
            # Without a reference to the closure: a cycle would keep the batch alive.
            closure.closure = functools.partial(self._pass_batch, parts, optimizer)
            return closure
        closure._step_fn = functools.partial(self._step_inside, closure._step_fn)
        if factor != 1.0:
            scale = functools.partial(scaled, factor=factor)
            closure._step_fn = functools.partial(_then, closure._step_fn, scale)
        if self.drops_outputs:
            closure._step_fn = functools.partial(_then, closure._step_fn, without_outputs)
        if self.frees_gradients and closure._zero_grad_fn is not None:
            early = _EarlyFree(optimizer, closure._zero_grad_fn)
            closure._step_fn = functools.partial(_step_after, early.free, closure._step_fn)
            closure._zero_grad_fn = early.zero
        if self.around_backward and closure._backward_fn is not None:
            closure._backward_fn = functools.partial(self.run_backward, closure._backward_fn)
        return closure

    def run_step(self, kwargs: dict[str, Any]) -> Any:
        step = functools.partial(self._training_step, kwargs)  # type: ignore[attr-defined]
        result = self._step_inside(step)
        return without_outputs(result) if self.drops_outputs else result

    def _step_inside(self, step: Callable[[], Any]) -> Any:
        with self.around_step():
            return step()

    def run_backward(
        self, backward: Callable[[Tensor], Any], loss: Tensor, is_last: bool = True
    ) -> None:
        with contextlib.ExitStack() as stack:
            for context in self.around_backward:
                stack.enter_context(context(is_last and will_step(self.trainer)))
            if not is_last:
                stack.enter_context(without_after_backward(self.trainer))
            backward(loss)

    @torch.enable_grad()
    def _pass_batch(self, parts: BatchParts, optimizer: Any, *_: Any, **__: Any) -> Any:
        assert self.pass_batch is not None, "the closure is only made with it"
        self.is_in_step = False
        if parts.zeroes and self.frees_before_parts:
            optimizer.zero_grad()
        with LoggedValues(self.trainer) as logged:
            parts.start(logged)
            self.pass_batch(parts.batch, parts, parts.zeroes)
            logged.flush()
        self.is_in_step = will_step(self.trainer)
        return with_memory_freed(parts.result)

    def _optimizer_step(self, batch_idx: int, closure: Any) -> None:
        failure, outside = None, sys.exception()
        self.is_in_step = False
        try:
            super()._optimizer_step(batch_idx, closure)  # type: ignore[misc]
        except Exception as error:
            found = find_out_of_memory(error, outside)
            if self.on_out_of_memory is None or not self.is_in_step or found is None:
                raise
            failure = self.on_out_of_memory(self.trainer.optimizers[0], found)
        # Outside of the except block, whose traceback would keep tensors of the step alive.
        if failure is not None:
            raise failure


@functools.cache
def _loop_class(base: Any) -> type[Any]:
    return type("MemsaveAutomaticOptimization", (_Loop, base), {})


def _then(step: Callable[[], Any], function: Callable[[Any], Any]) -> Any:
    return function(step())


def _step_after(first: Callable[[], None], step: Callable[[], Any]) -> Any:
    first()
    return step()


# Without a reference to the closure, as above.
class _EarlyFree:
    def __init__(self, optimizer: Any, zero_grad: Callable[[], None]) -> None:
        self._optimizer, self._zero_grad = optimizer, zero_grad

    def free(self) -> None:
        self._optimizer.zero_grad()
        self._freed = FreedGradients(self._optimizer)

    def zero(self) -> None:
        self._freed.zero(self._zero_grad)
