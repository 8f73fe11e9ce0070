"""Gradients that wait on the host until all of them are there."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_memsave.core.host_copies import host_copies


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
        self._buffers: Any = WeakTensorKeyDictionary()

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
        if host is not None:
            param.grad = host.to(param.device, non_blocking=True, copy=True)
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

    def _to_host(self, param: nn.Parameter, grad: Tensor) -> Tensor:
        if grad.is_cuda and grad.layout == torch.strided:
            return self._to_pinned(param, grad)  # pragma: no cover (gpu)
        return grad.to("cpu", copy=True)

    # The buffer is filled again only after its gradient was read: both in the order of the stream.
    def _to_pinned(self, param: nn.Parameter, grad: Tensor) -> Tensor:  # pragma: no cover (gpu)
        buffer = self._buffers.get(param)
        if buffer is None or buffer.shape != grad.shape or buffer.dtype != grad.dtype:
            buffer = torch.empty_like(grad, device="cpu", pin_memory=True)
            self._buffers[param] = buffer
        buffer.copy_(grad, non_blocking=True)
        return buffer  # type: ignore[no-any-return]


# With the operator that `clip_grad_norm_` uses on the device, for the same bits.
def _norm(grad: Tensor) -> Tensor:
    return torch.nn.utils.get_total_norm([grad])
