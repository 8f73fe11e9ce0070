"""Host memory in exact sizes, page-locked so that a GPU can copy it beside its computation."""

import contextlib
import ctypes
import itertools
import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memsave.core.memory import host_copies, is_fake, mark_as_host
from lightning_memsave.errors import MemsaveWarning
from lightning_memsave.techniques.flat_memory import aligned, note_piece
from lightning_memsave.units import format_bytes

_HUGE_PAGES_FROM_BYTES = 2**22  # as numpy
# Windows has no private mappings, and does not fork.
_PRIVATE: dict[str, Any] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)
# By address, weakly: its end unlocks memory, and a forked process has to find what is locked.
_LOCKED: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


class HostMemory:
    """Allocates host memory, each time in one piece of whole pages.

    torch's own allocator of page-locked memory rounds each size up to a power of two.
    """

    def __init__(self) -> None:
        self._is_locked = self._is_warned = False
        self._device: torch.device | None = None
        self._pieces: list[Any] = []  # weak references
        self.peak_bytes = 0
        """The most that was allocated at a time."""

    def tensors_like(
        self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None = None
    ) -> list[Tensor]:
        """Allocate memory for tensors, without values.

        Each result has a storage of its own, so that checkpoints treat it like any tensor.
        """
        dtypes = [tensor.dtype for tensor in tensors] if dtypes is None else dtypes
        are_fake = any(map(is_fake, tensors))
        device = "cpu" if are_fake else "meta"
        with torch.inference_mode(mode=False), host_copies():  # also for modes that change types
            # Without gaps, in the order of the given tensor.
            forms = [
                torch.empty_like(tensor, dtype=dtype, device=device)
                for tensor, dtype in zip(tensors, dtypes, strict=True)
            ]
            return _apart(forms) if are_fake else self._carve(forms)

    def lock(self, device: torch.device | None = None) -> None:
        """Lock the pages of all memory, also of what is allocated later, for a GPU.

        A process that is forked from this one does not have this memory: the system would copy
        locked pages at each fork, as the device knows where they are.
        """
        if self._is_locked:
            return
        self._is_locked, self._device = True, device
        for reference in self._pieces:
            memory = reference()
            if memory is not None:
                self._lock(memory)

    def _lock(self, memory: Any) -> None:
        with _current(self._device):
            is_done = not memory.nbytes or _lock(memory, self._device)
        if is_done or self._is_warned:
            return
        self._is_warned = True
        warnings.warn(
            f"{format_bytes(memory.nbytes)} of host memory cannot be page-locked: copies of it "
            "stop the computation. Free host memory, raise the limit of locked memory "
            "(`ulimit -l`), or in WSL the memory of the virtual machine.",
            MemsaveWarning,
            stacklevel=4,
        )

    def _allocate(self, num_bytes: int) -> Any:
        return _pages(num_bytes)

    def _carve(self, forms: Sequence[Tensor]) -> list[Tensor]:
        offsets, end = _places(forms)
        memory = self._allocate(end)
        self._pieces = [each for each in self._pieces if each() is not None]
        self._pieces.append(weakref.ref(memory))
        num_bytes = sum(each().nbytes for each in self._pieces)
        self.peak_bytes = max(self.peak_bytes, num_bytes)
        if self._is_locked:
            self._lock(memory)
        piece = torch.frombuffer(memory, dtype=torch.uint8) if end else torch.empty(0, device="cpu")
        mark_as_host(piece)
        return [
            _view(memory, form, offset, piece) if form.numel() else _empty(form)
            for form, offset in zip(forms, offsets, strict=True)
        ]


def trim_heap() -> None:
    """Give memory to the system that was freed, where malloc would keep it for later.

    Weights of less than 32 MiB each leave gaps between what stays.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)


def _places(forms: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return where tensors begin in one piece of memory, and where it ends."""
    starts = [0, *itertools.accumulate(aligned(form.nbytes) for form in forms)]
    return starts[:-1], starts[-1]


# The memory of fake tensors is not in one piece, but copied as if it were: a tensor on `meta` does
# not count.
def _apart(tensors: list[Tensor]) -> list[Tensor]:
    offsets, end = _places(tensors)
    piece = torch.empty(end, dtype=torch.uint8, device="meta")
    mark_as_host(piece)
    for tensor, offset in zip(tensors, offsets, strict=True):
        mark_as_host(tensor)
        note_piece(tensor, piece, offset)
    return tensors


def _view(memory: Any, form: Tensor, offset: int, piece: Tensor) -> Tensor:
    flat = torch.frombuffer(memory, dtype=form.dtype, count=form.numel(), offset=offset)
    mark_as_host(flat)  # before a counter sees it
    note_piece(flat, piece, offset)
    return flat.as_strided(form.shape, form.stride())


def _empty(form: Tensor) -> Tensor:
    made = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device="cpu")
    mark_as_host(made)
    return made


# Pages of its own: CUDA locks whole pages, and none twice.
def _pages(num_bytes: int) -> Any:
    if not num_bytes:
        return np.empty(0, np.uint8)
    try:
        pages = mmap.mmap(-1, num_bytes, **_PRIVATE)
    except OSError as error:
        what = f"{format_bytes(num_bytes)} of host memory cannot be allocated"
        raise MemoryError(what) from error
    if num_bytes >= _HUGE_PAGES_FROM_BYTES:
        _advise(pages, "MADV_HUGEPAGE")
    # Weak references to an array end before its memory does, those to a mapping after it.
    return np.frombuffer(pages, np.uint8)


# Not every system knows every advice.
def _advise(pages: mmap.mmap, name: str) -> None:
    if hasattr(mmap, name):
        with contextlib.suppress(OSError):
            pages.madvise(getattr(mmap, name))


def _lock(memory: Any, device: torch.device | None) -> bool:
    runtime, address = torch.cuda.cudart(), memory.ctypes.data
    if int(runtime.cudaHostRegister(address, memory.nbytes, 0)) == 0:
        unregister = runtime.cudaHostUnregister
        weakref.finalize(memory, _unlock, unregister, address, device, os.getpid())
        pages: Any = memoryview(memory.base).obj
        _advise(pages, "MADV_DONTFORK")
        _LOCKED[address] = memory
        return True
    if torch.cuda.is_available():  # pragma: no cover (gpu)
        _forget_error()
    return False


def _unlock(
    unregister: Callable[[int], object], address: int, device: torch.device | None, process: int
) -> None:
    if os.getpid() == process:
        with _current(device):
            unregister(address)


# In a thread that has not chosen a device, the runtime would create a context on the first one.
def _current(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if device is None else torch.cuda.device(device)


# The runtime keeps it for the next launch of a kernel, which would report it as its own.
def _forget_error() -> None:  # pragma: no cover (gpu)
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


# A forked process may map other memory where it does not have this, and would unmap that if the
# objects that stand for this were freed there.
_KEPT: list[Any] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _KEPT.extend(_LOCKED.values()))
