"""Host memory in exact sizes, page-locked so that a GPU can copy it beside its computation."""

import contextlib
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memsave.core.memory import host_copies, is_fake, mark_as_host
from lightning_memsave.errors import MemsaveWarning
from lightning_memsave.techniques.offloading.flat_memory import aligned, note_piece
from lightning_memsave.units import format_bytes


class HostMemory:
    """Allocates host memory, each time in one piece, without rounding sizes up.

    torch's own allocator of page-locked memory rounds each size up to a power of two.
    """

    def __init__(self) -> None:
        self._is_locked = self._is_warned = False
        self._pieces: list[Any] = []  # weak references
        self.peak_bytes = 0
        """The most that was allocated at a time."""

    def tensors_like(
        self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None = None
    ) -> list[Tensor]:
        """Allocate memory for tensors, without values.

        Each result has a storage of its own, so that checkpoints treat it like any tensor.

        Args:
            tensors: Tensors on any device; their values are not read.
            dtypes: Types of the results; ``None`` for those of the tensors.

        Returns:
            Tensors with the shapes and the memory order of the given ones, marked as host memory.
        """
        dtypes = [tensor.dtype for tensor in tensors] if dtypes is None else dtypes
        with torch.inference_mode(mode=False), host_copies():  # also for modes that change types
            # Without gaps, in the order of the given tensor.
            forms = [
                torch.empty_like(tensor, dtype=dtype, device="meta")
                for tensor, dtype in zip(tensors, dtypes, strict=True)
            ]
            return [_empty(form) for form in forms] if _are_fake(tensors) else self._carve(forms)

    def lock(self) -> None:
        """Lock the pages of all memory, also of what is allocated later, for a GPU."""
        if self._is_locked:
            return
        self._is_locked = True
        for reference in self._pieces:
            memory = reference()
            if memory is not None:
                self._lock(memory)

    def _lock(self, memory: Any) -> None:
        if _lock(memory) or self._is_warned:
            return
        self._is_warned = True
        warnings.warn(
            f"{format_bytes(memory.nbytes)} of host memory cannot be page-locked: copies of it "
            "stop the computation. Free host memory, raise the limit of locked memory "
            "(`ulimit -l`), or in WSL the memory of the virtual machine.",
            MemsaveWarning,
            stacklevel=4,
        )

    def _carve(self, forms: Sequence[Tensor]) -> list[Tensor]:
        offsets, end = [], 0
        for form in forms:
            offsets.append(end)
            end += aligned(form.nbytes)
        memory = np.empty(end, np.uint8)
        self._pieces = [each for each in self._pieces if each() is not None]
        self._pieces.append(weakref.ref(memory))
        num_bytes = sum(each().nbytes for each in self._pieces)
        self.peak_bytes = max(self.peak_bytes, num_bytes)
        if self._is_locked:
            self._lock(memory)
        piece = torch.frombuffer(memory, dtype=torch.uint8) if end else torch.empty(0)
        mark_as_host(piece)
        return [
            _view(memory, form, offset, piece) if form.numel() else _empty(form)
            for form, offset in zip(forms, offsets, strict=True)
        ]


def _view(memory: Any, form: Tensor, offset: int, piece: Tensor) -> Tensor:
    flat = torch.frombuffer(memory, dtype=form.dtype, count=form.numel(), offset=offset)
    mark_as_host(flat)  # before a counter sees it
    note_piece(flat, piece, offset)
    return flat.as_strided(form.shape, form.stride())


def _are_fake(tensors: Sequence[Tensor]) -> bool:
    return any(map(is_fake, tensors))


def _empty(form: Tensor) -> Tensor:
    made = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device="cpu")
    mark_as_host(made)
    return made


def _lock(memory: Any) -> bool:
    runtime, address = torch.cuda.cudart(), memory.ctypes.data
    if not memory.nbytes:
        return True
    if int(runtime.cudaHostRegister(address, memory.nbytes, 0)) == 0:
        weakref.finalize(memory, runtime.cudaHostUnregister, address)
        return True
    if torch.cuda.is_available():  # pragma: no cover (gpu)
        _forget_error()
    return False


# The runtime keeps it for the next launch of a kernel, which would report it as its own.
def _forget_error() -> None:  # pragma: no cover (gpu)
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
