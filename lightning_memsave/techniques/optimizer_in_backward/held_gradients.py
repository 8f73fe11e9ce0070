"""Gradients that wait on the host until all of them are there."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_memsave.core.memory import host_copies

_FIRST_CHUNK_BYTES, _MAX_CHUNK_BYTES = 2**20, 2**26


class HeldGradients:
    """Moves gradients to host memory and brings each one back when it is its turn.

    The norm of all of them together is known only when backward has ended; on the device there is
    one gradient at a time all the same.

    Args:
        clip_norm: Bound on the norm of all gradients together.
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
        """Forget all gradients."""
        self._gradients.clear()
        self._norms.clear()
        self._total_norm = None

    def take(self, param: nn.Parameter) -> None:
        """Move the gradient of a parameter away."""
        grad = param.grad
        assert grad is not None, "hooks come with a gradient"
        self._norms[param] = _norm(grad)
        with host_copies():
            self._gradients[param] = self._to_host(param, grad)
        param.grad = None

    def give_back(self, param: nn.Parameter) -> None:
        """Put the gradient of a parameter where it was, clipped if all of them are there.

        Args:
            param: One whose gradient was taken, or has not left it.
        """
        host = self._gradients.pop(param, None)
        if isinstance(host, Tensor):
            param.grad = host.to(param.device, copy=True)
        elif host is not None:
            param.grad = host.to(param.device)
        if self._total_norm is not None:
            torch.nn.utils.clip_grads_with_norm_([param], self._clip_norm, self._total_norm)

    def find_norm(self, params: list[nn.Parameter]) -> None:
        """Compute the norm of all gradients together, as ``clip_grad_norm_`` does.

        Args:
            params: All that have a gradient, in the order of the groups.
        """
        if not params:
            return
        norms = [_norm(p.grad) if p.grad is not None else self._norms[p] for p in params]
        device = norms[0].device
        self._total_norm = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]))

    # The copy is filled again only after its gradient was read: both in the order of the stream.
    def _to_host(self, param: nn.Parameter, grad: Tensor) -> "Tensor | _HostCopy":
        if grad.layout != torch.strided:
            return grad.to("cpu", copy=True)
        copy: _HostCopy | None = self._copies.get(param)
        if copy is None or not copy.is_for(grad):
            copy = self._copies[param] = _HostCopy(grad, self._memory)
        copy.fill(grad)
        return copy


class _HostCopy:
    """A gradient in pieces of host memory, in the order in which its entries lie on the device."""

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


# torch rounds each request for page-locked memory up to a power of two: a buffer for each parameter
# would take up to twice of what it holds.
class _HostMemory:
    """Host memory, page-locked for a GPU, in chunks whose sizes are powers of two."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)
        self._chunk_bytes = _FIRST_CHUNK_BYTES

    def take(self, num_bytes: int, *, is_pinned: bool) -> Iterator[Tensor]:
        """Give pieces of shape (bytes,) that make up a number of bytes together."""
        while num_bytes:
            if not len(self._free):
                self._free = torch.empty(
                    self._chunk_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned
                )
                self._chunk_bytes = min(2 * self._chunk_bytes, _MAX_CHUNK_BYTES)
            piece, self._free = self._free[:num_bytes], self._free[num_bytes:]
            num_bytes -= len(piece)
            yield piece


# With the operator that `clip_grad_norm_` uses on the device, for the same bits.
def _norm(grad: Tensor) -> Tensor:
    return torch.nn.utils.get_total_norm([grad])
