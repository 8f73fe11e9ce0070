"""Emulate the memory of CUDA kernels for fake CPU tensors."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _foreach_utils

from lightning_memsave.core.memory import emulating_cuda
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.prediction.cuda.attention import KERNELS, Attention
from lightning_memsave.prediction.cuda.autocast import add_autocast
from lightning_memsave.prediction.cuda.dispatch import Overrides, operator_named
from lightning_memsave.prediction.cuda.scratch import Multiprocessors, add_scratch
from lightning_memsave.prediction.fake.tensors import replaced

_KEY = "AutogradCPU"


def add_operators(overrides: Overrides) -> None:
    """Override operators so that they save for backward what CUDA's kernels save."""
    overrides.add("dropout", _KEY, _dropout)
    overrides.add("linear", _KEY, _linear)
    overrides.add("_fused_rms_norm", _KEY, _fused_rms_norm)
    for name in ("softmax", "log_softmax"):
        fused = operator_named(f"_{name}")
        overrides.add(f"{name}.int", _KEY, functools.partial(_softmax, fused))


# `linear` in Linear.cpp: a bias that no product takes along is added in place, but not to fake
# tensors.
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    is_flat = input.dim() == 2 or (input.dim() == 3 and input.is_contiguous())
    if bias is None or not is_flat:
        product = input.matmul(weight.t())
        return product if bias is None else product.add_(bias)
    flat = torch.addmm(bias, input.reshape(-1, input.size(-1)), weight.t())
    return flat.view(*input.shape[:-1], flat.size(-1))


# native_dropout, `dropout` in Dropout.cpp: a mask of one byte per element.
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


# A single kernel on CUDA, several operators on a CPU.
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


_CHOICE = "_default_to_fused_or_foreach"

Choice = Callable[..., tuple[bool, bool]]


@contextlib.contextmanager
def foreach_optimizers() -> Iterator[None]:
    """Let optimizers and gradient clipping use their ``foreach`` implementation on fake tensors.

    It is the default on CUDA and needs temporaries of the size of all parameters; the default on a
    CPU, a loop, needs those of one parameter.
    """
    types: list[type[Tensor]] = _foreach_utils._foreach_supported_types
    with contextlib.ExitStack() as undo:
        for name, module in list(sys.modules.items()):
            choice = getattr(module, _CHOICE, None) if name.startswith("torch.optim.") else None
            if choice is not None:  # every optimizer module has imported the name
                undo.enter_context(replaced(module, _CHOICE, _like_cuda(choice)))
        types.append(FakeTensor)
        undo.callback(types.remove, FakeTensor)
        yield


# torch refuses it on a CPU. It keeps what batch norm keeps, and what processes tell is small.
def _sync_batch_norm(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    forward = _BatchNorm.forward if isinstance(input, FakeTensor) else _sync_forward
    return forward(self, input)


_sync_forward = nn.SyncBatchNorm.forward


def _like_cuda(choice: Choice) -> Choice:
    def choose(
        params: list[Tensor | None], differentiable: bool, use_fused: bool = False
    ) -> tuple[bool, bool]:
        if differentiable or not all(p is None or isinstance(p, FakeTensor) for p in params):
            return choice(params, differentiable, use_fused)
        is_fused = use_fused and all(p is None or p.is_floating_point() for p in params)
        return is_fused, not is_fused

    return choose


ASSUMPTIONS: tuple[str, ...] = (
    "Dropout keeps a mask of one byte per element.",
    "Attention (`scaled_dot_product_attention`) uses torch's flash kernel in float16 and bfloat16 "
    "without mask, else its memory-efficient kernel, and plain matrix products if neither supports "
    "the arguments. cuDNN's kernel, which Hopper and Blackwell prefer, is treated as flash without "
    "a mask, and does not copy a mask.",
    "Autocast follows CUDA's lists: layer norm, softmax, powers, sums and losses in float32.",
    "Layer norm keeps its statistics in float32; RMS norm is a single kernel.",
    "Optimizers and gradient clipping use the `foreach` implementation unless set otherwise.",
    "Sums, means, norms, and backward of attention and of embeddings need the scratch memory that "
    "torch 2.14 allocates.",
    "Not counted: scratch memory of other kernels, and allocations of libraries other than torch.",
)


@contextlib.contextmanager
def cuda_kernels(
    attention: str | None = None,
    *,
    capability: tuple[int, int] = (8, 0),
    num_multiprocessors: int | None = None,
) -> Iterator[None]:
    """Let fake CPU tensors need the memory that they would need on CUDA.

    Changes what is saved for backward (dropout, attention, normalisation, casts of autocast) and
    temporaries (optimizer, reductions, backward of attention and embeddings); see `ASSUMPTIONS`.
    Costs a few microseconds per operator.

    Note:
        Enter it inside ``FakeTensorMode``, before contexts that count memory; statistics of layer
        norm are right inside `fake_tensors`. It overrides
        operators in torch's dispatcher for the whole process, for fake tensors only.
    """
    if attention is not None and attention not in KERNELS:
        raise ConfigurationError(
            f"`attention={attention!r}` is not an attention kernel of CUDA. "
            f"Use one of {', '.join(map(repr, KERNELS))}, or `None` for torch's choice."
        )
    with contextlib.ExitStack() as undo:
        overrides = Overrides()
        undo.callback(overrides.undo)
        attend = Attention(attention, capability)
        overrides.add("scaled_dot_product_attention", _KEY, attend)
        add_operators(overrides)
        add_autocast(overrides)
        number = num_multiprocessors or _NUM_MULTIPROCESSORS
        add_scratch(overrides, Multiprocessors(number, capability))
        undo.enter_context(foreach_optimizers())
        undo.enter_context(replaced(nn.SyncBatchNorm, "forward", _sync_batch_norm))
        undo.enter_context(emulating_cuda())
        yield


_NUM_MULTIPROCESSORS = 108


def module_assumptions(modules: Iterable[nn.Module], operators: Iterable[str]) -> tuple[str, ...]:
    lines = []
    if any("convolution" in operator for operator in operators):
        lines.append(
            "Not counted: cuDNN's workspaces while a convolution runs: from nothing to several "
            "GiB, and larger with `torch.backends.cudnn.benchmark`."
        )
    if any(isinstance(module, nn.RNNBase) for module in modules):
        lines.append(
            "Recurrent layers are assumed to save for backward what they save on a CPU; cuDNN's "
            "reserve space has another layout and may be 30 to 100 % larger or smaller. Its "
            "workspaces are not counted."
        )
    return tuple(lines)
