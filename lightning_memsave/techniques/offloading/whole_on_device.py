"""Update what waits on the host with the device's kernels, one whole parameter at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path, tree_map_with_path, tree_unflatten

from lightning_memsave.core.memory import counted_as, is_fake
from lightning_memsave.techniques.flat_memory import is_in_piece
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.offloading.device_tiles import (
    SCALARS,
    Update,
    has_scalars_on_device,
)
from lightning_memsave.techniques.offloading.halves import join_weight, split_weight
from lightning_memsave.techniques.optimizer_kinds import EACH_ALONE
from lightning_memsave.techniques.optimizer_step import group_of, updates_each_alone
from lightning_memsave.techniques.tiled_steps import step_values


def is_updated_whole(optimizer: Optimizer) -> bool:
    """Return whether the device updates each parameter alone that no tiles are made for.

    What ``NamedOptimizer`` makes has the bits that it has without offloading.
    """
    return bool(vars(optimizer).get(EACH_ALONE))


def step_on_device(
    optimizer: Optimizer, updates: Sequence[Update], device: torch.device, memory: HostMemory
) -> None:
    """Update parameters on the device, one after the other; new values are on the host then."""
    for update in updates:
        _step(optimizer, update, device, memory)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _step(optimizer: Any, update: Update, device: torch.device, memory: HostMemory) -> None:
    stand_in, part, param = update
    group, state = group_of(optimizer, stand_in), optimizer.state[stand_in]
    halves = part.halves_of(param)

    def bring(path: Any, value: Any) -> Any:
        if not isinstance(value, Tensor) or _stays(optimizer, group, path[0].key, value):
            return value
        return _on_device(value, device)

    with counted_as("temporary"):
        weights = [_on_device(half, device) for half in halves]
        values = nn.Parameter(join_weight(*weights) if len(weights) > 1 else weights[0])
        # Attributes that a project has given to its parameter are read by some classes.
        vars(values).update({k: v for k, v in vars(param).items() if not k.startswith("_memsave")})
        assert stand_in.grad is not None, "only parameters with a gradient are updated"
        grad = _on_device(stand_in.grad, device).to(values.dtype)
        after = step_values(optimizer, group, values, grad, tree_map_with_path(bring, state))
        if len(weights) > 1:
            split_weight(values.data, *weights)
    for half, weight in zip(halves, weights, strict=True):
        half.copy_(weight, non_blocking=True)
    landed = _landed(state, after, memory)
    state.clear()
    state.update(landed)


def lock_loaded(optimizer: Any, param: nn.Parameter, memory: HostMemory) -> None:
    """Lock numbers of a loaded state that torch would have moved to the device."""
    group = group_of(optimizer, param)
    is_here = bool(group.get("capturable") or group.get("fused"))

    def lock(path: Any, value: Any) -> Any:
        is_number = _is_plain(value) and not value.ndim and not is_in_piece(value)
        if not is_number or (path[0].key == "step" and not is_here):
            return value
        return memory.tensors_like([value])[0].copy_(value)

    state = optimizer.state[param]
    state.update(tree_map_with_path(lock, dict(state)))


# Numbers that a class has made on the host stay there: the others are in memory for the device.
def _stays(optimizer: Any, group: Mapping[str, Any], key: str, value: Tensor) -> bool:
    if value.ndim:
        return False
    if key in SCALARS and updates_each_alone(optimizer):
        return not has_scalars_on_device(optimizer, group)
    return not is_in_piece(value)


def _is_plain(value: Any) -> bool:
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided
    return is_dense and (type(value) in (Tensor, nn.Parameter) or is_fake(value))


def _on_device(source: Tensor, device: torch.device) -> Tensor:
    if not _is_plain(source):
        return source.to(device)
    target = torch.empty_like(source, device=device)
    return target.copy_(source, non_blocking=True)


def _landed(state: Any, after: Any, memory: HostMemory) -> Any:
    """Give a state with tensors of the host, in the memory that they had where they fit."""
    before = dict(tree_flatten_with_path(state)[0])
    pairs, spec = tree_flatten_with_path(after)
    leaves: list[Any] = [value for _, value in pairs]
    new: list[int] = []
    for index, (path, value) in enumerate(pairs):
        there: Any = before.get(path)
        is_there = there is value or not isinstance(value, Tensor)
        if is_there or (value.device.type == "cpu" and not is_fake(value)):
            continue
        if not _is_plain(value):
            leaves[index] = value.cpu()
        elif _form_of(there) == _form_of(value) and is_in_piece(there):
            leaves[index] = there.copy_(value, non_blocking=True)
        else:
            new.append(index)
    made = memory.tensors_like([leaves[index] for index in new])
    for index, target in zip(new, made, strict=True):
        leaves[index] = target.copy_(leaves[index], non_blocking=True)
    return tree_unflatten(leaves, spec)


def _form_of(value: Any) -> Any:
    is_tensor = isinstance(value, Tensor)
    return (value.shape, value.dtype, value.stride()) if is_tensor else None
