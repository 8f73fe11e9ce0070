"""Run the micro-batches of a batch, with the result of the whole batch."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave.core.nested import map_tensors, merge_outputs, sum_in_order
from lightning_memsave.core.optimizers import parameters_of
from lightning_memsave.core.patching import named, patch_method, previous_method
from lightning_memsave.core.technique import undo_all
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.trainer.distributed import broadcast_buffers
from lightning_memsave.trainer.hooks import FreedGradients, GradientVersions
from lightning_memsave.trainer.logged_values import LoggedValues
from lightning_memsave.trainer.trainer import is_strategy

_INNER_BACKWARD = Problem(
    "`training_step`",
    "it changes gradients itself, for example with `backward()`, and these cannot be distinguished "
    "from the gradients of earlier micro-batches",
    "Call `torch.autograd.grad` there, which does not touch the gradients of parameters, or set "
    "`micro_batch_size=None`.",
)


class BatchParts:
    """Runs training step and backward for the micro-batches of one batch."""

    def __init__(self, loop: Any, closure: Any, kwargs: Any, optimizer: Optimizer) -> None:
        self.batch = kwargs["batch"]
        self.factor = 1.0
        """Of every loss."""
        self.logged: LoggedValues | None = None
        self.zeroes = closure._zero_grad_fn is not None
        """Whether gradients are zeroed before this batch, not accumulated."""
        self._loop, self._kwargs = loop, kwargs
        self._backward, self._warn = closure._backward_fn, closure.warning_cache.warn
        self._zero_grad_fn, self._optimizer = closure._zero_grad_fn, optimizer
        self._passed: list[tuple[Any, float, int | None]] = []

    def start(self, logged: LoggedValues) -> None:
        """Begin the batch; an optimizer may call its closure several times."""
        self.logged, self._passed = logged, []
        self._zero_grad = self._zero_grad_fn
        is_freed = self.zeroes and self._loop.frees_before_parts
        self._freed = FreedGradients(self._optimizer) if is_freed else None

    def __call__(
        self, part: Any, weight: float, num_samples: int | None, is_last: bool = True
    ) -> None:
        assert self.logged is not None, "`start` was called"
        self.logged.start_part(weight, num_samples)
        result = self._run_step(part, is_last)
        result = scaled(result, weight * self.factor)
        if result.closure_loss is not None and self._backward is not None:
            self._loop.run_backward(self._backward, result.closure_loss, is_last)
        if self._passed or not is_last:
            result = _detached(result)
        self._passed.append((result, weight, num_samples))

    @contextlib.contextmanager
    def before_start(self) -> Iterator[None]:
        """Allow `compute_loss` before the batch begins."""
        with LoggedValues(self._loop.trainer) as self.logged:
            yield
        self.logged = None

    def compute_loss(self, part: Any, later: int = 0) -> Tensor | None:
        """Return the loss of the training step, without logging; ``None`` if there is none.

        The step may count on it that the batch is so much ``later``.
        """
        assert self.logged is not None, "`start` was called"
        kwargs = {**self._kwargs, "batch": part}
        if "batch_idx" in kwargs:
            kwargs["batch_idx"] += later
        with self.logged.forgotten():
            loss = self._loop.run_step(kwargs).closure_loss
        return None if loss is None else cast(Tensor, loss)

    def compute_next(self, part: Any) -> Tensor | None:
        """Return the loss of what may come in the next batch."""
        return self.compute_loss(part, later=1)

    # A `backward()` inside `training_step` leaves gradients. Lightning zeroes them after the step,
    # or accumulates them with those of earlier batches.
    def _run_step(self, part: Any, is_last: bool) -> Any:
        is_first, kwargs = not self._passed, {**self._kwargs, "batch": part}
        if is_first and (self.zeroes or is_last):
            result = self._loop.run_step(kwargs)
            if self._zero_grad is not None:
                if self._freed is None:
                    self._zero_grad()
                else:
                    self._freed.zero(self._zero_grad)
                # If the batch is repeated, hooks must not be called again.
                self._zero_grad = self._optimizer.zero_grad
            return result
        marks = GradientVersions(self._parameters())
        result = self._loop.run_step(kwargs)
        if marks.have_changed():
            raise IncompatibleError("micro_batch_size", [_INNER_BACKWARD])
        return result

    def _parameters(self) -> Iterable[nn.Parameter]:
        # FSDP moves gradients in its forward pass.
        if is_strategy(self._loop.trainer, "FSDPStrategy"):
            return ()
        return parameters_of(self._optimizer)

    def forget(self) -> None:
        self._passed = []
        if self.logged is not None:
            self.logged.clear()

    def result(self) -> Any:
        results = [result for result, _, _ in self._passed]
        losses = [result.closure_loss for result in results if result.closure_loss is not None]
        if not losses:
            self._warn("`training_step` returned `None`, so this batch was skipped.")
        if len(results) == 1 or not losses:
            return results[-1]
        sizes = [-1 if size is None else size for _, _, size in self._passed]
        weights = [weight for _, weight, _ in self._passed]
        extra = {}
        for name, last in results[-1].extra.items():
            try:
                values = [result.extra[name] for result in results]
                extra[name] = merge_outputs(values, sizes, weights)
            except (KeyError, ValueError):
                extra[name] = last
        return type(results[-1])(sum_in_order(losses), extra=extra)


def _detached(result: Any) -> Any:
    loss = None if result.closure_loss is None else result.closure_loss.detach()
    return type(result)(loss, extra=map_tensors(result.extra, Tensor.detach))


def scaled(result: Any, factor: float) -> Any:
    """Multiply the loss of a ``ClosureResult``; 1.0 returns it unchanged."""
    if result.closure_loss is None or factor == 1.0:
        return result
    return type(result)(result.closure_loss * factor, extra=result.extra)


def without_outputs(result: Any) -> Any:
    return type(result)(result.closure_loss)


RunStep = Callable[[Any], Any]
RunBatch = Callable[[Any, Any, RunStep, LoggedValues, tuple[Any, ...]], Any]
"""Returns the output of a batch, from the Trainer, the batch, the step of a micro-batch, the logged
values, and the name of the step with the DataLoader index, if there are several."""

# Attribute of a strategy whose steps are replaced: its Trainer and the function that runs batches.
_RUNS = "_memsave_run_evaluation_batch"


def split_evaluation_batches(trainer: Any, run_batch: RunBatch) -> Callable[[], None]:
    strategy = trainer.strategy
    vars(strategy)[_RUNS] = (trainer, run_batch)
    undo = [patch_method(strategy, function) for function in _STEPS]
    undo.append(lambda: vars(strategy).pop(_RUNS, None))
    return functools.partial(undo_all, undo)


def _run(strategy: Any, name: str, batch: Any, *args: Any, **kwargs: Any) -> Any:
    step = functools.partial(_step, previous_method(strategy, name), args, kwargs)
    # If the step takes the dataloader iterator itself, there is no batch to split.
    if _RUNS not in vars(strategy) or isinstance(batch, Iterator):
        return step(batch)
    trainer, run_batch = vars(strategy)[_RUNS]
    broadcast_buffers(trainer)  # DDP would do it in the first micro-batch, and in each repetition
    with LoggedValues(trainer) as logged:
        output = run_batch(trainer, batch, step, logged, (name, *args[1:]))
        logged.flush()
    return output


def _step(method: Callable[..., Any], args: Any, kwargs: Any, batch: Any) -> Any:
    return method(batch, *args, **kwargs)


_STEPS = [named(name, _run) for name in ("validation_step", "test_step", "predict_step")]
