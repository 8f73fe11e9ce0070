"""Modules with bfloat16 weights that can be called where Lightning has not entered autocast."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_memsave.core.patching import is_undone, patch_method, previous_method


def autocast_calls(model: nn.Module) -> list[Callable[[], None]]:
    """Let each module with bfloat16 weights enter autocast, where nobody has entered or left it.

    Lightning enters it around the steps alone. In other hooks and in callbacks, which sample or
    generate, layers would refuse weights of two types. All modules are meant and not only the
    outermost, as methods such as ``encode`` call those inside.

    Args:
        model: Of which modules are called. Inside of steps nothing changes.

    Returns:
        Functions that take it back.
    """
    return [
        patch_method(module, _Called._call_impl)
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule) and _device_of_bf16(module) is not None
    ]


# Around the call and not around `forward`, which checkpointing and others replace. Not as hooks:
# torch's transformer layers compute otherwise in evaluation while they have any.
class _Called:
    @staticmethod
    def _call_impl(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        run = previous_method(module, "_call_impl")
        # While it compiles, it is inside of a call that has been here.
        if torch.compiler.is_compiling() or _is_decided() or is_undone(module, "_call_impl"):
            return run(*args, **kwargs)
        device = _device_of_bf16(module)
        if device is None:  # a copy that somebody has made float32
            return run(*args, **kwargs)
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):  # as Lightning does
            return run(*args, **kwargs)


# Also true inside of `autocast(enabled=False)`, with which somebody has said what he wants.
def _is_decided() -> bool:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0


def _device_of_bf16(module: nn.Module) -> str | None:
    params = module.parameters()
    return next((p.device.type for p in params if p.dtype is torch.bfloat16), None)
