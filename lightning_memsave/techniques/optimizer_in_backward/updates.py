"""Updates of parameters while backward runs, and what has to wait for its end."""

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
    # What bitsandbytes does in its first step needs all the parameters.
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


ACTIVE_UPDATES: weakref.WeakKeyDictionary[Optimizer, "GradientUpdates"] = (
    weakref.WeakKeyDictionary()
)
"""Every optimizer whose parameters are updated in backward: hooks on parameters hold none."""


def all_in_backward() -> list[tuple[Optimizer, "GradientUpdates"]]:
    """List what is in `ACTIVE_UPDATES`, whatever other threads put there meanwhile."""
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
    """Updates the parameters of one optimizer, each as its gradient is complete.

    Hooks on parameters are seen by no garbage collection, so nothing that they hold may hold the
    optimizer or the parameters: they are referred to weakly.

    Args:
        optimizer: The optimizer.
        clip: Clips the gradient of one parameter.
        held: Where gradients wait until all are there; ``None`` updates at once.
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
        """Where a second gradient in a step may come from, and what to do about it."""
        self._optimizer = weakref.ref(optimizer)
        self._clip = clip
        self._hooks: Any = WeakTensorKeyDictionary()
        self._taken: set[int] = set()
        # Each GPU has a thread of its own in backward.
        self._lock = threading.RLock()

    @property
    def has_taken(self) -> bool:
        """Whether gradients were taken since the last step of the optimizer."""
        return bool(self._taken)

    def start(self) -> list[Callable[[], None]]:
        """Register all hooks.

        Returns:
            Functions that remove them.
        """
        optimizer = self._optimizer()
        assert optimizer is not None, "the caller holds it"
        ACTIVE_UPDATES[optimizer] = self
        self._watch_parameters(optimizer)
        hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        return [self._stop, *(hook.remove for hook in hooks)]

    def forget(self) -> None:
        """Start anew, as after a step."""
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

    # A parameter that came later, or was frozen until now, is found after the step that updates it
    # for the first time.
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
        # Backward may run inside, and only then are the gradients complete.
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
        """Update what waits, and what has a gradient that no backward has completed."""
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
