"""Predict the peak memory of training, without a GPU and without the memory of the model."""

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.callbacks.precision import full_name
from lightning_memsave.core.nested import items_of
from lightning_memsave.errors import ConfigurationError, MemsaveError
from lightning_memsave.measure.storages import tensors_in
from lightning_memsave.prediction.cuda.constants import DETERMINISTIC_WORKSPACE
from lightning_memsave.prediction.cuda.gpus import Gpu, as_gpu
from lightning_memsave.prediction.fake.tensors import FakeTensors, real_tensors
from lightning_memsave.prediction.predict import Question, predict
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.simulate import NUM_STEPS
from lightning_memsave.targets.code import explained, remedy_for
from lightning_memsave.techniques.registry import with_rest_off, with_stack
from lightning_memsave.trainer.trainer import PACKAGES


def check_arguments(device: str, time_limit_s: float | None) -> None:
    """Refuse a device or a time that there is not.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        time_limit_s: Seconds, or ``None``.

    Raises:
        ConfigurationError: If one of them is something else.
    """
    if device not in ("cuda", "cpu"):
        raise ConfigurationError(
            f'`device={device!r}` is not known here. Use `"cuda"` or `"cpu"`; for one GPU in '
            'particular: `device="cuda", gpu="T4"`.'
        )
    if time_limit_s is not None and not (_is_number(time_limit_s) and time_limit_s > 0):
        raise ConfigurationError(
            f"`time_limit_s={time_limit_s!r}` is no time to predict in. Use seconds, such as "
            "`time_limit_s=60`, or `None` for no limit."
        )


def check_batch(batch: Any) -> None:
    """Refuse a batch with which nothing would be trained.

    Args:
        batch: Tensors in any nesting.

    Raises:
        ConfigurationError: If there is none, or no sample in it.
    """
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


def check_functions(optimizer: Any, loss: Any) -> None:
    """Refuse what makes no optimizer or gives no loss.

    Args:
        optimizer: Of `predict_memory`.
        loss: Of `predict_memory`.

    Raises:
        ConfigurationError: If one of them cannot be called so.
    """
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


def check_mapping(value: Any, name: str, example: str) -> None:
    """Refuse arguments that are not given by name.

    Args:
        value: What was given.
        name: Of the argument that it was given for.
        example: What to write, as code.

    Raises:
        ConfigurationError: If it is not a mapping.
    """
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"`{name}={value!r}` is not a mapping of names to values. Write for example "
            f"`{name}={example}`."
        )


def check_trainer_values(arguments: Mapping[str, Any]) -> None:
    """Refuse values with which a Trainer could not train.

    Args:
        arguments: Of Lightning's Trainer, those that are not ``None``.

    Raises:
        ConfigurationError: If one is wrong.
    """
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


TIME_LIMIT_S = 300.0

_WRAPPER = "wrapped"
# One device holds everything: what a Trainer is told of devices and strategies is not used.
_CHECK_BATCH = "check that the batch is one that the module takes."
_NOTHING_TO_TRAIN = "optimizer got an empty parameter list"
_MATTER = (
    *("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("max_epochs", "max_steps"),
)
_LOSS = (
    "The loss is the `loss` of what the module gives, or the mean of its first tensor: pass "
    "`loss=` in Python, or a LightningModule, for another one."
)
_DEFAULT_PRECISION = ("32", "32-true")
MakeOptimizer = Callable[..., torch.optim.Optimizer]


def predict_memory(
    module: nn.Module | Callable[[], nn.Module],
    batch: Any,
    optimizer: MakeOptimizer | None = None,
    settings: Mapping[str, Any] | MemSaveCallback | None = None,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    gpu: str | Gpu | None = None,
    attention: str | None = None,
    trainer_arguments: Mapping[str, Any] | None = None,
    may_extrapolate: bool = True,
    time_limit_s: float | None = TIME_LIMIT_S,
) -> MemoryPrediction:
    """Predict the peak memory of a training step, by category, by phase and by module.

    Two steps of the module's own training code run in a Trainer of Lightning, on tensors that have
    shapes and no data: forward, backward, optimizer, and all that `MemSaveCallback` would do. So it
    needs neither a GPU nor the memory of the model. On a CPU the result is what is counted in the
    real step, to the byte where the code does not depend on data.

    Args:
        module: A LightningModule, any other module, or a function without arguments that makes one;
            the function never allocates the model.
        batch: A batch, in any nesting, whose tensors may be real or on the meta device; or a
            function that gives one. What follows from its integers (masks of padding, numbers of
            labels) is computed from them.
        optimizer: For modules that are no LightningModule: makes the optimizer from the parameters,
            such as a class. Without it: AdamW.
        settings: Arguments of `MemSaveCallback` by name, or one. In a mapping, techniques that are
            not named are off: the step as it is.
        loss: For modules that are no LightningModule: gives the loss from output and batch. Without
            it: the ``loss`` of the output, or the mean of a tensor.
        device: Whose kernels to assume.
        gpu: The GPU that is meant, such as ``"T4"``: it decides which precision ``"auto"`` is.
        attention: CUDA's attention kernel, ``"flash"``, ``"efficient"`` or ``"math"``; without it
            the one that torch would choose.
        trainer_arguments: Arguments of the Trainer; ``precision``, accumulation, gradient
            clipping and ``deterministic`` matter for memory, others are not used.
        may_extrapolate: Whether models of 30 blocks and more may be predicted from copies with
            fewer, which takes seconds instead of minutes.
        time_limit_s: Give up after this time; ``None`` for never. A step that repeats itself until
            some number is small enough would never end on tensors without data.

    Returns:
        The prediction.

    Raises:
        ConfigurationError: If arguments are wrong, or the module cannot be made or copied.
        MemsaveError: If settings do not go with the module.
        TimeoutError: If the step does not end, or takes longer than ``time_limit_s``.

    Note:
        Whatever the module's step raises on this batch comes through, with a note. For CUDA the
        prediction rests on ``assumptions``, which the result lists. Hooks of the module run too, up
        to ``on_train_start`` and in each step: what they write to files or send away is written and
        sent. Those of the end of a fit do not run.

    Example:
        >>> model = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 10))
        >>> prediction = predict_memory(model, torch.ones(32, 100), device="cpu")
        >>> prediction.peak.parameter_bytes, prediction.peak.optimizer_state_bytes
        (88840, 177696)
    """
    check_arguments(device, time_limit_s)
    check_functions(optimizer, loss)
    arguments = _arguments(settings)
    trainer_arguments = {} if trainer_arguments is None else trainer_arguments
    trainer_settings = _trainer_settings(trainer_arguments)
    is_deterministic = bool(trainer_arguments.get("deterministic"))
    card = as_gpu(gpu)
    if with_stack(arguments)["precision"] == "auto":
        arguments["precision"] = _auto_precision(device, card, trainer_settings)

    def build(fakes: FakeTensors) -> tuple[Any, Any]:
        made = module if isinstance(module, nn.Module) else _made(module)
        data = batch
        if inspect.isroutine(batch):
            with real_tensors():
                data = batch()
        check_batch(data)
        twin = fakes.copy_module(made, without=_trainers(made)) if made is module else made
        if not _is_lightning(twin):
            twin = _wrap(twin, optimizer, loss)
        return twin, fakes.copy_batch(data)

    question = Question(
        build,
        MemSaveCallback,
        arguments,
        device,
        attention=attention,
        capability=(card and card.compute_capability) or (8, 0),
        trainer_arguments=trainer_settings,
        workspace_config=DETERMINISTIC_WORKSPACE if is_deterministic else None,
        time_limit_s=time_limit_s,
        may_extrapolate=may_extrapolate,
    )
    try:
        prediction = predict(question)
    except (MemsaveError, TimeoutError):
        raise
    except Exception as error:
        if _NOTHING_TO_TRAIN in str(error):
            raise ConfigurationError(
                "The optimizer has no parameter to train: those of the module have "
                "`requires_grad=False`, or there are none. Let some of them be trained, or pass a "
                "module whose optimizer takes them."
            ) from error
        error.add_note(
            "This comes from the training step of the module, which `predict_memory` ran on "
            f"tensors without data: {remedy_for(error) or _CHECK_BATCH}"
        )
        raise
    if prediction.modules[0].class_name != "Wrapped":
        return prediction
    return _without_wrapper(prediction, () if loss is not None else (_LOSS,))


def _made(make: Any) -> nn.Module:
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


def _arguments(settings: Mapping[str, Any] | MemSaveCallback | None) -> dict[str, Any]:
    if isinstance(settings, MemSaveCallback):
        return dict(settings.arguments)
    settings = {} if settings is None else settings
    check_mapping(settings, "settings", '{"optimizer": "8bit"}')
    known = inspect.signature(MemSaveCallback).parameters
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ConfigurationError(
            f"`{unknown[0]}` is no argument of `MemSaveCallback`. Use "
            f"{', '.join(f'`{name}`' for name in known)}."
        )
    defaults = {name: parameter.default for name, parameter in known.items()}
    arguments = defaults | with_rest_off(settings)
    MemSaveCallback(**arguments)  # says all that is wrong with them
    return arguments


def with_instances(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Make the techniques that arguments of `MemSaveCallback` name by their ``class_path``.

    Args:
        settings: Arguments of `MemSaveCallback`, as YAML has them.

    Returns:
        The arguments with instances in place of their descriptions.

    Raises:
        ConfigurationError: If a class or one of its arguments is wrong.
    """
    nested = {n for n, v in settings.items() if isinstance(v, dict) and "class_path" in v}
    if not nested:
        return dict(settings)
    from jsonargparse import ArgumentParser  # noqa: PLC0415

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(MemSaveCallback, "memsave", fail_untyped=False, sub_configs=True)
    with explained("Reading the settings of `MemSaveCallback`", "Check classes and arguments."):
        config = parser.parse_object({"memsave": settings})
        # The old name is deprecated from 4.49 on.
        instantiate: Any = getattr(parser, "instantiate", None) or parser.instantiate_classes
        callback = instantiate(config).memsave
    return dict(settings) | {name: callback.arguments[name] for name in nested}


def _trainer_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    check_mapping(given, "trainer_arguments", '{"precision": "bf16-mixed"}')
    known = inspect.signature(_installed_package().Trainer).parameters
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            raise ConfigurationError(
                f"`trainer_arguments` has {name!r}, which is no argument of Lightning's Trainer. "
                + (f"Did you mean {near[0]!r}?" if near else "Remove it.")
            )
    matter = {name: given[name] for name in _MATTER if given.get(name) is not None}
    check_trainer_values(matter)
    if 0 <= matter.get("max_steps", -1) < NUM_STEPS:
        del matter["max_steps"]
    return matter


# Lightning's default cannot be told from no choice, which the callback changes on CUDA.
def _auto_precision(
    device: str, gpu: Gpu | None, trainer_arguments: Mapping[str, Any]
) -> str | None:
    if device != "cuda" or str(trainer_arguments.get("precision", 32)) not in _DEFAULT_PRECISION:
        return None
    return "bf16-mixed" if gpu is None or gpu.has_bf16 else None


def _is_lightning(module: nn.Module) -> bool:
    starts = tuple(f"{package}." for package in PACKAGES)
    return any(cls.__module__.startswith(starts) for cls in type(module).__mro__)


def _trainers(module: Any) -> list[Any]:
    trainer = getattr(module, "_trainer", None)
    return [] if trainer is None else [trainer]


def _installed_package() -> Any:
    """Import the first of Lightning's two packages that is installed."""
    installed = (name for name in PACKAGES if importlib.util.find_spec(name.partition(".")[0]))
    return importlib.import_module(next(installed))


def _wrap(module: nn.Module, optimizer: Any, loss: Any) -> Any:
    package: Any = _installed_package()

    class Wrapped(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = module

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = _call(self.wrapped, batch)
            return _loss_of(output) if loss is None else _checked_loss(loss(output, batch))

        def configure_optimizers(self) -> Any:
            parameters = [p for p in self.wrapped.parameters() if p.requires_grad]
            made = (optimizer or torch.optim.AdamW)(parameters)
            if made is None:
                raise ConfigurationError(
                    "`optimizer=` gave `None`. Return the optimizer, or pass its class: "
                    "`optimizer=torch.optim.AdamW`."
                )
            return made

    return Wrapped()


def _checked_loss(found: Any) -> Any:
    is_tensor = isinstance(found, Tensor)
    if is_tensor and tuple(found.shape) in ((), (1,)):
        return found
    what = f"a tensor of shape {tuple(found.shape)}" if is_tensor else type(found).__name__
    raise ConfigurationError(
        f"`loss=` gave {what}, not a tensor with one value. Reduce it: "
        "for example `loss=lambda output, batch: (output - batch[1]).square().mean()`."
    )


# Under the name that it has in the LightningModule around it no one would look for a module.
def _without_wrapper(
    prediction: MemoryPrediction, assumptions: tuple[str, ...]
) -> MemoryPrediction:
    def own(name: str) -> str:
        return "" if name == _WRAPPER else name.removeprefix(f"{_WRAPPER}.")

    outer, inner, *others = prediction.modules
    inner = replace(inner, name="", memory=inner.memory + outer.memory)
    return replace(
        prediction,
        modules=(inner, *(replace(module, name=own(module.name)) for module in others)),
        largest_tensors=tuple(
            replace(tensor, module=own(tensor.module)) for tensor in prediction.largest_tensors
        ),
        peak_module=own(prediction.peak_module),
        assumptions=(*assumptions, *prediction.assumptions),
        ineffective={
            name: why.replace("`Wrapped`", f"`{prediction.model}`")
            for name, why in prediction.ineffective.items()
        },
    )


def _call(module: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return module(**batch)
    if isinstance(batch, list | tuple):
        return module(*batch)
    return module(batch)


def _loss_of(output: Any) -> Tensor:
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if isinstance(found, Tensor):
        return found
    if isinstance(output, Tensor):
        return output.float().mean()
    tensors = [item for _, item in items_of(output) if isinstance(item, Tensor)]
    if tensors and tensors[0].is_floating_point():
        return tensors[0].float().mean()
    raise ConfigurationError(
        f"The module gives {type(output).__name__}, in which there is no loss. Pass `loss=`, a "
        "function of output and batch."
    )
