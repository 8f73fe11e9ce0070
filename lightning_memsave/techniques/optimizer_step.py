"""Replace the step of an optimizer: who updates which parameters, in which order.

Techniques own parameters: those on the host, those in bfloat16. The optimizer's own code updates
what nobody owns. Hooks, schedulers, a ``GradScaler`` and profilers see one step.
"""

import contextlib
import functools
import inspect
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_memsave.core.memory import host_copies, is_host
from lightning_memsave.core.optimizers import STEP_HOOKS, parameters_of
from lightning_memsave.core.patching import (
    is_patched_with,
    own,
    patch_method,
    previous_method,
    set_own,
)
from lightning_memsave.core.saved_state import with_attribute
from lightning_memsave.core.technique import undo_all
from lightning_memsave.techniques.group_settings import apply_written, note_written, settings_of
from lightning_memsave.techniques.optimizer_kinds import (
    EACH_ALONE,
    ELEMENTWISE,
    is_low_bit,
    is_made_here,
    is_of_torch,
)

OWN_STATE = (COMPENSATION, SEED) = ("compensation", "rounding_seed")
"""Keys of the state that rounded updates add to that of the optimizer."""
_ROUNDED = "_memsave_is_rounded"
WAITING_STATE = "memsave_waiting_state"
"""Attribute of optimizers whose state waits on the host: its ``bring`` lets it come."""

_STEPS = "memsave_steps"

# Of torch's optimizers, only LBFGS couples parameters.
_KNOWN = ELEMENTWISE | {torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam}


class StepOwner(ABC):
    """Updates some parameters of an optimizer in the place of its own step."""

    order: ClassVar[int]
    """Its place among the owners of an optimizer: the host before rounding."""

    @abstractmethod
    def update(self, optimizer: Optimizer, done: set[int]) -> set[int]:
        """Update its parameters with a gradient but for those with these ids; return the ids."""

    def update_some(self, optimizer: Optimizer, params: list[nn.Parameter]) -> list[nn.Parameter]:
        """Update what it owns of these parameters, as in backward; return the others."""
        return params

    def calls_closure(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer calls a closure itself, as LBFGS does several times."""
        return False

    def run_with(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Run a step that calls the closure."""
        return step_without_hooks(optimizer, closure)

    def allocate(self, optimizer: Optimizer, param: nn.Parameter) -> None:  # noqa: B027 - optional
        """Add to the newly allocated state of a parameter."""

    def before_zeros(self, optimizer: Optimizer) -> None:  # noqa: B027 - optional
        """Get ready for zeros that are written into gradients."""


@dataclass
class _Steps:
    owners: list[StepOwner] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)
    positions: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of parameters in groups, so that an update does not search all of them."""


def _steps_of(optimizer: Optimizer) -> _Steps:
    steps: _Steps | None = own(optimizer, _STEPS)
    if steps is None:  # as of a copy, of those that copy all attributes
        set_own(optimizer, _STEPS, steps := _Steps())
    return steps


def own_step(optimizer: Optimizer, owner: StepOwner) -> Callable[[], None]:
    """Let a technique update some parameters of an optimizer; returns a function that ends it."""
    steps = _steps_of(optimizer)
    if not steps.owners:
        is_seen = is_patched_with(optimizer, step)
        steps.undo = [] if is_seen else [patch_method(optimizer, step)]
        steps.undo.append(patch_method(optimizer, zero_grad))
    steps.owners = sorted([*steps.owners, owner], key=lambda each: each.order)

    def undo() -> None:
        steps.owners = [each for each in steps.owners if each is not owner]
        if not steps.owners:
            undo_all(steps.undo)
        _forget(optimizer)

    return undo


def _forget(optimizer: Optimizer) -> None:
    if not owners_of(optimizer):
        vars(optimizer).pop(_STEPS, None)


def owners_of(optimizer: Optimizer) -> list[StepOwner]:
    """Return what updates parameters of an optimizer in the place of its own step."""
    steps: _Steps | None = own(optimizer, _STEPS)
    return [] if steps is None else steps.owners


def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Update all parameters and return the result of the closure; replaces ``Optimizer.step``."""
    if any("initial_lr" in group for group in self.param_groups):  # which schedulers have set
        self._opt_called = True  # type: ignore[attr-defined]
    if not owners_of(self):  # also after `undo`: a scheduler that wrapped the method may call it
        return previous_method(self, "step")(closure)
    return _step_with_hooks(self) if closure is None else _step_with_hooks(self, closure)


# Without this mark, schedulers would wrap the method in a closure, which cannot be copied.
step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


@Optimizer.profile_hook_step
@torch.no_grad()
def _step_with_hooks(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    owners, loss = owners_of(self), None
    if closure is not None and owners[0].calls_closure(self):
        return owners[0].run_with(self, closure)
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    done: set[int] = set()
    for owner in owners:
        done |= owner.update(self, done)
    params = parameters_of(self)
    if any(p.grad is not None and id(p) not in done for p in params):
        _step_others(self, [p for p in params if id(p) in done])
    apply_written(self)
    return loss


def _step_others(optimizer: Optimizer, done: list[nn.Parameter]) -> None:
    with scaling(optimizer), with_attribute(done, "grad", None):
        step_without_hooks(optimizer)


def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
    """Reset gradients, which an update may still read; replaces ``Optimizer.zero_grad``."""
    for owner in [] if set_to_none else owners_of(self):
        owner.before_zeros(self)
    previous_method(self, "zero_grad")(set_to_none)


def mark_rounded(param: torch.Tensor, is_rounded: bool) -> None:
    """Mark (or unmark) a bfloat16 parameter as updated in float32, so that its state is float32."""
    if is_rounded:
        vars(param)[_ROUNDED] = True
    else:
        vars(param).pop(_ROUNDED, None)


def is_marked_rounded(param: torch.Tensor) -> bool:
    return _ROUNDED in vars(param)


Hook = Callable[[Optimizer], None]


def around_step(
    optimizer: Optimizer, before: Hook, after: Hook | None = None, *, is_first: bool = False
) -> list[Callable[[], None]]:
    """Call ``before``, ahead of earlier hooks if ``is_first``, and ``after`` around each step."""

    def pre_hook(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            before(optimizer)
            return None

        def run() -> Any:
            result = closure()
            before(optimizer)
            return result

        if len(args) > 1:
            return (args[0], run, *args[2:]), kwargs
        return args, {**kwargs, "closure": run}

    handle = optimizer.register_step_pre_hook(pre_hook)
    undo = [handle.remove]
    if is_first:
        getattr(optimizer, STEP_HOOKS[0]).move_to_end(handle.id, last=False)
    if after is not None:
        undo.append(optimizer.register_step_post_hook(lambda owner, *_: after(owner)).remove)
    return [*undo, functools.partial(_forget, optimizer)]


def around_all_steps(
    before: Callable[..., None], after: Callable[..., None]
) -> list[Callable[[], None]]:
    return [
        register_optimizer_step_pre_hook(before).remove,
        register_optimizer_step_post_hook(after).remove,
    ]


ACTIVE_UPDATES: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
"""Every optimizer whose parameters are updated in backward; hooks on parameters do not hold it, and
those of other models are looked for."""


def all_in_backward() -> list[tuple[Optimizer, Any]]:
    """List the items of `ACTIVE_UPDATES`, safe against changes by other threads."""
    optimizers = [ref() for ref in ACTIVE_UPDATES.keyrefs()]
    pairs = [(o, ACTIVE_UPDATES.get(o)) for o in optimizers if o is not None]
    return [(optimizer, updates) for optimizer, updates in pairs if updates is not None]


def in_backward_of(params: Iterable[torch.Tensor]) -> list[tuple[Optimizer, Any]]:
    """List those of them that update any of these parameters."""
    own = {id(param) for param in params}
    return [
        (optimizer, updates)
        for optimizer, updates in all_in_backward()
        if any(id(param) in own for param in parameters_of(optimizer))
    ]


_num_updates = 0


def step_parameters(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    global _num_updates  # noqa: PLW0603 - asked by each operator that a prediction records
    _num_updates += 1
    try:
        bring(optimizer, params)
        for owner in owners_of(optimizer):
            params = owner.update_some(optimizer, params)
        if params:
            plain_step(optimizer, params)
    finally:
        _num_updates -= 1


def is_updating() -> bool:
    """Return whether `step_parameters` runs."""
    return _num_updates > 0


def bring(optimizer: Optimizer, params: Iterable[torch.Tensor] | None = None) -> None:
    """Bring state that waits on the host; may be called again after it ran out of memory."""
    waiting = vars(optimizer).get(WAITING_STATE)
    if waiting is not None:
        waiting.bring(optimizer, params)


def initialize(optimizer: Any) -> None:
    """Move all state of a bitsandbytes optimizer to its device, as its first step would."""
    if getattr(optimizer, "initialized", True) is False and hasattr(optimizer, "to_gpu"):
        optimizer.check_overrides()  # of all parameters, which an update in backward does not see
        optimizer.to_gpu()
        optimizer.initialized = True


def plain_step(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    """Update some parameters with the optimizer's own code, in one step."""
    run_step(optimizer, [(group_of(optimizer, param), param) for param in params])


def group_of(optimizer: Optimizer, param: nn.Parameter) -> dict[str, Any]:
    found = _find(optimizer, param)
    if found is None:
        raise KeyError("the optimizer has no such parameter")
    return found


def owns(optimizer: Optimizer, param: nn.Parameter) -> bool:
    return _find(optimizer, param) is not None


def run_step(optimizer: Optimizer, pairs: Iterable[tuple[Mapping[str, Any], Any]]) -> None:
    """Run the optimizer's step for some tensors, each with the settings of a group.

    Step hooks and the step count of schedulers belong to steps of the whole optimizer and are
    bypassed. What it writes into groups is noted, for the end of the whole step.
    """
    initialize(optimizer)
    copy_of = dict if (is_known := updates_each_alone(optimizer)) else settings_of
    groups: dict[int, tuple[Mapping[str, Any], dict[str, Any]]] = {}
    for group, param in pairs:
        if id(group) not in groups:
            groups[id(group)] = group, {**copy_of(group), "params": []}
        groups[id(group)][1]["params"].append(param)
    before, optimizer.param_groups = optimizer.param_groups, [own for _, own in groups.values()]
    try:
        step_without_hooks(optimizer)
    finally:
        optimizer.param_groups = before
    for group, own_group in () if is_known else groups.values():
        note_written(optimizer, group, own_group)


def step_without_hooks(optimizer: Optimizer, *closure: Callable[[], Any]) -> Any:
    """Run a step of all parameters with a gradient, bypassing hooks and schedulers."""
    step = type(optimizer).step
    # torch wraps the step of each class, once, to call the hooks.
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    # The step of a subclass may call that of its base, which is wrapped as well.
    hooks = {key: vars(optimizer).get(key, {}) for key in STEP_HOOKS}
    vars(optimizer).update({key: OrderedDict() for key in STEP_HOOKS})
    try:
        return step(optimizer, *closure)
    finally:
        vars(optimizer).update(hooks)


def take_hooks(new: Optimizer, old: Optimizer) -> None:
    """Let an optimizer call the step hooks of the one whose place it takes."""
    for key in STEP_HOOKS:
        getattr(new, key).update(getattr(old, key))


def show_steps(optimizer: Optimizer) -> Callable[[], None]:
    """Let schedulers that were made for another optimizer see the steps of this one."""
    return patch_method(optimizer, step)


def _find(optimizer: Optimizer, param: nn.Parameter) -> dict[str, Any] | None:
    groups, steps = optimizer.param_groups, _steps_of(optimizer)
    group_index, index = steps.positions.get(id(param), (len(groups), 0))
    if group_index < len(groups):
        found: dict[str, Any] = groups[group_index]
        if index < len(found["params"]) and found["params"][index] is param:
            return found
    steps.positions = {
        id(p): (i, j) for i, group in enumerate(groups) for j, p in enumerate(group["params"])
    }
    position = steps.positions.get(id(param))
    return None if position is None else groups[position[0]]


def updates_each_alone(optimizer: Optimizer) -> bool:
    cls = type(optimizer)  # exact types: a subclass may couple parameters
    return (
        cls in _KNOWN
        or is_made_here(optimizer)
        or is_low_bit(optimizer)
        or cls.__module__.startswith("bitsandbytes.optim.")
        or (cls.__module__, cls.__name__) == ("transformers.optimization", "Adafactor")
    )


def may_update_alone(optimizer: Optimizer) -> bool:
    """Return whether parameters may be updated one by one, with what is noted of their groups."""
    return updates_each_alone(optimizer) or bool(vars(optimizer).get(EACH_ALONE))


def allocates_all_state(optimizer: Optimizer) -> bool:
    """Return whether `allocate_state` makes all state of an optimizer, which updates change."""
    if type(optimizer) is torch.optim.SGD:
        groups = optimizer.param_groups
        return all(g["momentum"] == 0 or g["dampening"] == 0 for g in groups)
    is_ours = is_low_bit(optimizer) or is_made_here(optimizer)
    is_known = is_ours or is_of_torch(optimizer)
    return is_known and updates_each_alone(optimizer)


def allocate_state(optimizer: Optimizer) -> None:
    """Allocate the state of every parameter that has a gradient and no state yet; bring what waits.

    Optimizers allocate it during the step, some parameter by parameter: if memory runs out, half of
    the parameters would be updated, and the step could be neither finished nor repeated. Optimizers
    of other packages are skipped, as their state is not known.
    """
    bring(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        stateless = [
            p for p in group["params"] if p.grad is not None and not optimizer.state.get(p)
        ]
        homes = {id(p): is_host(p.untyped_storage()) for p in stateless}
        for is_on_host in set(homes.values()):
            own = [param for param in stateless if homes[id(param)] is is_on_host]
            try:
                with on_host() if is_on_host else contextlib.nullcontext():
                    _allocate(optimizer, index, group, own)
                    for owner in owners_of(optimizer):
                        for param in own:
                            owner.allocate(optimizer, param)
            except BaseException:
                # Optimizers would not complete a partial state.
                for param in own:
                    optimizer.state.pop(param, None)
                raise


# torch makes the count of steps on the default device, which may be a GPU.
@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Let tensors that optimizers make inside be on the host, and count as memory there."""
    with host_copies(), torch.device("cpu"):
        yield


def _allocate(
    optimizer: Optimizer, index: int, group: dict[str, Any], stateless: list[torch.Tensor]
) -> None:
    if is_low_bit(optimizer):
        _allocate_low_bit(optimizer, index, group, stateless)
    elif type(optimizer) is torch.optim.SGD:
        _allocate_momentum(optimizer, group, stateless)
    elif type(optimizer) is torch.optim.Adafactor:
        # Its state has the type of the gradient, which is float32 where weights are rounded.
        if all(param.dtype is torch.float32 for param in stateless):
            initialize_state(optimizer, group, stateless)
    elif is_made_here(optimizer) or is_of_torch(optimizer):
        initialize_state(optimizer, group, stateless)


def _allocate_low_bit(
    optimizer: Any, index: int, group: dict[str, Any], stateless: list[torch.Tensor]
) -> None:
    own = {id(param) for param in stateless}
    for param_index, param in enumerate(group["params"]):
        # Of a weight in two halves on the host, bitsandbytes would make a whole one.
        has_memory = param.untyped_storage().nbytes() >= param.nbytes
        if id(param) in own and has_memory:
            optimizer.init_state(group, param, index, param_index)


# torch starts with a copy of the gradient. Zeros give the same in the first step, unless there is
# dampening.
def _allocate_momentum(
    optimizer: Optimizer, group: dict[str, Any], stateless: list[torch.Tensor]
) -> None:
    if group["momentum"] != 0 and group["dampening"] == 0:
        for param in stateless:
            if not param.grad.is_sparse:  # type: ignore[union-attr] # chosen for having one
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def initialize_state(
    optimizer: Any, group: Mapping[str, Any], stateless: list[torch.Tensor]
) -> None:
    """Do what torch's optimizers do at the beginning of each step, with lists to fill."""
    initialize = getattr(optimizer, "_init_group", None)
    if initialize is None:
        return
    parameters = list(inspect.signature(initialize).parameters.values())[1:]
    own = {**group, "params": stateless}
    initialize(own, *([] for p in parameters if p.default is inspect.Parameter.empty))


@contextlib.contextmanager
def scaling(optimizer: Optimizer, *, is_on_host: bool = False) -> Iterator[None]:
    """Let what a ``GradScaler`` gives to fused optimizers be what kernels read, where they run."""
    own = vars(optimizer)
    before = {
        k: own[k] for k in ("grad_scale", "found_inf") if isinstance(own.get(k), torch.Tensor)
    }
    if is_on_host:  # once landed
        own.update({name: value.cpu() for name, value in before.items()})
    if "found_inf" in before:  # a sum over devices, while kernels look for 1
        own["found_inf"] = own["found_inf"].clamp(max=1.0)
    try:
        yield
    finally:
        own.update(before)


def double_of(
    optimizer: Optimizer,
    param_groups: list[dict[str, Any]],
    state: MutableMapping[torch.Tensor, Any],
) -> Optimizer:
    """Make an optimizer of the same kind, with the step of its class, for other parameters."""
    double: Optimizer = object.__new__(type(optimizer))
    own = {k: v for k, v in vars(optimizer).items() if k not in ("step", "zero_grad", _STEPS)}
    vars(double).update(own, param_groups=param_groups, state=state)
    return double
