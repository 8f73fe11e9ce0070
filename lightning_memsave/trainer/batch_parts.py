"""The parts of a training batch, passed one by one as if the batch had passed at once."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave.core.nested import map_tensors, merge_outputs
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.trainer.hooks import GradientVersions
from lightning_memsave.trainer.logged_values import LoggedValues
from lightning_memsave.trainer.trainer import is_strategy

_INNER_BACKWARD = Problem(
    "`training_step`",
    "it changes gradients itself, as by a `backward()` inside of it, and they cannot be told from "
    "those of the parts of the batch that have passed",
    "Call `torch.autograd.grad` there, which leaves the gradients of parameters alone, or set "
    "`micro_batch_size=None`.",
)


class BatchParts:
    """Passes the parts of one batch through training step and backward.

    Args:
        loop: Our loop.
        closure: Lightning's closure for the batch.
        kwargs: Arguments of the training step.
        factor: Of every loss.
        optimizer: Whose step follows.
    """

    def __init__(
        self, loop: Any, closure: Any, kwargs: Any, factor: float, optimizer: Optimizer
    ) -> None:
        self.batch = kwargs["batch"]
        self.logged: LoggedValues | None = None
        self.zeroes = closure._zero_grad_fn is not None
        """Whether there are no gradients of earlier batches to be kept."""
        self._loop, self._kwargs, self._factor = loop, kwargs, factor
        self._backward, self._warn = closure._backward_fn, closure.warning_cache.warn
        self._zero_grad_fn, self._optimizer = closure._zero_grad_fn, optimizer
        self._passed: list[tuple[Any, float, int | None]] = []

    def start(self, logged: LoggedValues) -> None:
        """Pass the batch from its beginning, as an optimizer may ask for several times.

        Args:
            logged: Holds back what is logged.
        """
        self.logged, self._passed = logged, []
        self._zero_grad = self._zero_grad_fn

    def __call__(
        self, part: Any, weight: float, num_samples: int | None, is_last: bool = True
    ) -> None:
        """Pass one part.

        Args:
            part: A batch.
            weight: Its share in the loss of the whole batch.
            num_samples: Its samples, if they can be counted.
            is_last: No other part of the batch comes after it.
        """
        assert self.logged is not None, "parts pass while values are held back"
        self.logged.start_part(weight, num_samples)
        result = self._run_step(part, is_last)
        result = scaled(result, weight * self._factor)
        if result.closure_loss is not None and self._backward is not None:
            self._loop.run_backward(self._backward, result.closure_loss, is_last)
        if self._passed or not is_last:
            result = _detached(result)
        self._passed.append((result, weight, num_samples))

    def compute_loss(self, part: Any) -> Tensor | None:
        """Run the training step for its loss alone; nothing is logged.

        Args:
            part: A batch.

        Returns:
            The loss; ``None`` if the training step gives none.
        """
        assert self.logged is not None, "parts pass while values are held back"
        with self.logged.forgotten():
            loss = self._loop.run_step({**self._kwargs, "batch": part}).closure_loss
        return None if loss is None else cast(Tensor, loss)

    # A backward pass in `training_step` leaves gradients. Lightning zeroes after the step, so that
    # they are gone; and where it does not, they count with those of the batches before.
    def _run_step(self, part: Any, is_last: bool) -> Any:
        is_first, kwargs = not self._passed, {**self._kwargs, "batch": part}
        if is_first and (self.zeroes or is_last):
            result = self._loop.run_step(kwargs)
            if self._zero_grad is not None:
                self._zero_grad()
                # Hooks have been called, should the batch be repeated.
                self._zero_grad = self._optimizer.zero_grad
            return result
        marks = GradientVersions(self._parameters())
        result = self._loop.run_step(kwargs)
        if marks.have_changed():
            raise IncompatibleError("micro_batch_size", [_INNER_BACKWARD])
        return result

    def _parameters(self) -> Iterable[nn.Parameter]:
        trainer = self._loop.trainer
        # It moves gradients about in its forward pass.
        if is_strategy(trainer, "FSDPStrategy"):
            return ()
        return cast(Iterable[nn.Parameter], trainer.lightning_module.parameters())

    def forget(self) -> None:
        """Take back what was noted, as the batch will be repeated."""
        self._passed = []
        if self.logged is not None:
            self.logged.clear()

    def result(self) -> Any:
        """Give what Lightning's closure would for the whole batch.

        Returns:
            The result of the only part; or a loss that is the sum over the parts, and what else
            the training step returned, put together or, where that cannot be, of the last part.
        """
        results = [result for result, _, _ in self._passed]
        losses = [result.closure_loss for result in results if result.closure_loss is not None]
        if not losses:
            self._warn("`training_step` returned `None`, so nothing was learned from this batch.")
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
        return type(results[-1])(torch.stack(losses).sum(), extra=extra)


def _detached(result: Any) -> Any:
    loss = None if result.closure_loss is None else result.closure_loss.detach()
    return type(result)(loss, extra=map_tensors(result.extra, Tensor.detach))


def scaled(result: Any, factor: float) -> Any:
    """Multiply the loss of a training step.

    Args:
        result: What Lightning makes of it, a ``ClosureResult``.
        factor: Of the loss; 1.0 leaves it as it is.

    Returns:
        Another result, or the same.
    """
    if result.closure_loss is None or factor == 1.0:
        return result
    return type(result)(result.closure_loss * factor, extra=result.extra)


def without_outputs(result: Any) -> Any:
    """Let go of what a training step has returned beside its loss.

    Args:
        result: What Lightning makes of it, a ``ClosureResult``.

    Returns:
        The loss alone.
    """
    return type(result)(result.closure_loss)
