"""Memory saving built into a LightningModule, one concern each.

The mixins are plain classes, so that they fit modules of ``lightning.pytorch`` and of
``pytorch_lightning``. What several of them ask for comes together in one callback.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, cast
from weakref import WeakSet

from lightning_memsave.callbacks.memory_monitor import GPUMemoryMonitor
from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.techniques.activation_checkpointing.technique import (
    ActivationCheckpointing,
)
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.trainer.trainer import PACKAGES

_Callback = MemSaveCallback | GPUMemoryMonitor

# A callback that a module brought stays in the Trainer. It has to give way to that of the next
# module, while one that the user gave to the Trainer wins over a module's.
_BROUGHT_BY_MODULES: WeakSet[_Callback] = WeakSet()


class _Cache:
    """The callback of one module; copies and pickles of the module make their own."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] | None = None
        self.callback: _Callback | None = None

    def __reduce__(self) -> tuple[type["_Cache"], tuple[()]]:
        return _Cache, ()


class MemSaveMixin:
    """What the mixins share: it brings the callback, unless the Trainer was given one."""

    _memsave_setting: ClassVar[tuple[str, str] | None] = None
    """An argument of `MemSaveCallback`, and the attribute that it is taken from."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__ == __name__:
            return
        before = cls.__mro__[: cls.__mro__.index(MemSaveMixin)]
        if any(base.__module__.startswith(PACKAGES) for base in before):
            mixin = next(b for b in before if b is not cls and issubclass(b, MemSaveMixin))
            raise ConfigurationError(
                f"`{cls.__name__}` names LightningModule before `{mixin.__name__}`, which hides "
                "its `configure_callbacks`, so that nothing would be saved. Write "
                f"`class {cls.__name__}({mixin.__name__}, LightningModule)`."
            )
        arguments = _asked_for(cls, cls)
        # What a property gives is known for an instance only, and checked when a fit starts.
        if not any(hasattr(value, "__get__") for value in arguments.values()):
            make_callback(everything_off() | arguments)

    def _base_arguments(self) -> dict[str, Any]:
        return everything_off()

    def configure_callbacks(self) -> list[Any]:
        """Bring the callback that does what this module asks for.

        The same one comes for each Trainer and each stage. A `MemSaveCallback` that the user gave
        to the Trainer wins, and nothing is brought then. An override must call ``super()``.

        Returns:
            The callbacks of the classes behind this one, and at most one more.
        """
        inherited = cast(Any, super()).configure_callbacks()
        callbacks = [*inherited] if isinstance(inherited, Sequence) else [inherited]
        callback, trainer = self._own_callback(), _trainer_of(self)
        given = [] if trainer is None else [*trainer.callbacks]
        kept = [c for c in given if c is callback or not _is_of_a_module(c)]
        if len(kept) < len(given):
            cast(Any, trainer).callbacks = kept
        rivals = (type(callback), MemSaveCallback)
        if callback is None or any(isinstance(c, rivals) for c in [*callbacks, *kept]):
            return callbacks
        return [*callbacks, callback]

    def _own_callback(self) -> _Callback | None:
        cache = cast(_Cache, vars(self).setdefault("_memsave_cache", _Cache()))
        arguments = self._base_arguments() | _asked_for(type(self), self)
        if arguments != cache.arguments:
            cache.arguments, cache.callback = arguments, make_callback(arguments)
            if cache.callback is not None:
                _BROUGHT_BY_MODULES.add(cache.callback)
        return cache.callback


class ActivationCheckpointingMixin(MemSaveMixin):
    """Recompute the activations of each block, in a module that says so itself.

    Of a block only the input is kept for backward, for about one third more compute. The Trainer
    needs no callback; one that it is given, a `MemSaveCallback`, wins.

    Write it before ``LightningModule``. The class attribute ``activation_checkpointing`` takes what
    `MemSaveCallback` takes under that name; the default is ``"all"``. A subclass or an instance may
    set another one, also ``None``. All else is left as it is, unless other mixins ask for it.

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
    """Keep the state of the optimizer in 8 bits, in a module that says so itself.

    That takes a quarter of the memory of 32-bit state; embeddings, norms and biases keep theirs.
    The Trainer needs no callback; one that it is given, a `MemSaveCallback`, wins.

    Write it before ``LightningModule``. The class attribute ``low_bit_optimizer`` takes what
    `MemSaveCallback` takes as ``optimizer``; the default is ``"8bit"``, the 8-bit form of what
    ``configure_optimizers`` gives. A subclass or an instance may set another one, also ``None``.

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
    low_bit_optimizer: str | LowBitOptimizer | None = "8bit"


class MemoryLoggingMixin(MemSaveMixin):
    """Log memory to every logger, in a module that says so itself.

    Saves nothing and shows all; see `GPUMemoryMonitor` for the keys. One that the Trainer is given,
    or a `MemSaveCallback`, wins.

    Write it before ``LightningModule``. The class attribute ``log_memory_every_n_steps`` is the
    interval in optimizer steps, 50 by default; ``None`` logs nothing.

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
    """Give the arguments of `MemSaveCallback` that leave everything as it is.

    Returns:
        A new dictionary.
    """
    return {"stack": "off", "monitor": False}


def make_callback(arguments: dict[str, Any]) -> _Callback | None:
    """Make the one callback that does what a module asks for.

    Args:
        arguments: Of `MemSaveCallback`. As ``monitor``, a number is the interval of logging, and
            ``None`` is for not.

    Returns:
        A `MemSaveCallback`; a `GPUMemoryMonitor` if there is nothing to do but to measure; ``None``
        if there is nothing to do at all.
    """
    monitor = arguments.get("monitor", True)
    if monitor is None:
        monitor = False
    elif not isinstance(monitor, bool | GPUMemoryMonitor):
        monitor = GPUMemoryMonitor(monitor)
    wanted = {name: value for name, value in arguments.items() if value is not None}
    if wanted | {"monitor": False} != everything_off():
        return MemSaveCallback(**arguments | {"monitor": monitor})
    return GPUMemoryMonitor() if monitor is True else monitor or None


def _asked_for(cls: type, owner: object) -> dict[str, Any]:
    settings = (vars(base).get("_memsave_setting") for base in cls.__mro__)
    return {setting[0]: getattr(owner, setting[1]) for setting in settings if setting}


def _trainer_of(module: Any) -> Any:
    try:
        trainer = module.trainer
    except RuntimeError:  # not attached to one
        return None
    # Fabric puts an object without callbacks in its place.
    return trainer if hasattr(trainer, "callbacks") else None


def _is_of_a_module(callback: object) -> bool:
    return isinstance(callback, _Callback) and callback in _BROUGHT_BY_MODULES
