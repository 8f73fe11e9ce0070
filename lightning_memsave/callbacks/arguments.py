"""Arguments of ``MemSaveCallback``: checked all at once, and turned into settings."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lightning_memsave.callbacks.accumulation import AccumulationSetting
from lightning_memsave.callbacks.argument_values import (
    Arguments,
    as_given,
    exactness_limit,
    is_asked,
    read_flag,
    refuse_technique,
    why_beyond,
)
from lightning_memsave.callbacks.early_release import EarlyReleaseSetting
from lightning_memsave.callbacks.evaluation import EvalMicroBatchSetting
from lightning_memsave.callbacks.low_precision_weights import LowPrecisionWeightsSetting
from lightning_memsave.callbacks.memory_monitor import GPUMemoryMonitor
from lightning_memsave.callbacks.micro_batching import MicroBatchSetting
from lightning_memsave.callbacks.module_techniques import (
    ActivationCheckpointingSetting,
    AttentionSetting,
    ChunkedCrossEntropySetting,
    ModuleSetting,
)
from lightning_memsave.callbacks.optimizer_in_backward import OptimizerInBackwardSetting
from lightning_memsave.callbacks.optimizers import OptimizerSetting
from lightning_memsave.callbacks.precision import PrecisionSetting
from lightning_memsave.callbacks.run_prediction import TIME_LIMIT_S
from lightning_memsave.callbacks.settings import Setting, Settings, Stack, TF32Setting
from lightning_memsave.core.technique import Exactness
from lightning_memsave.errors import ConfigurationError, Problem
from lightning_memsave.techniques.activation_checkpointing.technique import (
    ActivationCheckpointing,
)
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.low_precision_weights.technique import (
    LowPrecisionWeights,
)
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.techniques.optimizer_in_backward.technique import OptimizerInBackward
from lightning_memsave.techniques.registry import Entry, entries, with_stack
from lightning_memsave.trainer.precision import full_name

_BF16 = "bf16-mixed"


def _activation_checkpointing(arguments: Arguments) -> Setting:
    name = "activation_checkpointing"
    wanted, blocks = arguments[name], arguments["blocks"]
    if wanted is None or isinstance(wanted, ActivationCheckpointing):
        if blocks is not None:
            raise ConfigurationError(
                f"`blocks={blocks!r}` is not used with {as_given(arguments, name)}. Use "
                f"`{name}=ActivationCheckpointing(..., blocks=...)`, or remove `blocks`."
            )
        technique = wanted
    else:
        refuse_technique(name, wanted, ActivationCheckpointing)
        technique = ActivationCheckpointing(wanted, blocks=blocks)
    value = "None" if technique is None else repr(technique.which)
    own = is_asked(arguments, name) or blocks is not None
    return ActivationCheckpointingSetting(name, technique, value, own)


def _early_release(arguments: Arguments) -> Setting:
    name, wanted = "early_release", arguments["early_release"]
    if wanted is not None and not isinstance(wanted, bool):
        raise ConfigurationError(
            f"`{name}={wanted!r}` is not a valid value. Use `{name}=True`, or `None`."
        )
    return EarlyReleaseSetting(wanted is True, is_asked(arguments, name))


def _optimizer(arguments: Arguments) -> Setting:
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
                f"{as_given(arguments, 'optimizer')}. Pass `optimizer=LowBitOptimizer(...)` with "
                'them, or use `optimizer="8bit"`.'
            )
        technique = wanted
    else:
        refuse_technique("optimizer", wanted, LowBitOptimizer)
        technique = LowBitOptimizer(wanted, **details)
    value = "None" if technique is None else repr(technique.optimizer)
    if technique and (why := why_beyond(arguments, "optimizer", technique.exactness)):
        return OptimizerSetting(None, "None", is_asked=False, off_reason=why)
    return OptimizerSetting(technique, value, is_asked(arguments, "optimizer"))


def _low_precision_weights(arguments: Arguments) -> Setting:
    name, wanted = "low_precision_weights", arguments["low_precision_weights"]
    technique = LowPrecisionWeights.from_value(wanted)
    own = is_asked(arguments, name)

    def off(why: str = "") -> LowPrecisionWeightsSetting:
        return LowPrecisionWeightsSetting(
            None, "None", sets_precision=False, is_asked=own, off_reason=why
        )

    if technique is None:
        return off()
    if why := why_beyond(arguments, name, technique.exactness):
        return off(why)
    precision = arguments["precision"]
    brings = precision == "auto" or (precision is not None and full_name(precision) == _BF16)
    what = as_given(arguments, name)
    if not brings and precision is not None and not own:
        return off(f"it computes in {_BF16}, and `precision={precision!r}` was given")
    if not brings and precision is not None:
        raise ConfigurationError(
            f"{what} computes in bfloat16 and does not go with "
            f"`precision={precision!r}`. Use `precision={_BF16!r}`, or set `{name}=None`."
        )
    return LowPrecisionWeightsSetting(
        technique, repr(technique.rounding), sets_precision=brings, written=what, is_asked=own
    )


def _optimizer_in_backward(arguments: Arguments) -> Setting:
    name, wanted = "optimizer_in_backward", arguments["optimizer_in_backward"]
    technique = OptimizerInBackward.from_value(wanted)
    if technique is not None:
        why_beyond(arguments, name, technique.exactness)
    parts = arguments["micro_batch_size"]
    return OptimizerInBackwardSetting(
        technique,
        _short(wanted),
        is_asked=is_asked(arguments, name),
        halves_batches=getattr(parts, "micro_batch_size", parts) == "auto",
    )


# Techniques on the module that need to know more of a Trainer than their conflicts.
_KINDS: Mapping[str, type[ModuleSetting]] = {
    "attention": AttentionSetting,
    "chunked_cross_entropy": ChunkedCrossEntropySetting,
}


def _module_technique(entry: Entry, arguments: Arguments) -> Setting:
    name, own = entry.argument, is_asked(arguments, entry.argument)
    assert entry.technique is not None, "settings of the Trainer have readers of their own"
    kind, technique = _KINDS.get(name, ModuleSetting), entry.technique.from_value(arguments[name])
    if technique is not None and (why := why_beyond(arguments, name, technique.exactness)):
        return kind(name, None, "None", own, why)
    return kind(name, technique, _short(arguments[name]), own)


def _short(value: object) -> str:
    return "None" if value is None or value is False else repr(value)


def _precision(arguments: Arguments) -> Setting:
    wanted, own = arguments["precision"], is_asked(arguments, "precision")
    if wanted is None:
        return PrecisionSetting(None, is_asked=own)
    has_weights = arguments["low_precision_weights"] is not None
    if wanted == "auto" and has_weights:
        wanted = "bf16-mixed"  # or layers would get weights and inputs of different types
    if wanted != "auto":
        wanted = full_name(wanted)
    # "32-true" is what Lightning does by itself; it cannot be told from no choice.
    exactness = Exactness.BITWISE if wanted == "32-true" else Exactness.APPROXIMATE
    if why := why_beyond(arguments, "precision", exactness):
        return PrecisionSetting(None, is_asked=False, off_reason=why)
    return PrecisionSetting(
        wanted,
        written=as_given({**arguments, "precision": wanted}, "precision"),
        required_by_bf16_weights=has_weights,
        is_asked=own or (has_weights and is_asked(arguments, "low_precision_weights")),
    )


def _tf32(arguments: Arguments) -> Setting:
    wanted = read_flag(arguments, "tf32", (True, False, None))
    if wanted:
        why_beyond(arguments, "tf32", Exactness.APPROXIMATE)
    return TF32Setting(wanted)


def _accumulation(arguments: Arguments) -> Setting:
    wanted = arguments["accumulate_grad_batches"]
    if wanted is not None and (type(wanted) is not int or wanted < 1):
        raise ConfigurationError(
            f"`accumulate_grad_batches={wanted!r}` is not a number of batches: it must be a whole "
            "number of at least 1. Use `accumulate_grad_batches=4` for a step every four batches, "
            "or `None` to leave it to the Trainer."
        )
    if wanted is not None and wanted > 1:
        why_beyond(arguments, "accumulate_grad_batches", Exactness.ROUNDING)
    return AccumulationSetting(wanted)


def _micro_batches(arguments: Arguments) -> Setting:
    technique, why = _micro_batching(arguments, "micro_batch_size")
    value = "None" if technique is None or why else repr(technique.micro_batch_size)
    return MicroBatchSetting(
        None if why else technique,
        value,
        not why and is_asked(arguments, "micro_batch_size"),
        off_reason=why,
        limit=exactness_limit(arguments),
    )


def _evaluation_micro_batches(arguments: Arguments) -> Setting:
    technique, why = _micro_batching(arguments, "eval_micro_batch_size")
    is_own = is_asked(arguments, "eval_micro_batch_size")
    return EvalMicroBatchSetting(None if why else technique, is_own, off_reason=why)


def _micro_batching(arguments: Arguments, name: str) -> tuple[MicroBatching | None, str]:
    """Read one of the two sizes, and why the limit switches it off."""
    wanted, details = arguments[name], _micro_batch_details(arguments)
    if isinstance(wanted, MicroBatching) and details:
        raise ConfigurationError(
            f"{', '.join(f'`{name}`' for name in details)} is not used with "
            f"`{name}={wanted!r}`. Pass `MicroBatching(...)` with it."
        )
    if wanted is None:
        MicroBatching(**details)  # refuses what is wrong with them
        return None, ""
    technique = wanted
    if not isinstance(wanted, MicroBatching):
        refuse_technique(name, wanted, MicroBatching)
        try:
            technique = MicroBatching(wanted, **details)
        except ConfigurationError as error:
            message = str(error).replace("`micro_batch_size=", f"`{name}=")
            raise ConfigurationError(message) from None
    return technique, why_beyond(arguments, name, technique.exactness)


def _micro_batch_details(arguments: Arguments) -> dict[str, Any]:
    defaults = {"loss_weight": "auto", "split_batch": None}
    return {n: arguments[n] for n, default in defaults.items() if arguments[n] != default}


_READERS: Mapping[str, Callable[[Arguments], Setting]] = {
    "precision": _precision,
    "micro_batch_size": _micro_batches,
    "eval_micro_batch_size": _evaluation_micro_batches,
    "activation_checkpointing": _activation_checkpointing,
    "early_release": _early_release,
    "optimizer": _optimizer,
    "low_precision_weights": _low_precision_weights,
    "optimizer_in_backward": _optimizer_in_backward,
}
"""Of settings of the Trainer and of optimizers; all others change the module."""


def _readers() -> list[Callable[[Arguments], Setting]]:
    """Give what reads each argument, in the order in which settings are applied."""
    found = [
        _READERS.get(entry.argument) or functools.partial(_module_technique, entry)
        for entry in entries()
    ]
    return [_tf32, _accumulation, *found]


T = TypeVar("T")


def make_settings(owner: str, arguments: Arguments) -> tuple[Settings, GPUMemoryMonitor | None]:
    """Check every argument and make what the callback works with.

    Args:
        owner: Name of the class whose arguments they are, for the message.
        arguments: All arguments of ``MemSaveCallback`` by name.

    Returns:
        The settings and the monitor.

    Raises:
        ConfigurationError: If any argument is wrong; the message lists every problem.
    """
    problems: list[Problem | str] = []
    try:
        arguments = with_stack(arguments)
    except ConfigurationError as error:
        problems.append(str(error))
        arguments = with_stack({**arguments, "stack": None})

    def attempt(make: Callable[[Arguments], T]) -> T | None:
        try:
            return make(arguments)
        except ConfigurationError as error:
            problems.extend(error.problems or [str(error)])
            return None

    attempt(exactness_limit)
    settings = [attempt(make) for make in _readers()]
    monitor = attempt(_monitor)
    attempt(_report)
    attempt(_prediction)
    if problems:
        failure = ConfigurationError.from_problems(owner, list(dict.fromkeys(problems)))
        raise failure
    found = [setting for setting in settings if setting is not None]
    stack = Stack(arguments)
    made = Settings([*found, stack] if arguments["stack"] is None else [stack, *found])
    made.find(MicroBatchSetting).weights = made.find(LowPrecisionWeightsSetting)
    return made, monitor


def _monitor(arguments: Arguments) -> GPUMemoryMonitor | None:
    wanted = arguments["monitor"]
    if isinstance(wanted, GPUMemoryMonitor):
        return wanted
    if isinstance(wanted, bool):
        return GPUMemoryMonitor() if wanted else None
    raise ConfigurationError(
        f"`monitor={wanted!r}` is neither True, False nor a monitor. Use "
        "`monitor=GPUMemoryMonitor(every_n_steps=10)` for settings of its own."
    )


def _report(arguments: Arguments) -> bool:
    return bool(read_flag(arguments, "report", (True, False)))


def _prediction(arguments: Arguments) -> float | None:
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
