"""Updating one parameter at a time with the optimizer that owns all of them."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

ParameterStep = Callable[[Optimizer, nn.Parameter], None]

_ATTRIBUTE = "memsave_parameter_step"


def step_parameter(optimizer: Optimizer, param: nn.Parameter) -> None:
    """Update one parameter as ``optimizer.step()`` would, and no other.

    Args:
        optimizer: One that treats each parameter on its own.
        param: One of its parameters, with a gradient.
    """
    step = vars(optimizer).get(_ATTRIBUTE, plain_step)
    step(optimizer, param)


def set_parameter_step(optimizer: Optimizer, step: ParameterStep) -> Callable[[], None]:
    """Give an optimizer another way to update one parameter.

    Args:
        optimizer: The optimizer.
        step: Takes the optimizer and a parameter; it can be pickled.

    Returns:
        A function that takes it back.
    """
    own = vars(optimizer)
    own[_ATTRIBUTE] = step

    def undo() -> None:
        if own.get(_ATTRIBUTE) is step:
            del own[_ATTRIBUTE]

    return undo


def plain_step(optimizer: Optimizer, param: nn.Parameter) -> None:
    """Update one parameter with the optimizer's own code.

    Args:
        optimizer: One that treats each parameter on its own.
        param: One of its parameters, with a gradient.
    """
    run_step(optimizer, group_of(optimizer, param), param)


def group_of(optimizer: Optimizer, param: nn.Parameter) -> dict[str, Any]:
    """Find the group of a parameter.

    Args:
        optimizer: The optimizer.
        param: One of its parameters.

    Returns:
        The group itself, so that what schedulers write into it is seen.

    Raises:
        KeyError: If the optimizer has no such parameter.
    """
    for group in optimizer.param_groups:
        if any(param is other for other in group["params"]):
            found: dict[str, Any] = group
            return found
    raise KeyError("the optimizer has no such parameter")


def run_step(optimizer: Optimizer, group: Mapping[str, Any], param: nn.Parameter) -> None:
    """Run the optimizer's step for one tensor under the settings of a group.

    Hooks on the step, and the count that schedulers keep of it, are for steps of the whole
    optimizer and do not see this one.

    Args:
        optimizer: Its ``state[param]`` is used, and made if it is missing.
        group: Settings; a copy of it takes the place of all groups during the step.
        param: A tensor with a gradient, which need not be one of the optimizer's own.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": [param]}]
    step = type(optimizer).step
    # torch wraps the step of each class, once, in one that calls the hooks.
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    try:
        step(optimizer)
    finally:
        optimizer.param_groups = groups
