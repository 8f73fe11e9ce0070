"""What is known about a Trainer: which package, strategy and callbacks it has."""

import importlib
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar, cast

from lightning_memsave.core.patching import patch_method
from lightning_memsave.core.trainer_facts import TrainerFacts
from lightning_memsave.errors import Problem

CallbackT = TypeVar("CallbackT")

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_AVERAGES = ("WeightAveraging", "StochasticWeightAveraging")

_NEEDED = (
    "strategy.precision_plugin",
    "strategy.load_optimizer_state_dict",
    "fit_loop._should_accumulate",
    "fit_loop.epoch_loop._batches_that_stepped",
    "fit_loop.epoch_loop._num_ready_batches_reached",
    "fit_loop.epoch_loop._results.update_metrics",
    "fit_loop.epoch_loop.automatic_optimization._make_closure",
    "fit_loop.epoch_loop.automatic_optimization._optimizer_step",
    "fit_loop.epoch_loop.automatic_optimization._skip_backward",
    "fit_loop.epoch_loop.automatic_optimization._training_step",
    "fit_loop.epoch_loop.batch_progress",
    "_signal_connector.register_signal_handlers",
    "_accelerator_connector._precision_flag",
    "_accelerator_connector._precision_plugin_flag",
    "_accelerator_connector._check_and_init_precision",
)


def package_of(thing: Any) -> ModuleType:
    """Find the package that a Trainer or a LightningModule comes from.

    Args:
        thing: A Trainer or LightningModule of either package, or of a subclass.

    Returns:
        The module ``lightning.pytorch`` or ``pytorch_lightning``.

    Raises:
        TypeError: If the object is of neither.
    """
    for cls in type(thing).__mro__:
        for package in PACKAGES:
            if cls.__module__.startswith(f"{package}."):
                return importlib.import_module(package)
    raise TypeError(f"{thing!r} is no Trainer or LightningModule of {' or '.join(PACKAGES)}")


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


def put_first(trainer: Any, callback: Any, *added: Any) -> None:
    """Let a callback run before all others, tuners included.

    Those that copy the module in ``setup`` and stood before it stay there: in the Trainer's next
    fit they must not come after it.

    Args:
        trainer: A Trainer in ``setup``.
        callback: One of its callbacks. The list is replaced, not changed, because the hook that
            is running holds it.
        added: Callbacks that are to run after it, before `remove_callback`.
    """
    callbacks = trainer.callbacks
    place = next(i for i, c in enumerate(callbacks) if c is callback)
    before = [c for c in callbacks[:place] if averages_weights(c)]
    first = [*before, callback, *added]
    trainer.callbacks = [*first, *(c for c in callbacks if all(c is not f for f in first))]


def remove_callback(trainer: Any, callback: Any) -> None:
    """Take a callback out of a Trainer that may be calling it.

    Args:
        trainer: A Trainer.
        callback: What `put_first` added, or any object.
    """
    if any(c is callback for c in trainer.callbacks):
        trainer.callbacks = [c for c in trainer.callbacks if c is not callback]


def leave_device(trainer: Any, pl_module: Any) -> None:
    """Drop gradients and move the module to the host, as the strategy does a moment later.

    Args:
        trainer: A Trainer whose run is over.
        pl_module: Its LightningModule.
    """
    for parameter in pl_module.parameters():
        parameter.grad = None
    # They hold shards of it in places of their own.
    if not is_strategy(trainer, "FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"):
        pl_module.cpu()


def first_of(trainer: Any, cls: type[CallbackT]) -> CallbackT | None:
    """Find the first callback of a class.

    Args:
        trainer: A Trainer.
        cls: The class, or a base of it.

    Returns:
        The callback, or ``None``.
    """
    return next((c for c in trainer.callbacks if isinstance(c, cls)), None)


def averages_weights(callback: Any) -> bool:
    """Say whether a callback of Lightning copies the module in ``setup``, to average its weights.

    Args:
        callback: Any callback of a Trainer.

    Returns:
        True for weight averaging, exponential or stochastic, and subclasses.
    """
    return _is_of(callback, _AVERAGES)


def prunes_weights(callback: Any) -> bool:
    """Say whether a callback of Lightning puts other tensors in place of weights.

    Args:
        callback: Any callback of a Trainer.

    Returns:
        True for ``ModelPruning`` and subclasses.
    """
    return _is_of(callback, ("ModelPruning",))


def unfreezes_later(trainer: Any) -> bool:
    """Say whether a callback of Lightning gives the optimizer more parameters in the course of fit.

    Args:
        trainer: A Trainer.

    Returns:
        True for ``BackboneFinetuning`` and other subclasses of ``BaseFinetuning``.
    """
    return any(_is_of(callback, ("BaseFinetuning",)) for callback in trainer.callbacks)


# Not imported: older releases have not all of them, and either package may be missing.
def _is_of(callback: Any, names: tuple[str, ...]) -> bool:
    return any(
        cls.__name__ in names and cls.__module__.startswith(PACKAGES)
        for cls in type(callback).__mro__
    )


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


def facts_of(trainer: Any) -> TrainerFacts:
    """Collect what techniques may ask about a Trainer."""
    return TrainerFacts(
        tuple(cls.__name__ for cls in type(trainer.strategy).__mro__),
        trainer.world_size,
        getattr(trainer.strategy, "root_device", None),
        _checkpoints_activations(trainer),
    )


# `FSDPStrategy(activation_checkpointing_policy=...)` and DeepSpeed's own setting.
def _checkpoints_activations(trainer: Any) -> bool:
    strategy = trainer.strategy
    config = getattr(strategy, "config", None)
    in_config = isinstance(config, dict) and "activation_checkpointing" in config
    return bool(getattr(strategy, "_activation_checkpointing_kwargs", None)) or (
        in_config and is_strategy(trainer, "DeepSpeedStrategy")
    )


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


def has_configure_optimizers(pl_module: Any) -> bool:
    """Say whether a LightningModule has a ``configure_optimizers`` of its own.

    Args:
        pl_module: The LightningModule.

    Returns:
        True also if it was set on the instance.
    """
    name = "configure_optimizers"
    base = next((c for c in type(pl_module).__mro__ if c.__name__ == "LightningModule"), None)
    own = getattr(type(pl_module), name, None)
    return name in vars(pl_module) or own is not getattr(base, name, None)
