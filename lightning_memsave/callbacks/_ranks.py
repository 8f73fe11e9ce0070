"""One value from those of all ranks."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist

_OPERATORS = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM} if dist.is_available() else {}
_UNKNOWN = -1.0


def reduce_over_ranks(
    trainer: Any, how: Literal["max", "sum"], values: Mapping[str, float | None]
) -> dict[str, float]:
    """Reduce values over the ranks of a Trainer, all of them in one exchange.

    Args:
        trainer: The Trainer. All of its ranks must get here, with the same keys.
        how: What to take.
        values: Values by name, none of them negative. ``None`` is unknown: a rank may lack what
            others know, as NVML in a container.

    Returns:
        The reduced values, without those that are unknown on all ranks ("max") or on one ("sum").
    """
    if trainer.world_size > 1 and values:
        unknown = _UNKNOWN if how == "max" else float("nan")
        known = [unknown if value is None else float(value) for value in values.values()]
        # float32 is exact to 16 MiB only.
        tensor = torch.tensor(known, dtype=torch.float64, device=trainer.strategy.root_device)
        dist.all_reduce(tensor, _OPERATORS[how])
        values = dict(zip(values, tensor.tolist(), strict=True))
    return {key: value for key, value in values.items() if value is not None and value >= 0}
