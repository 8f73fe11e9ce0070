"""Memory that an optimizer takes in its first step, taken before anything is changed."""

import inspect
from typing import Any

import torch

from lightning_memsave.techniques._optimizers.kinds import is_low_bit
from lightning_memsave.techniques._weights.rounded_updates import RoundedStep


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of every parameter that has a gradient and no state yet.

    Optimizers make it while they step, some parameter by parameter: where memory runs out half of
    the parameters would be updated, and the step could be neither ended nor repeated. For
    optimizers of other packages nothing is done, as their state is not known.

    Args:
        optimizer: When all gradients are there; what its step computes is not changed.
    """
    for index, group in enumerate(optimizer.param_groups):
        stateless = [
            p for p in group["params"] if p.grad is not None and not optimizer.state.get(p)
        ]
        if not stateless:
            continue
        try:
            _allocate(optimizer, index, group, stateless)
            step = getattr(optimizer, "memsave_parameter_step", None)
            if isinstance(step, RoundedStep):
                for param in stateless:
                    step.allocate(optimizer, param)
        except BaseException:
            # Half a state would be taken for a whole one.
            for param in stateless:
                optimizer.state.pop(param, None)
            raise


def _allocate(
    optimizer: torch.optim.Optimizer,
    index: int,
    group: dict[str, Any],
    stateless: list[torch.Tensor],
) -> None:
    if is_low_bit(optimizer):
        _allocate_low_bit(optimizer, index, group)
    elif type(optimizer) is torch.optim.SGD:
        _allocate_momentum(optimizer, group, stateless)
    elif type(optimizer).__module__.startswith("torch.optim."):
        _initialize(optimizer, group)


def _allocate_low_bit(optimizer: Any, index: int, group: dict[str, Any]) -> None:
    for param_index, param in enumerate(group["params"]):
        if param.grad is not None and not optimizer.state[param]:
            optimizer.init_state(group, param, index, param_index)


# torch begins with a copy of the gradient, which is what zeros become in the first step; with
# dampening they would not.
def _allocate_momentum(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], stateless: list[torch.Tensor]
) -> None:
    if group["momentum"] != 0 and group["dampening"] == 0:
        for param in stateless:
            if not param.grad.is_sparse:  # type: ignore[union-attr] # chosen for having one
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


# What torch's optimizers call at the beginning of each step, with lists to be filled.
def _initialize(optimizer: Any, group: dict[str, Any]) -> None:
    initialize = getattr(optimizer, "_init_group", None)
    if initialize is None:
        return
    parameters = list(inspect.signature(initialize).parameters.values())[1:]
    initialize(group, *([] for p in parameters if p.default is inspect.Parameter.empty))
