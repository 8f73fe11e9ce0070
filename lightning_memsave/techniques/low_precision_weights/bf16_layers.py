"""Let modules compute in bfloat16: calls under autocast, and layers that autocast widens."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_memsave.core.patching import kept_in_copies, patch_method, previous_method
from lightning_memsave.techniques.residences import residence_of


class _Calls(threading.local):
    """Calls of this thread, each with the context that it entered."""

    def __init__(self) -> None:
        self.entered: list[tuple[nn.Module, torch.autocast | None]] = []


_CALLS = _Calls()


def compute_in_autocast(
    model: nn.Module, params: Iterable[nn.Parameter]
) -> list[Callable[[], None]]:
    """Let calls of modules enter bfloat16 autocast outside of it.

    Lightning enters it around the steps only, and layers fail on weights of two types without it.
    Layers within a block are not watched, as they are called inside of it, and each hook costs
    time in each step.
    """
    chosen = {id(param) for param in params}
    blocks = [item for m in model.modules() if isinstance(m, nn.ModuleList) for item in m]
    layers = {
        id(layer)
        for block in blocks
        for layer in block.modules()
        if layer is not block and not any(True for _ in layer.children())
    }
    undo: list[Callable[[], None]] = []
    for module in model.modules():
        is_watched = id(module) not in layers and not isinstance(module, torch.jit.ScriptModule)
        if is_watched and any(id(param) in chosen for param in module.parameters()):
            undo += [
                module.register_forward_pre_hook(_before_call).remove,
                module.register_forward_hook(_after_call, always_call=True).remove,
            ]
    return undo


def _has_bfloat16(module: nn.Module) -> bool:
    return any(param.dtype is torch.bfloat16 for param in module.parameters())


@kept_in_copies(_has_bfloat16)
def _before_call(module: nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling():
        return
    residence, context = residence_of(module), None
    # A copy may be float32 again.
    if not _is_in_autocast() and (residence is not None or _has_bfloat16(module)):
        device = next(module.parameters()).device if residence is None else residence.device
        context = torch.autocast(device.type, torch.bfloat16)
        context.__enter__()
    _CALLS.entered.append((module, context))


@kept_in_copies(_has_bfloat16)
def _after_call(module: nn.Module, *_: Any) -> None:
    # Not of this call, where another hook raised an error before ours was called.
    if torch.compiler.is_compiling() or not _CALLS.entered or _CALLS.entered[-1][0] is not module:
        return
    context = _CALLS.entered.pop()[1]
    if context is not None:
        context.__exit__(None, None, None)


# Also where the user has switched it off inside: there a layer has to fail, as it would not compute
# in float32, which is what is asked for.
def _is_in_autocast() -> bool:
    depth: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1


_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
# Hugging Face's tanh-approximated GELUs, which consist of several operators.
_COMPOSITE_GELUS = ("NewGELUActivation", "FastGELUActivation", "GELUTanh")


def keep_in_bfloat16(module: nn.Module) -> list[Callable[[], None]]:
    """Let normalization layers and GELUs return bfloat16 for bfloat16 inputs.

    On CUDA, autocast runs normalization and powers (the first operator of GPT-2's activation) in
    float32, so their outputs are float32 and saved as such. Here normalization uses bfloat16 copies
    of its weights, and the activation uses torch's kernel. Both compute in float32 inside.
    """
    undo = []
    for child in module.modules():
        if "forward" in vars(child):  # patched already
            continue
        if type(child) in _NORMS:
            undo.append(patch_method(child, _Norm.forward))
        elif type(child).__name__ in _COMPOSITE_GELUS and type(child).__module__.startswith(
            "transformers."
        ):
            undo.append(patch_method(child, _GELU.forward))
    return undo


# `patch_method` needs functions named "forward".
class _Norm:
    @staticmethod
    def forward(layer: Any, /, input: Tensor) -> Tensor:
        if not _keeps_bfloat16(layer, input):
            return _as_before(layer, input)
        weight = None if layer.weight is None else layer.weight.to(input.dtype)
        bias = getattr(layer, "bias", None)
        bias = None if bias is None else bias.to(input.dtype)
        with torch.autocast(input.device.type, enabled=False):
            if isinstance(layer, nn.GroupNorm):
                return functional.group_norm(input, layer.num_groups, weight, bias, layer.eps)
            if isinstance(layer, nn.LayerNorm):
                shape = layer.normalized_shape
                return functional.layer_norm(input, shape, weight, bias, layer.eps)
            return functional.rms_norm(input, layer.normalized_shape, weight, layer.eps)


class _GELU:
    @staticmethod
    def forward(layer: Any, /, input: Tensor) -> Tensor:
        if not _keeps_bfloat16(layer, input):
            return _as_before(layer, input)
        return functional.gelu(input, approximate="tanh")


def _keeps_bfloat16(layer: nn.Module, input: Tensor) -> bool:
    device = input.device.type
    return (
        input.dtype is torch.bfloat16
        and torch.is_autocast_enabled(device)
        and torch.get_autocast_dtype(device) is torch.bfloat16
    )


def _as_before(layer: nn.Module, input: Tensor) -> Tensor:
    output: Tensor = previous_method(layer, "forward")(input)
    return output


def sum_in_float32(params: Iterable[nn.Parameter]) -> list[Callable[[], None]]:
    chosen = [p for p in params if p.dtype is torch.bfloat16 and p.grad_dtype is not torch.float32]

    def set_dtype(dtype: torch.dtype) -> None:
        for param in chosen:
            # Skip weights that are float32 again.
            if param.dtype is torch.bfloat16 or dtype is torch.float32:
                grad = None if param.grad is None else param.grad.to(dtype)
                param.grad = None
                param.grad_dtype = dtype
                param.grad = grad

    set_dtype(torch.float32)
    return [lambda: set_dtype(torch.bfloat16)]
