"""8-bit state of sharded parameters: each process keeps that of its own shard.

Whether a parameter has 8-bit state is decided by its whole size, and so is the same for any number
of processes. `state_dict` has torch's 32-bit format, sharded as the parameters are: it is gathered,
saved and loaded like any other, also by another number of processes, and on one device.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from lightning_memsave.techniques.parameter_names import is_dtensor


def are_sharded(params: Iterable[torch.Tensor]) -> bool:
    return any(map(is_dtensor, params))


@contextlib.contextmanager
def local_shard(optimizer: Any, param: Any) -> Iterator[torch.Tensor]:
    """Give what this process holds of a parameter, with its gradient and its state."""
    if not is_dtensor(param):
        yield param
        return
    local = param.to_local().detach()
    local.grad = param.grad.redistribute(placements=param.placements).to_local()
    optimizer.state[local] = optimizer.state[param]
    try:
        yield local
    finally:
        del optimizer.state[local]


def as_sharded(state: Mapping[str, Any], param: Any) -> dict[str, Any]:
    """Shard the tensors of a local state as the parameter is."""
    if not is_dtensor(param):
        return {**state}
    shape = param.to_local().shape
    return {
        key: type(param).from_local(
            value.view(shape),
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
        if isinstance(value, torch.Tensor) and value.ndim
        else value
        for key, value in state.items()
    }


def as_local(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.to_local() if is_dtensor(v) else v for k, v in state.items()}
