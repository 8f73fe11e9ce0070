"""Pass batches in parts, and in smaller ones when memory runs out."""

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from lightning_memsave.core.batches import count_samples
from lightning_memsave.core.out_of_memory import (
    find_out_of_memory,
    first_line,
    free_unused,
)
from lightning_memsave.errors import IncompatibleError, MemoryExhaustedError
from lightning_memsave.techniques._micro_batches.loss_weights import (
    LossWeight,
    resolve,
    weight_function,
)
from lightning_memsave.techniques._micro_batches.training_state import TrainingState

NO_LIMIT = 2**31 - 1
"""What a process that had enough memory answers for the next size."""


class PassPart(Protocol):
    """Passes one part of a batch."""

    def __call__(self, part: Any, weight: float, num_samples: int | None, is_last: bool) -> None:
        """Pass it.

        Args:
            part: A batch.
            weight: Its share in the loss of the whole batch.
            num_samples: Its samples, if they can be counted.
            is_last: It is the last part of the batch.
        """


class MicroBatchRunner:
    """Splits batches and repeats them; remembers the size that fits.

    Args:
        size: Samples that pass at once, or ``"auto"``.
        loss_weight: What a loss is the mean over.
        split_batch: A function of batch and size that gives a list of batches.
        module: The model, if it is known.
        agree: Of the next size that this process wants, ``NO_LIMIT`` if it had enough memory: the
            smallest one that any process wants.
    """

    def __init__(
        self,
        size: Any,
        loss_weight: LossWeight,
        split_batch: Callable[[Any, int], Any],
        module: nn.Module | None = None,
        agree: Callable[[int], int] = lambda size: size,
    ) -> None:
        self.is_auto = size == "auto"
        """Whether the size shrinks when memory runs out."""
        self.size: int | None = None if self.is_auto else size
        """Samples that pass at once; ``None`` for the whole batch."""
        self.retries: list[str] = []
        """One line for each time that memory ran out."""
        self.weighted_by: LossWeight | None = None
        """What the losses of the last batch in parts were weighted by."""
        self._loss_weight, self._split_batch = loss_weight, split_batch
        self._module, self._agree = module, agree

    def split(self, batch: Any) -> tuple[list[Any], list[float], list[int | None]]:
        """Split a batch into parts.

        Args:
            batch: A batch.

        Returns:
            Parts, weights of their losses, which sum to 1, and numbers of samples, as far as they
            can be counted. Parts without a valid token are left out: the mean over nothing is not a
            number.
        """
        if self.size is None:
            return [batch], [1.0], [None]
        parts = list(self._split_batch(batch, self.size))
        if len(parts) == 1:
            return parts, [1.0], [None]
        self.weighted_by = resolve(self._loss_weight, batch, self._module)
        weigh = weight_function(self.weighted_by, batch)
        weights = torch.stack([torch.as_tensor(weigh(part)).double().cpu() for part in parts])
        total = weights.sum().item()
        if total <= 0:
            return [batch], [1.0], [None]
        kept = [
            (part, weight) for part, weight in zip(parts, weights.tolist(), strict=True) if weight
        ]
        return (
            [part for part, _ in kept],
            [weight / total for _, weight in kept],
            [_samples_of(part) for part, _ in kept],
        )

    def run(
        self,
        batch: Any,
        pass_part: PassPart,
        *,
        take_down: Callable[[], TrainingState | None],
        forget: Callable[[], None],
    ) -> None:
        """Pass a batch, in smaller parts if memory runs out.

        Args:
            batch: A batch.
            pass_part: Passes one part.
            take_down: Gives the state before the batch, to be put back before it is repeated;
                called for ``"auto"`` only, and again if memory was not enough for it.
            forget: Takes back what ``pass_part`` noted elsewhere.

        Raises:
            MemoryExhaustedError: If memory runs out with one sample.
        """
        before = _Before(take_down if self.is_auto else lambda: None)
        while True:
            failure = self._failure_of(lambda: self._pass(batch, pass_part, before))
            if not self.is_auto:
                return
            wanted = NO_LIMIT if failure is None else self._size_of(batch) // 2
            size = self._agree(wanted)
            if size == NO_LIMIT:
                return
            # Outside of the handler, whose traceback would keep the tensors of the step alive.
            before.has_failed = True
            forget()
            if size == 0:
                self._failure_of(before.prepare)
                raise MemoryExhaustedError(self._report(failure))
            self._shrink(batch, size)

    def _pass(self, batch: Any, pass_part: PassPart, before: "_Before") -> None:
        before.prepare()
        parts, weights, sizes = self.split(batch)
        for index, (part, weight, size) in enumerate(zip(parts, weights, sizes, strict=True)):
            pass_part(part, weight, size, index == len(parts) - 1)

    # Gives what was said when memory ran out.
    def _failure_of(self, function: Callable[[], None]) -> str | None:
        outside = sys.exception()
        try:
            function()
        except Exception as error:
            found = find_out_of_memory(error, outside) if self.is_auto else None
            if found is None:
                raise
            return first_line(found)
        return None

    def _size_of(self, batch: Any) -> int:
        samples = count_samples(batch)
        return samples if self.size is None else min(self.size, samples)

    def _shrink(self, batch: Any, size: int) -> None:
        before, self.size = self._size_of(batch), size
        self.retries.append(f"out of memory with {before} samples at once, repeated with {size}")

    def _report(self, failure: str | None) -> str:
        said = failure or "another process ran out of memory"
        tried = "".join(f"\n  - {line}" for line in self.retries) or " the batch is one sample."
        return (
            f"Out of memory with one sample at once, and there is nothing smaller: {said}\n"
            f"Tried:{tried}\n"
            'Use `activation_checkpointing="all"`, `optimizer="8bit"`, `precision="bf16-mixed"`, '
            "shorter samples or a smaller model."
        )


# Saving and restoring need memory, too: they are part of a try, which fails where there is none.
class _Before:
    def __init__(self, take_down: Callable[[], TrainingState | None]) -> None:
        self.has_failed = False  # a try has failed
        self._take_down = take_down
        self._state: TrainingState | None = None

    def prepare(self) -> None:
        if self.has_failed:
            free_unused()
        if self._state is None:
            self._state = self._take_down()
        else:
            self._state.restore()


def _samples_of(part: Any) -> int | None:
    try:
        return count_samples(part)
    except IncompatibleError:  # only `split_batch` knows what its parts are
        return None
