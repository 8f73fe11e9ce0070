"""Describe the training step to predict: model, batch, settings and device."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave.core.names import did_you_mean
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.measure.storages import tensors_in
from lightning_memsave.prediction.cuda.constants import DETERMINISTIC_WORKSPACE
from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.prediction.fake.tensors import FakeTensors, real_tensors
from lightning_memsave.prediction.simulate import MAX_STEPS
from lightning_memsave.prediction.user_code import build_module
from lightning_memsave.prediction.wrapped_module import installed_package, is_lightning, wrap
from lightning_memsave.techniques.registry import with_preset
from lightning_memsave.trainer.precision import EMULATED, full_name

TIME_LIMIT_S = 300.0
OFF: Mapping[str, Any] = {"preset": "off"}
"""Arguments of `MemSaveCallback` with which nothing is on."""
MakeOptimizer = Callable[..., Optimizer]
ComputeLoss = Callable[[Any, Any], Tensor]
STRATEGIES: Mapping[str, str] = MappingProxyType({"ddp": "ddp", "fsdp2": "memsave_fsdp2"})
"""What can be predicted with several processes, and its name for the Trainer."""
_CAPABILITY = (8, 0)  # assumed if no GPU is named
# Predictions are for a single device: arguments on devices and strategies are ignored.
_MEMORY_ARGUMENTS = (
    *("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("max_epochs", "max_steps"),
)
_DEFAULT_PRECISION = ("32", "32-true")


@dataclass(frozen=True)
class RunningFit:
    num_batches: int = 1000
    has_buckets: bool = False
    """DDP has a copy of all gradients."""
    has_started: bool = True
    num_processes: int = 1
    strategy_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingStep:
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
    fit: RunningFit | None = None
    strategy: str | None = None
    world_size: int = 1
    change: Callable[[nn.Module], object] | None = None

    def __post_init__(self) -> None:
        if self.device not in ("cuda", "cpu"):
            raise ConfigurationError(
                f'`device={self.device!r}` is not supported. Use `"cuda"` or `"cpu"`; for a '
                'specific GPU: `device="cuda", gpu="T4"`.'
            )
        _check_processes(self.strategy, self.world_size)
        limit_s = self.time_limit_s
        if limit_s is not None and not (_is_number(limit_s) and limit_s > 0):
            raise ConfigurationError(
                f"`time_limit_s={limit_s!r}` is not a positive number of seconds. Use for example "
                "`time_limit_s=60`, or `None` for no limit."
            )
        _check_functions(self.optimizer, self.loss)
        _check_mapping(self.settings, "settings", '{"optimizer": "8bit"}')
        self._given  # noqa: B018 - raises for invalid settings
        _check_trainer_arguments(self.trainer_arguments)

    def with_settings(self, changes: Mapping[str, Any]) -> Self:
        return replace(self, settings={**self.settings, **changes})

    @cached_property
    def _given(self) -> Mapping[str, Any]:
        given = {str(name): value for name, value in self.settings.items()}
        return MappingProxyType(dict(self.make_callback(**given).arguments))

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """All arguments of `MemSaveCallback`; an ``"auto"`` precision is resolved."""
        arguments = dict(self._given)
        if with_preset(arguments)["precision"] == "auto":
            arguments["precision"] = self._auto_precision()
        return MappingProxyType(arguments | dict.fromkeys(self.emulated))

    @cached_property
    def emulated(self) -> dict[str, str]:
        """Settings of the preset that stay off without native bfloat16: value and reason."""
        arguments = with_preset(self._given)
        names = ("precision", "low_precision_weights")
        own = [name for name in names if name not in arguments["from_preset"]]
        chosen = str(self.trainer_settings.get("precision", 32))
        if (
            self.device != "cuda"
            or self.gpu is None
            or self.gpu.has_bf16
            or any(arguments[name] is not None for name in own)
            or not str(arguments["precision"]).startswith("bf16")
            or chosen not in _DEFAULT_PRECISION
        ):
            return {}
        values = {name: arguments[name] for name in names if name not in own}
        return {n: f"{value!r}: {EMULATED}" for n, value in values.items() if value is not None}

    @cached_property
    def effective_settings(self) -> Mapping[str, Any]:
        """All arguments of `MemSaveCallback`; ``"auto"`` is resolved to the preset's values."""
        return MappingProxyType(with_preset(self.arguments))

    @cached_property
    def trainer_settings(self) -> Mapping[str, Any]:
        arguments = _select_memory_arguments(self.trainer_arguments)
        if 0 <= arguments.get("max_steps", -1) < MAX_STEPS:
            del arguments["max_steps"]
        return MappingProxyType(arguments)

    @property
    def trainer_code(self) -> str:
        if self.strategy is None:
            return "Trainer()"
        return f'Trainer(strategy="{STRATEGIES[self.strategy]}", devices={self.world_size})'

    @property
    def precision(self) -> str:
        chosen = self.trainer_settings.get("precision")
        return str(self.effective_settings["precision"] or chosen or "32-true")

    @property
    def capability(self) -> tuple[int, int]:
        return (self.gpu and self.gpu.compute_capability) or _CAPABILITY

    @property
    def workspace_config(self) -> str | None:
        """Value of ``CUBLAS_WORKSPACE_CONFIG``; ``None`` to read it from the environment."""
        return DETERMINISTIC_WORKSPACE if self.trainer_arguments.get("deterministic") else None

    def build_module(self, fakes: FakeTensors) -> Any:
        """Build the LightningModule on fake tensors; a plain module is wrapped in one."""
        module = self.model if isinstance(self.model, nn.Module) else build_module(self.model)
        # Also what a function returns: it may return the same module each time.
        trainer = getattr(module, "_trainer", None)
        module = fakes.copy_module(module, without=[] if trainer is None else [trainer])
        if self.change is not None:
            self.change(module)
        return module if is_lightning(module) else wrap(module, self.optimizer, self.loss)

    def build(self, fakes: FakeTensors) -> tuple[Any, Any]:
        fake_module, batch = self.build_module(fakes), self.batch
        if inspect.isroutine(batch):
            with real_tensors():
                batch = batch()
        _check_batch(batch)
        if self.fit is None:
            return fake_module, fakes.copy_batch(batch)
        return fake_module, fakes.copy_whole_batch(batch)

    # An explicit precision of 32 cannot be told from Lightning's default, which the callback
    # replaces on CUDA.
    def _auto_precision(self) -> str | None:
        precision = str(self.trainer_settings.get("precision", 32))
        if self.device != "cuda" or precision not in _DEFAULT_PRECISION:
            return None
        return "bf16-mixed" if self.gpu is None or self.gpu.has_bf16 else None


def as_code(make_callback: Callable[..., Any], settings: Mapping[str, Any]) -> str:
    shown = changed_arguments(make_callback, settings)
    return f"MemSaveCallback({', '.join(f'{n}={_quoted(v)}' for n, v in shown.items())})"


def changed_arguments(
    make_callback: Callable[..., Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    defaults, arguments = make_callback().arguments, make_callback(**settings).arguments
    shown = [n for n, v in arguments.items() if v != defaults[n]]
    return {name: arguments[name] for name in sorted(shown, key=lambda name: name != "preset")}


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _check_batch(batch: Any) -> None:
    if batch is None:
        raise ConfigurationError(
            "`batch=None` is not a batch. Pass one that `training_step` accepts, on any device: "
            "for example `next(iter(train_dataloader))`."
        )
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim}
    if sizes == {0}:
        raise ConfigurationError(
            "The batch has no samples: the first dimension of its tensors is 0. Pass one of the "
            "size that you train with."
        )


def _check_functions(optimizer: Any, loss: Any) -> None:
    if isinstance(optimizer, Optimizer):
        name = type(optimizer).__name__
        raise ConfigurationError(
            f"`optimizer={name}(...)` is bound to other parameters. Pass a class or function that "
            f"constructs one: `optimizer=torch.optim.{name}`, or "
            f"`lambda parameters: torch.optim.{name}(...)`."
        )
    if optimizer is not None and not callable(optimizer):
        raise ConfigurationError(
            f"`optimizer={optimizer!r}` does not construct an optimizer. Pass a class such as "
            "`optimizer=torch.optim.AdamW`; for an 8-bit one add "
            '`settings={"optimizer": "8bit"}`.'
        )
    if loss is not None and not _accepts_two_arguments(loss):
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


def _check_processes(strategy: str | None, world_size: int) -> None:
    if strategy is not None and strategy not in STRATEGIES:
        raise ConfigurationError(
            f"`strategy={strategy!r}` is not predicted. Use `strategy='fsdp2'` for the Trainer's "
            "`strategy='memsave_fsdp2'`, `strategy='ddp'`, or `None` for one process."
        )
    if type(world_size) is not int or world_size < 1 or (strategy is None and world_size > 1):
        raise ConfigurationError(
            f"`world_size={world_size!r}` with `strategy={strategy!r}`: it must be a number of "
            'processes that a strategy trains. Use for example `strategy="fsdp2", world_size=8`.'
        )


def _check_trainer_arguments(arguments: Mapping[str, Any]) -> None:
    _check_mapping(arguments, "trainer_arguments", '{"precision": "bf16-mixed"}')
    known = inspect.signature(installed_package().Trainer).parameters
    for name in arguments:
        if name not in known:
            fix = did_you_mean(str(name), known).strip() or "Remove it."
            raise ConfigurationError(
                f"`trainer_arguments` has {name!r}, which Lightning's Trainer does not accept. "
                f"{fix}"
            )
    _check_trainer_values(_select_memory_arguments(arguments))


def _select_memory_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in _MEMORY_ARGUMENTS if arguments.get(name) is not None}


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
                f"`{name}={arguments[name]!r}` is not a valid value for Lightning's Trainer. Use "
                f"for example `{name}={example!r}`, or remove it."
            )


def _accepts_two_arguments(function: Any) -> bool:
    if isinstance(function, type) or not callable(function):
        return False
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # some functions written in C have no signature
        return True
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
