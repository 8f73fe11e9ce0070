"""Hold gradients in host memory until all are complete, to clip them by their total norm."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_memsave.core.memory import host_copies, mark_as_host

_FIRST_CHUNK_BYTES, _MAX_CHUNK_BYTES = 2**20, 2**26


class HeldGradients:
    """Moves gradients to host memory and returns them one at a time.

    Their total norm is known only after backward, but the device holds one gradient at a time.

    Args:
        clip_norm: Bound on the total norm of all gradients.
    """

    def __init__(self, clip_norm: float) -> None:
        self._clip_norm = clip_norm
        self._total_norm: Tensor | None = None
        self._gradients: Any = WeakTensorKeyDictionary()
        self._norms: Any = WeakTensorKeyDictionary()
        self._copies: Any = WeakTensorKeyDictionary()
        self._memory = _HostMemory()

    def __contains__(self, param: nn.Parameter) -> bool:
        return param in self._gradients

    def clear(self) -> None:
        """Discard all gradients."""
        self._gradients.clear()
        self._norms.clear()
        self._total_norm = None

    def take(self, param: nn.Parameter) -> None:
        """Move the gradient of a parameter to the host."""
        grad = param.grad
        assert grad is not None, "hooks run when there is a gradient"
        self._norms[param] = _norm(grad)
        with host_copies():
            self._gradients[param] = self._to_host(param, grad)
        param.grad = None

    def give_back(self, param: nn.Parameter) -> None:
        """Move the gradient of a parameter back to it, clipped if the total norm is known.

        Args:
            param: A parameter whose gradient is on the host or still in place.
        """
        host = self._gradients.pop(param, None)
        if isinstance(host, Tensor):
            param.grad = host.to(param.device, copy=True)
        elif host is not None:
            param.grad = host.to(param.device)
        if self._total_norm is not None:
            torch.nn.utils.clip_grads_with_norm_([param], self._clip_norm, self._total_norm)

    def find_norm(self, params: list[nn.Parameter]) -> None:
        """Compute the total norm of all gradients, as ``clip_grad_norm_`` does.

        Args:
            params: All parameters with a gradient, in the order of the groups.
        """
        if not params:
            return
        norms = [_norm(p.grad) if p.grad is not None else self._norms[p] for p in params]
        device = norms[0].device
        self._total_norm = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]))

    # A copy is refilled only after its gradient was read: both are ordered by the stream.
    def _to_host(self, param: nn.Parameter, grad: Tensor) -> "Tensor | _HostCopy":
        if grad.layout != torch.strided:
            return grad.to("cpu", copy=True)
        copy: _HostCopy | None = self._copies.get(param)
        if copy is None or not copy.is_for(grad):
            copy = self._copies[param] = _HostCopy(grad, self._memory)
        copy.fill(grad)
        return copy


class _HostCopy:
    """A gradient in pieces of host memory, in the memory order of the device."""

    def __init__(self, grad: Tensor, memory: "_HostMemory") -> None:
        like = torch.empty_like(grad, device="meta")  # without gaps, in the order of `grad`
        self._form = (like.shape, like.stride(), like.dtype)
        self._pieces = list(memory.take(grad.nbytes, is_pinned=grad.is_cuda))

    def is_for(self, grad: Tensor) -> bool:
        like = torch.empty_like(grad, device="meta")
        return self._form == (like.shape, like.stride(), like.dtype)

    def fill(self, grad: Tensor) -> None:
        shape, strides, dtype = self._form
        if grad.stride() != strides:
            grad = torch.empty_strided(shape, strides, dtype=dtype, device=grad.device).copy_(grad)
        for piece, part in self._with_parts_of(grad):
            piece.copy_(part, non_blocking=True)

    def to(self, device: torch.device) -> Tensor:
        shape, strides, dtype = self._form
        grad = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        for piece, part in self._with_parts_of(grad):
            part.copy_(piece, non_blocking=True)
        return grad

    def _with_parts_of(self, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        as_bytes = grad.as_strided((grad.numel(),), (1,)).view(torch.uint8)
        sizes = [len(piece) for piece in self._pieces]
        return zip(self._pieces, as_bytes.split(sizes), strict=True)


# torch rounds each request for page-locked memory up to a power of two: a buffer per parameter
# would need up to twice its size.
class _HostMemory:
    """Host memory, page-locked for a GPU, in chunks whose sizes are powers of two."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)
        self._chunk_bytes = _FIRST_CHUNK_BYTES

    def take(self, num_bytes: int, *, is_pinned: bool) -> Iterator[Tensor]:
        """Yield pieces of shape (bytes,) with ``num_bytes`` in total."""
        while num_bytes:
            if not len(self._free):
                self._free = torch.empty(
                    self._chunk_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned
                )
                mark_as_host(self._free)
                self._chunk_bytes = min(2 * self._chunk_bytes, _MAX_CHUNK_BYTES)
            piece, self._free = self._free[:num_bytes], self._free[num_bytes:]
            num_bytes -= len(piece)
            yield piece


# With the operator that `clip_grad_norm_` uses, to get the same bits.
def _norm(grad: Tensor) -> Tensor:
    return torch.nn.utils.get_total_norm([grad])
