"""How much host memory may be used, and how much weights need there."""

import math
from collections.abc import Mapping
from typing import Any

import psutil

from lightning_memsave.units import parse_bytes

SMALLER_FORM = "in a smaller form: "
"""Begins what is said where the host has too little memory for the fastest one."""
_SHARE = 0.5


def host_budget_bytes(budget: int | str | None, *, is_here: bool = True) -> float:
    """Read a budget of host memory."""
    if budget is None:
        return _SHARE * psutil.virtual_memory().available if is_here else math.inf
    if isinstance(budget, str):
        return parse_bytes(budget)
    if isinstance(budget, bool) or not budget > 0:
        raise ValueError
    return int(budget)


def host_bytes_per_parameter(arguments: Mapping[str, Any]) -> int:
    """Reckon what a trained weight needs on the host, with its gradient and AdamW's state."""
    low = arguments.get("low_precision_weights")
    weight = 6 if getattr(low, "rounding", low) == "master" else 4
    optimizer = arguments.get("optimizer")
    state = 2 if "8bit" in str(getattr(optimizer, "optimizer", optimizer)) else 8
    gradient = 0 if arguments.get("optimizer_in_backward") else 4
    return weight + state + gradient
