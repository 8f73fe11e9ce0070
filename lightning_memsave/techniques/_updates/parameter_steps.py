"""Updating one parameter at a time with the optimizer that owns all of them."""

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

ParameterStep = Callable[[Optimizer, nn.Parameter], None]

_ATTRIBUTE = "memsave_parameter_step"
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

# Where each parameter was found last, so that an update does not search all of them.
_POSITIONS: weakref.WeakKeyDictionary[Optimizer, dict[int, tuple[int, int]]] = (
    weakref.WeakKeyDictionary()
)


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
    group = group_of(optimizer, param)
    if not _has_overrides(optimizer):
        run_step(optimizer, group, param)
        return
    # bitsandbytes finds the settings that were overridden by the place in the groups.
    group_index, index = _POSITIONS[optimizer][id(param)]
    before: list[dict[str, Any]] = [{**g, "params": []} for g in optimizer.param_groups]
    padding = [_without_gradient()] * index
    _run(optimizer, [*before[:group_index], {**group, "params": [*padding, param]}])


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
    found = _find(optimizer, param)
    if found is None:
        raise KeyError("the optimizer has no such parameter")
    return found


def owns(optimizer: Optimizer, param: nn.Parameter) -> bool:
    """Say whether a parameter is in one of the groups.

    Args:
        optimizer: The optimizer.
        param: Any parameter.

    Returns:
        True if it is there now.
    """
    return _find(optimizer, param) is not None


def run_step(optimizer: Optimizer, group: Mapping[str, Any], param: nn.Parameter) -> None:
    """Run the optimizer's step for one tensor under the settings of a group.

    Hooks on the step, and the count that schedulers keep of it, are for steps of the whole
    optimizer and do not see this one.

    Args:
        optimizer: Its ``state[param]`` is used, and made if it is missing.
        group: Settings; a copy of it takes the place of all groups during the step.
        param: A tensor with a gradient, which need not be one of the optimizer's own.
    """
    _run(optimizer, [{**group, "params": [param]}])


def _run(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    # What bitsandbytes does in its first step needs all the parameters.
    if getattr(optimizer, "initialized", True) is False and hasattr(optimizer, "to_gpu"):
        optimizer.check_overrides()  # type: ignore[attr-defined]
        optimizer.to_gpu()
        optimizer.initialized = True  # type: ignore[attr-defined]
    own_groups = optimizer.param_groups
    optimizer.param_groups = groups
    try:
        step_without_hooks(optimizer)
    finally:
        optimizer.param_groups = own_groups


def step_without_hooks(optimizer: Optimizer) -> None:
    """Run a step that neither hooks nor schedulers see.

    Args:
        optimizer: All of its parameters that have a gradient are updated.
    """
    step = type(optimizer).step
    # torch wraps the step of each class, once, in one that calls the hooks.
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    # The step of a subclass may call that of its base, which is wrapped as well.
    hooks = {key: vars(optimizer).get(key, {}) for key in _HOOKS}
    vars(optimizer).update({key: {} for key in _HOOKS})
    try:
        step(optimizer)
    finally:
        vars(optimizer).update(hooks)


def _find(optimizer: Optimizer, param: nn.Parameter) -> dict[str, Any] | None:
    groups, table = optimizer.param_groups, _POSITIONS.get(optimizer, {})
    group_index, index = table.get(id(param), (len(groups), 0))
    if group_index < len(groups):
        found: dict[str, Any] = groups[group_index]
        if index < len(found["params"]) and found["params"][index] is param:
            return found
    _POSITIONS[optimizer] = {
        id(p): (i, j) for i, group in enumerate(groups) for j, p in enumerate(group["params"])
    }
    position = _POSITIONS[optimizer].get(id(param))
    return None if position is None else optimizer.param_groups[position[0]]


def _has_overrides(optimizer: Optimizer) -> bool:
    return bool(getattr(getattr(optimizer, "mng", None), "index2config", None))


@functools.cache
def _without_gradient() -> nn.Parameter:
    return nn.Parameter(torch.empty(0), requires_grad=False)
