"""Which modules have weights that wait on the host, for techniques that must know it.

What moves the weights of a module is a `Residence` of ``offloading``.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from lightning_memsave.core.patching import own, set_own

_RESIDENCE = "_memsave_residence"


def set_residence(
    modules: Iterable[nn.Module], params: Iterable[Tensor], residence: Any
) -> list[Callable[[], None]]:
    """Note what moves parameters, of which it holds those, but not the modules."""
    to_residence = weakref.ref(residence)  # a cycle with the parameters would delay their end
    return [
        *(set_own(module, _RESIDENCE, residence) for module in modules),
        *(set_own(param, _RESIDENCE, to_residence) for param in params),
    ]


def residence_of(module: nn.Module) -> Any:
    """Return what moves the parameters of a module; ``None`` if they are not offloaded."""
    return own(module, _RESIDENCE)


def residence_with(param: Tensor) -> Any:
    """Return what moves a parameter; ``None`` if it is not offloaded."""
    to_residence = own(param, _RESIDENCE)
    return None if to_residence is None else to_residence()


def residence_among(params: Iterable[Tensor]) -> Any:
    """Return what moves the first parameter that is offloaded; ``None`` if there is none."""
    return next(filter(None, map(residence_with, params)), None)


def leave_device(module: nn.Module) -> None:
    """Let offloaded weights and gradients be on the host, as after a pass that has failed."""
    residence = residence_of(module)
    if residence is not None:
        residence.end_pass()
