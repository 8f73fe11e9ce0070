"""Mixins that add one memory-saving technique each to a LightningModule.

They are plain classes, so they work with ``lightning.pytorch`` and ``pytorch_lightning``. Several
mixins of a module share one callback.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

from lightning_memsave.callbacks.memory_monitor import GPUMemoryMonitor
from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.core.patching import own, set_own
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.named_optimizer.technique import NamedOptimizer
from lightning_memsave.trainer.trainer import PACKAGES

_Callback = MemSaveCallback | GPUMemoryMonitor

# On a module's callback, which stays in the Trainer: the next module's replaces it, while one that
# the user passed to the Trainer overrides a module's.
_BROUGHT = "_memsave_brought_by_module"


# The callbacks of one module, and their arguments; copies of the module create their own.
_CACHE = "_memsave_cache"


class MemSaveMixin:
    """Base of the mixins: adds the callback, unless the Trainer has one."""

    _memsave_setting: ClassVar[tuple[str, str] | None] = None
    """An argument of `MemSaveCallback` or ``"monitor"``, and the attribute with its value."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__ == __name__:
            return
        before = cls.__mro__[: cls.__mro__.index(MemSaveMixin)]
        if any(base.__module__.startswith(PACKAGES) for base in before):
            mixin = next(b for b in before if b is not cls and issubclass(b, MemSaveMixin))
            raise ConfigurationError(
                f"`{cls.__name__}` lists LightningModule before `{mixin.__name__}` and overrides "
                "the mixin's `configure_callbacks`, so no memory would be saved. Write "
                f"`class {cls.__name__}({mixin.__name__}, LightningModule)`."
            )
        arguments = _asked_for(cls, cls)
        # The value of a property is known only for an instance, and checked when a fit starts.
        if not any(hasattr(value, "__get__") for value in arguments.values()):
            _make_callbacks(everything_off() | arguments)

    def _base_arguments(self) -> dict[str, Any]:
        return everything_off()

    def configure_callbacks(self) -> list[Any]:
        """Add the callbacks with this module's settings.

        They are the same objects for each Trainer and stage, and are not added if the Trainer
        already has a `MemSaveCallback`. An override must call ``super()``.
        """
        inherited = cast(Any, super()).configure_callbacks()
        callbacks = [*inherited] if isinstance(inherited, Sequence) else [inherited]
        own, trainer = self._own_callbacks(), _trainer_of(self)
        given = [] if trainer is None else [*trainer.callbacks]
        kept = [c for c in given if c in own or not _is_of_a_module(c)]
        if len(kept) < len(given):
            cast(Any, trainer).callbacks = kept
        others = [c for c in (*callbacks, *kept) if c not in own]

        def is_wanted(callback: _Callback) -> bool:
            rivals = (type(callback), MemSaveCallback)
            return callback not in kept and not any(isinstance(c, rivals) for c in others)

        return [*callbacks, *filter(is_wanted, own)]

    def _own_callbacks(self) -> list[_Callback]:
        callbacks: list[_Callback]
        before, callbacks = own(self, _CACHE) or (None, [])
        arguments = self._base_arguments() | _asked_for(type(self), self)
        if arguments != before:
            callbacks = _make_callbacks(arguments)
            set_own(self, _CACHE, (arguments, callbacks))
            for callback in callbacks:
                setattr(callback, _BROUGHT, True)
        return callbacks


class ActivationCheckpointingMixin(MemSaveMixin):
    """Activation checkpointing built into a LightningModule.

    Only the inputs of blocks are kept for backward, for about one third more compute. You need no
    callback in the Trainer; a `MemSaveCallback` there overrides this mixin.

    Write it before ``LightningModule``. The class attribute ``activation_checkpointing`` has the
    same values as the argument of `MemSaveCallback`, by default ``"all"``. A subclass or an
    instance may set another value; ``None`` disables it. Everything else is unchanged.

    Note:
        Exactness is *bitwise*. Limits are those of `ActivationCheckpointing`.

    Example:
        >>> from lightning.pytorch import LightningModule
        >>> class Lit(ActivationCheckpointingMixin, LightningModule):
        ...     activation_checkpointing = "every:2"
        >>> [callback.arguments["activation_checkpointing"] for callback in
        ...     Lit().configure_callbacks()]
        ['every:2']

    References:
        Chen et al. (2016), Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.
    """

    _memsave_setting = ("activation_checkpointing", "activation_checkpointing")
    activation_checkpointing: int | float | str | ActivationCheckpointing | None = "all"


class LowBitOptimizerMixin(MemSaveMixin):
    """An 8-bit optimizer built into a LightningModule.

    8-bit state needs a quarter of the memory of 32-bit state; embeddings, norms and biases keep
    32-bit state. You need no callback in the Trainer; a `MemSaveCallback` there overrides this
    mixin.

    Write it before ``LightningModule``. The class attribute ``low_bit_optimizer`` has the same
    values as the argument ``optimizer`` of `MemSaveCallback`, by default ``"8bit"``: the 8-bit form
    of the optimizer that ``configure_optimizers`` returns. A subclass or an instance may set
    another value; ``None`` disables it.

    Note:
        Exactness is *approximate*. Limits are those of `LowBitOptimizer`.

    Example:
        >>> from lightning.pytorch import LightningModule
        >>> class Lit(ActivationCheckpointingMixin, LowBitOptimizerMixin, LightningModule):
        ...     low_bit_optimizer = "paged_8bit"
        >>> [callback] = Lit().configure_callbacks()  # one for both
        >>> callback.arguments["optimizer"]
        'paged_8bit'

    References:
        Dettmers et al. (2022), 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.
    """

    _memsave_setting = ("optimizer", "low_bit_optimizer")
    low_bit_optimizer: str | LowBitOptimizer | NamedOptimizer | None = "8bit"


class MemoryLoggingMixin(MemSaveMixin):
    """Memory logging built into a LightningModule.

    Logs to every logger and saves no memory; see `GPUMemoryMonitor` for the keys. A
    `GPUMemoryMonitor` or `MemSaveCallback` in the Trainer overrides this mixin.

    Write it before ``LightningModule``. The class attribute ``log_memory_every_n_steps`` is the
    interval in optimizer steps, by default 50; ``None`` disables logging.

    Note:
        Exactness is *bitwise*.

    Example:
        >>> from lightning.pytorch import LightningModule
        >>> class Lit(MemoryLoggingMixin, LightningModule):
        ...     log_memory_every_n_steps = 10
        >>> Lit().configure_callbacks()
        [GPUMemoryMonitor(every_n_steps=10, print_summary=True)]
    """

    _memsave_setting = ("monitor", "log_memory_every_n_steps")
    log_memory_every_n_steps: int | None = 50


def everything_off() -> dict[str, Any]:
    return {"preset": "off"}


def _make_callbacks(arguments: dict[str, Any]) -> list[_Callback]:
    arguments = {**arguments}
    every_n_steps = arguments.pop("monitor", None)
    callbacks: list[_Callback] = []
    wanted = {name: value for name, value in arguments.items() if value is not None}
    if wanted != everything_off():
        callbacks.append(MemSaveCallback(**arguments))
    if every_n_steps is not None:
        callbacks.append(GPUMemoryMonitor(every_n_steps))
    return callbacks


def _asked_for(cls: type, owner: object) -> dict[str, Any]:
    settings = (vars(base).get("_memsave_setting") for base in cls.__mro__)
    return {setting[0]: getattr(owner, setting[1]) for setting in settings if setting}


def _trainer_of(module: Any) -> Any:
    try:
        trainer = module.trainer
    except RuntimeError:  # not attached to one
        return None
    # In Fabric it is an object without callbacks.
    return trainer if hasattr(trainer, "callbacks") else None


def _is_of_a_module(callback: object) -> bool:
    return isinstance(callback, _Callback) and hasattr(callback, _BROUGHT)
