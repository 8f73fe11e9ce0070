"""Let modules with bfloat16 weights compute under autocast wherever they are called."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

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


def _before_call(module: nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling():
        return
    context = None
    if not _is_in_autocast():
        residence = residence_of(module)
        device = next(module.parameters()).device if residence is None else residence.device
        context = torch.autocast(device.type, torch.bfloat16)
        context.__enter__()
    _CALLS.entered.append((module, context))


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
