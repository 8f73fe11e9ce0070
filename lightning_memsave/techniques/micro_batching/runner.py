"""Run batches as micro-batches, with smaller ones after an out-of-memory error."""

import contextlib
import itertools
import math
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from torch import Tensor

from lightning_memsave.core.nested import Path, count_samples, parts_of, split_samples
from lightning_memsave.core.out_of_memory import (
    find_out_of_memory,
    first_line,
    free_unused,
    is_out_of_memory,
    phase_in,
)
from lightning_memsave.core.states import next_state
from lightning_memsave.errors import (
    ConfigurationError,
    IncompatibleError,
    MemoryExhaustedError,
    MemsaveError,
)
from lightning_memsave.techniques.micro_batching.loss_weights import (
    LossWeight,
    Weighting,
    read_weights,
    shares_of,
    weightings_of,
)
from lightning_memsave.techniques.micro_batching.training_state import TrainingState

T = TypeVar("T")

SplitBatch: TypeAlias = Callable[[Any, int], Sequence[Any]]
"""Function of a batch and a size that returns a list of batches."""


def split_batch_with(
    own: SplitBatch | None, batch: Any, size: int, whole: frozenset[Path] = frozenset()
) -> list[Any]:
    if own is None:
        return split_samples(batch, size, whole)
    result: Any = own(batch, size)  # the user may return anything
    parts = list(result) if isinstance(result, Iterable) and not isinstance(result, Tensor) else []
    if not parts:
        shown = "an empty list" if isinstance(result, Sequence) else f"`{type(result).__name__}`"
        raise ConfigurationError(
            f"`split_batch` returned {shown} for a batch of type `{type(batch).__name__}` and size "
            f"{size}. Return a list of batches, such as `[batch[:2], batch[2:]]`."
        )
    sizes = [samples_of(part) for part in parts]
    num_samples, found = samples_of(batch), sum(size or 0 for size in sizes)
    if None not in sizes and num_samples is not None and found != num_samples:
        raise ConfigurationError(
            f"`split_batch` returned micro-batches with {found} samples in total for a batch of "
            f"{num_samples} samples. Return each sample of the batch in exactly one of them."
        )
    return parts


def samples_of(batch: Any, whole: frozenset[Path] = frozenset()) -> int | None:
    """Count the samples of a batch; ``None`` if only the user's `split_batch` can split it."""
    try:
        return count_samples(batch, whole)
    except IncompatibleError:
        return None


_ADVICE = (
    'Use `activation_checkpointing="all"`, `optimizer="8bit"`, `precision="bf16-mixed"`, '
    "shorter samples or a smaller model."
)
NO_LIMIT = 2**31 - 1
"""Next size of a process that did not run out of memory."""


class Splitting(Enum):
    """What is known of the weights by which batches are split."""

    GIVEN = auto()  # nothing but what the user has given
    WHOLE = auto()  # batches are not split when memory runs out
    UNPROVEN = auto()  # batches pass whole until a proof finds weightings
    PROVEN = auto()


_SPLITTING = {
    Splitting.GIVEN: (Splitting.GIVEN, Splitting.WHOLE, Splitting.UNPROVEN, Splitting.PROVEN),
    Splitting.WHOLE: (),
    Splitting.UNPROVEN: (Splitting.UNPROVEN, Splitting.PROVEN),
    # Another dataloader's are not known yet, or a further batch has left none.
    Splitting.PROVEN: (Splitting.PROVEN, Splitting.UNPROVEN, Splitting.GIVEN),
}


class PassPart(Protocol):
    """Runs forward and backward of one micro-batch."""

    def __call__(self, part: Any, weight: float, num_samples: int | None, is_last: bool) -> None:
        """Run one micro-batch."""


class MicroBatchRunner:
    """Splits batches, repeats them after out-of-memory errors, remembers the size that fits."""

    def __init__(
        self,
        size: Any,
        loss_weight: LossWeight,
        split_batch: SplitBatch | None,
        agree: Callable[[int], int] = lambda size: size,
    ) -> None:
        self.is_auto = size == "halve"
        """Whether the size shrinks when memory runs out."""
        self.size: int | None = None if self.is_auto else size
        """Samples per micro-batch; ``None`` for the whole batch."""
        self.splitting = self._without_proof = Splitting.GIVEN
        self.retries: list[str] = []
        """One line for each out-of-memory error."""
        self.weightings: Sequence[Weighting] = ()
        """Possible weightings of losses; the first one is used if they differ."""
        self.whole: frozenset[Path] = frozenset()
        """Leaves of batches that are shared by all micro-batches."""
        self.parts: frozenset[Path] | None = None
        """Where the batches that this is known of have tensors."""
        self._of_others: dict[frozenset[Path], tuple[Sequence[Weighting], frozenset[Path]]] = {}
        self.prove: Callable[[Any], object] | None = None
        """Called with a batch that will be split, as long as there are no weightings."""
        self.tell_apart: Callable[[Any, bool], bool] | None = None
        """Called with a batch and whether the weightings give its micro-batches different weights;
        returns whether the batch may be split."""
        self.relieve: Callable[[int], bool] | None = None
        """Called after each out-of-memory error of a batch, with their number so far; returns
        whether to repeat the batch as it is, instead of with smaller micro-batches."""
        self.asks_together = False
        """Whether `tell_apart` is a collective call of all processes."""
        self.advice = _ADVICE
        """Remedy if a single sample does not fit."""
        self.failure = ""
        """Why batches cannot be repeated: saving or restoring the module's state has failed."""
        self._loss_weight, self._split_batch, self._agree = loss_weight, split_batch, agree

    def _become(self, splitting: Splitting) -> None:
        self.splitting = next_state(self.splitting, splitting, _SPLITTING)

    def keep_whole(self) -> None:
        """Repeat batches that run out of memory as they are."""
        self._become(Splitting.WHOLE)

    def require_proof(self) -> None:
        """Split no batch as long as there are no weightings."""
        self._without_proof = Splitting.UNPROVEN
        self._become(Splitting.UNPROVEN)

    def use(self, weightings: Sequence[Weighting], whole: frozenset[Path]) -> None:
        """Split by what a proof has found, if it has."""
        self._become(Splitting.PROVEN if weightings else self._without_proof)
        self.weightings, self.whole = weightings, whole

    def meet(self, batch: Any) -> bool:
        """Use the proof for batches with the same parts; returns whether the parts are new.

        A part of a batch may be missing, or come later: the loss is another one then.
        """
        parts = parts_of(batch)
        if self.parts == parts or self.splitting not in (Splitting.UNPROVEN, Splitting.PROVEN):
            return False
        if self.parts is not None:
            self._of_others[self.parts] = self.weightings, self.whole
            self.use(*self._of_others.get(parts, ((), frozenset())))
        is_other, self.parts = self.parts is not None, parts
        return is_other

    def split(self, batch: Any) -> tuple[list[Any], list[float], list[int | None]]:
        if self.size is not None and self.prove is not None and not self.weightings:
            self.prove(batch)
        if self.size is None or self.splitting is Splitting.UNPROVEN:
            return [batch], [1.0], [None]
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

    def weightings_for(self, batch: Any) -> Sequence[Weighting]:
        """Return what losses are weighted by: what is proven, else what was given."""
        if self.weightings or self._loss_weight == "proven":
            return self.weightings
        return weightings_of(self._loss_weight, batch)

    def _shares(self, batch: Any, parts: Sequence[Any]) -> list[float] | None:
        there = parts_of(batch)
        weightings = [w for w in self.weightings_for(batch) if w.path is None or {w.path} <= there]
        asks = self.tell_apart is not None and (self.asks_together or len(parts) > 1)
        if not weightings or (len(parts) == 1 and not asks):
            return None
        rows = read_weights(weightings, parts)
        shares = [shares_of(*pair) for pair in zip(weightings, rows, strict=True)]
        if self.tell_apart is not None and asks:
            if not self.tell_apart(batch, len(parts) > 1 and not _agree_on(shares)):
                return None
            shares = [s for w, s in zip(weightings, shares, strict=True) if w in self.weightings]
        return shares[0]

    def run(
        self,
        batch: Any,
        pass_part: PassPart,
        *,
        save_state: Callable[[], TrainingState | None],
        forget: Callable[[], None],
    ) -> None:
        """Run a batch, with smaller micro-batches if memory runs out."""
        before = _Before(self, save_state if self.is_auto else lambda: None)
        failure: _Failure | None = None
        for num_failures in itertools.count(1):
            with _told(failure):
                failure = self._failure_of(lambda: self._pass(batch, pass_part, before))
            if not self.is_auto:
                return
            next_size = NO_LIMIT
            if failure is not None:
                is_whole = self.splitting is Splitting.WHOLE
                next_size = 0 if is_whole else self.size_of(batch) // 2
            size = self._agree(next_size)
            if size == NO_LIMIT:
                return
            # Outside of the except block, whose traceback would keep tensors of the step alive.
            before.has_failed = True
            with _told(failure):
                forget()
                self.require_repeatable()
            if self.relieve is not None and self.relieve(num_failures):
                continue
            if size == 0:
                self._failure_of(before.prepare)
                phase = "" if failure is None else failure.phase
                raise MemoryExhaustedError(self._report(failure), phase)
            self._shrink(batch, size)

    def _pass(self, batch: Any, pass_part: PassPart, before: "_Before") -> None:
        before.prepare()
        parts, weights, sizes = self.split(batch)
        for index, (part, weight, size) in enumerate(zip(parts, weights, sizes, strict=True)):
            pass_part(part, weight, size, index == len(parts) - 1)

    def require_repeatable(self) -> None:
        """Raise where memory has run out and the state before the batch is lost."""
        if self.failure:
            raise MemoryExhaustedError(
                f"Out of memory, and the batch cannot be repeated: {self.failure}. Use smaller "
                "batches, or a fixed size such as `micro_batch_size=4`."
            )

    def record(self, function: Callable[[], T]) -> T | None:
        """Call what saves or restores state: if it fails, batches are not repeated any more."""
        outside = sys.exception()
        try:
            return function()
        except Exception as error:
            if isinstance(error, MemsaveError) or is_out_of_memory(error, outside):
                raise
            why = textwrap.shorten(f"{type(error).__name__}: {first_line(error)}", 150)
            self.failure = f"the state of the module cannot be saved and restored ({why})"
            return None

    def _failure_of(self, function: Callable[[], None]) -> "_Failure | None":
        outside = sys.exception()
        try:
            function()
        except Exception as error:
            found = find_out_of_memory(error, outside) if self.is_auto else None
            if found is None:
                raise
            return _Failure(first_line(found), phase_in(_frames_of(error, found)))
        return None

    def size_of(self, batch: Any) -> int:
        samples = count_samples(batch, self.whole)
        return samples if self.size is None else min(self.size, samples)

    def _shrink(self, batch: Any, size: int) -> None:
        before, self.size = self.size_of(batch), size
        self.retries.append(f"out of memory with {before} samples at once, repeated with {size}")

    def _report(self, failure: "_Failure | None") -> str:
        why = failure.line if failure else "another process ran out of memory"
        if self.splitting is Splitting.WHOLE:
            return f"Out of memory, and micro-batches would change results: {why}\n{self.advice}"
        if self.splitting is Splitting.UNPROVEN and self.prove is None:  # each attempt was whole
            return (
                "Out of memory, and the batch cannot be split: how its loss is weighted cannot be "
                f"proven as long as the loss of its first samples is 0: {why}\n{self.advice}"
            )
        tried = "".join(f"\n  - {line}" for line in self.retries) or " the batch is one sample."
        return (
            f"Out of memory with one sample per micro-batch, which cannot be reduced: {why}\n"
            f"Tried:{tried}\n{self.advice}"
        )


class _Failure(NamedTuple):
    """First line of an out-of-memory error, and the phase that its traceback shows."""

    line: str
    phase: str


# Frames from here on: further out is the step of the optimizer, whose closure this is.
def _frames_of(*errors: BaseException) -> str:
    return "".join(line for error in errors for line in traceback.format_tb(error.__traceback__))


@contextlib.contextmanager
def _told(failure: _Failure | None) -> Iterator[None]:
    """Add the original error, gone by then, to one that says why a batch is not repeated."""
    try:
        yield
    except MemoryExhaustedError as error:
        if failure is None or error.phase:
            raise
        message = f"{error}\nThe original error: {failure.line}"
        raise MemoryExhaustedError(message, failure.phase) from None


# Saving and restoring need memory too: they are part of an attempt, which may run out of memory.
class _Before:
    def __init__(
        self, runner: MicroBatchRunner, save_state: Callable[[], TrainingState | None]
    ) -> None:
        self.has_failed = False  # an attempt has run out of memory
        self._runner, self._save_state = runner, save_state
        self._state: TrainingState | None = None

    def prepare(self) -> None:
        if self.has_failed:
            free_unused()
        if self._state is not None:
            self._runner.record(self._state.restore)
            self._runner.require_repeatable()
        elif not self._runner.failure:
            self._state = self._runner.record(self._save_state)


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
