"""How much host memory may be used, and how much weights need there."""

import math
from collections.abc import Mapping
from typing import Any

import psutil

from lightning_memsave.errors import Problem
from lightning_memsave.units import format_bytes, parse_bytes

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


def budget_problems(needed: int, limit: float, budget: int | str | None) -> list[Problem]:
    if needed <= limit:
        return []
    why = f"`host_budget` is {format_bytes(int(limit))}"
    why += ", half of what is free" if budget is None else ""
    fix = f"Free host memory, or pass `host_budget={needed}` if there is enough."
    return [Problem(f"{format_bytes(needed)} of host memory", why, fix)]


def host_bytes_per_parameter(arguments: Mapping[str, Any]) -> int:
    """Reckon what a trained weight needs on the host, with its gradient and AdamW's state."""
    low = arguments.get("low_precision_weights")
    weight = 6 if getattr(low, "rounding", low) == "master" else 4
    state = 2 if _is_8bit(arguments) else 8
    gradient = 0 if arguments.get("optimizer_in_backward") else 4
    return weight + state + gradient


def host_bytes_for_a_while(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Reckon what weights need beyond that: one gradient, and all of embeddings.

    Gradients in backward wait, and 8-bit state of a weight is there twice while it is moved.
    Embeddings keep whole state beside 8-bit state, and updates of it make float32 copies of their
    weights and gradients.
    """
    is_half, is_8bit = arguments["low_precision_weights"] is not None, _is_8bit(arguments)
    gradient = (2 if is_half else 4) * bool(arguments["optimizer_in_backward"])
    is_whole = is_8bit and "*" not in getattr(arguments["optimizer"], "force_8bit", ())
    return {
        "bytes_per_gradient": gradient + is_8bit,
        "bytes_per_embedding": (6 + 8) * is_whole,
    }


def _is_8bit(arguments: Mapping[str, Any]) -> bool:
    optimizer = arguments.get("optimizer")
    return "8bit" in str(getattr(optimizer, "optimizer", optimizer))
