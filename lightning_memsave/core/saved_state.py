"""Save and restore random states and the contents of containers."""

import collections
import random
import sys
from typing import Any

import torch
from torch import nn

# Exact types: subclasses may not be mutable, such as Hugging Face's model outputs.
CONTAINERS = {
    *(list, dict, set, collections.deque),
    *(collections.OrderedDict, collections.defaultdict, collections.Counter),
}
"""Types of containers of which a copy has the contents."""


class RandomState:
    """States of the global random number generators.

    Args:
        devices: CUDA devices in use.
        of_torch_only: Leave out those of Python and NumPy, which take 0.1 ms to read.
    """

    def __init__(self, devices: set[torch.device], of_torch_only: bool = False) -> None:
        self._cpu = torch.get_rng_state()
        self._python = None if of_torch_only else random.getstate()
        numpy = None if of_torch_only else sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state(legacy=False)
        self._cuda = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def restore(self) -> None:
        """Restore them; may be called again."""
        torch.set_rng_state(self._cpu)
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)

    def has_changed(self) -> bool:
        """Return whether random numbers have been drawn since."""
        return (
            self.has_changed_beside_torch()
            or not torch.equal(self._cpu, torch.get_rng_state())
            or any(not torch.equal(s, torch.cuda.get_rng_state(d)) for d, s in self._cuda)
        )

    def has_changed_beside_torch(self) -> bool:
        """Return whether numbers of Python or NumPy have been drawn since."""
        if self._python is not None and random.getstate() != self._python:
            return True
        if self._numpy is None:
            return False
        # Other bit generators than the default have other fields, some of them arrays.
        return repr(self._numpy) != repr(sys.modules["numpy"].random.get_state(legacy=False))


def devices_of(module: nn.Module) -> set[torch.device]:
    """Return the CUDA devices on which a module's steps may draw random numbers.

    Args:
        module: The module. With offloading its weights may all be in host memory, so the current
            device counts too.

    Returns:
        The devices; empty as long as CUDA is not in use.
    """
    devices = {p.device for p in module.parameters() if p.is_cuda}
    if torch.cuda.is_initialized():
        devices.add(torch.device("cuda", torch.cuda.current_device()))
    return devices


def generator_state(value: Any) -> Any:
    """Return the state of a random number generator; ``None`` if the value is not one."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return value.get_state(legacy=False)
    return None


def set_generator(generator: Any, state: Any) -> None:
    """Restore what `generator_state` returned."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def is_same(container: Any, contents: Any) -> bool:
    """Return whether a container has the same objects as a copy of it."""
    if len(container) != len(contents):
        return False
    if isinstance(container, set):
        return bool(container == contents)
    pairs = (
        zip([*container, *container.values()], [*contents, *contents.values()], strict=True)
        if isinstance(container, dict)
        else zip(container, contents, strict=True)
    )
    return all(now is before for now, before in pairs)


# In place: other objects may refer to it.
def refill(container: Any, before: Any) -> None:
    """Give a list, deque, dictionary or set the contents of a copy of it."""
    if isinstance(container, list):
        container[:] = before
        return
    container.clear()
    if isinstance(container, collections.deque):
        container.extend(before)
    else:
        container.update(before)
