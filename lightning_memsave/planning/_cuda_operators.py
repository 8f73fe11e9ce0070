"""Operators that keep or take other memory on CUDA than on a CPU."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_memsave.planning._cuda_dispatch import Overrides, operator_named

_KEY = "AutogradCPU"


def add_operators(overrides: Overrides) -> None:
    """Let operators on fake tensors keep for backward what they keep on CUDA.

    Args:
        overrides: Where to add what it takes.
    """
    overrides.add("dropout", _KEY, _dropout)
    overrides.add("_fused_rms_norm", _KEY, _fused_rms_norm)
    for name in ("softmax", "log_softmax"):
        fused = operator_named(f"_{name}")
        overrides.add(f"{name}.int", _KEY, functools.partial(_softmax, fused))


def add_scratch(overrides: Overrides) -> None:
    """Let backward operators on fake tensors take the scratch memory of their CUDA kernels.

    Args:
        overrides: Where to add what it takes.
    """
    overrides.add_scratch("_scaled_dot_product_flash_attention_backward", _flash_scratch)
    overrides.add_scratch("_scaled_dot_product_efficient_attention_backward", _efficient_scratch)
    overrides.add_scratch("embedding_dense_backward", _embedding_scratch)


class FloatStatistics(TorchDispatchMode):
    """Statistics of normalisation layers in float32, also where inputs are in less.

    A CPU keeps them in the precision of the input. To be entered inside of ``FakeTensorMode``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @override
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_layer_norm.default:
            output, mean, reciprocal = result
            return output, mean.float(), reciprocal.float()
        return result


# native_dropout, `dropout` in Dropout.cpp: a mask of one byte an element.
def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or input.numel() == 0:
        return input
    if p == 1:
        return input * input.new_zeros(())
    output: Tensor = torch.ops.aten.native_dropout(input, p, train)[0]
    return output


# `softmax` in SoftMax.cpp: one kernel converts float16, but not bfloat16, to float32.
def _softmax(
    fused: Callable[..., Tensor], input: Tensor, dim: int, dtype: torch.dtype | None = None
) -> Tensor:
    is_converted = input.dtype is torch.float16 and dtype is torch.float32
    if dtype is not None and not is_converted:
        input = input.to(dtype)
    return fused(input, dim, is_converted)


def _fused_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    apply: Callable[..., tuple[Tensor, Tensor]] = _RMSNorm.apply
    return apply(input, len(normalized_shape), weight)


# One kernel on CUDA, a chain of operators on a CPU.
class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, num_axes: int, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        shape = (*input.shape[:-num_axes], *[1] * num_axes)
        reciprocal = input.new_empty(shape, dtype=torch.float32)
        ctx.save_for_backward(input, reciprocal, weight)
        ctx.mark_non_differentiable(reciprocal)
        ctx.set_materialize_grads(False)
        return torch.empty_like(input), reciprocal

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        input, _, weight = ctx.saved_tensors
        needs_input, _, needs_weight = ctx.needs_input_grad
        return (
            torch.empty_like(input) if needs_input else None,
            None,
            torch.empty_like(weight) if needs_weight else None,
        )


# `mha_bwd` in flash_api.cpp: float32 sums of the query's gradient, and gradients of keys and values
# for each query head where heads share them.
def _flash_scratch(grad_out: Tensor, query: Tensor, key: Tensor, *_: Any) -> int:
    batch, heads, tokens, size = query.shape
    tokens = _rounded_up(tokens, 128)
    num_bytes = 4 * batch * heads * tokens * (_rounded_up(size, 32) + 1)
    if key.size(1) != heads:
        num_bytes += 2 * batch * key.size(2) * heads * size * query.element_size()
    return num_bytes


# `workspace_size` in mem_eff_attention/kernel_backward.h, and the row sums ("delta").
def _efficient_scratch(grad_out: Tensor, query: Tensor, *_: Any) -> int:
    batch, heads, tokens, size = query.shape
    return 4 * batch * heads * (_rounded_up(tokens, 64) * _rounded_up(size, 64) + tokens)


# `embedding_dense_backward_cuda` in Embedding.cu and EmbeddingBackwardKernel.cu: sorted indices,
# and float32 sums of parts of at most ten rows for each index.
def _embedding_scratch(
    grad: Tensor, indices: Tensor, num_weights: int, _: int, scale_grad_by_freq: bool
) -> int:
    num_indices = indices.numel()
    if num_indices <= 3072 and not scale_grad_by_freq:
        return 0
    num_segments = min(num_indices, num_weights)
    num_parts = num_indices // 10 + num_segments
    num_columns = _rounded_up(grad.size(-1), 32)
    return 16 * num_indices + 24 * num_segments + num_parts * (8 + 4 * num_columns)


def _rounded_up(value: int, step: int) -> int:
    return -(-value // step) * step
