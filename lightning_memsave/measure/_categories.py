"""What kind of memory a new storage is, as far as that can be known when it is made."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_memsave.core.host_copies import is_host_copy

HOST = "host"
"""Kept on the host by a technique; counted apart from the categories of `MemoryBreakdown`."""

UNCLAIMED = frozenset({"activation", "temporary", "other", "weight_copy"})
"""What the phase of the step says of a new storage is a guess until something claims it. What is
claimed already keeps its category, for example a parameter that an optimizer also has in
``state``."""

_NO_GRAPH_TASK = -1


def in_backward() -> bool:
    """Say whether autograd's engine runs.

    Returns:
        True in backward, recomputation included.
    """
    return torch._C._current_graph_task_id() != _NO_GRAPH_TASK


def category_of_new(
    func: Callable[..., Any], is_parameter: Callable[[], bool], *, in_step: bool
) -> str:
    """Say what an operator makes.

    Args:
        func: The operator.
        is_parameter: Tells whether its first argument is a parameter; asked where that matters.
        in_step: Whether an optimizer steps.

    Returns:
        A category of `MemoryBreakdown`, or `HOST`.
    """
    if is_host_copy():
        return HOST
    if func is torch.ops.aten._to_copy.default and is_parameter():
        return "weight_copy"
    if torch.is_grad_enabled():
        return "activation"
    return "temporary" if in_backward() or in_step else "activation"
