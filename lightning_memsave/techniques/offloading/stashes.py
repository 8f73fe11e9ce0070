"""The memory of saved tensors: on the device, in host memory that is used again, or both."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from lightning_memsave.core.memory import counted_as
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.offloading.copies import Copies


class HostBuffers:
    """Host memory that is used again from step to step."""

    def __init__(self, memory: HostMemory) -> None:
        self.num_bytes = 0
        """Bytes of all that is in use or free."""
        self._memory = memory
        # Garbage collection may append at any time.
        self._free: list[Tensor] = []

    def take(self, flat: Tensor, copies: Copies) -> Tensor:
        """Give the smallest free memory in which a tensor has room."""
        sizes = [buffer.nbytes for buffer in self._free]
        fitting = [index for index, size in enumerate(sizes) if size >= flat.nbytes]
        if fitting:
            return self._free.pop(min(fitting, key=sizes.__getitem__))
        if sizes:
            copies.synchronize()
            self.num_bytes -= self._free.pop(sizes.index(max(sizes))).nbytes
        self.num_bytes += flat.nbytes
        return self._memory.tensors_like([flat])[0]

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)

    def clear(self) -> None:
        """Free what nobody uses; no copy may run."""
        self.num_bytes -= sum(buffer.nbytes for buffer in self._free)
        self._free.clear()


class Stash:
    """The memory behind saved tensors; all that share a storage share one stash."""

    def __init__(self, tensor: Tensor, buffers: HostBuffers, copies: Copies) -> None:
        self.copies = copies
        self.place = -1
        """Of the latest block that saved it, among those with saved tensors."""
        self.flat: Tensor | None = None
        """All bytes, on the device."""
        self.on_host: Tensor | None = None
        """The same bytes, or a copy that has begun."""
        self.is_fetched = False
        """Whether ``flat`` came back, and was not used yet."""
        self._tensor = TensorWeakRef(tensor)
        self._storage = weakref.ref(tensor.untyped_storage())
        # Until another copy of the bytes came back, which nobody else knows.
        self._version: int | None = tensor._version
        self._is_changed = False
        self._num_bytes = tensor.untyped_storage().nbytes()
        self._device = tensor.device
        self._buffers = buffers
        self._buffer: Tensor | None = None
        self._wait: Callable[[], None] | None = None
        self._num_saved = self._num_used = 0

    def __del__(self) -> None:
        self._finish_copy()
        if self._buffer is not None:
            self._buffers.give_back(self._buffer)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether it has the bytes of a tensor, which has not changed since."""
        storage = self._storage()
        is_same = storage is not None and storage._cdata == tensor.untyped_storage()._cdata
        return is_same and self._version == tensor._version

    def save(self, tensor: Tensor, place: int) -> "Saved":
        self.flat = _flat(tensor)
        self.place = place
        self._num_saved += 1
        offset = int(tensor.storage_offset())
        return Saved(self, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def leave_for(self, buffer: Tensor) -> None:
        """Note host memory to which a copy of all bytes has begun."""
        self._buffer = buffer
        self.on_host = buffer[: self._num_bytes]

    def make_room(self) -> Tensor:
        """Return device memory to copy all bytes back to."""
        with counted_as("activation"):
            return torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)

    def come_to(self, flat: Tensor, wait: Callable[[], None]) -> None:
        """Note device memory to which a copy of all bytes has begun, and how to wait for it."""
        self.flat = flat
        self._version = None
        self._wait = wait
        self.is_fetched = True

    def find(self) -> bool:
        """Return whether somebody else holds on to the tensor on the device, and hold on to it."""
        tensor = self._tensor()
        if tensor is None or not self.holds(tensor):
            return False
        self.flat = _flat(tensor)
        self.is_fetched = True
        return True

    def use(self) -> Tensor:
        """Return all bytes on the device, to which it holds on until each save was used once."""
        self._finish_copy()
        self.look_for_changes()
        if self._is_changed:
            _refuse()
        flat = self.flat
        assert flat is not None, "the caller has fetched it"
        self.is_fetched = False
        self._num_used += 1
        if self._num_used >= self._num_saved:
            self.leave()
        return flat

    def look_for_changes(self) -> None:
        """Note whether bytes on the device were changed in place since they were saved."""
        if self.flat is not None and self._version is not None:
            self._is_changed |= self.flat._version != self._version

    def leave(self) -> None:
        """Let go of device memory that has a copy on the host."""
        if self.on_host is not None:
            self._finish_copy()
            self.flat = None
            self.is_fetched = False
            self._num_used = 0

    # A copy that nobody waits for would write to memory that is used by others already.
    def _finish_copy(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved tensor: the bytes of a stash, and how to read them."""

    stash: Stash
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    def restore(self) -> Tensor:
        flat = self.stash.use().view(self.dtype)
        return flat.as_strided(self.size, self.stride, self.offset)


class Kept:
    """A saved tensor that stays where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # An output would hold itself through its own graph.
        self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self._version = tensor._version

    def restore(self) -> Tensor:
        if self._tensor._version != self._version:
            _refuse()
        return self._tensor


# As autograd itself does without hooks.
def _refuse() -> NoReturn:
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        "operation, after it was saved in a block whose activations are offloaded. Write "
        "`x = x + y` instead of `x += y`."
    )


def _flat(tensor: Tensor) -> Tensor:
    num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((num_elements,), (1,), 0).view(torch.uint8)
