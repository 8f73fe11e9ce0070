"""Correct meta kernels whose outputs differ from the real kernels."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memsave.core.memory import on_cuda
from lightning_memsave.prediction.fake import shape_cache

MAX_MEASURED_NUMEL = 2**24
"""Output elements up to which a recurrent layer is run to measure what it saves for backward;
larger ones are scaled in proportion."""

aten = torch.ops.aten


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on fake tensors; shapes, types and sizes are those of the real kernel."""
    return _CORRECTIONS.get(func, shape_cache.run)(func, args, kwargs)


# CUDA's layer norm keeps statistics in at least 32 bits. CPU kernels keep them in the type of the
# parameters, if it differs from that of the input.
def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = shape_cache.run(func, args, kwargs)
    is_layer_norm = func is aten.native_layer_norm.default
    weight, dtype = args[2 if is_layer_norm else 1], result[1].dtype
    if is_layer_norm and on_cuda(args[0]):
        dtype = torch.promote_types(args[0].dtype, torch.float32)
    elif weight is not None:
        dtype = weight.dtype
    if dtype == result[1].dtype:
        return result
    return (result[0], *(part.new_empty(part.shape, dtype=dtype) for part in result[1:]))


# The meta kernel only accepts bfloat16.
def _grouped_mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    a, b = args[:2]
    if a.dtype is torch.bfloat16 and b.dtype is torch.bfloat16:
        result: Tensor = func(*args, **kwargs)
        return result
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    groups = () if offsets is None else (len(offsets),)
    shape: tuple[int, ...] = (a.shape[-2], b.shape[-1])
    if a.ndim == b.ndim == 2:
        shape = (*groups, *shape)
    elif a.ndim == b.ndim == 3:
        shape = (len(a), *shape)
    return torch.empty(shape, dtype=kwargs.get("out_dtype") or a.dtype, device=a.device)


# oneDNN saves an opaque workspace for backward, which is empty in the meta kernel.
def _recurrent(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    *outputs, kept = func(*args, **kwargs)
    names = [argument.name for argument in func._schema.arguments]
    is_training = dict(zip(names, args, strict=False)).get("train", False)
    if not is_training or not torch.is_grad_enabled():
        return (*outputs, kept)
    described = tuple(_TensorSpec(a) if isinstance(a, Tensor) else _hashable(a) for a in args)
    numel = outputs[0].numel()
    if numel > MAX_MEASURED_NUMEL:
        first = args[0]
        shorter = max(1, len(first) * MAX_MEASURED_NUMEL // numel)
        described = (_TensorSpec(first[:shorter]), *described[1:])
        num_bytes = math.ceil(_workspace_bytes(func, described) * len(first) / shorter)
    else:
        num_bytes = _workspace_bytes(func, described)
    return (*outputs, kept.new_empty(num_bytes))


class _TensorSpec(tuple[Any, ...]):
    __slots__ = ()

    def __new__(cls, tensor: Tensor) -> "_TensorSpec":
        return super().__new__(cls, (tuple(tensor.shape), tensor.dtype))

    def make(self) -> Tensor:
        return torch.zeros(self[0], dtype=self[1])


@functools.cache
def _workspace_bytes(func: Any, described: tuple[Any, ...]) -> int:
    with _disable_current_modes():
        arguments = [d.make() if isinstance(d, _TensorSpec) else d for d in described]
        return int(func(*arguments)[-1].numel())


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_CORRECTIONS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    aten.native_layer_norm.default: _norm,
    aten.native_group_norm.default: _norm,
    aten.native_batch_norm.default: _norm,
    aten._grouped_mm.default: _grouped_mm,
    aten.mkldnn_rnn_layer.default: _recurrent,
}
