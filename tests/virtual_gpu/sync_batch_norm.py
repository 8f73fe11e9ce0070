"""Values of the operators of `SyncBatchNorm`, which have no CPU kernel: those of `BatchNorm` do."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _along_channels(x: Tensor, values: Tensor) -> Tensor:
    return values.float().view(1, -1, *[1] * (x.ndim - 2))


def _other_dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _stats(_: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x.float(), _other_dims(x), correction=0)
    return mean, (variance + eps).rsqrt()


def _gather(_: Any, x: Tensor, means: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Join the statistics of all processes, of shape (processes, channels)."""
    invstds, running_mean, running_var, momentum, eps, counts = others
    weights = counts.float()[:, None]
    mean = (weights * means).sum(0) / weights.sum()
    variances = invstds.pow(-2) - eps + (means - mean).square()
    total = (weights * variances).sum(0)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((total / (weights.sum() - 1)).to(running_var.dtype), momentum)
    return mean, (total / weights.sum() + eps).rsqrt()


def _normalize(_: Any, x: Tensor, weight: Any, bias: Any, *statistics: Any) -> Tensor:
    mean, invstd, _eps = statistics
    normal = (x.float() - _along_channels(x, mean)) * _along_channels(x, invstd)
    if weight is not None:
        normal = normal * _along_channels(x, weight)
    return normal if bias is None else normal + _along_channels(x, bias)


def _reduce(
    _: Any, grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    centred = x.float() - _along_channels(x, mean)
    sum_dy = grad.float().sum(_other_dims(x))
    sum_dy_xmu = (grad.float() * centred).sum(_other_dims(x))
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy


def _backward(_: Any, grad: Tensor, x: Tensor, *others: Any) -> Tensor:
    mean, invstd, weight, sum_dy, sum_dy_xmu, counts = others
    total, scale = counts.sum(), invstd if weight is None else invstd * weight.float()
    centred = x.float() - _along_channels(x, mean)
    slope = _along_channels(x, invstd.square() * sum_dy_xmu / total)
    shifted = grad.float() - _along_channels(x, sum_dy / total)
    return (shifted - centred * slope) * _along_channels(x, scale)


SYNC_BATCH_NORM: dict[str, Callable[..., Any]] = {
    "aten::batch_norm_stats": _stats,
    "aten::batch_norm_gather_stats_with_counts": _gather,
    "aten::batch_norm_elemt": _normalize,
    "aten::batch_norm_backward_reduce": _reduce,
    "aten::batch_norm_backward_elemt": _backward,
}
