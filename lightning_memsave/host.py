"""The one file with private access to Lightning: which package, hooks, loops, precision.

Everything is resolved from the Trainer at run time, so that one callback class serves Trainers of
``lightning.pytorch`` and of ``pytorch_lightning``. Written against 2.6.6; ``check_host`` says which
names are missing in another release before anything is changed.
"""

import functools
import importlib
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from lightning_memsave.core.patching import patch_method
from lightning_memsave.errors import Problem

CallbackT = TypeVar("CallbackT")

PACKAGES = ("lightning.pytorch", "pytorch_lightning")

_NEEDED = (
    "strategy.precision_plugin",
    "strategy.load_optimizer_state_dict",
    "fit_loop.epoch_loop.automatic_optimization._make_closure",
    "fit_loop.epoch_loop.batch_progress",
    "_accelerator_connector._precision_flag",
    "_accelerator_connector._precision_plugin_flag",
    "_accelerator_connector._check_and_init_precision",
)

# Precisions that this package set, so that a second fit may set another one.
_OUR_PRECISION: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

Adjust = Callable[[Any, int, bool, Iterable[Any]], float]
"""Gives the factor of a loss, from Trainer, batch index, whether it is the last, and parameters."""


def package_of(trainer: Any) -> ModuleType:
    """Find the package that a Trainer comes from.

    Args:
        trainer: A Trainer of either package, or of a subclass.

    Returns:
        The module ``lightning.pytorch`` or ``pytorch_lightning``.

    Raises:
        TypeError: If the object is no Trainer.
    """
    for cls in type(trainer).__mro__:
        for package in PACKAGES:
            if cls.__module__.startswith(f"{package}."):
                return importlib.import_module(package)
    raise TypeError(f"{trainer!r} is no Trainer of {' or '.join(PACKAGES)}")


def check_host(trainer: Any) -> list[Problem]:
    """Find private names of Lightning that this package uses and that this release lacks.

    Args:
        trainer: A Trainer.

    Returns:
        A problem for each missing name.
    """
    package = package_of(trainer)
    version = getattr(package, "__version__", "?")
    return [
        Problem(
            f"`Trainer.{path}`",
            f"{package.__name__} {version} has no such name",
            "Install lightning 2.6, with which this version of lightning-memsave was tested.",
        )
        for path in _NEEDED
        if not _has(trainer, path)
    ]


def _has(owner: Any, path: str) -> bool:
    try:
        operator.attrgetter(path)(owner)
    except AttributeError:
        return False
    return True


def put_first(trainer: Any, callback: Any) -> None:
    """Let a callback run before all others, tuners included.

    Args:
        trainer: A Trainer in ``setup``.
        callback: One of its callbacks. The list is replaced, not changed, because the hook that
            is running holds it.
    """
    trainer.callbacks = [callback, *(c for c in trainer.callbacks if c is not callback)]


def first_of(trainer: Any, cls: type[CallbackT]) -> CallbackT | None:
    """Find the first callback of a class.

    Args:
        trainer: A Trainer.
        cls: The class, or a base of it.

    Returns:
        The callback, or ``None``.
    """
    return next((c for c in trainer.callbacks if isinstance(c, cls)), None)


def builds_model_late(pl_module: Any) -> bool:
    """Say whether a module makes its layers in ``configure_model``, after ``setup``.

    Args:
        pl_module: A LightningModule.

    Returns:
        True if it or a base class of the user's overrides the hook.
    """
    hook = type(pl_module).configure_model
    return not hook.__module__.startswith(PACKAGES)


def is_strategy(trainer: Any, *names: str) -> bool:
    """Say whether the Trainer's strategy is of one of these classes.

    Args:
        trainer: A Trainer.
        names: Class names, such as ``"FSDPStrategy"``.

    Returns:
        True for these classes and their subclasses.
    """
    return any(cls.__name__ in names for cls in type(trainer.strategy).__mro__)


def checkpoints_activations_itself(trainer: Any) -> bool:
    """Say whether the strategy was told to checkpoint activations.

    Args:
        trainer: A Trainer.

    Returns:
        True for ``FSDPStrategy(activation_checkpointing_policy=...)`` and DeepSpeed's own setting.
    """
    strategy = trainer.strategy
    config = getattr(strategy, "config", None)
    in_config = isinstance(config, dict) and "activation_checkpointing" in config
    return bool(getattr(strategy, "_activation_checkpointing_kwargs", None)) or (
        in_config and is_strategy(trainer, "DeepSpeedStrategy")
    )


@dataclass(frozen=True, slots=True)
class PrecisionState:
    """What decides the precision of a Trainer.

    Args:
        current: Precision in force, such as ``"32-true"``.
        is_ours: It was set by this package, in an earlier fit.
        plugin: Class name of a precision plugin that the user passed, or ``None``.
        is_frozen: It cannot be changed any more.
        has_own_mixed_precision: ``FSDPStrategy(mixed_precision=...)``, which wins over the plugin.
    """

    current: str
    is_ours: bool
    plugin: str | None
    is_frozen: bool
    has_own_mixed_precision: bool


def precision_state(trainer: Any) -> PrecisionState:
    """Read what decides the precision of a Trainer.

    Args:
        trainer: A Trainer.

    Returns:
        The state now.
    """
    flag = trainer._accelerator_connector._precision_plugin_flag
    return PrecisionState(
        current=str(trainer.precision),
        is_ours=_OUR_PRECISION.get(trainer) == str(trainer.precision),
        plugin=None if flag is None else type(flag).__name__,
        is_frozen=getattr(trainer.strategy, "_config_initialized", False),
        has_own_mixed_precision=getattr(trainer.strategy, "mixed_precision", None) is not None,
    )


def set_precision(trainer: Any, precision: str) -> None:
    """Give the Trainer another precision, as its constructor would have.

    Args:
        trainer: A Trainer in ``setup``.
        precision: One of Lightning's precision strings, in the long form.
    """
    connector = trainer._accelerator_connector
    before = connector._precision_flag
    connector._precision_flag = precision
    try:
        plugin = connector._check_and_init_precision()
    except Exception:
        connector._precision_flag = before
        raise
    trainer.strategy.precision_plugin = plugin
    connector.precision_plugin = plugin
    _OUR_PRECISION[trainer] = str(trainer.precision)


def adjust_losses(trainer: Any, adjust: Adjust) -> Callable[[], None]:
    """Multiply the loss of each training batch before its backward pass.

    Args:
        trainer: A Trainer in ``setup``, with automatic optimization.
        adjust: Gives the factor; 1.0 leaves a batch exactly as it is.

    Returns:
        A function that puts Lightning's own loop back.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    original = epoch_loop.automatic_optimization
    loop_class: Any = _adjusting_loop_class(cast(Any, type(original)))
    replacement = loop_class(trainer)
    # Progress objects are shared, so loop state in checkpoints is as without us.
    vars(replacement).update(vars(original))
    replacement.adjust = adjust
    epoch_loop.automatic_optimization = replacement

    def undo() -> None:
        if epoch_loop.automatic_optimization is replacement:
            vars(original).update({k: v for k, v in vars(replacement).items() if k != "adjust"})
            epoch_loop.automatic_optimization = original

    return undo


@functools.cache
def _adjusting_loop_class(base: Any) -> type[Any]:
    class AdjustingAutomaticOptimization(base):  # type: ignore[misc] # known at run time only
        adjust: Adjust

        def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
            closure = super()._make_closure(kwargs, optimizer, batch_idx)
            if self._skip_backward:  # stochastic weight averaging updates batch norm, nothing else
                return closure
            is_last = self.trainer.fit_loop.epoch_loop._num_ready_batches_reached()
            parameters = self.trainer.lightning_module.parameters()
            factor = self.adjust(self.trainer, batch_idx, is_last, parameters)
            if factor != 1.0:
                closure._step_fn = functools.partial(_scaled_step, closure._step_fn, factor)
            return closure

    return AdjustingAutomaticOptimization


def _scaled_step(step: Callable[[], Any], factor: float) -> Any:
    result = step()
    if result.closure_loss is None:
        return result
    return type(result)(result.closure_loss * factor, extra=result.extra)


def convert_loaded_optimizer_states(
    trainer: Any, load_optimizer_state_dict: Callable[..., None]
) -> Callable[[], None]:
    """Put a function in place of the strategy's ``load_optimizer_state_dict``.

    Args:
        trainer: A Trainer in ``setup``.
        load_optimizer_state_dict: A module-level function of strategy and checkpoint.

    Returns:
        A function that restores the strategy's own method.
    """
    return patch_method(trainer.strategy, load_optimizer_state_dict)


def logged_step(trainer: Any) -> int:
    """Give the step under which Lightning logs the current batch.

    Args:
        trainer: A Trainer in fit.

    Returns:
        Optimizer steps so far, counted once for several optimizers.
    """
    return cast(int, trainer.fit_loop.epoch_loop._batches_that_stepped)
