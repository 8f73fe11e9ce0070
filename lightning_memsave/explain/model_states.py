"""What parameters cost before the first activation: themselves, gradients, optimizer state."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.measure.parameters import ParameterTable, TensorEntry
from lightning_memsave.measure.storages import storages_of, tensors_in
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.techniques.optimizer_step import allocate_state
from lightning_memsave.units import format_bytes

MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]
"""A class of optimizers, or a function that makes one for a list of parameters."""


@dataclass(frozen=True, slots=True)
class ModelStates:
    optimizer: str
    by_module: Mapping[str, int]
    parts: tuple[str, ...] = ("parameters", "gradients", "optimizer state")
    remark: str = ""

    @property
    def summary(self) -> str:
        return " and ".join(filter(None, (", ".join(self.parts[:-1]), self.parts[-1])))

    @property
    def total_bytes(self) -> int:
        return sum(self.by_module.values())

    def of(self, modules: Iterable[str]) -> int:
        return sum(self.by_module.get(name, 0) for name in set(modules))

    @classmethod
    def from_prediction(cls, prediction: MemoryPrediction, optimizer: str = "") -> Self:
        found: dict[str, int] = {}
        for module in prediction.modules:
            found[module.name] = sum(_sizes(module.memory).values())
        parts = tuple(part for part, size in _sizes(prediction.peak).items() if size)
        alive = prediction.peak.gradient_bytes
        whole = max([m.gradient_bytes for m in prediction.by_phase.values()], default=0)
        remark = ""
        if not alive and whole:
            remark = f"the gradients, {format_bytes(whole)}, are not alive then"
        elif alive < whole:
            remark = f"of the gradients {format_bytes(alive)} of {format_bytes(whole)} are alive"
        name = optimizer or prediction.settings.get("optimizer", "the optimizer")
        return cls(name, found, parts or ("parameters",), remark)


def _sizes(memory: MemoryBreakdown) -> dict[str, int]:
    return {
        "parameters": memory.parameter_bytes,
        "copies of weights": memory.weight_copy_bytes,
        "gradients": memory.gradient_bytes,
        "optimizer state": memory.optimizer_state_bytes,
    }


def model_states(
    table: ParameterTable, optimizer: MakeOptimizer | Optimizer = torch.optim.AdamW
) -> ModelStates:
    """Say what each module costs with an optimizer, from the state that it really makes.

    The optimizer is made for copies of the parameters on the meta device, which use no memory.

    Note:
        All parameters are in group 0 and have no names: settings that depend on these, such as
        32-bit state for embeddings, do not count. A prediction has them.
    """
    copies = {entry.name: _copy(entry) for entry in table.parameters if _is_trained(entry)}
    name, state = _state_of(optimizer, list(copies.values()))
    by_module: dict[str, int] = {}
    for entry in table.parameters:
        num_bytes = entry.num_bytes
        if entry.name in copies:
            num_bytes += entry.num_bytes + _bytes_in(state.get(copies[entry.name]))
        by_module[entry.module] = by_module.get(entry.module, 0) + num_bytes
    return ModelStates(name, by_module)


def _is_trained(entry: TensorEntry) -> bool:
    is_float = getattr(torch, entry.dtype).is_floating_point
    return entry.is_trainable is not False and entry.num_elements > 0 and is_float


def _copy(entry: TensorEntry) -> nn.Parameter:
    empty = torch.empty(entry.shape or (), dtype=getattr(torch, entry.dtype), device="meta")
    copy = nn.Parameter(empty)
    copy.grad = torch.empty_like(empty)
    return copy


def _state_of(
    optimizer: MakeOptimizer | Optimizer, parameters: list[nn.Parameter]
) -> tuple[str, Mapping[Tensor, Any]]:
    make: Any = optimizer
    if isinstance(optimizer, Optimizer):
        make = functools.partial(type(optimizer), **optimizer.defaults)
    name = getattr(optimizer, "__name__", type(optimizer).__name__)
    if not parameters:
        return name, {}
    try:
        made = make(parameters)
        allocate_state(made)
        if not made.state:  # of another package, or without state
            made.step()
    except Exception as error:
        raise ConfigurationError(
            f"The state of `{name}` cannot be read without a training step "
            f"({error}). Give a batch, so that its step is predicted, or an optimizer that can be "
            "made for a list of parameters, such as `torch.optim.AdamW`."
        ) from error
    return type(made).__name__, made.state


def _bytes_in(state: object) -> int:
    storages = {s._cdata: s for tensor in tensors_in(state) for s in storages_of(tensor)}
    return sum(storage.nbytes() for storage in storages.values())
