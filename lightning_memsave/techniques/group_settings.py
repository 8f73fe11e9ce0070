"""What a step writes into the groups of an optimizer, where parameters are updated one by one.

Some optimizers count their steps there. Each parameter, or some of them together, is updated with a
copy of its group, and the group itself changes when all are: as in a step of all.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only

from lightning_memsave.errors import IncompatibleError, Problem

_WRITTEN = "_memsave_written"
"""Attribute with what steps have written by the position of the group, and what was there before;
doubles share it."""


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy all of a group but its parameters, so that what a step writes stays in the copy."""
    found: dict[str, Any] = tree_map_only(
        Tensor, Tensor.clone, {k: v for k, v in group.items() if k != "params"}
    )
    return found


def note_written(optimizer: Optimizer, group: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Note what a step for some parameters of a group has changed in a copy of its settings.

    It is an error if a step for others has made something else of them.
    """
    changed = {k: v for k, v in settings_of(after).items() if not are_same(v, group.get(k))}
    position = next(i for i, own in enumerate(optimizer.param_groups) if own is group)
    written: dict[int, Any] = vars(optimizer).setdefault(_WRITTEN, {})
    began, before = written.get(position, ({}, changed))
    if not are_same(began, {k: group.get(k) for k in began}):  # of a step that was interrupted
        before = changed
    written[position] = {k: group.get(k) for k in before}, before
    keys = [k for k in before | changed if not are_same(before.get(k), changed.get(k))]
    if keys:
        what = f"`{type(optimizer).__name__}` with `{keys[0]}` in its groups"
        why = "it depends on all parameters of a step, which are updated one by one"
        fix = "Use an optimizer such as AdamW, or set `optimizer_in_backward=None` and "
        fix += "`low_precision_weights=None`."
        raise IncompatibleError("optimizer", [Problem(what, why, fix)])


def share_written(optimizer: Optimizer) -> None:
    """Let doubles of an optimizer that are made from now on note in it what they write."""
    vars(optimizer).setdefault(_WRITTEN, {})


def apply_written(optimizer: Optimizer) -> None:
    """Let the groups have what a step has written, once all parameters are updated."""
    written: Mapping[int, Any] = vars(optimizer).pop(_WRITTEN, {})
    for position, (_, changed) in written.items():
        if position < len(optimizer.param_groups):
            optimizer.param_groups[position].update(changed)


def are_same(some: Any, others: Any) -> bool:
    """Return whether nested values are equal, tensors bit for bit."""
    (some_leaves, some_spec), (other_leaves, other_spec) = tree_flatten(some), tree_flatten(others)
    return some_spec == other_spec and all(map(_is_same, some_leaves, other_leaves))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_alike = (one.shape, one.dtype) == (other.shape, other.dtype)
        return is_alike and bool((one.eq(other) | (one.ne(one) & other.ne(other))).all())
    return type(one) is type(other) and bool(one == other)
