"""Emulate CUDA's autocast for fake CPU tensors."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from lightning_memsave.measure.storages import operands
from lightning_memsave.prediction.cuda.dispatch import Overrides, operator_named

_KEY = "AutocastCPU"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The lists of `aten/src/ATen/autocast_mode.h`, without operators that CPU autocast treats alike.
_FLOAT32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan softplus
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar layer_norm native_layer_norm rms_norm group_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity dist pdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
    upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
""")
# fp32_set_opt_dtype
_FLOAT32_RESULT = _names("""
    softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
# fp32_append_dtype
_FLOAT32_NORM = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}
# promote
_WIDEST = _names("""
    addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add
""")
# lower_precision_fp
_LOWER = _names("""
    _convolution convolution cudnn_convolution cudnn_convolution_transpose addmv addr mv einsum
    chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
""")
# Only on the CPU's lists, without effect on memory: in low precision both ways, or refused if
# types differ. Not so `cat` and `stack`, which on CUDA copy each type into the result.
_UNCHANGED = _names("""
    _addmm_activation _native_multi_head_attention mkldnn_rnn_layer conv1d.padding conv2d.padding
    conv3d.padding index_copy
""")


def add_autocast(overrides: Overrides) -> None:
    """Override operators so that ``torch.autocast("cpu")`` casts fake tensors as on CUDA."""
    here, there = _registered("AutocastCPU"), _registered("AutocastCUDA")
    for name in there - here:
        kernel = _kernel(name)
        if kernel is not None:  # None for operators that this torch lists and 2.13 does not
            overrides.add(name, _KEY, kernel)
    for name in here - there - _UNCHANGED:
        overrides.add(name, _KEY, None)  # in float32 on a CPU, and not listed on CUDA


def _registered(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _kernel(name: str) -> Callable[..., Any] | None:
    operator = operator_named(name)
    if name in _FLOAT32:
        return functools.partial(_call_cast, operator, lambda _: torch.float32)
    if name in _FLOAT32_RESULT:
        return functools.partial(_call_with_dtype, operator)
    if name in _FLOAT32_NORM:
        return functools.partial(_call_norm, operator, operator_named(_FLOAT32_NORM[name]))
    if name in _WIDEST:
        return functools.partial(_call_cast, operator, _widest)
    if name in _LOWER:
        return functools.partial(_call_cast, operator, lambda _: torch.get_autocast_dtype("cpu"))
    return None


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU))


def _call_cast(
    operator: Any, choose: Callable[[list[Tensor]], torch.dtype], *args: Any, **kwargs: Any
) -> Any:
    dtype = choose([*operands((args, tuple(kwargs.values())))])
    with _without_autocast():
        return operator(
            *(_cast(value, dtype) for value in args),
            **{name: _cast(value, dtype) for name, value in kwargs.items()},
        )


def _call_with_dtype(operator: Any, *args: Any, **kwargs: Any) -> Any:
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if _is_eligible(args[0]) and given.get("dtype") is None:
        given["dtype"] = torch.float32
    with _without_autocast():
        return operator(**given)


def _call_norm(operator: Any, with_dtype: Any, *args: Any) -> Any:
    with _without_autocast():
        if not _is_eligible(args[0]):
            return operator(*args)
        defaults = [argument.default_value for argument in operator._schema.arguments]
        return with_dtype(*args, *defaults[len(args) :], dtype=torch.float32)


def _widest(tensors: list[Tensor]) -> torch.dtype:
    is_float32 = any(_is_eligible(tensor) and tensor.dtype is torch.float32 for tensor in tensors)
    return torch.float32 if is_float32 else torch.get_autocast_dtype("cpu")


def _is_eligible(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_cpu
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if _is_eligible(value):
        return value.to(dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value
