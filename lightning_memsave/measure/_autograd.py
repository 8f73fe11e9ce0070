"""What autograd's engine does, as far as it decides what is alive."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.measure.storages import LiveStorage

_NO_GRAPH_TASK = -1
NO_NODE = -1
# The tensor itself, and the storage object that was made to ask.
_SOLE_OWNER = 2


def in_backward() -> bool:
    """Say whether autograd's engine runs.

    Returns:
        True in backward, recomputation included.
    """
    return torch._C._current_graph_task_id() != _NO_GRAPH_TASK


def current_node() -> int:
    """Tell apart the nodes of the graph that run one after the other in backward.

    Returns:
        The number of the node that runs or ran last; `NO_NODE` outside of backward.
    """
    if not in_backward():
        return NO_NODE
    node: Any = torch._C._current_autograd_node()
    number: int = NO_NODE if node is None else node._sequence_nr()
    return number


def summed_in_place(
    entries: Mapping[int, LiveStorage], total: Tensor, gradient: object
) -> LiveStorage | None:
    """Find the storage in which autograd adds up two gradients.

    It adds in the memory of the first where it holds the last reference to it (``accumulate`` in
    torch's ``input_buffer.cpp``), but never while a dispatch mode looks on.

    Args:
        entries: Known storages.
        total: What there is of the gradient already.
        gradient: What is added to it.

    Returns:
        The storage that would hold the sum without the mode; ``None`` if that would be a new one.
    """
    if not isinstance(gradient, Tensor) or torch.is_grad_enabled():
        return None
    is_alike = total.shape == gradient.shape and total.dtype == gradient.dtype
    key = total.untyped_storage()._cdata
    if not is_alike or not total.is_contiguous() or torch._C._storage_Use_Count(key) > _SOLE_OWNER:
        return None
    entry = entries.get(key)
    # What this node made itself is added in its own formula, which takes new memory.
    if entry is None or entry.category != "temporary" or entry.node == current_node():
        return None
    return entry
