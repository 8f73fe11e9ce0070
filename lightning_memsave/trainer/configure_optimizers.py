"""Exchange the optimizers that ``configure_optimizers`` returns, in every form that it may have."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from lightning_memsave.core.patching import (
    is_patched_with,
    keep_copies_plain,
    patch_method,
    previous_method,
)
from lightning_memsave.core.technique import Handle, Technique, undo_all
from lightning_memsave.errors import IncompatibleError, NoEffectWarning, Problem
from lightning_memsave.trainer.trainer import has_configure_optimizers

Undo = Callable[[], None]
OptimizerHandle = Handle[Optimizer]

_STATE = "_memsave_optimizer_techniques"


class TechniqueState:
    """What ``configure_optimizers`` on a module does with one technique."""

    def __init__(self, technique: Technique[Any], yields: bool, method: str) -> None:
        self.technique = technique
        self.yields = yields
        self.method = method
        self.handles: list[OptimizerHandle] = []
        """One for each optimizer of the latest call, in the order in which they were returned."""
        self.problems: list[Problem] = []
        """Why it was applied to none of them, where it yields."""
        self.undo: list[Undo] = []


def enable(
    pl_module: Any, technique: Technique[Any], yields: bool = False, method: str = "apply"
) -> tuple[TechniqueState, Undo]:
    """Let a LightningModule configure its optimizers with a technique.

    Several techniques are applied one after the other, each to what the one before has given. A
    module without ``configure_optimizers`` of its own is not patched, so that Lightning continues
    seeing that it has none.
    """
    attributes = vars(pl_module)
    # Filled in for each call: a copy of the module must not hold on to the original.
    state = TechniqueState(_with_module(technique, None), yields, method)
    is_first = _STATE not in attributes or not is_patched_with(pl_module, configure_optimizers)
    undo: list[Undo] = []
    if is_first:
        attributes[_STATE] = []
        undo.append(lambda: attributes.pop(_STATE, None))
        if has_configure_optimizers(pl_module):
            undo.append(patch_method(pl_module, configure_optimizers))
        undo.append(keep_copies_plain(pl_module))
    attributes[_STATE].append(state)

    def restore() -> None:
        undo_all(state.undo)
        if state in attributes.get(_STATE, ()):
            attributes[_STATE].remove(state)
        undo_all(undo)

    return state, restore


def configure_optimizers(self: Any) -> Any:
    """Give what the module's own ``configure_optimizers`` gives, with all techniques applied."""
    output = previous_method(self, "configure_optimizers")()
    states: list[TechniqueState] = vars(self)[_STATE]
    for state in states:
        exchange = _Exchange(getattr(_with_module(state.technique, self), state.method))
        try:
            output = exchange.convert(output)
        except IncompatibleError as error:
            if not state.yields:
                raise
            state.problems = list(error.problems)
            continue
        exchange.replace_attributes(self)
        state.handles = exchange.handles
        state.undo += [handle.undo for handle in exchange.handles]
    return output


def rebind_schedulers(schedulers: Iterable[Any], old: Optimizer, new: Optimizer) -> list[Undo]:
    """Let learning rate schedulers, and those inside them, work on another optimizer."""
    undo: list[Undo] = []
    for scheduler in _with_inner(schedulers):
        attributes = vars(scheduler)
        changes = {name: new for name, value in attributes.items() if value is old}
        if changes and "use_beta1" in attributes:
            # OneCycleLR and CyclicLR cycle either `betas[0]` or `momentum`.
            changes["use_beta1"] = "betas" in new.defaults  # type: ignore[assignment]
        if changes:
            before = {name: attributes[name] for name in changes}
            undo.append(functools.partial(attributes.update, before))
            attributes.update(changes)
    return undo


class _Exchange:
    """Old optimizers and what took their place, during one call of ``configure_optimizers``."""

    def __init__(self, apply: Callable[[Optimizer], OptimizerHandle]) -> None:
        self._apply_technique = apply
        self._done: dict[int, tuple[Optimizer, OptimizerHandle]] = {}

    @property
    def handles(self) -> list[OptimizerHandle]:
        return [handle for _, handle in self._done.values()]

    def convert(self, output: Any) -> Any:
        try:
            for optimizer in _leaves(output, Optimizer):
                self._apply(optimizer)
        except BaseException:
            undo_all([handle.undo for handle in self.handles])
            raise
        self._rebind(_leaves(output, object))
        return self._mapped(output)

    def replace_attributes(self, owner: Any) -> None:
        """Put new optimizers and their schedulers where the module keeps the old ones itself."""
        attributes = vars(owner)
        for name, value in list(attributes.items()):
            mapped = self._mapped(value)
            if mapped is not value:
                attributes[name] = mapped
                changed = (old for old in _leaves(value, Optimizer) if id(old) in self._done)
                self._add_undo(next(changed), functools.partial(attributes.update, {name: value}))
        self._rebind(_leaves(list(attributes.values()), object))

    def _apply(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._done:
            return
        with warnings.catch_warnings():
            # One warning for all optimizers is given by the caller.
            warnings.simplefilter("ignore", NoEffectWarning)
            handle = self._apply_technique(optimizer)
        self._done[id(optimizer)] = (optimizer, handle)

    def _rebind(self, leaves: Iterable[Any]) -> None:
        schedulers = [leaf for leaf in leaves if _is_scheduler(leaf)]
        for old, handle in list(self._done.values()):
            if handle.target is not old:
                for undo in rebind_schedulers(schedulers, old, handle.target):
                    self._add_undo(old, undo)

    def _add_undo(self, old: Optimizer, undo: Undo) -> None:
        _, handle = self._done[id(old)]
        fields = handle.target, handle.changes, handle.skipped, (handle.undo, undo)
        self._done[id(old)] = (old, Handle(*fields, summary=handle.summary))

    def _mapped(self, value: Any) -> Any:
        """Return the value with new optimizers in it; the same object if there are none."""
        if isinstance(value, Optimizer):
            _, handle = self._done.get(id(value), (value, None))
            return value if handle is None else handle.target
        if type(value) is dict:
            mapped: Any = {key: self._mapped(item) for key, item in value.items()}
            return value if all(mapped[key] is value[key] for key in value) else mapped
        if isinstance(value, list | tuple):
            items = [self._mapped(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value


def _leaves(value: Any, kind: type) -> list[Any]:
    if type(value) is dict:
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item, kind)]
    return [value] if isinstance(value, kind) else []


def _is_scheduler(value: Any) -> bool:
    # By form: schedulers of other packages do not derive from torch's.
    return (
        isinstance(getattr(value, "__dict__", {}).get("optimizer"), Optimizer)
        and callable(getattr(value, "step", None))
        and not isinstance(value, Optimizer)
    )


def _with_inner(schedulers: Iterable[Any]) -> list[Any]:
    """Return the schedulers and those that they hold, as SequentialLR and ChainedScheduler do."""
    found: dict[int, Any] = {}
    waiting = list(schedulers)
    while waiting:
        scheduler = waiting.pop()
        if id(scheduler) not in found and _is_scheduler(scheduler):
            found[id(scheduler)] = scheduler
            waiting += _leaves(list(vars(scheduler).values()), object)
    return list(found.values())


def _with_module(technique: Technique[Any], module: Any) -> Technique[Any]:
    if "module" not in getattr(technique, "__dataclass_fields__", {}):
        return technique
    return dataclasses.replace(technique, module=module)  # type: ignore[type-var]
