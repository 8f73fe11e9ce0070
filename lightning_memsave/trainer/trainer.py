"""Inspect a Trainer: its package, strategy, callbacks and module."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar, cast

from lightning_memsave.core.patching import patch_method
from lightning_memsave.core.trainer_facts import SHARDED
from lightning_memsave.errors import Problem

CallbackT = TypeVar("CallbackT")

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_AVERAGES = ("WeightAveraging", "StochasticWeightAveraging")


def package_of(thing: Any) -> ModuleType:
    for cls in type(thing).__mro__:
        for package in PACKAGES:
            if cls.__module__.startswith(f"{package}."):
                return importlib.import_module(package)
    raise TypeError(f"{thing!r} is not a Trainer or LightningModule of {' or '.join(PACKAGES)}")


def second_use(trainer: Any, user: int | None) -> list[Problem]:
    """Refuse a callback that is in a run already."""
    if user is None:
        return []
    why = "another Trainer is in a run with it"
    if user == id(trainer):
        why = "the Trainer has it twice among its callbacks"
    return [Problem("this callback object", why, "Make one `MemSaveCallback` for each Trainer.")]


def data_connector_of(trainer: Any) -> ModuleType:
    return importlib.import_module(
        f"{package_of(trainer).__name__}.trainer.connectors.data_connector"
    )


def put_first(trainer: Any, callback: Any, *added: Any) -> Callable[[], None]:
    """Move a callback before all others, including tuners; returns what gives the order back.

    Callbacks that copy the module in ``setup`` stay before it.
    """
    callbacks = list(trainer.callbacks)
    place = next(i for i, c in enumerate(callbacks) if c is callback)
    before = [c for c in callbacks[:place] if averages_weights(c)]
    first = [*before, callback, *added]
    trainer.callbacks = [*first, *(c for c in callbacks if all(c is not f for f in first))]

    def undo() -> None:
        now = trainer.callbacks  # another list: the Trainer may be calling those in this one
        kept = [c for c in callbacks if any(c is one for one in now)]
        known = (*callbacks, *added)
        trainer.callbacks = [*kept, *(c for c in now if all(c is not one for one in known))]

    return undo


def leave_device(trainer: Any, pl_module: Any) -> None:
    """Free gradients and move the module to the host, as the strategy's teardown does later."""
    for parameter in pl_module.parameters():
        parameter.grad = None
    # Sharded strategies hold the shards themselves.
    if not is_strategy(trainer, *SHARDED):
        pl_module.cpu()


def first_of(trainer: Any, cls: type[CallbackT]) -> CallbackT | None:
    return next((c for c in trainer.callbacks if isinstance(c, cls)), None)


def averages_weights(callback: Any) -> bool:
    return _is_of(callback, _AVERAGES)


def prunes_weights(callback: Any) -> bool:
    return _is_of(callback, ("ModelPruning",))


def unfreezes_later(trainer: Any) -> bool:
    return any(_is_of(callback, ("BaseFinetuning",)) for callback in trainer.callbacks)


# By name: older releases do not have all classes, and either package may be missing.
def _is_of(callback: Any, names: tuple[str, ...]) -> bool:
    return any(
        cls.__name__ in names and cls.__module__.startswith(PACKAGES)
        for cls in type(callback).__mro__
    )


def builds_model_late(pl_module: Any) -> bool:
    hook = type(pl_module).configure_model
    return not hook.__module__.startswith(PACKAGES)


def sets_up(trainer: Any, pl_module: Any) -> bool:
    """Return whether a module may make or replace layers in ``setup``, after that of callbacks."""
    is_own = "setup" in vars(pl_module) or not type(pl_module).setup.__module__.startswith(PACKAGES)
    # There the module is copied before the strategy is set up, with all techniques applied.
    return is_own and not is_strategy(trainer, "FSDP2StrategyMixin")


def is_strategy(trainer: Any, *names: str) -> bool:
    """Return whether the strategy is an instance of a class with one of these names."""
    return any(cls.__name__ in names for cls in type(trainer.strategy).__mro__)


def convert_loaded_optimizer_states(
    trainer: Any, load_optimizer_state_dict: Callable[..., None]
) -> Callable[[], None]:
    return patch_method(trainer.strategy, load_optimizer_state_dict)


def logged_step(trainer: Any) -> int:
    return cast(int, trainer.fit_loop.epoch_loop._batches_that_stepped)


def has_configure_optimizers(pl_module: Any) -> bool:
    """Return whether a LightningModule overrides ``configure_optimizers``, also on the instance."""
    name = "configure_optimizers"
    base = next((c for c in type(pl_module).__mro__ if c.__name__ == "LightningModule"), None)
    own = getattr(type(pl_module), name, None)
    return name in vars(pl_module) or own is not getattr(base, name, None)


def is_compiled_whole(pl_module: Any) -> bool:
    """Return whether ``torch.compile`` was called with a LightningModule, as Lightning marks it."""
    return getattr(pl_module, "_compiler_ctx", None) is not None
