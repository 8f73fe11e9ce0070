"""Hold gradients until all are complete, to clip them by their total norm."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _has_foreach_support
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_memsave.core.memory import host_copies, is_fake, on_cuda
from lightning_memsave.techniques.host_memory import HostMemory


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
        # Weakly by parameter, as the hooks that lead here.
        self._gradients: Any = WeakTensorKeyDictionary()
        self._norms: Any = WeakTensorKeyDictionary()
        self._copies: Any = WeakTensorKeyDictionary()
        self._memory = HostMemory()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._leaving: _Transfer | None = None

    def __contains__(self, param: nn.Parameter) -> bool:
        return param in self._gradients

    def is_on_host(self, param: nn.Parameter) -> bool:
        held = self._gradients.get(param)
        return held is not None and held is self._copies.get(param)

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
        self._memory = HostMemory()

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
        on_host = {param for param in group if self.is_on_host(param)}
        held = [(param, self._gradients.pop(param, None)) for param in group]
        if not on_host:
            return [value if value is None else value.to(p.device) for p, value in held], None
        pairs = [(v, torch.empty_like(v, device=p.device) if p in on_host else v) for p, v in held]
        with self._transfer(group[0], []) as transfer:
            for value, grad in pairs:
                if grad is not value:
                    grad.copy_(value, non_blocking=True)
        return [grad for _, grad in pairs], transfer

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

    def _to_host(self, param: nn.Parameter, grad: Tensor) -> Tensor:
        if grad.layout != torch.strided:
            return grad.to("cpu", copy=True)
        copy: Tensor | None = self._copies.get(param)
        like = torch.empty_like(grad, device="meta")  # without gaps, in the order of `grad`
        if copy is None or _form_of(copy) != _form_of(like):
            if grad.is_cuda:
                self._memory.lock(grad.device)
            copy = self._copies[param] = self._memory.tensors_like([grad])[0]
        if grad.stride() != like.stride():
            grad = torch.empty_like(like, device=grad.device).copy_(grad)
        copy.copy_(grad, non_blocking=True)
        return copy


def _form_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


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


def dense_bytes(grad: Tensor) -> int:
    """Return the bytes of a gradient, for a sparse one those of its dense form."""
    return grad.numel() * grad.element_size()


# As `clip_grad_norm_` computes them, to get the same bits.
def _norms(grads: list[Tensor]) -> list[Tensor]:
    if grads and _has_foreach_support(grads, grads[0].device):
        return list(torch._foreach_norm(grads))
    return [torch.linalg.vector_norm(grad) for grad in grads]
