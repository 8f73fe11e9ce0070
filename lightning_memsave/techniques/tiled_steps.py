"""Update bfloat16 parameters in float32, large ones tile by tile."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave.core.memory import each_part, is_host, on_cuda
from lightning_memsave.techniques.muon import is_of_muon
from lightning_memsave.techniques.optimizer_kinds import BLOCKSIZE, ELEMENTWISE, is_low_bit
from lightning_memsave.techniques.optimizer_step import run_step

MIN_TILE_NUMEL = 2**20
MAX_TILE_NUMEL = 2**22
"""A tile is an eighth of its parameter between these limits: 4 to 16 MiB in float32."""
CUDA_FACTOR = 4
"""On a GPU tiles are larger: smaller ones take less time to run than to launch."""


class Weights(NamedTuple):
    load: Callable[[Any], Tensor]
    store: Callable[[Any, Tensor], None]


class Values(NamedTuple):
    """Numbers that an optimizer updates in the place of a parameter, or of a part of it."""

    group: Mapping[str, Any]
    values: Tensor
    grad: Tensor
    state: dict[str, Any]


def is_tiled(optimizer: Optimizer, param: nn.Parameter) -> bool:
    # bitsandbytes' own classes may use norms of updates.
    is_elementwise = type(optimizer) in ELEMENTWISE or is_low_bit(optimizer)
    if not is_elementwise or is_of_muon(optimizer, param) or param.numel() <= _tile_numel(param):
        return False
    tensors = [param, *(v for v in optimizer.state[param].values() if isinstance(v, Tensor))]
    is_dense = param.grad is not None and not param.grad.is_sparse
    return is_dense and all(tensor.is_contiguous() for tensor in tensors)


def step_whole(
    optimizer: Optimizer, group: Mapping[str, Any], param: nn.Parameter, weights: Weights
) -> None:
    values = weights.load(...)
    step_values(optimizer, group, values, _gradient(param).float(), optimizer.state[param])
    weights.store(..., values)


def step_in_tiles(
    optimizer: Optimizer, group: Mapping[str, Any], param: nn.Parameter, weights: Weights
) -> None:
    state, grad = optimizer.state[param], _gradient(param).reshape(-1)
    new_state: dict[str, Any] = {}
    size, numel = _tile_numel(param), param.numel()

    def step_tile(part: slice) -> None:
        values = weights.load(part)
        # Without state, the optimizer initializes it for each tile.
        before = {key: _cut(key, value, numel, part) for key, value in state.items()}
        after = step_values(optimizer, group, values, grad[part].float(), dict(before))
        weights.store(part, values)
        for key, value in after.items():
            whole = new_state.get(key)
            whole = state.get(key) if whole is None else whole
            if whole is None and isinstance(value, Tensor) and value.numel() == values.numel():
                whole = torch.empty_like(param, dtype=value.dtype)
            view = None if whole is None else _view(key, whole, numel, part)
            if view is not None and (value is not before.get(key) or not view.is_contiguous()):
                view.copy_(value)
            new_state[key] = value if view is None else whole

    each_part(param, numel, size, step_tile, is_first_apart=not state)
    state.update(new_state)


def step_values(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    values: Tensor,
    grad: Tensor,
    state: dict[str, Any],
) -> dict[str, Any]:
    """Update values in place; return the state that they have then."""
    (after,) = step_together(optimizer, [Values(group, values, grad, state)])
    return after


def step_together(optimizer: Optimizer, several: Sequence[Values]) -> list[dict[str, Any]]:
    """Update values in place, in one step; return the states that they have then."""
    for each in several:
        each.values.grad = each.grad
        optimizer.state[each.values] = each.state
    try:
        run_step(optimizer, [(each.group, each.values) for each in several])
    finally:
        after = [optimizer.state.pop(each.values) for each in several]
        for each in several:
            each.values.grad = None
    return after


def _view(key: str, value: Any, numel: int, part: slice) -> Tensor | None:
    """Return the view of a state tensor for a slice of the parameter; ``None`` if it has none."""
    if not isinstance(value, Tensor) or key.startswith("qmap"):
        return None
    if key.startswith("absmax"):
        numel = -(-numel // BLOCKSIZE)
        part = slice(part.start // BLOCKSIZE, -(-part.stop // BLOCKSIZE))
    if value.numel() == 1:
        return None
    return value.view(-1)[part]


def _cut(key: str, value: Any, numel: int, part: slice) -> Any:
    """Return the state of a slice of the parameter, as the optimizer expects it."""
    view = _view(key, value, numel, part)
    if view is None:
        # A step count must not count tiles; tables are shared.
        return value.clone() if isinstance(value, Tensor) and value.numel() == 1 else value
    cut: Any = view.contiguous()
    if getattr(value, "is_paged", False):  # pragma: no cover (gpu)
        # bitsandbytes' marks of paged memory; without them it would allocate new pages.
        cut.is_paged, cut.page_deviceid = True, value.page_deviceid
    return cut


def _gradient(param: nn.Parameter) -> Tensor:
    assert param.grad is not None, "only parameters with a gradient are updated"
    return param.grad


def _tile_numel(param: nn.Parameter) -> int:
    # Tiles must not split a block of 8-bit state.
    is_on_gpu = on_cuda(param) and not is_host(param.untyped_storage())
    factor = CUDA_FACTOR if is_on_gpu else 1
    share = factor * param.numel() // 8 // BLOCKSIZE * BLOCKSIZE
    return max(factor * MIN_TILE_NUMEL, min(share, factor * MAX_TILE_NUMEL))
