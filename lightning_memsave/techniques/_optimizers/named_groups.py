"""Settings of another optimizer, written into the groups of the one that it replaces."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_memsave.techniques._optimizers.kinds import KIND_BY_TYPE, Kind

Restore = Callable[[torch.optim.Optimizer], None]


def set_groups(
    target: torch.optim.Optimizer, kind: Kind, kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], Restore]:
    """Write into the groups what the named optimizer needs.

    Args:
        target: The optimizer whose groups are taken over.
        kind: The named optimizer.
        kwargs: The user's settings for it, for groups without a value of their own.

    Returns:
        The new optimizer's ``defaults``, and a function that restores the groups, to be called
        with the new optimizer.
    """
    old_kind = KIND_BY_TYPE.get(type(target))
    old = dict(target.defaults)
    if old_kind is None or old_kind.family != kind.family:
        # Another optimizer means something else by `betas` and `eps`.
        old = {key: value for key, value in old.items() if key == "weight_decay"}
    defaults = {key: old.get(key, value) for key, value in kind.defaults.items()} | dict(kwargs)
    if defaults.get("momentum") == 0:
        defaults["momentum"] = kind.defaults["momentum"]  # there is no 8-bit SGD without it

    before = [(group, dict(group)) for group in target.param_groups]
    for group in target.param_groups:
        own = {k for k in kind.defaults if k in old and group.get(k, old[k]) not in (old[k], 0.0)}
        if group.get("weight_decay", old.get("weight_decay")) != old.get("weight_decay"):
            own.add("weight_decay")
        group.update({key: value for key, value in defaults.items() if key not in own})
        if kind.family == "adam":
            group["decoupled_weight_decay"] = kind.word == "adamw"
    written = {*kind.defaults, "decoupled_weight_decay"}

    def restore(new: torch.optim.Optimizer) -> None:
        # The new optimizer may still be saved after this: it keeps what it has trained with.
        new.param_groups = [dict(group) for group in new.param_groups]
        for group, was in before:
            for key in written & group.keys():
                if key in was:
                    group[key] = was[key]
                else:
                    del group[key]

    lr = target.defaults.get("lr", target.param_groups[0]["lr"])
    return {**defaults, "lr": lr}, restore
