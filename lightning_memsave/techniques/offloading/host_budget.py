"""How much host memory may be used, and how much weights need there."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import psutil
from torch import nn

from lightning_memsave.errors import Problem
from lightning_memsave.techniques.host_weight import is_asking
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
    state = _state_bytes_of(arguments, unknown=8)
    gradient = 0 if arguments.get("optimizer_in_backward") else 4
    return weight + state + gradient


class HostForm(NamedTuple):
    """Bytes of an element that other settings need on the host, or spare."""

    copy: int = 0  # in 16 bits, which tables do not have
    split: int = 0  # weights in no block, whole beside their halves before there is any state
    moved_state: int = 0  # twice while that of a weight moves to memory locked for a GPU
    whole_state: int = 0  # that of embeddings, beyond 8 bits
    in_backward: int = 0  # a gradient that waits there for its update


def form_on_host(arguments: Mapping[str, Any]) -> HostForm:
    low, kind = arguments["low_precision_weights"], _kind_of(arguments)
    rounding = getattr(low, "rounding", low)
    is_whole = kind == "8bit" and "*" not in getattr(arguments["optimizer"], "force_8bit", ())
    return HostForm(
        copy=2 * (rounding == "master"),
        split=4 * (rounding == "split"),
        moved_state=_state_bytes_of(arguments, unknown=0),
        whole_state=6 * is_whole,
        in_backward=(4 if low is None else 2) * bool(arguments["optimizer_in_backward"]),
    )


def bytes_of_form(
    form: HostForm,
    model: nn.Module,
    parts: Sequence[Sequence[nn.Parameter]],
    tables: Sequence[nn.Parameter],
) -> int:
    """Reckon what weights need in this form, beyond what all of their elements do.

    Gradients of a part come to the host together; those of tables are made there, in float32: by
    look-ups one at a time, and by a head in memory of its own. State moves in the first update,
    when a resumed fit has all of it. Left out are 64 MiB through which gradients come, and tiles.
    """
    looked_up = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    asking = {module.weight for module in model.modules() if is_asking(module)}
    heads = {table for table in tables if table in asking}
    made = looked_up.intersection(tables if form.in_backward else heads)
    held = 2 * form.in_backward * max(map(num_elements, parts), default=0)
    held += 4 * bool(form.in_backward) * num_elements(heads) - form.copy * num_elements(tables)
    for_a_while = 0
    for weight in [*(param for part in parts for param in part), *tables]:
        whole_state, gradient = form.whole_state * (weight in looked_up), 4 * (weight in made)
        state = form.moved_state + whole_state
        # What is added to the gradient of a head is gone when its update begins.
        most = max(gradient, state) if weight in heads else gradient + state
        held += whole_state * weight.numel()
        for_a_while = max(for_a_while, most * weight.numel())
    return held + for_a_while


def num_elements(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)


# What the device updates in tiles, by what is in the name of the optimizer. Of Muon, what matrices
# need less than two moments is more than what moves.
_STATE_BYTES = {"8bit": 2, "bf16_state": 4, ":": 8}


def _state_bytes_of(arguments: Mapping[str, Any], *, unknown: int) -> int:
    found: int | None = getattr(arguments.get("optimizer"), "state_bytes", None)
    return _STATE_BYTES.get(_kind_of(arguments), unknown) if found is None else found


def _kind_of(arguments: Mapping[str, Any]) -> str:
    optimizer = arguments.get("optimizer")
    name = str(getattr(optimizer, "optimizer", optimizer))
    return next((kind for kind in _STATE_BYTES if kind in name), "")
