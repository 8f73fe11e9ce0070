"""Combine the values that a module logs for micro-batches to those of the whole batch."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.core.out_of_memory import with_memory_freed
from lightning_memsave.trainer.nested_fit import silent_logger
from lightning_memsave.trainer.trainer import package_of


@dataclass(frozen=True, slots=True)
class _Value:
    weight: float
    num_samples: int | None
    value: Any
    batch_size: int
    batch_value: Any  # value of a metric for this micro-batch alone


class LoggedValues:
    """Buffers logged values, and logs them once for the whole batch.

    Nothing reaches Lightning before ``flush``, so that a batch can be repeated.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._results = trainer, trainer._results
        self._is_shared = trainer.world_size > 1
        self._values: dict[tuple[str, int], list[_Value]] = {}
        self._weight = 1.0
        self._num_samples: int | None = None
        self._occurrences: dict[str, int] = {}

    def __enter__(self) -> "LoggedValues":
        if self._results is not None:
            self._results.update_metrics = self._hold
        return self

    def __exit__(self, *exc: object) -> None:
        if self._results is not None:
            vars(self._results).pop("update_metrics", None)

    def start_part(self, weight: float, num_samples: int | None) -> None:
        self._weight, self._num_samples = weight, num_samples
        self._occurrences = {}

    def clear(self) -> None:
        self._values = {}

    @contextlib.contextmanager
    def forgotten(self) -> Iterator[None]:
        names = set(self._results or ())
        loggers = self._trainer.loggers
        if loggers:
            self._trainer.loggers = [silent_logger(package_of(self._trainer))]
        try:
            yield
        finally:
            self._trainer.loggers = loggers
            self.clear()
            for name in set(self._results or ()) - names:
                # Metrics refer to themselves: their values would stay until garbage is collected.
                vars(self._results.pop(name)).clear()

    def tensors(self) -> dict[str, tuple[Any, Tensor]]:
        """Return the logged tensors of one micro-batch: Lightning's metadata and value by name."""
        metrics = {key: self._results[key] for key, _ in self._values}
        return {
            key: (metrics[key].meta, parts[-1].value)
            for (key, _), parts in self._values.items()
            if metrics[key].is_tensor
        }

    def flush(self) -> None:
        """Log one value per name; values of a single micro-batch are passed on unchanged."""
        values, self._values = self._values, {}
        for (key, _), parts in values.items():
            log = functools.partial(self._log, key, parts)
            # May run collectives: a single process must not retry.
            log() if self._is_shared else with_memory_freed(log)

    def _log(self, key: str, parts: Sequence[_Value]) -> None:
        metric = self._results[key]
        before = dict(vars(metric))  # Lightning replaces its values, never in place
        try:
            self._update(metric, key, parts)
        except BaseException:
            vars(metric).update(before)
            raise

    def _update(self, metric: Any, key: str, parts: Sequence[_Value]) -> None:
        log = functools.partial(type(self._results).update_metrics, self._results, key)
        size = _batch_size(parts)
        if not metric.is_tensor:
            log(parts[-1].value, size)
            if len(parts) > 1:
                values = [p.batch_value for p in parts]
                metric._forward_cache = _mean(values, [p.weight for p in parts])
        elif len(parts) == 1:
            log(parts[0].value, size)
        else:
            log(combined(metric.meta, [p.value for p in parts], [p.weight for p in parts]), size)

    def _hold(self, key: str, value: Any, batch_size: int) -> None:
        occurrence = self._occurrences.get(key, 0)
        self._occurrences[key] = occurrence + 1
        held = _Value(
            self._weight,
            self._num_samples,
            value.detach() if isinstance(value, Tensor) else value,
            batch_size,
            getattr(value, "_forward_cache", None),
        )
        self._values.setdefault((key, occurrence), []).append(held)


# Without `batch_size=`, Lightning passes the size of the whole batch each time; a user passes that
# of the micro-batch.
def _batch_size(parts: Sequence[_Value]) -> int:
    sizes = [part.batch_size for part in parts]
    if len(parts) > 1 and sizes == [part.num_samples for part in parts]:
        return sum(sizes)
    return max(sizes)


def combined(meta: Any, values: Sequence[Any], weights: Sequence[float]) -> Any:
    if meta.is_mean_reduction:
        return _mean(values, weights)
    stacked = torch.stack([value.to(values[0].device) for value in values])
    if meta.is_sum_reduction:
        return stacked.sum(0)
    return stacked.amax(0) if meta.is_max_reduction else stacked.amin(0)


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    are_numbers = all(isinstance(value, Tensor) and value.shape == () for value in values)
    if not are_numbers:
        return values[-1]  # not a scalar: the value of the last micro-batch
    stacked = torch.stack([value.to(values[0].device) for value in values])
    stacked = stacked if stacked.is_floating_point() else stacked.float()
    factors = stacked.new_tensor(weights)
    return (stacked * factors).sum() / factors.sum()
