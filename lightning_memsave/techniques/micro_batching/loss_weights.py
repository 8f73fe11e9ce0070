"""Weights of micro-batches in the loss of their batch."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_memsave.core.label_counts import note_count
from lightning_memsave.core.nested import Path, count_samples, leaf_at, leaves_of, path_text
from lightning_memsave.errors import ConfigurationError

LossWeight: TypeAlias = (
    Literal["proven", "samples", "tokens", "tokens_shifted"] | Callable[[Any], float | Tensor]
)
NAMES = ("proven", "samples", "tokens", "tokens_shifted")

IGNORED = -100
"""The label that torch's and Hugging Face's losses ignore."""
_USUALLY_IGNORED = (IGNORED, 0, -1)


@dataclass(frozen=True)
class Weighting:
    """The elements that the loss of a batch is a mean over, or that it is a sum."""

    text: str
    """Description that completes "losses are"."""
    weigh: Callable[[Any], Any] | None = field(compare=False)
    """Computes the weight of a micro-batch's loss; ``None`` for a sum."""
    is_own: bool = False
    """Whether it is the user's function."""
    labels: tuple[Path, int] | None = None
    """The leaf whose entries it counts, and the value that it leaves out; ``None`` for others."""
    path: Path | None = None
    """The leaf that it reads, without which there is no weight."""


def weightings_of(
    loss_weight: LossWeight,
    part: Any,
    whole: frozenset[Path] = frozenset(),
    ignored: Iterable[int] = (),
    class_weights: Sequence[Tensor] = (),
) -> list[Weighting]:
    if callable(loss_weight):
        return [Weighting("weighted by `loss_weight`", loss_weight, is_own=True)]
    samples = Weighting("weighted by samples", lambda part: count_samples(part, whole))
    if loss_weight == "samples":
        return [samples]
    leaves = [
        (path, value)
        for path, value in leaves_of(part)
        if isinstance(value, Tensor) and value.ndim and path not in whole
    ]
    if loss_weight != "proven":
        labels = [path for path, _ in leaves if path[-1:] == ("labels",)]
        if not labels:
            raise ConfigurationError(
                f"`loss_weight={loss_weight!r}` counts the labels that are not {IGNORED}, but the "
                "batch has no tensor named `labels`. Use `loss_weight=lambda part: ...` to count "
                'them, or `loss_weight="samples"`.'
            )
        return [_entries(labels[0], IGNORED, 1 if loss_weight == "tokens_shifted" else 0)]
    found = [samples]
    for path, leaf in leaves:
        for start in range(1 if leaf.ndim == 1 else 2):
            found += _of_leaf(path, leaf, start, (*_USUALLY_IGNORED, *ignored), class_weights)
    return [*found, Weighting("summed, as the loss is a sum over samples", None)]


def read_weights(weightings: Sequence[Weighting], parts: Sequence[Any]) -> list[list[float]]:
    """Compute the weights of micro-batches, with one device synchronization."""
    values = [[1.0 if w.weigh is None else w.weigh(part) for part in parts] for w in weightings]
    for weighting, row in zip(weightings, values, strict=True):
        if weighting.is_own:
            for value in row:
                _check_is_number(value)
    flat = _read([value for row in values for value in row])
    rows = [flat[i : i + len(parts)] for i in range(0, len(flat), len(parts))]
    for weighting, row in zip(weightings, rows, strict=True):
        is_usable = all(math.isfinite(w) and w >= 0 for w in row) and sum(row) > 0
        if weighting.is_own and not is_usable:
            raise ConfigurationError(
                f"`loss_weight` returned the weights {', '.join(f'{w:g}' for w in row)} for the "
                "micro-batches of a batch. Return weights that are finite, not negative, and not "
                "all zero."
            )
        if weighting.labels is not None:
            path, ignored = weighting.labels
            for part, count in zip(parts, row, strict=True):
                note_count(leaf_at(part, path), ignored, int(count))
    return rows


def shares_of(weighting: Weighting, weights: Sequence[float]) -> list[float] | None:
    if weighting.weigh is None:
        return list(weights)
    total = sum(weights)
    if not (math.isfinite(total) and total > 0 and min(weights) >= 0):
        return None
    return [weight / total for weight in weights]


def _of_leaf(
    path: Path, leaf: Tensor, start: int, ignored: Iterable[int], class_weights: Sequence[Tensor]
) -> Iterator[Weighting]:
    name = path_text(path)
    rest = ", without the first of each sample" if start else ""
    if leaf.dtype == torch.bool or leaf.is_floating_point() or (leaf.ndim == 1 and not start):
        yield _count(path, start, lambda leaf: leaf, f"the sum of {name}{rest}")
    if leaf.is_floating_point():
        yield _count(path, start, _is_known, f"the entries of {name} that are not NaN{rest}")
        if leaf.ndim > 2:
            text = f"the vectors of {name} that are not 0{rest}"
            yield _count(path, start, lambda leaf: (leaf != 0).any(-1), text)
    if leaf.dtype == torch.bool:
        yield _count(path, start, operator.inv, f"the entries of {name} that are False{rest}")
    elif not (leaf.is_floating_point() or leaf.is_complex()):
        low = 0 if leaf.dtype == torch.uint8 else -torch.inf
        kept = [value for value in dict.fromkeys(ignored) if value >= low]
        for value in kept:
            yield _entries(path, value, start)
            for weights in class_weights:
                text = f"the class weights at {name}{rest}, where it is not {value}"
                yield _class_weights(path, start, value, weights, text)


def _is_known(leaf: Tensor) -> Tensor:
    return ~leaf.isnan()


def _entries(path: Path, ignored: int, start: int) -> Weighting:
    rest = ", without the first of each sample" if start else ""
    text = f"the entries of {path_text(path)} that are not {ignored}{rest}"
    weighting = _count(path, start, lambda leaf: leaf != ignored, text)
    return weighting if start else replace(weighting, labels=(path, ignored))


def _class_weights(path: Path, start: int, ignored: int, weights: Tensor, text: str) -> Weighting:
    def at(leaf: Tensor) -> Tensor:
        return weights[leaf.long().clamp(0, len(weights) - 1)] * (leaf != ignored)

    return _count(path, start, at, text)


def _count(path: Path, start: int, entries: Callable[[Tensor], Tensor], text: str) -> Weighting:
    def weigh(part: Any) -> Tensor:
        leaf = leaf_at(part, path)
        return entries(leaf[:, start:] if start else leaf).sum()

    return Weighting(f"weighted by {text}", weigh, path=path)


def _check_is_number(value: Any) -> None:
    is_number = isinstance(value, int | float) or hasattr(value, "__float__")
    if is_number and (not isinstance(value, Tensor) or value.numel() == 1):
        return
    raise ConfigurationError(
        f"`loss_weight` returned {value!r} of type `{type(value).__name__}` for a micro-batch, "
        "which is not a weight. Return a number, such as the number of tokens that its loss is the "
        "mean over."
    )


def _read(values: Sequence[Any]) -> list[float]:
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return [float(value) for value in values]
    device = max((tensor.device for tensor in tensors), key=lambda device: device.type != "cpu")
    # MPS and other devices do not support float64.
    dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    scalars = [torch.as_tensor(value).detach().to(device, dtype).reshape(()) for value in values]
    result: list[float] = torch.stack(scalars).tolist()
    return result
