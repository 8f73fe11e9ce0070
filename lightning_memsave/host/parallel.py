"""Processes that train together: when they share gradients, and what they agree on."""

import contextlib
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_BUCKET_BYTES = 25 * 2**20


def without_sync(trainer: Any) -> contextlib.AbstractContextManager[None]:
    """Keep gradients of a backward pass to this process, where the strategy can do that.

    Args:
        trainer: A Trainer in fit.

    Returns:
        A context for forward and backward.
    """
    block = getattr(trainer.strategy, "block_backward_sync", None)
    return contextlib.nullcontext() if block is None else block()


def smallest(trainer: Any, size: int) -> int:
    """Find the smallest number that any process has.

    Args:
        trainer: A Trainer in fit.
        size: The number of this process.

    Returns:
        The smallest; all processes must ask.
    """
    if trainer.world_size == 1:
        return size
    found = torch.tensor(size, device=trainer.strategy.root_device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found.item())


def share_buffers(trainer: Any) -> None:
    """Give all processes the buffers of the first, as DDP does in the forward pass of a step.

    Afterwards DDP's own forward passes do not, until gradients have been shared by DDP: a process
    that repeats a batch must not wait for the others in its forward pass.

    Args:
        trainer: A Trainer in fit.
    """
    ddp = trainer.strategy.model
    if isinstance(ddp, DistributedDataParallel):
        if ddp.will_sync_module_buffers():
            ddp._sync_buffers()
        ddp.require_forward_param_sync = False


def average_gradients(trainer: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Average gradients over all processes, in place, as DDP does in backward.

    Args:
        trainer: A Trainer in fit; all processes must call this.
        parameters: The same ones in all processes. Where some processes have no gradient, it counts
            as zero; where none has, there is none afterwards.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    device = trainer.strategy.root_device
    has_gradient = torch.tensor([p.grad is not None for p in trained], device=device).int()
    dist.all_reduce(has_gradient, dist.ReduceOp.MAX)
    gradients = []
    for parameter, has in zip(trained, has_gradient.tolist(), strict=True):
        if has and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if has:
            gradients.append(cast(torch.Tensor, parameter.grad))
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        flat /= trainer.world_size  # before the sum, as DDP does
        dist.all_reduce(flat)
        parts = flat.split([gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        is_other_type = bool(bucket) and bucket[0].dtype != tensor.dtype
        if bucket and (is_other_type or num_bytes + tensor.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(tensor)
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket
