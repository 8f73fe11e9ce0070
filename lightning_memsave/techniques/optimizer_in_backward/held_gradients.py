"""Hold gradients until all are complete, to clip them by their total norm."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _has_foreach_support
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_memsave.core.memory import host_copies, is_fake, mark_as_host, on_cuda

_FIRST_CHUNK_BYTES, _MAX_CHUNK_BYTES = 2**20, 2**26


class HeldGradients:
    """Holds gradients, on the host or the device, and returns them group by group, clipped.

    Their total norm is known only after backward. Those that are complete last, when backward has
    freed most activations, may stay on the device. On CUDA, copies run beside the computation: each
    waits only for the gradients that it needs, and the device holds one group more.
    """

    def __init__(self, clip_norm: float, kept_bytes: int | None = None) -> None:
        self._clip_norm = clip_norm
        self.kept_bytes = kept_bytes
        self.expected_bytes = 0
        """Bytes of the gradients of a whole step."""
        self.on_take: Callable[[int], None] | None = None
        """Called with the bytes of complete gradients, for a prediction of when they come."""
        self._num_bytes = 0  # of those that have come
        self._coefficient: Tensor | None = None
        self._gradients: Any = WeakTensorKeyDictionary()
        self._norms: Any = WeakTensorKeyDictionary()
        self._copies: Any = WeakTensorKeyDictionary()
        self._memory = _HostMemory()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._leaving: _Transfer | None = None

    def __contains__(self, param: nn.Parameter) -> bool:
        return param in self._gradients

    def is_on_host(self, param: nn.Parameter) -> bool:
        return isinstance(self._gradients.get(param), _HostCopy)

    def clear(self) -> None:
        self._let_go()
        self._gradients.clear()
        self._norms.clear()
        self._coefficient = None
        self._num_bytes = 0

    def keep(self, num_bytes: int) -> None:
        """Let so many bytes of gradients stay on the device, and free the host memory for them."""
        self.kept_bytes = num_bytes
        self._copies.clear()
        self._memory = _HostMemory()

    def take(self, params: list[nn.Parameter]) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        assert len(grads) == len(params), "hooks run when there is a gradient"
        self._norms.update(zip(params, _norms(grads), strict=True))
        self._let_go()
        num_bytes = sum(dense_bytes(grad) for grad in grads)
        if self.on_take is not None:
            self.on_take(num_bytes)
        left = self.expected_bytes - self._num_bytes
        self._num_bytes += num_bytes
        if self.kept_bytes and left <= self.kept_bytes:
            self._gradients.update(zip(params, grads, strict=True))
        else:
            with host_copies(), self._transfer(params[0], grads) as transfer:
                for param, grad in zip(params, grads, strict=True):
                    self._gradients[param] = self._to_host(param, grad)
            self._leaving = transfer
        for param in params:
            param.grad = None

    def give_back(self, groups: Iterable[list[nn.Parameter]]) -> Iterator[list[nn.Parameter]]:
        """Put gradients back in place, clipped if the total norm is known."""
        self._let_go()
        ready = None
        for group in groups:
            coming = self._fetch(group)
            if ready is not None:
                yield self._place(*ready)
            ready = group, *coming
            if coming[1] is None:  # nothing to wait for
                yield self._place(*ready)
                ready = None
        if ready is not None:
            yield self._place(*ready)

    def find_norm(self, params: list[nn.Parameter]) -> None:
        if not params:
            return
        kinds: dict[Any, list[nn.Parameter]] = {}  # in the order in which torch sums them
        for param in params:
            kinds.setdefault((param.device, param.dtype), []).append(param)
        found = []
        for group in kinds.values():
            in_place = [p for p in group if p.grad is not None]
            norms = _norms([p.grad for p in in_place if p.grad is not None])
            self._norms.update(zip(in_place, norms, strict=True))
            found += [self._norms[p] for p in group]
        device = found[0].device
        total = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in found]))
        one = nn.Parameter(torch.ones_like(total))
        one.grad = torch.ones_like(total)
        torch.nn.utils.clip_grads_with_norm_([one], self._clip_norm, total)
        self._coefficient = one.grad

    def _fetch(self, group: list[nn.Parameter]) -> "tuple[list[Tensor | None], _Transfer | None]":
        held = [self._gradients.pop(param, None) for param in group]
        if not any(isinstance(value, _HostCopy) for value in held):
            on_device = [
                v if v is None else v.to(p.device) for p, v in zip(group, held, strict=True)
            ]
            return on_device, None
        grads = [
            value.make(param.device) if isinstance(value, _HostCopy) else value
            for param, value in zip(group, held, strict=True)
        ]
        with self._transfer(group[0], []) as transfer:
            for value, grad in zip(held, grads, strict=True):
                if isinstance(value, _HostCopy):
                    value.read(grad)
        return grads, transfer

    def _place(
        self, group: list[nn.Parameter], grads: list[Tensor | None], transfer: "_Transfer | None"
    ) -> list[nn.Parameter]:
        if transfer is not None:
            transfer.wait()
        for param, grad in zip(group, grads, strict=True):
            if grad is not None:
                param.grad = grad
        grads.clear()  # the update frees them
        if self._coefficient is not None:
            found = [param.grad for param in group if param.grad is not None]
            coefficient = self._coefficient.to(group[0].device)
            if _has_foreach_support(found, group[0].device):
                torch._foreach_mul_(found, coefficient)
            else:
                for grad in found:
                    grad.mul_(coefficient)
        return group

    # On CUDA beside the computation; `record_stream` instead would free memory at times that no
    # prediction can know.
    @contextlib.contextmanager
    def _transfer(self, param: nn.Parameter, grads: list[Tensor]) -> Iterator["_Transfer | None"]:
        if not on_cuda(param):
            yield None
            return
        transfer = _Transfer(grads)
        if not is_fake(param):
            if param.device not in self._streams:
                self._streams[param.device] = torch.cuda.Stream(param.device)
            stream = self._streams[param.device]
            stream.wait_stream(torch.cuda.current_stream(param.device))
            with torch.cuda.stream(stream):
                yield transfer
            transfer.end = stream.record_event()
        else:
            yield transfer

    def _let_go(self) -> None:
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None

    def _to_host(self, param: nn.Parameter, grad: Tensor) -> "Tensor | _HostCopy":
        if grad.layout != torch.strided:
            return grad.to("cpu", copy=True)
        copy: _HostCopy | None = self._copies.get(param)
        if copy is None or not copy.is_for(grad):
            copy = self._copies[param] = _HostCopy(grad, self._memory)
        copy.fill(grad)
        return copy


@dataclass
class _Transfer:
    """A copy between device and host, and the gradients that it reads."""

    grads: list[Tensor]
    end: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Let the current stream wait for the copy, and free what it has read."""
        if self.end is not None:
            self.end.wait()
        self.grads.clear()


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

    def make(self, device: torch.device) -> Tensor:
        shape, strides, dtype = self._form
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    def read(self, grad: Tensor) -> None:
        for piece, part in self._with_parts_of(grad):
            part.copy_(piece, non_blocking=True)

    def _with_parts_of(self, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        as_bytes = grad.as_strided((grad.numel(),), (1,)).view(torch.uint8)
        sizes = [len(piece) for piece in self._pieces]
        return zip(self._pieces, as_bytes.split(sizes), strict=True)


# torch rounds each request for page-locked memory up to a power of two: a buffer per parameter
# would need up to twice its size.
class _HostMemory:
    """Host memory, page-locked for a GPU, in chunks whose sizes are powers of two."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8, device="cpu")
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


def dense_bytes(grad: Tensor) -> int:
    """Return the bytes of a gradient, for a sparse one those of its dense form."""
    return grad.numel() * grad.element_size()


# As `clip_grad_norm_` computes them, to get the same bits.
def _norms(grads: list[Tensor]) -> list[Tensor]:
    if grads and _has_foreach_support(grads, grads[0].device):
        return list(torch._foreach_norm(grads))
    return [torch.linalg.vector_norm(grad) for grad in grads]
