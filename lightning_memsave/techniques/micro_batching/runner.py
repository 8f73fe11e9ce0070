"""Pass batches in parts, and in smaller ones when memory runs out."""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from lightning_memsave.core.nested import Path, count_samples, split_samples
from lightning_memsave.core.out_of_memory import (
    find_out_of_memory,
    first_line,
    free_unused,
)
from lightning_memsave.errors import ConfigurationError, IncompatibleError, MemoryExhaustedError
from lightning_memsave.techniques.micro_batching.loss_weights import (
    LossWeight,
    Weighting,
    guess,
    read_weights,
    shares_of,
    weightings_of,
)
from lightning_memsave.techniques.micro_batching.training_state import TrainingState

SplitBatch: TypeAlias = Callable[[Any, int], Sequence[Any]]
"""Of batch and size: a list of batches."""


def split_batch_with(
    own: SplitBatch | None, batch: Any, size: int, whole: frozenset[Path] = frozenset()
) -> list[Any]:
    """Split a batch into micro-batches.

    Args:
        own: The user's function; ``None`` for `split_samples`.
        batch: A batch.
        size: Samples in each micro-batch.
        whole: Leaves that belong to every micro-batch.

    Returns:
        At least one micro-batch.

    Raises:
        ConfigurationError: If the user's function gives no list, or other samples than the batch.
    """
    if own is None:
        return split_samples(batch, size, whole)
    given: Any = own(batch, size)  # the user may return anything
    parts = list(given) if isinstance(given, Iterable) and not isinstance(given, Tensor) else []
    if not parts:
        shown = "an empty list" if isinstance(given, Sequence) else f"`{type(given).__name__}`"
        raise ConfigurationError(
            f"`split_batch` gave {shown} for a batch of type `{type(batch).__name__}` and size "
            f"{size}. Return a list of batches, such as `[batch[:2], batch[2:]]`."
        )
    sizes = [samples_of(part) for part in parts]
    num_samples, found = samples_of(batch), sum(size or 0 for size in sizes)
    if None not in sizes and num_samples is not None and found != num_samples:
        raise ConfigurationError(
            f"`split_batch` gave micro-batches of {found} samples together for a batch of "
            f"{num_samples} samples. Return each sample of the batch in exactly one of them."
        )
    return parts


def samples_of(batch: Any, whole: frozenset[Path] = frozenset()) -> int | None:
    """Count the samples of a batch.

    Args:
        batch: A batch.
        whole: Leaves that belong to every micro-batch.

    Returns:
        The number; ``None`` where only `split_batch` knows what a batch is made of.
    """
    try:
        return count_samples(batch, whole)
    except IncompatibleError:
        return None


_ADVICE = (
    'Use `activation_checkpointing="all"`, `optimizer="8bit"`, `precision="bf16-mixed"`, '
    "shorter samples or a smaller model."
)
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
        split_batch: The user's function of batch and size; ``None`` for `split_samples`.
        agree: Of the next size that this process wants, ``NO_LIMIT`` if it had enough memory: the
            smallest one that any process wants.
    """

    def __init__(
        self,
        size: Any,
        loss_weight: LossWeight,
        split_batch: SplitBatch | None,
        agree: Callable[[int], int] = lambda size: size,
    ) -> None:
        self.is_auto = size == "auto"
        """Whether the size shrinks when memory runs out."""
        self.size: int | None = None if self.is_auto else size
        """Samples that pass at once; ``None`` for the whole batch."""
        self.retries: list[str] = []
        """One line for each time that memory ran out."""
        self.weightings: Sequence[Weighting] = ()
        """What losses can be weighted by, the first of them if they do not agree."""
        self.whole: frozenset[Path] = frozenset()
        """Leaves of batches that belong to every micro-batch."""
        self.needs_proof = False
        """Batches pass whole while there are no weightings."""
        self.prove: Callable[[Any], object] | None = None
        """Called with a batch that will be split while there are no weightings."""
        self.tell_apart: Callable[[Any, bool], bool] | None = None
        """Called with a batch and whether the weightings give its micro-batches other weights; says
        whether the batch may be split."""
        self.asks_together = False
        """All processes call that, or none."""
        self.advice = _ADVICE
        """What to do where one sample is too many."""
        self._loss_weight, self._split_batch, self._agree = loss_weight, split_batch, agree

    def split(self, batch: Any) -> tuple[list[Any], list[float], list[int | None]]:
        """Split a batch into micro-batches.

        Args:
            batch: A batch.

        Returns:
            Micro-batches, factors of their losses, and numbers of samples, as far as they can be
            counted. Micro-batches without a valid token are left out: the mean over nothing is not
            a number.
        """
        if self.size is None or (self.needs_proof and not self.weightings):
            return [batch], [1.0], [None]
        if self.prove is not None and not self.weightings:
            self.prove(batch)
        parts = split_batch_with(self._split_batch, batch, self.size, self.whole)
        shares = self._shares(batch, parts)
        if len(parts) == 1 or shares is None:
            return [batch], [1.0], [None]
        kept = [(part, share) for part, share in zip(parts, shares, strict=True) if share]
        return (
            [part for part, _ in kept],
            [share for _, share in kept],
            [samples_of(part, self.whole) for part, _ in kept],
        )

    def _shares(self, batch: Any, parts: Sequence[Any]) -> list[float] | None:
        weightings = self.weightings or self._guessed(batch)
        asks = self.tell_apart is not None and (self.asks_together or len(parts) > 1)
        if len(parts) == 1 and not asks:
            return None
        rows = read_weights(weightings, parts)
        shares = [shares_of(*pair) for pair in zip(weightings, rows, strict=True)]
        if self.tell_apart is not None and asks:
            if not self.tell_apart(batch, len(parts) > 1 and not _agree_on(shares)):
                return None
            shares = [s for w, s in zip(weightings, shares, strict=True) if w in self.weightings]
        return shares[0]

    def _guessed(self, batch: Any) -> list[Weighting]:
        if self._loss_weight == "auto":
            return [guess(batch)]
        return weightings_of(self._loss_weight, batch)

    def run(
        self,
        batch: Any,
        pass_part: PassPart,
        *,
        save_state: Callable[[], TrainingState | None],
        forget: Callable[[], None],
    ) -> None:
        """Pass a batch, in smaller parts if memory runs out.

        Args:
            batch: A batch.
            pass_part: Passes one part.
            save_state: Gives the state before the batch, to be put back before it is repeated;
                called for ``"auto"`` only, and again if memory was not enough for it.
            forget: Takes back what ``pass_part`` noted elsewhere.

        Raises:
            MemoryExhaustedError: If memory runs out with one sample.
        """
        before = _Before(save_state if self.is_auto else lambda: None)
        while True:
            failure = self._failure_of(lambda: self._pass(batch, pass_part, before))
            if not self.is_auto:
                return
            wanted = NO_LIMIT if failure is None else self.size_of(batch) // 2
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

    def size_of(self, batch: Any) -> int:
        """Count the samples that pass at once."""
        samples = count_samples(batch, self.whole)
        return samples if self.size is None else min(self.size, samples)

    def _shrink(self, batch: Any, size: int) -> None:
        before, self.size = self.size_of(batch), size
        self.retries.append(f"out of memory with {before} samples at once, repeated with {size}")

    def _report(self, failure: str | None) -> str:
        said = failure or "another process ran out of memory"
        tried = "".join(f"\n  - {line}" for line in self.retries) or " the batch is one sample."
        return (
            f"Out of memory with one sample at once, and there is nothing smaller: {said}\n"
            f"Tried:{tried}\n{self.advice}"
        )


# Saving and restoring need memory, too: they are part of a try, which fails where there is none.
class _Before:
    def __init__(self, save_state: Callable[[], TrainingState | None]) -> None:
        self.has_failed = False  # a try has failed
        self._save_state = save_state
        self._state: TrainingState | None = None

    def prepare(self) -> None:
        if self.has_failed:
            free_unused()
        if self._state is None:
            self._state = self._save_state()
        else:
            self._state.restore()


def _agree_on(shares: Sequence[Sequence[float] | None]) -> bool:
    first = shares[0]
    return all(
        (first is None and other is None)
        or (
            first is not None
            and other is not None
            and all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(first, other, strict=True))
        )
        for other in shares[1:]
    )
