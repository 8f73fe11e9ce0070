"""Split batches, with the user's function where there is one."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from lightning_memsave.core.batches import Path, count_samples, split_samples
from lightning_memsave.errors import ConfigurationError, IncompatibleError

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
    given = own(batch, size)
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
