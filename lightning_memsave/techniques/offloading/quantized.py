"""Frozen weights of 4 bits, as in bitsandbytes' `Linear4bit`."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave.core.patching import PROCESS_WIDE


def has_4_bits(param: Any) -> bool:
    """Return whether a parameter is a quantized one of 4 bits."""
    return type(param).__name__ == "Params4bit" and param.quant_state is not None


def move_scales(params: Iterable[nn.Parameter], device: torch.device) -> None:
    """Move what quantized weights need beside their 4 bits; it does not wait on the host."""
    for param in filter(has_4_bits, params):
        param.quant_state.to(device)  # type: ignore[attr-defined]


_own: Any = None
_num_users = 0


def save_as_autograd_does() -> Callable[[], None]:
    """Let products with weights of 4 bits save them like all others.

    bitsandbytes keeps them in an attribute of the node, which recomputation cannot free: all
    blocks would stay on the device.
    """
    _count(1)
    return lambda: _count(-1)


def _count(number: int) -> None:
    global _own, _num_users  # noqa: PLW0603 - as the class, they are one for all
    functions = sys.modules.get("bitsandbytes.autograd._functions")
    if functions is None:  # then there is no such weight
        return
    with PROCESS_WIDE:
        product: Any = functions.MatMul4Bit
        _own = _own or (product.forward, product.backward)
        _num_users += number
        both = (_forward, _backward) if _num_users else _own
        product.forward, product.backward = map(staticmethod, both)


def _forward(ctx: Any, *args: Any) -> Any:
    result = _own[0](ctx, *args)
    kept = getattr(ctx, "tensors", None)
    if kept is not None and isinstance(kept[1], Tensor):
        ctx.save_for_backward(kept[1])
        ctx.tensors = None
    return result


def _backward(ctx: Any, gradient: Tensor) -> Any:
    saved = ctx.saved_tensors  # once: recomputation gives them once
    if not saved:
        return _own[1](ctx, gradient)
    ctx.tensors = (None, *saved)
    try:
        return _own[1](ctx, gradient)
    finally:
        ctx.tensors = None
