"""Save and restore random states, tensors of any layout, and the contents of containers."""

import collections
import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Exact types: subclasses may not be mutable, such as Hugging Face's model outputs.
CONTAINERS = {
    *(list, dict, set, collections.deque),
    *(collections.OrderedDict, collections.defaultdict, collections.Counter),
}
"""Types of containers of which a copy has the contents."""


class RandomState:
    def __init__(self, devices: set[torch.device], of_torch_only: bool = False) -> None:
        self._cpu = torch.get_rng_state()
        self._python = None if of_torch_only else random.getstate()
        self._numpy = None if of_torch_only else np.random.get_state(legacy=False)
        self._cuda = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def restore(self) -> None:
        """Restore them; may be called again."""
        torch.set_rng_state(self._cpu)
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            np.random.set_state(self._numpy)
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)

    def has_changed(self) -> bool:
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
        return repr(self._numpy) != repr(np.random.get_state(legacy=False))


def devices_of(module: nn.Module) -> set[torch.device]:
    """Return the CUDA devices on which a module's steps may draw random numbers."""
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
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
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


@contextlib.contextmanager
def with_attribute(owners: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """Set an attribute of objects inside, and give each back its own afterwards."""
    before = [(owner, getattr(owner, name)) for owner in owners]
    for owner, _ in before:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, own in before:
            setattr(owner, name, own)


def is_plain(tensor: Tensor) -> bool:
    """Return whether the values are elements of one storage: not sparse, opaque or nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def values_in(tensor: Tensor) -> Tensor:
    """Return the plain tensor that holds the values of a sparse or nested one, or itself."""
    if is_plain(tensor):
        return tensor
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of the values of a tensor of any layout; 0 if it does not tell."""
    try:
        return values_in(tensor).nbytes
    except RuntimeError:
        return 0


def once(tensor: Tensor) -> Tensor:
    """Return a view that has each element of an expanded tensor once."""
    if is_plain(tensor):
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            tensor = tensor.narrow(dim, 0, 1) if size > 1 and stride == 0 else tensor
    return tensor


def copy_of(tensor: Tensor, *, on_host: bool = False) -> Tensor:
    """Copy the values of a tensor of any layout, those of an expanded one once."""
    values = once(tensor.detach())
    # Not all layouts can be copied to a CPU where they are.
    is_there = tensor.device.type in ("cpu", "meta")
    return values.to("cpu", copy=True) if on_host and not is_there else values.clone()


def write_back(tensor: Tensor, before: Tensor) -> None:
    # Tensors made under `torch.inference_mode` can only be written under it.
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        once(tensor).copy_(before)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the values of a plain tensor as a row of bytes, without a copy if they are dense."""
    values = once(tensor.detach()).resolve_conj().resolve_neg()
    values = (values.int_repr() if values.is_quantized else values).contiguous()
    # One element, or none, counts as contiguous with any stride, and has no bytes to view then.
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)


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
