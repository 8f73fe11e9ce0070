"""Emulate CUDA's choice of kernels for ``scaled_dot_product_attention``."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.torch_version import TorchVersion

_HALF = (torch.float16, torch.bfloat16)
# https://github.com/pytorch/pytorch/pull/191085
_EFFICIENT_SHARES_HEADS = TorchVersion(torch.__version__) >= TorchVersion("2.14")
# `check_cudnn_dropout`
_CUDNN_DROPOUT_STEPS = 16 if TorchVersion(torch.__version__) >= TorchVersion("2.14") else 0
_MASK_ALIGNMENT = 16  # of the efficient kernel, in elements
KERNELS = ("flash", "efficient", "math")


class _Inputs(NamedTuple):
    query: Tensor  # (B, H, T, D)
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


class Attention:
    def __init__(self, kernel: str | None, capability: tuple[int, int]) -> None:
        self._kernel = kernel
        self._capability = capability

    def __call__(  # noqa: PLR0917 (the order of the operator)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            is_kept = attn_mask
            attn_mask = torch.full_like(is_kept, -math.inf, dtype=query.dtype)
            attn_mask.masked_fill_(is_kept, 0)
        inputs = _Inputs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return _RUN[self.choose(inputs)](inputs)

    def choose(self, inputs: _Inputs) -> str:
        """Select the kernel (``select_sdp_backend`` in ``transformers/cuda/sdp_utils.cpp``)."""
        if self._kernel == "math":
            return "math"
        # Without a mask, cuDNN's kernel saves the same tensors as flash.
        if self._kernel is None and inputs.mask is not None and self._cudnn_fits(inputs):
            return "cudnn"
        fits = {"flash": self._flash_fits, "efficient": self._efficient_fits}
        order = reversed(fits) if self._kernel == "efficient" else iter(fits)
        return next((kernel for kernel in order if fits[kernel](inputs)), "math")

    # `check_prefer_cudnn_attention`, since torch 2.9; `check_cudnn_tensor_shapes`.
    def _cudnn_fits(self, inputs: _Inputs) -> bool:
        sizes = {t.size(-1) for t in inputs[:3]}
        most = 256 if self._capability == (9, 0) else 128
        dropout = _CUDNN_DROPOUT_STEPS * inputs.dropout_p
        is_nondeterministic_fine = (
            not torch.are_deterministic_algorithms_enabled()
            or torch.is_deterministic_algorithms_warn_only_enabled()
        )
        return (
            torch.backends.cuda.cudnn_sdp_enabled()
            and is_nondeterministic_fine
            and self._capability in {(9, 0), (10, 0)}
            and not (inputs.mask is not None and inputs.mask.requires_grad)
            and dropout == int(dropout)
            and inputs.query.dtype in _HALF
            and _is_regular(inputs, may_share_heads=True)
            and len(sizes) == 1
            and all(size % 8 == 0 and size <= most for size in sizes)
        )

    # `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`.
    def _flash_differentiates(self, inputs: _Inputs) -> bool:
        size = inputs.query.size(-1)
        is_small = self._capability[0] == 12 or (8, 6) <= self._capability <= (8, 9)
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in inputs[:3])
        return not (
            is_small and needs_grad and (192 < size <= 224 or (size > 224 and inputs.dropout_p > 0))
        )

    def _flash_fits(self, inputs: _Inputs) -> bool:
        query, key, value = inputs[:3]
        return (
            torch.backends.cuda.flash_sdp_enabled()
            and self._capability >= (8, 0)
            and query.dtype in _HALF
            and inputs.mask is None
            and _is_regular(inputs, may_share_heads=True)
            and query.size(-1) == key.size(-1) == value.size(-1) <= 256
            and not (inputs.is_causal and query.size(-2) != key.size(-2))
            and self._flash_differentiates(inputs)
        )

    def _efficient_fits(self, inputs: _Inputs) -> bool:
        query, mask = inputs.query, inputs.mask
        is_half = query.dtype in _HALF
        bfloat16 = {torch.bfloat16} if self._capability >= (8, 0) else set()
        has_tensor_cores = self._capability >= (8, 0) or (is_half and self._capability >= (7, 0))
        alignment = 4 if self._capability >= (8, 0) else 1
        if has_tensor_cores:
            alignment = max(alignment, 128 // (16 if is_half else 32))
        return (
            torch.backends.cuda.mem_efficient_sdp_enabled()
            and self._capability >= (5, 0)
            and query.dtype in {torch.float32, torch.float16, *bfloat16}
            and _is_regular(inputs, may_share_heads=_EFFICIENT_SHARES_HEADS)
            and all(t.size(-1) % alignment == 0 for t in (query, inputs.value))
            and (mask is None or mask.stride(-1) == 1)
        )


def _is_regular(inputs: _Inputs, *, may_share_heads: bool) -> bool:
    query, key, value = tensors = inputs[:3]
    if any(t.dim() != 4 or 0 in t.shape or t.stride(-1) != 1 for t in tensors):
        return False
    if not query.size(0) == key.size(0) == value.size(0) or key.size(1) != value.size(1):
        return False
    if inputs.enable_gqa and may_share_heads:
        return query.size(1) % key.size(1) == 0
    return query.size(1) == key.size(1)


def _flash(inputs: _Inputs) -> Tensor:
    size = inputs.query.size(-1)
    scale = inputs.scale or 1 / math.sqrt(size)
    padded = (functional.pad(t, (0, -size % 8)) if size % 8 else t for t in inputs[:3])
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        *padded, inputs.dropout_p, inputs.is_causal, False, scale=scale
    )[0]
    return output[..., :size] if size % 8 else output


def _efficient(inputs: _Inputs) -> Tensor:
    query, key, _ = tensors = inputs[:3]
    needs_statistics = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    mask = inputs.mask
    if mask is not None:
        mask = _aligned(mask).expand(*query.shape[:-1], key.size(-2))
    output: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        *tensors, mask, needs_statistics, inputs.dropout_p, inputs.is_causal, scale=inputs.scale
    )[0]
    return output


def _cudnn(inputs: _Inputs) -> Tensor:
    tensors, mask = inputs[:3], inputs.mask
    assert mask is not None, "without a mask it is treated as flash"
    needs_statistics = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    mask = mask.expand(*inputs.query.shape[:-1], inputs.key.size(-2))
    output: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(*tensors, mask, needs_statistics, inputs.dropout_p, inputs.is_causal), scale=inputs.scale
    )[0]
    return output


def _math(inputs: _Inputs) -> Tensor:
    output: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        *inputs[:6], scale=inputs.scale, enable_gqa=inputs.enable_gqa
    )[0]
    return output


_RUN = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "math": _math}


# preprocess_mask: a mask whose rows are not aligned is copied.
def _aligned(mask: Tensor) -> Tensor:
    if mask.stride(-1) == 1 and all(n % _MASK_ALIGNMENT == 0 for n in mask.stride()[:-1]):
        return mask
    size = mask.size(-1)
    padded = functional.pad(mask, (0, _MASK_ALIGNMENT - size % _MASK_ALIGNMENT))
    return padded[..., :size]
