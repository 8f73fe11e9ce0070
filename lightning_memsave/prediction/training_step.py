"""The one request: which training step is meant, and on what it runs."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave.core.names import did_you_mean
from lightning_memsave.core.patching import unpatch
from lightning_memsave.errors import ConfigurationError, MemsaveError
from lightning_memsave.measure.storages import tensors_in
from lightning_memsave.prediction.cuda.constants import DETERMINISTIC_WORKSPACE
from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.prediction.fake.tensors import FakeTensors, real_tensors
from lightning_memsave.prediction.simulate import NUM_STEPS
from lightning_memsave.prediction.wrapped_module import installed_package, is_lightning, wrap
from lightning_memsave.techniques.registry import with_stack
from lightning_memsave.trainer.precision import full_name

TIME_LIMIT_S = 300.0
MakeOptimizer = Callable[..., Optimizer]
ComputeLoss = Callable[[Any, Any], Tensor]
_CAPABILITY = (8, 0)  # where no GPU in particular is meant
# One device holds everything: what a Trainer is told of devices and strategies is not used.
_MATTER = (
    *("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("max_epochs", "max_steps"),
)
_DEFAULT_PRECISION = ("32", "32-true")


@dataclass(frozen=True)
class RunningFit:
    """What is known of a step because its fit has begun.

    Args:
        num_batches: In an epoch, for schedules.
        other_bytes: What there is all the time and no prediction sees, such as what a strategy
            holds.
    """

    num_batches: int = 1000
    other_bytes: int = 0


@dataclass(frozen=True)
class TrainingStep:
    """A training step: of which model, with which batch and settings, on which device.

    Args:
        model: A LightningModule, any other module, or a function without arguments that makes one;
            ``None`` where only its parameters are known, which is not predicted.
        batch: A batch, in any nesting, real or on the meta device; or a function that gives one;
            ``None`` where there is none yet.
        make_callback: Makes a `MemSaveCallback` from its arguments.
        settings: Its arguments by name, as they would be written.
        optimizer: For modules that are no LightningModule: makes the optimizer from the parameters;
            ``None`` for AdamW.
        loss: For modules that are no LightningModule: gives the loss from output and batch.
        trainer_arguments: Arguments of the Trainer.
        device: Whose kernels are assumed, ``"cuda"`` or ``"cpu"``.
        gpu: The GPU that is meant.
        attention: CUDA's attention kernel; ``None`` for the one that torch would choose.
        time_limit_s: Give up a prediction after this time; ``None`` for never.
        may_extrapolate: Whether deep models may be predicted from copies with fewer blocks.
        fit: What is known of the fit that the step is one of; ``None`` before there is one.

    Raises:
        ConfigurationError: If an argument cannot be used.
    """

    model: nn.Module | Callable[[], nn.Module] | None
    batch: Any
    make_callback: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    optimizer: MakeOptimizer | None = None
    loss: ComputeLoss | None = None
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cuda"
    gpu: Gpu | None = None
    attention: str | None = None
    time_limit_s: float | None = TIME_LIMIT_S
    may_extrapolate: bool = True
    fit: RunningFit | None = None

    def __post_init__(self) -> None:
        _check_device(self.device)
        _check_time_limit(self.time_limit_s)
        _check_functions(self.optimizer, self.loss)
        _check_settings(self.settings, self.make_callback)
        _check_trainer_arguments(self.trainer_arguments)

    def with_settings(self, changes: Mapping[str, Any]) -> Self:
        """Give the same step with other arguments of `MemSaveCallback`."""
        return replace(self, settings={**self.settings, **changes})

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments of `MemSaveCallback`, with the precision that ``"auto"`` is here."""
        arguments = dict(self.make_callback(**self.settings).arguments)
        if with_stack(arguments)["precision"] == "auto":
            arguments["precision"] = self._auto_precision()
        return arguments

    @property
    def effective_settings(self) -> dict[str, Any]:
        """The same with the values of the stack in place of ``"auto"``."""
        return with_stack(self.arguments)

    @property
    def trainer_settings(self) -> dict[str, Any]:
        """Those of the Trainer's arguments that matter for memory."""
        matter = _that_matter(self.trainer_arguments)
        if 0 <= matter.get("max_steps", -1) < NUM_STEPS:
            del matter["max_steps"]
        return matter

    @property
    def precision(self) -> str:
        """What is trained in."""
        chosen = self.trainer_settings.get("precision")
        return str(self.effective_settings["precision"] or chosen or "32-true")

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of the GPU, or of the one that is assumed."""
        return (self.gpu and self.gpu.compute_capability) or _CAPABILITY

    @property
    def workspace_config(self) -> str | None:
        """As ``CUBLAS_WORKSPACE_CONFIG``; ``None`` where that variable says it."""
        return DETERMINISTIC_WORKSPACE if self.trainer_arguments.get("deterministic") else None

    def build(self, fakes: FakeTensors) -> tuple[Any, Any]:
        """Make the LightningModule and the batch, both without data.

        Args:
            fakes: Makes tensors without data.

        Returns:
            Both.

        Raises:
            ConfigurationError: If one of them cannot be made or copied, or the batch is empty.
        """
        made = self.model if isinstance(self.model, nn.Module) else _make(self.model)
        batch = self.batch
        if inspect.isroutine(batch):
            with real_tensors():
                batch = batch()
        _check_batch(batch)
        twin = made
        if made is self.model:
            trainer = getattr(made, "_trainer", None)
            twin = fakes.copy_module(made, without=[] if trainer is None else [trainer])
        if not is_lightning(twin):
            twin = wrap(twin, self.optimizer, self.loss)
        if self.fit is None:
            return twin, fakes.copy_batch(batch)
        for part in twin.modules():
            unpatch(part)
        return twin, fakes.copy_whole_batch(batch)

    # Lightning's default cannot be told from no choice, which the callback changes on CUDA.
    def _auto_precision(self) -> str | None:
        given = str(self.trainer_settings.get("precision", 32))
        if self.device != "cuda" or given not in _DEFAULT_PRECISION:
            return None
        return "bf16-mixed" if self.gpu is None or self.gpu.has_bf16 else None


def as_code(make_callback: Callable[..., Any], settings: Mapping[str, Any]) -> str:
    """Write what to type for settings.

    Args:
        make_callback: Makes a `MemSaveCallback`.
        settings: Its arguments by name.

    Returns:
        Such as ``MemSaveCallback(stack="off", optimizer="8bit")``; defaults are left out.
    """
    defaults, arguments = make_callback().arguments, make_callback(**settings).arguments
    # Command lines and YAML write an empty list for `()`.
    shown = [n for n, v in arguments.items() if v != defaults[n] and (v or defaults[n] != ())]
    shown.sort(key=lambda name: name != "stack")
    return f"MemSaveCallback({', '.join(f'{n}={_quoted(arguments[n])}' for n in shown)})"


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _make(make: Any) -> nn.Module:
    if not callable(make):
        raise ConfigurationError(
            f"`{make!r}` is {type(make).__name__}, neither a module nor a function that makes one. "
            "Pass the module, or for example `lambda: Model(config)`."
        )
    try:
        made = make()
    except MemsaveError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"`{make!r}` cannot make the module ({type(error).__name__}: {error}). It is called "
            "without arguments and its tensors have no data: see that it needs neither, or pass "
            "the module itself."
        ) from error
    if not isinstance(made, nn.Module):
        raise ConfigurationError(
            f"`{make!r}` gave {type(made).__name__}, not a module. Return the module."
        )
    return made


def _check_device(device: str) -> None:
    if device not in ("cuda", "cpu"):
        raise ConfigurationError(
            f'`device={device!r}` is not known here. Use `"cuda"` or `"cpu"`; for one GPU in '
            'particular: `device="cuda", gpu="T4"`.'
        )


def _check_time_limit(time_limit_s: float | None) -> None:
    if time_limit_s is not None and not (_is_number(time_limit_s) and time_limit_s > 0):
        raise ConfigurationError(
            f"`time_limit_s={time_limit_s!r}` is no time to predict in. Use seconds, such as "
            "`time_limit_s=60`, or `None` for no limit."
        )


def _check_batch(batch: Any) -> None:
    if batch is None:
        raise ConfigurationError(
            "`batch=None` is no batch. Pass one that `training_step` takes, on any device: for "
            "example `next(iter(train_dataloader))`."
        )
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim}
    if sizes == {0}:
        raise ConfigurationError(
            "The batch has no samples: the first size of its tensors is 0. Pass one of the size "
            "that is trained with."
        )


def _check_functions(optimizer: Any, loss: Any) -> None:
    if isinstance(optimizer, Optimizer):
        name = type(optimizer).__name__
        raise ConfigurationError(
            f"`optimizer={name}(...)` is an optimizer of other parameters. Pass what makes one: "
            f"`optimizer=torch.optim.{name}`, or `lambda parameters: torch.optim.{name}(...)`."
        )
    if optimizer is not None and not callable(optimizer):
        raise ConfigurationError(
            f"`optimizer={optimizer!r}` does not make an optimizer. Pass a class such as "
            "`optimizer=torch.optim.AdamW`; for an 8-bit one add "
            '`settings={"optimizer": "8bit"}`.'
        )
    if loss is not None and not _takes_two(loss):
        raise ConfigurationError(
            f"`loss={loss!r}` is not a function of output and batch. Pass for example "
            "`loss=lambda output, batch: torch.nn.functional.mse_loss(output, batch[1])`."
        )


def _check_mapping(value: Any, name: str, example: str) -> None:
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"`{name}={value!r}` is not a mapping of names to values. Write for example "
            f"`{name}={example}`."
        )


def _check_settings(settings: Mapping[str, Any], make_callback: Callable[..., Any]) -> None:
    _check_mapping(settings, "settings", '{"optimizer": "8bit"}')
    make_callback(
        **{str(name): value for name, value in settings.items()}
    )  # says all that is wrong with them


def _check_trainer_arguments(given: Mapping[str, Any]) -> None:
    _check_mapping(given, "trainer_arguments", '{"precision": "bf16-mixed"}')
    known = inspect.signature(installed_package().Trainer).parameters
    for name in given:
        if name not in known:
            fix = did_you_mean(str(name), known).strip() or "Remove it."
            raise ConfigurationError(
                f"`trainer_arguments` has {name!r}, which is no argument of Lightning's Trainer. "
                f"{fix}"
            )
    _check_trainer_values(_that_matter(given))


def _that_matter(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in _MATTER if given.get(name) is not None}


def _check_trainer_values(arguments: Mapping[str, Any]) -> None:
    if "precision" in arguments:
        full_name(arguments["precision"])
    rules: dict[str, tuple[Callable[[Any], bool], Any]] = {
        "accumulate_grad_batches": (lambda v: type(v) is int and v >= 1, 4),
        "gradient_clip_val": (_is_number, 1.0),
        "gradient_clip_algorithm": (lambda v: v in ("norm", "value"), "norm"),
        "max_epochs": (lambda v: type(v) is int, 3),
        "max_steps": (lambda v: type(v) is int, 1000),
    }
    for name, (is_right, example) in rules.items():
        if name in arguments and not is_right(arguments[name]):
            raise ConfigurationError(
                f"`{name}={arguments[name]!r}` is not a value of Lightning's Trainer. Use for "
                f"example `{name}={example!r}`, or remove it."
            )


def _takes_two(function: Any) -> bool:
    if isinstance(function, type) or not callable(function):
        return False
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # some written in C do not say what they take
        return True
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
