"""Numbers of labels that were read from the device once, for all who need them in Python.

Micro-batches are weighted by their labels: the counts of all of them are read at once, before the
first. The loss of each would otherwise wait for the same number again.
"""

from torch import Tensor

_COUNTS = "_memsave_label_counts"


def note_count(labels: Tensor, ignored: int, count: int) -> None:
    """Remember how many entries are not ignored, until the labels are changed or freed."""
    if _is_countable(labels):
        storage = labels.untyped_storage()
        counts = getattr(storage, _COUNTS, {})
        counts[_place(labels, ignored)] = labels._version, count
        setattr(storage, _COUNTS, counts)


def known_count(labels: Tensor, ignored: int) -> int | None:
    """Return how many entries are not ignored, if it was noted for a view of the same entries."""
    if not _is_countable(labels):
        return None
    counts = getattr(labels.untyped_storage(), _COUNTS, {})
    version, count = counts.get(_place(labels, ignored), (None, None))
    return count if version == labels._version else None


# Values of fake tensors may be guesses, and a view with gaps may leave out other entries.
def _is_countable(labels: Tensor) -> bool:
    return type(labels) is Tensor and not labels.is_inference() and labels.is_contiguous()


def _place(labels: Tensor, ignored: int) -> tuple[object, ...]:
    return labels.storage_offset(), labels.numel(), labels.dtype, ignored
