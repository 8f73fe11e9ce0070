"""Which modules have weights that wait on the host, for techniques that must know it.

What moves the weights of a module is a `Residence` of ``offloading``.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# By module, so that copies of a module do not move the parameters of the original.
_RESIDENCES: "weakref.WeakKeyDictionary[nn.Module, Any]" = weakref.WeakKeyDictionary()


def set_residence(module: nn.Module, residence: Any) -> Callable[[], None]:
    """Note what moves the parameters of a module; returns a function that forgets it."""
    _RESIDENCES[module] = residence
    reference = weakref.ref(module)

    def forget() -> None:
        own = reference()
        if own is not None:
            _RESIDENCES.pop(own, None)

    return forget


def residence_of(module: nn.Module) -> Any:
    """Return what moves the parameters of a module; ``None`` if they are not offloaded."""
    return _RESIDENCES.get(module)


def residence_with(param: Tensor) -> Any:
    """Return what moves a parameter; ``None`` if it is not offloaded."""
    found = {*_RESIDENCES.values()}
    return next((each for each in found if each.part_of(param) is not None), None)


def leave_device(module: nn.Module) -> None:
    """Let offloaded weights and gradients be on the host, as after a pass that has failed."""
    residence = _RESIDENCES.get(module)
    if residence is not None:
        residence.end_pass()
