"""Exchange the optimizers that ``configure_optimizers`` returns, in every form that it may have."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_memsave.callbacks.settings import setting as _setting
from lightning_memsave.callbacks.settings.setting import Setting, off_rows, row_of, saves
from lightning_memsave.callbacks.settings.values import (
    Arguments,
    is_asked,
    refuse_technique,
    why_beyond,
)
from lightning_memsave.core.patching import is_patched_with, patch_method, previous_method
from lightning_memsave.core.technique import Handle, Row, Technique, undo_all
from lightning_memsave.errors import IncompatibleError, NoEffectWarning, Problem
from lightning_memsave.techniques.low_bit_optimizer.state import convert_state_dict
from lightning_memsave.techniques.low_bit_optimizer.state_checks import check_type
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.offloading.technique import trains_offloaded
from lightning_memsave.techniques.optimizer_kinds import is_low_bit
from lightning_memsave.trainer.trainer import (
    convert_loaded_optimizer_states,
    facts_of,
    has_configure_optimizers,
    unfreezes_later,
)

Undo = Callable[[], None]
OptimizerHandle = Handle[Optimizer]

_STATE = "_memsave_optimizer_techniques"


class TechniqueState:
    """What ``configure_optimizers`` on a module does with one technique.

    Copies of the module and pickles of it take the technique along, not the optimizers.
    """

    def __init__(self, technique: Technique[Optimizer], yields: bool = False) -> None:
        self.technique = technique
        self.yields = yields
        self.handles: list[OptimizerHandle] = []
        """One for each optimizer of the latest call, in the order in which they were returned."""
        self.problems: list[Problem] = []
        """Why it was applied to none of them, where it yields."""
        self.undo: list[Undo] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "handles": [], "problems": [], "undo": []}


def enable(
    pl_module: Any, technique: Technique[Optimizer], yields: bool = False
) -> tuple[TechniqueState, Undo]:
    """Let a LightningModule configure its optimizers with a technique.

    Several techniques are applied one after the other, each to what the one before has given. A
    module without ``configure_optimizers`` of its own is not patched, so that Lightning continues
    seeing that it has none.
    """
    attributes = vars(pl_module)
    # Filled in for each call: a copy of the module must not hold on to the original.
    state = TechniqueState(_with_module(technique, None), yields)
    is_first = _STATE not in attributes or not is_patched_with(pl_module, configure_optimizers)
    undo: list[Undo] = []
    if is_first:
        attributes[_STATE] = []
        undo.append(lambda: attributes.pop(_STATE, None))
        if has_configure_optimizers(pl_module):
            undo.append(patch_method(pl_module, configure_optimizers))
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
        exchange = _Exchange(_with_module(state.technique, self))
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


def load_optimizer_state_dict(self: Any, checkpoint: Mapping[str, Any]) -> None:
    """Load optimizer states as the strategy does, after translating them between 32 and 8 bits."""
    states = checkpoint.get("optimizer_states", [])
    check_type(states, Sequence, "`optimizer_states`")
    translated = [
        convert_state_dict(state, optimizer)
        for state, optimizer in zip(states, self.optimizers, strict=False)
    ]
    paged = [
        (optimizer, state)
        for state, optimizer in zip(translated, self.optimizers, strict=False)
        if (is_low_bit(optimizer) and optimizer.is_paged) or trains_offloaded(optimizer)
    ]
    # Lightning moves what it has loaded to the GPU. State that may not fit there comes afterwards.
    shown = [
        {**state, "state": {}} if any(state is one for _, one in paged) else state
        for state in translated
    ]
    if any(new is not old for new, old in zip(shown, states, strict=False)):
        checkpoint = {**checkpoint, "optimizer_states": shown}
    previous_method(self, "load_optimizer_state_dict")(checkpoint)
    for optimizer, state in paged:
        optimizer.load_state_dict(state)


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
            undo.append(_setter(attributes, {name: attributes[name] for name in changes}))
            attributes.update(changes)
    return undo


class _Exchange:
    """Old optimizers and what took their place, during one call of ``configure_optimizers``."""

    def __init__(self, technique: Technique[Optimizer]) -> None:
        self._technique = technique
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
                self._add_undo(next(changed), _setter(attributes, {name: value}))
        self._rebind(_leaves(list(attributes.values()), object))

    def _apply(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._done:
            return
        with warnings.catch_warnings():
            # One warning for all optimizers is given by the caller.
            warnings.simplefilter("ignore", NoEffectWarning)
            handle = self._technique.apply(optimizer)
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
    """Return what lies in nested lists, tuples and dictionaries."""
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


def _setter(attributes: dict[str, Any], values: dict[str, Any]) -> Undo:
    return lambda: attributes.update(values)


def _with_module(technique: Technique[Optimizer], module: Any) -> Technique[Optimizer]:
    if "module" not in getattr(technique, "__dataclass_fields__", {}):
        return technique
    return dataclasses.replace(technique, module=module)  # type: ignore[type-var]


_SLOW_ON_CPU = "its steps are slower on a CPU; `optimizer=None` leaves it out"


class OptimizerSetting(Setting):
    """A technique that replaces what ``configure_optimizers`` returns.

    Checkpoints whose optimizer state has another format are converted when they are loaded, with
    and without a technique.
    """

    name = "optimizer"

    def __init__(
        self,
        technique: Technique[Optimizer] | None,
        value: str,
        is_asked: bool,
        off_reason: str = "",
        saves_all: bool = False,
    ) -> None:
        super().__init__()
        self.technique = technique
        self.value = value
        self.is_asked = is_asked
        self.off_reason = off_reason
        self.saves_all = saves_all
        self._state: Any = None

    @classmethod
    def read(cls, arguments: Arguments) -> "OptimizerSetting":
        """Make the setting that the arguments describe."""
        wanted = arguments["optimizer"]
        technique = wanted
        if wanted is not None and not isinstance(wanted, LowBitOptimizer):
            refuse_technique("optimizer", wanted, LowBitOptimizer)
            technique = LowBitOptimizer(wanted)
        value = "None" if technique is None else repr(technique.optimizer)
        if technique and (why := why_beyond(arguments, "optimizer", technique.exactness)):
            return cls(None, "None", is_asked=False, off_reason=why)
        saves_all = arguments["preset"] == "single_gpu"
        return cls(technique, value, is_asked(arguments, "optimizer"), saves_all=saves_all)

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find conflicts with the Trainer; the optimizer itself does not exist yet."""
        if self.technique is None:
            return []
        return self.technique.conflicts(facts_of(trainer), f"`{self.name}={self.value}`")

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Wrap ``configure_optimizers`` and the loading of optimizer states."""
        self._convert_loaded_states(trainer)
        self.rows = []
        if self.technique is None:
            self.rows = off_rows(self)
            return
        yields = not self.is_asked
        technique = self.technique
        # Those that are unfrozen later count, too.
        is_weighed = yields and not (self.saves_all or unfreezes_later(trainer))
        if is_weighed and isinstance(technique, LowBitOptimizer):
            technique = dataclasses.replace(
                technique, min_saved_bytes=_setting.SMALLEST_SAVING_BYTES
            )
        self._state, undo = enable(pl_module, technique, yields)
        self._undo.append(undo)

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Say what became of each optimizer."""
        if self._state is None or self.technique is None:
            return
        if self._state.problems:
            self.yield_to(self._state.problems, trainer, pl_module)
            return
        handles, exactness = self._state.handles, self.technique.exactness.value
        self.rows = [row_of(self.name, self.value, handle, exactness) for handle in handles] or [
            Row(self.name, self.value, "off", ("the module configures no optimizer",))
        ]
        is_on = any(handle.changes for handle in handles)
        is_served = any(_is_8bit(handle.target) for handle in handles)
        if self.is_asked and handles and not is_on and not is_served:
            what = f"`{self.name}={self.value}`"
            why = "; ".join(reason for handle in handles for reason in handle.skipped)
            fix = "Use another optimizer, or set `optimizer=None`."
            raise IncompatibleError("MemSaveCallback", [Problem(what, why, fix)])
        if is_on and not self.is_asked and trainer.strategy.root_device.type == "cpu":
            self.rows = [
                dataclasses.replace(row, details=(*row.details, _SLOW_ON_CPU)) for row in self.rows
            ]

    def yield_to(self, problems: Sequence[Problem], trainer: Any, pl_module: Any) -> None:
        """Stay off, but load optimizer states of every format."""
        super().yield_to(problems, trainer, pl_module)
        self._convert_loaded_states(trainer)

    def savings(self, pl_module: Any) -> str:
        """Say how much state AdamW would keep less."""
        sizes = [p.numel() for p in pl_module.parameters() if p.requires_grad and not is_lazy(p)]
        large = [size for size in sizes if size >= LowBitOptimizer.min_8bit_size]
        return saves(6 * sum(large), "optimizer state")

    def _convert_loaded_states(self, trainer: Any) -> None:
        self._undo.append(convert_loaded_optimizer_states(trainer, load_optimizer_state_dict))

    def undo(self) -> None:
        """Restore module and strategy, and let go of the optimizers; a second call does nothing."""
        self._state = None
        super().undo()


def _is_8bit(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("bitsandbytes.")
