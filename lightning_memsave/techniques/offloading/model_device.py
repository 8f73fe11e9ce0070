"""``model.device`` of models that read it from their parameters, as those of Hugging Face do."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_memsave.techniques.residences import residence_of

_PLAIN: dict[type, Any] = {}  # properties by class, while a module of it is offloaded
_NUM_MODULES: Counter[type] = Counter()


def tell_device(model: nn.Module) -> list[Callable[[], None]]:
    """Let ``device`` be where the model computes, not where its parameters wait.

    ``generate`` and users bring tokens there.
    """
    undo: list[Callable[[], None]] = []
    for module in model.modules():
        classes = type(module).__mro__
        owner = next((c for c in classes if isinstance(vars(c).get("device"), property)), None)
        if owner is None or hasattr(module, "_device"):  # Lightning notes it by itself
            continue
        _NUM_MODULES[owner] += 1
        if owner not in _PLAIN:
            _PLAIN[owner] = vars(owner)["device"]
            owner.device = property(_device)  # type: ignore[attr-defined]
        undo.append(functools.partial(_forget, owner))
    return undo


def _forget(owner: type) -> None:
    _NUM_MODULES[owner] -= 1
    if not _NUM_MODULES[owner]:
        owner.device = _PLAIN.pop(owner)  # type: ignore[attr-defined]


def _device(self: nn.Module) -> torch.device:
    residence = residence_of(self)
    if residence is not None and not hasattr(self, "_device"):
        return torch.device(residence.device)
    plain = next(_PLAIN[cls] for cls in type(self).__mro__ if cls in _PLAIN)
    device: torch.device = plain.fget(self)
    return device
