"""Update parameters in backward through hooks on their gradients."""

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.optimizer_in_backward.held_gradients import HeldGradients

ParameterStep = Callable[[Optimizer, nn.Parameter], None]

_ATTRIBUTE = "memsave_parameter_step"
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

# Cached positions of parameters in groups, so that an update does not search all of them.
_POSITIONS: weakref.WeakKeyDictionary[Optimizer, dict[int, tuple[int, int]]] = (
    weakref.WeakKeyDictionary()
)


def step_parameter(optimizer: Optimizer, param: nn.Parameter) -> None:
    """Update one parameter as ``optimizer.step()`` would, and no other.

    Args:
        optimizer: An optimizer that does not couple parameters.
        param: One of its parameters, with a gradient.
    """
    step = vars(optimizer).get(_ATTRIBUTE, plain_step)
    step(optimizer, param)


def set_parameter_step(optimizer: Optimizer, step: ParameterStep) -> Callable[[], None]:
    """Replace the function with which an optimizer updates one parameter.

    Args:
        optimizer: The optimizer.
        step: Called with the optimizer and a parameter; must be picklable.

    Returns:
        A function that undoes it.
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
        optimizer: An optimizer that does not couple parameters.
        param: One of its parameters, with a gradient.
    """
    run_step(optimizer, group_of(optimizer, param), param)


def group_of(optimizer: Optimizer, param: nn.Parameter) -> dict[str, Any]:
    """Find the group of a parameter.

    Args:
        optimizer: The optimizer.
        param: One of its parameters.

    Returns:
        The group itself, with the current values of schedulers.

    Raises:
        KeyError: If the optimizer has no such parameter.
    """
    found = _find(optimizer, param)
    if found is None:
        raise KeyError("the optimizer has no such parameter")
    return found


def owns(optimizer: Optimizer, param: nn.Parameter) -> bool:
    """Return whether a parameter is in one of the optimizer's groups."""
    return _find(optimizer, param) is not None


def run_step(optimizer: Optimizer, group: Mapping[str, Any], param: nn.Parameter) -> None:
    """Run the optimizer's step for one tensor under the settings of a group.

    Step hooks and the step count of schedulers belong to steps of the whole optimizer and are
    bypassed.

    Args:
        optimizer: Its ``state[param]`` is used, and created if it is missing.
        group: Settings; a copy of it replaces all groups during the step.
        param: A tensor with a gradient, not necessarily one of the optimizer's own.
    """
    # The initialization of bitsandbytes needs all parameters.
    if getattr(optimizer, "initialized", True) is False and hasattr(optimizer, "to_gpu"):
        optimizer.check_overrides()  # type: ignore[attr-defined]
        optimizer.to_gpu()
        optimizer.initialized = True  # type: ignore[attr-defined]
    own_groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": [param]}]
    try:
        step_without_hooks(optimizer)
    finally:
        optimizer.param_groups = own_groups


def step_without_hooks(optimizer: Optimizer) -> None:
    """Run a step of all parameters with a gradient, bypassing hooks and schedulers."""
    step = type(optimizer).step
    # torch wraps the step of each class, once, to call the hooks.
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


ACTIVE_UPDATES: weakref.WeakKeyDictionary[Optimizer, "GradientUpdates"] = (
    weakref.WeakKeyDictionary()
)
"""Every optimizer whose parameters are updated in backward; hooks on parameters do not hold it."""


def all_in_backward() -> list[tuple[Optimizer, "GradientUpdates"]]:
    """List the items of `ACTIVE_UPDATES`, safe against changes by other threads."""
    optimizers = [ref() for ref in ACTIVE_UPDATES.keyrefs()]
    pairs = [(o, ACTIVE_UPDATES.get(o)) for o in optimizers if o is not None]
    return [(optimizer, updates) for optimizer, updates in pairs if updates is not None]


_ADVICE = (
    "from a second backward pass without `optimizer.step()` between them, from a block that is "
    "used twice under checkpointing with `use_reentrant=True`, or from DistributedDataParallel",
    "Run every backward pass but the last of a step inside `with handle.accumulating():`, "
    "checkpoint with `use_reentrant=False`, and train in one process.",
)


class GradientUpdates:
    """Updates each parameter of one optimizer as soon as its gradient is complete.

    The garbage collector does not traverse hooks on parameters, so they refer to the optimizer and
    the parameters weakly.

    Args:
        optimizer: The optimizer.
        clip: Clips the gradient of one parameter.
        held: Holds gradients until all are complete; ``None`` to update at once.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        clip: Callable[[nn.Parameter], None],
        held: HeldGradients | None = None,
    ) -> None:
        self.is_accumulating = False
        self.held = held
        self.advice = _ADVICE
        """Cause of a second gradient in a step, and its remedy."""
        self._optimizer = weakref.ref(optimizer)
        self._clip = clip
        self._hooks: Any = WeakTensorKeyDictionary()
        self._taken: set[int] = set()
        # In backward, each GPU has its own thread.
        self._lock = threading.RLock()

    @property
    def has_taken(self) -> bool:
        """Whether a gradient was processed since the last step of the optimizer."""
        return bool(self._taken)

    def start(self) -> list[Callable[[], None]]:
        """Register all hooks.

        Returns:
            Functions that remove them.
        """
        optimizer = self._optimizer()
        assert optimizer is not None, "the caller holds a reference"
        ACTIVE_UPDATES[optimizer] = self
        self._watch_parameters(optimizer)
        hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        return [self._stop, *(hook.remove for hook in hooks)]

    def forget(self) -> None:
        """Reset the state of the current step."""
        self._taken.clear()
        if self.held is not None:
            self.held.clear()

    def _stop(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        optimizer = self._optimizer()
        if optimizer is not None:
            ACTIVE_UPDATES.pop(optimizer, None)
            for param in _parameters(optimizer):
                if self.held is not None and param in self.held:
                    self.held.give_back(param)
        self.forget()

    # Parameters that were added or unfrozen are found after their first step.
    def _watch_parameters(self, optimizer: Optimizer) -> None:
        for param in _parameters(optimizer):
            if param.requires_grad and param.is_leaf and param not in self._hooks:
                register: Any = param.register_post_accumulate_grad_hook  # untyped in torch
                self._hooks[param] = register(self._take)

    def _take(self, param: nn.Parameter) -> None:
        optimizer = self._optimizer()
        if self.is_accumulating or optimizer is None or param.grad is None:
            return
        with self._lock, torch.no_grad():
            if not owns(optimizer, param):
                return
            self._mark_as_taken(optimizer, param)
            if self.held is None:
                self._update(optimizer, param)
            else:
                self.held.take(param)

    def _mark_as_taken(self, optimizer: Optimizer, param: nn.Parameter) -> None:
        if id(param) in self._taken:
            cause, fix = self.advice
            why = f"it has a second gradient after its update in this step: {cause}"
            raise IncompatibleError(
                "optimizer_in_backward", [Problem(_named(optimizer, param), why, fix)]
            )
        self._taken.add(id(param))

    def _update(self, optimizer: Optimizer, param: nn.Parameter) -> None:
        self._clip(param)
        step_parameter(optimizer, param)
        param.grad = None

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._finish(optimizer)
            return None
        # Backward may run inside the closure: gradients are complete after it.
        closure = functools.partial(self._run_closure, optimizer, closure)
        if len(args) > 1:
            return (args[0], closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure}

    def _run_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        result = closure()
        self._finish(optimizer)
        return result

    @torch.no_grad()
    def _finish(self, optimizer: Optimizer) -> None:
        """Update parameters with held gradients, and those whose hook did not run."""
        waiting = []
        for param in _parameters(optimizer):
            if param.grad is not None:
                self._mark_as_taken(optimizer, param)
                waiting.append(param)
            elif self.held is not None and param in self.held:
                waiting.append(param)
        if self.held is not None:
            self.held.find_norm(waiting)
        for param in waiting:
            if self.held is not None:
                self.held.give_back(param)
            self._update(optimizer, param)

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.forget()
        self._watch_parameters(optimizer)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _named(optimizer: Optimizer, param: nn.Parameter) -> str:
    return f"a parameter of shape {tuple(param.shape)} of `{type(optimizer).__name__}`"
