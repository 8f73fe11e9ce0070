"""Arguments of ``MemSaveCallback``: checked all at once, and turned into settings."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lightning_memsave.callbacks._accumulation import Accumulation
from lightning_memsave.callbacks._evaluation_micro_batching import EvaluationMicroBatches
from lightning_memsave.callbacks._micro_batching import MicroBatches
from lightning_memsave.callbacks._precision import TrainerPrecision, full_name
from lightning_memsave.callbacks._run_prediction import TIME_LIMIT_S
from lightning_memsave.callbacks._settings import Row, Setting, TensorFloat32
from lightning_memsave.callbacks._techniques import ModuleTechnique, OptimizerTechnique
from lightning_memsave.callbacks.memory_monitor import GPUMemoryMonitor
from lightning_memsave.core.technique import Exactness, Technique
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memsave.techniques.low_bit_optimizer import LowBitOptimizer
from lightning_memsave.techniques.micro_batching import MicroBatching

T = TypeVar("T")

_Arguments = Mapping[str, Any]


def make_settings(
    owner: str, arguments: _Arguments
) -> tuple[list[Setting], GPUMemoryMonitor | None]:
    """Check every argument and make what the callback works with.

    Args:
        owner: Name of the class whose arguments they are, for the message.
        arguments: All arguments of ``MemSaveCallback`` by name.

    Returns:
        The settings in the order in which they are applied, and the monitor.

    Raises:
        ConfigurationError: If any argument is wrong; the message lists every problem.
    """
    problems: list[str] = []

    def attempt(make: Callable[[_Arguments], T]) -> T | None:
        try:
            return make(arguments)
        except ConfigurationError as error:
            problems.append(str(error))
            return None

    makers: tuple[Callable[[_Arguments], Setting], ...] = (
        _precision,
        _tf32,
        _accumulation,
        _micro_batches,
        _evaluation_micro_batches,
        _activation_checkpointing,
        _optimizer,
    )
    attempt(_limit)
    settings = [attempt(make) for make in makers]
    monitor = attempt(_monitor)
    attempt(_report)
    attempt(_prediction)
    if problems:
        error = ConfigurationError.from_problems(owner, list(dict.fromkeys(problems)))
        raise error
    return [setting for setting in settings if setting is not None], monitor


def _limit(arguments: _Arguments) -> Exactness:
    try:
        return Exactness(arguments["exactness"])
    except ValueError as error:
        raise ConfigurationError(
            f"`exactness={arguments['exactness']!r}` is no exactness. Use "
            f"{' or '.join(repr(e.value) for e in Exactness)}."
        ) from error


# True if the limit switches off what was left to us; what the user asked for by name is refused.
def _is_beyond(arguments: _Arguments, name: str, exactness: Exactness) -> bool:
    limit = _limit(arguments)
    if limit.allows(exactness):
        return False
    if arguments[name] == "auto":
        return True
    raise ConfigurationError(
        f"`{name}={arguments[name]!r}` is {exactness.value}, which "
        f"`exactness={limit.value!r}` does not allow. Use `exactness={exactness.value!r}`, or "
        f"`{name}=None`."
    )


def _off(arguments: _Arguments, name: str) -> Row:
    reason = f"`exactness={arguments['exactness']!r}` does not allow it"
    return Row(name, "auto", "off", (reason,))


def _precision(arguments: _Arguments) -> Setting:
    wanted = arguments["precision"]
    if wanted is None:
        return TrainerPrecision(None)
    if wanted != "auto":
        wanted = full_name(wanted)
    # "32-true" is what Lightning does by itself; it cannot be told from no choice.
    exactness = Exactness.BITWISE if wanted == "32-true" else Exactness.APPROXIMATE
    if _is_beyond(arguments, "precision", exactness):
        setting = TrainerPrecision(None)
        setting.rows = [_off(arguments, "precision")]
        return setting
    return TrainerPrecision(wanted)


def _tf32(arguments: _Arguments) -> Setting:
    wanted = _flag(arguments, "tf32", (True, False, None))
    if wanted:
        _is_beyond(arguments, "tf32", Exactness.APPROXIMATE)
    return TensorFloat32(wanted)


def _accumulation(arguments: _Arguments) -> Setting:
    wanted = arguments["accumulate_grad_batches"]
    if wanted is not None and (type(wanted) is not int or wanted < 1):
        raise ConfigurationError(
            f"`accumulate_grad_batches={wanted!r}` is not a number of batches: it must be a whole "
            "number of at least 1. Use `accumulate_grad_batches=4` for a step every four batches, "
            "or `None` to leave it to the Trainer."
        )
    return Accumulation(wanted)


def _activation_checkpointing(arguments: _Arguments) -> Setting:
    name = "activation_checkpointing"
    wanted, blocks = arguments[name], arguments["blocks"]
    if wanted is None or isinstance(wanted, ActivationCheckpointing):
        if blocks is not None:
            raise ConfigurationError(
                f"`blocks={blocks!r}` is not used with `{name}={wanted!r}`. Use "
                f"`{name}=ActivationCheckpointing(..., blocks=...)`, or remove `blocks`."
            )
        technique = wanted
    else:
        _refuse_technique(name, wanted, ActivationCheckpointing)
        technique = ActivationCheckpointing("all" if wanted == "auto" else wanted, blocks=blocks)
    value = "None" if technique is None else repr(technique.which)
    return ModuleTechnique(name, technique, value, is_auto=wanted == "auto")


def _optimizer(arguments: _Arguments) -> Setting:
    wanted = arguments["optimizer"]
    details = {
        name: arguments[name]
        for name in ("optimizer_kwargs", "keep_32bit", "force_8bit")
        if arguments[name]
    }
    if wanted is None or isinstance(wanted, LowBitOptimizer):
        if details:
            raise ConfigurationError(
                f"{', '.join(f'`{name}`' for name in details)} is not used with "
                f"`optimizer={wanted!r}`. Pass `optimizer=LowBitOptimizer(...)` with them, "
                'or use `optimizer="8bit"`.'
            )
        technique = wanted
    else:
        _refuse_technique("optimizer", wanted, LowBitOptimizer)
        technique = LowBitOptimizer("8bit" if wanted == "auto" else wanted, **details)
    value = "None" if technique is None else repr(technique.optimizer)
    if technique and _is_beyond(arguments, "optimizer", technique.exactness):
        setting = OptimizerTechnique(None, "None", is_auto=True)
        setting.rows = [_off(arguments, "optimizer")]
        return setting
    return OptimizerTechnique(technique, value, is_auto=wanted == "auto")


def _micro_batches(arguments: _Arguments) -> Setting:
    wanted = arguments["micro_batch_size"]
    details = _micro_batch_details(arguments)
    if isinstance(wanted, MicroBatching) and details:
        raise ConfigurationError(
            f"{', '.join(f'`{name}`' for name in details)} is not used with "
            f"`micro_batch_size={wanted!r}`. Pass `MicroBatching(...)` with it."
        )
    if wanted is None:
        return MicroBatches(None, "None")
    technique = wanted
    if not isinstance(wanted, MicroBatching):
        _refuse_technique("micro_batch_size", wanted, MicroBatching)
        technique = MicroBatching(wanted, **details)
    if _is_beyond(arguments, "micro_batch_size", technique.exactness):
        setting = MicroBatches(None, "None")
        setting.rows = [_off(arguments, "micro_batch_size")]
        return setting
    return MicroBatches(technique, repr(technique.micro_batch_size))


def _evaluation_micro_batches(arguments: _Arguments) -> Setting:
    wanted = arguments["eval_micro_batch_size"]
    if wanted is None:
        return EvaluationMicroBatches(None)
    try:
        technique = MicroBatching(wanted, **_micro_batch_details(arguments))
    except ConfigurationError as error:
        message = str(error).replace("`micro_batch_size=", "`eval_micro_batch_size=")
        raise ConfigurationError(message) from None
    return EvaluationMicroBatches(technique)


def _micro_batch_details(arguments: _Arguments) -> dict[str, Any]:
    defaults = {"loss_weight": "auto", "split_batch": None}
    return {n: arguments[n] for n, default in defaults.items() if arguments[n] != default}


def _refuse_technique(name: str, value: object, expected: type[Technique[Any]]) -> None:
    if isinstance(value, Technique) or (isinstance(value, type) and issubclass(value, Technique)):
        raise ConfigurationError(
            f"`{name}={value!r}` is not an instance of `{expected.__name__}`. Use "
            f"`{name}={expected.__name__}()`."
        )


def _monitor(arguments: _Arguments) -> GPUMemoryMonitor | None:
    wanted = arguments["monitor"]
    if isinstance(wanted, GPUMemoryMonitor):
        return wanted
    if isinstance(wanted, bool):
        return GPUMemoryMonitor() if wanted else None
    raise ConfigurationError(
        f"`monitor={wanted!r}` is neither True, False nor a monitor. Use "
        "`monitor=GPUMemoryMonitor(every_n_steps=10)` for settings of its own."
    )


def _report(arguments: _Arguments) -> bool:
    return bool(_flag(arguments, "report", (True, False)))


def _prediction(arguments: _Arguments) -> float | None:
    return time_limit(arguments["predict"])


def time_limit(predict: object) -> float | None:
    """Read how long a prediction may take.

    Args:
        predict: True, False or a number of seconds.

    Returns:
        Seconds; ``None`` if there shall be no prediction.

    Raises:
        ConfigurationError: If it is none of these.
    """
    if isinstance(predict, bool):
        return TIME_LIMIT_S if predict else None
    if not isinstance(predict, int | float) or not 0 < predict < math.inf:
        raise ConfigurationError(
            f"`predict={predict!r}` is neither True, False nor a number of seconds. Use "
            "`predict=60` to let the prediction take a minute."
        )
    return float(predict)


def _flag(arguments: _Arguments, name: str, allowed: tuple[bool | None, ...]) -> bool | None:
    value = arguments[name]
    if not any(value is option for option in allowed):
        options = ", ".join(f"`{name}={option}`" for option in allowed)
        raise ConfigurationError(f"`{name}={value!r}` is not a choice. Use one of {options}.")
    result: bool | None = value
    return result
