"""One value from those of all ranks."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torchmetrics import MaxMetric, SumMetric

_METRICS = {"max": MaxMetric, "sum": SumMetric}


def over_ranks(
    trainer: Any, how: Literal["max", "sum"], values: Mapping[str, float | None]
) -> dict[str, float]:
    """Reduce values over the ranks of a Trainer; with one rank there is nothing to do.

    Args:
        trainer: The Trainer. All of its ranks must get here, with the same keys.
        how: What to take.
        values: Values by name; what is ``None`` is left out.

    Returns:
        The reduced values.
    """
    known = {key: value for key, value in values.items() if value is not None}
    if trainer.world_size == 1:
        return known
    result = {}
    for key, value in known.items():
        metric = _METRICS[how]().to(trainer.strategy.root_device)
        metric.set_dtype(torch.float64)  # float32 is exact to 16 MiB only; `to` would undo it
        metric.update(value)
        result[key] = float(metric.compute())
    return result
