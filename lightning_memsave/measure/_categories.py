"""What kind of memory a new storage is, as far as that can be known when it is made."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_memsave.core.host_copies import is_host_copy
from lightning_memsave.measure._autograd import in_backward
from lightning_memsave.measure.storages import LiveStorage, storages_of

HOST = "host"
"""Kept on the host by a technique; counted apart from the categories of `MemoryBreakdown`."""

UNCLAIMED = frozenset({"activation", "temporary", "other", "weight_copy"})
"""What the phase of the step says of a new storage is a guess until something claims it. What is
claimed already keeps its category, for example a parameter that an optimizer also has in
``state``."""


def category_of_new(
    func: Callable[..., Any],
    args: Sequence[Any],
    entries: Mapping[int, LiveStorage],
    *,
    in_step: bool,
) -> str:
    """Say what an operator makes.

    Args:
        func: The operator.
        args: What it was given.
        entries: Known storages.
        in_step: Whether an optimizer steps.

    Returns:
        A category of `MemoryBreakdown`, or `HOST`.
    """
    if is_host_copy():
        return HOST
    if func is torch.ops.aten._to_copy.default:
        sources = [entries.get(storage._cdata) for storage in storages_of(args[0])]
        if any(source is not None and source.category == "parameter" for source in sources):
            return "weight_copy"
    if torch.is_grad_enabled():
        return "activation"
    return "temporary" if in_backward() or in_step else "activation"
