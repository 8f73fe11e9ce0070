"""What parameters cost before the first activation: themselves, gradients, optimizer state."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.explain.parameters import ParameterTable
from lightning_memsave.measure.storages import storages_of, tensors_in
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.techniques.optimizer_tools import allocate_state
from lightning_memsave.units import format_bytes

MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]
"""A class of optimizers, or a function that makes one for a list of parameters."""

# Sides of two squares, of which the difference gives bytes for each number: above 4,096 numbers,
# where 8-bit optimizers begin, and in whole blocks of theirs.
_TRIAL_SIZES = (128, 256)


@dataclass(frozen=True, slots=True)
class FixedCosts:
    """Bytes of parameters, copies, gradients and optimizer state, by module.

    Args:
        optimizer: Its name.
        by_module: Bytes of what each module owns itself.
        parts: What they are costs of.
        remark: What is left out of them, as a clause; empty if nothing is.
    """

    optimizer: str
    by_module: Mapping[str, int]
    parts: tuple[str, ...] = ("parameters", "gradients", "optimizer state")
    remark: str = ""

    @property
    def summary(self) -> str:
        """The parts in words, such as ``"parameters, gradients and optimizer state"``."""
        return " and ".join(filter(None, (", ".join(self.parts[:-1]), self.parts[-1])))

    @property
    def total_bytes(self) -> int:
        """Sum over all modules."""
        return sum(self.by_module.values())

    def of(self, modules: Iterable[str]) -> int:
        """Sum over some modules.

        Args:
            modules: Their names; what is inside them is not counted.

        Returns:
            Bytes; a module that is not known counts as nothing.
        """
        return sum(self.by_module.get(name, 0) for name in set(modules))

    @classmethod
    def from_prediction(cls, prediction: MemoryPrediction, optimizer: str = "") -> Self:
        """Take the costs from a prediction of a training step.

        Args:
            prediction: Whose ``modules`` say what is there at the peak.
            optimizer: Its name; by default what the prediction's settings say.

        Returns:
            The costs at the peak, with a remark on gradients that are not alive then.
        """
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


def fixed_costs(
    table: ParameterTable,
    optimizer: MakeOptimizer | Optimizer = torch.optim.AdamW,
    gradient_bytes_per_parameter: float | None = None,
) -> FixedCosts:
    """Say what each module costs with an optimizer, from the state that this one really makes.

    The optimizer is made for a parameter of each shape on the meta device, where it takes no
    memory; one that cannot run there takes a step with small parameters on the CPU instead.

    Args:
        table: Which parameters there are. Those of a checkpoint all count as trained.
        optimizer: Class, function that makes one, or an instance, whose settings count.
        gradient_bytes_per_parameter: ``None`` for the size of the parameter; 0 where no gradient
            stays, as with an optimizer in backward.

    Returns:
        The costs.

    Raises:
        ConfigurationError: If the optimizer cannot be made or stepped.

    Note:
        Each parameter is looked at alone and in group 0: settings that depend on its name, such as
        32-bit state for embeddings, do not count. A prediction has them.

    Example:
        >>> from lightning_memsave.explain.parameters import parameter_table
        >>> table = parameter_table({"weight": (100, 10)})
        >>> fixed_costs(table, torch.optim.SGD).total_bytes, fixed_costs(table).total_bytes
        (8000, 16004)
    """
    make = _remade(optimizer) if isinstance(optimizer, Optimizer) else optimizer
    name = type(optimizer).__name__ if isinstance(optimizer, Optimizer) else _name_of(make)
    state_bytes: dict[tuple[tuple[int, ...], str], int] = {}
    found: dict[str, int] = {}
    for entry in table.parameters:
        costs = entry.num_bytes
        if entry.is_trainable is not False and entry.num_elements:
            key = (entry.shape or (), entry.dtype)
            if key not in state_bytes:
                state_bytes[key] = _state_bytes(make, key[0], getattr(torch, entry.dtype))
            costs += state_bytes[key]
            costs += (
                entry.num_bytes
                if gradient_bytes_per_parameter is None
                else round(entry.num_elements * gradient_bytes_per_parameter)
            )
        found[entry.module] = found.get(entry.module, 0) + costs
    return FixedCosts(name, found)


def _remade(optimizer: Optimizer) -> MakeOptimizer:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return type(optimizer)(parameters, **optimizer.defaults)

    return make


def _name_of(make: MakeOptimizer) -> str:
    if isinstance(make, type):
        return make.__name__
    try:
        return type(make([nn.Parameter(torch.zeros(2, 2))])).__name__
    except Exception:  # it is said what is wrong where it is needed
        return _name_or_repr(make)


def _state_bytes(make: MakeOptimizer, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    try:
        return _on_meta(make, shape, dtype)
    except Exception:  # whatever a kernel says that has no form without data
        return _from_small_ones(make, shape, dtype)


def _on_meta(make: MakeOptimizer, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    optimizer = make([parameter])
    allocate_state(optimizer)
    if not optimizer.state.get(parameter):
        try:
            optimizer.step()
        except Exception:  # such as Adafactor, which asks for a norm when the state is there
            if not optimizer.state.get(parameter):
                raise
    return _bytes_in(optimizer)


# State that grows with the sum of rows and columns, not with the parameter, would be overestimated;
# the optimizers of torch that have it run on the meta device.
def _from_small_ones(make: MakeOptimizer, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    wanted = torch.Size(shape).numel()
    small, large = (size * size for size in _TRIAL_SIZES)
    if wanted <= large:
        return _of_real_step(make, shape, dtype)
    at_small, at_large = (
        _of_real_step(make, (n,) if len(shape) < 2 else (s, s) + (1,) * (len(shape) - 2), dtype)
        for s, n in zip(_TRIAL_SIZES, (small, large), strict=True)
    )
    return round(at_large + (at_large - at_small) / (large - small) * (wanted - large))


def _of_real_step(make: MakeOptimizer, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about the CPU, where nothing will be trained
            optimizer = make([parameter])
            optimizer.step()
    except Exception as error:
        raise ConfigurationError(
            f"The state of `{_name_or_repr(make)}` cannot be read, as a step with a parameter of "
            f"shape {shape} fails ({error}). Pass a class of optimizers or a function of a list of "
            "parameters, such as `torch.optim.AdamW`."
        ) from error
    return _bytes_in(optimizer)


def _name_or_repr(make: MakeOptimizer) -> str:
    return getattr(make, "__name__", "") or repr(make)


def _bytes_in(optimizer: Optimizer) -> int:
    return sum(storage.nbytes() for storage in _storages(optimizer))


def _storages(optimizer: Optimizer) -> Iterator[torch.UntypedStorage]:
    seen = set()
    state: list[Tensor] = list(tensors_in(list(optimizer.state.values())))
    for tensor in state:
        for storage in storages_of(tensor):
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage
