"""Weights of heads that stay on the host, of which the device has a few rows at a time."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_memsave.core.patching import is_patched_with, own, set_own
from lightning_memsave.errors import IncompatibleError, Problem

HostWeight: TypeAlias = Any
"""A weight (V, D) on the host, which a `HostTable` of `offloading` moves."""

_ASKING: list[Callable[..., Any]] = []
"""Replacements of ``forward`` that ask for host weights themselves."""


def asks_for_host_weights(function: Callable[..., Any]) -> Callable[..., Any]:
    """Note that a replacement of ``forward`` asks for host weights itself."""
    _ASKING.append(function)
    return function


def is_asking(module: nn.Module) -> bool:
    return any(is_patched_with(module, function) for function in _ASKING)


_HOST = "_memsave_host_weight"


def set_host_weight(host: HostWeight) -> Callable[[], None]:
    return set_own(host.weight, _HOST, host)


def host_weight_of(weight: Tensor) -> HostWeight | None:
    return own(weight, _HOST)


def host_linear(x: Tensor, host: HostWeight, bias: Tensor | None) -> Tensor:
    """Compute ``F.linear(x, weight, bias)`` tile by tile of the weight."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    apply: Any = _HostLinear.apply  # untyped in torch
    outputs: Tensor = apply(host, x, host.weight, bias)
    return outputs


class _HostLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, host: HostWeight, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.host = host
        ctx.save_for_backward(x)
        rows = x.flatten(0, -2)
        outputs = x.new_empty(len(rows), len(weight))
        with torch.autocast(x.device.type, enabled=False):
            places = _places(host.weight)
            for place, tile in zip(places, host.tiles(places, x.device), strict=True):
                part = None if bias is None else bias[place]
                outputs[:, place] = nn.functional.linear(rows, tile.to(x.dtype), part)
        return outputs.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise IncompatibleError("offloading", [_TWICE])
        (x,) = ctx.saved_tensors
        host, outer = ctx.host, gradients[0].flatten(0, -2)
        rows = x.flatten(0, -2)
        total = torch.zeros_like(rows, dtype=torch.promote_types(x.dtype, torch.float32))
        places = _places(host.weight)
        for place, tile in zip(places, host.tiles(places, x.device), strict=True):
            part = outer[:, place]
            if ctx.needs_input_grad[1]:
                total += part @ tile.to(x.dtype)
            if ctx.needs_input_grad[2]:
                host.add_gradient(place, (part.t() @ rows).to(host.weight.dtype))
        of_bias = outer.sum(0) if ctx.needs_input_grad[3] else None
        return None, total.to(x.dtype).view_as(x), None, of_bias


_TWICE = Problem(
    "gradients of gradients (`create_graph=True`) of a head on the host",
    "its logits are computed tile by tile, and only have a first derivative",
    'Leave out `"embeddings"`, as in `offload="parameters"`.',
)
_TILE_BYTES = 2**23


def _places(weight: Tensor) -> list[slice]:
    size = max(1, _TILE_BYTES // (weight.shape[1] * weight.element_size()))
    num = len(weight)
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]
