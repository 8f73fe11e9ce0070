"""Arguments of ``MemSaveCallback``: checked all at once, and turned into settings."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_memsave.callbacks.run_prediction import TIME_LIMIT_S
from lightning_memsave.callbacks.settings.accumulate_grad_batches import AccumulationSetting
from lightning_memsave.callbacks.settings.activation_checkpointing import CheckpointingSetting
from lightning_memsave.callbacks.settings.attention import AttentionSetting
from lightning_memsave.callbacks.settings.budget import BudgetSetting
from lightning_memsave.callbacks.settings.chunked_cross_entropy import ChunkedCrossEntropySetting
from lightning_memsave.callbacks.settings.early_release import EarlyReleaseSetting
from lightning_memsave.callbacks.settings.evaluation import EvaluationSetting
from lightning_memsave.callbacks.settings.low_precision_weights import LowPrecisionWeightsSetting
from lightning_memsave.callbacks.settings.micro_batch_size import (
    BlockMicroBatchSetting,
    MicroBatchSetting,
)
from lightning_memsave.callbacks.settings.offload import OffloadSetting
from lightning_memsave.callbacks.settings.optimizer import OptimizerSetting
from lightning_memsave.callbacks.settings.optimizer_in_backward import OptimizerInBackwardSetting
from lightning_memsave.callbacks.settings.precision import PrecisionSetting
from lightning_memsave.callbacks.settings.preset import PresetSetting
from lightning_memsave.callbacks.settings.setting import (
    Arguments,
    Setting,
    Settings,
    exactness_limit,
)
from lightning_memsave.errors import ConfigurationError, IncompatibleError, Problem
from lightning_memsave.techniques.low_precision_weights.technique import ON_HOST
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.registry import (
    SMALLER_PRESET,
    preset_forms,
    with_plan,
    with_preset,
)
from lightning_memsave.units import format_bytes

SETTINGS: tuple[type[Setting], ...] = (
    AccumulationSetting,
    EarlyReleaseSetting,
    EvaluationSetting,
    PrecisionSetting,
    MicroBatchSetting,
    AttentionSetting,
    ChunkedCrossEntropySetting,
    CheckpointingSetting,
    BlockMicroBatchSetting,
    OptimizerSetting,
    OffloadSetting,
    LowPrecisionWeightsSetting,
    OptimizerInBackwardSetting,
)
"""In the order in which they are applied, which is that of the registry."""
T = TypeVar("T")


def host_form(
    arguments: Arguments, trainer: Any, pl_module: Any
) -> tuple[Settings, Arguments] | None:
    """Choose the fastest form of what is on the host for which it has enough memory."""
    offload = with_preset(arguments)[OffloadSetting.name]
    if offload in (None, False, "activations") or isinstance(offload, Offloading):
        return None
    tried: list[tuple[int, Settings, dict[str, Any]]] = []
    why = ""
    for form in preset_forms(arguments):
        settings = make_settings("MemSaveCallback", arguments, form=form)
        # What conflicts with this fit would be off, and the host would need as much as before.
        name = OptimizerInBackwardSetting.name
        if name in form and settings.conflicts_of(name, trainer, pl_module):
            continue
        setting = settings.find(OffloadSetting)
        changed = ", ".join(f"`{name}={value!r}`" for name, value in form.items())
        setting.why_form = f"{changed}: {why}" if form else ""
        needed_bytes, limit_bytes = setting.technique.host_bytes(pl_module)
        tried.append((needed_bytes, settings, form))
        if needed_bytes <= limit_bytes:
            break
        needs, has = format_bytes(needed_bytes), format_bytes(int(limit_bytes))
        why = f"without, the host needs {needs}, and `host_budget` is {has}"
    else:
        _, settings, form = min(tried, key=lambda one: one[0])
        setting = settings.find(OffloadSetting)
    problems = [] if setting.is_asked else setting.check(trainer, pl_module)
    if not problems:
        return settings, with_preset(arguments, form)
    instead = {**arguments, "preset": SMALLER_PRESET, setting.name: None, "host_budget": None}
    settings = make_settings("MemSaveCallback", instead)
    low = arguments[LowPrecisionWeightsSetting.name]
    if getattr(low, "rounding", low) in ON_HOST:  # which the user wrote
        raise IncompatibleError("MemSaveCallback", problems)
    reasons = "; ".join(f"{problem.what}: {problem.why}" for problem in problems)
    settings.find(OffloadSetting).off_reason = f"{reasons}; as `preset={SMALLER_PRESET!r}`"
    return settings, with_preset(instead)


def make_settings(
    owner: str, arguments: Arguments, plan: Arguments | None = None, form: Arguments | None = None
) -> Settings:
    problems: list[Problem | str] = []
    try:
        arguments = with_preset(arguments, form) if plan is None else with_plan(arguments, plan)
    except ConfigurationError as error:
        problems.append(str(error))
        arguments = with_preset({**arguments, "preset": None})

    def attempt(make: Callable[[Arguments], T]) -> T | None:
        try:
            return make(arguments)
        except ConfigurationError as error:
            problems.extend(error.problems or [str(error)])
            return None

    attempt(_budget)
    attempt(exactness_limit)
    settings = [attempt(kind) for kind in SETTINGS]
    attempt(_report)
    attempt(lambda given: time_limit(given["predict"]))
    if problems:
        raise ConfigurationError.from_problems(owner, list(dict.fromkeys(problems)))
    found = [setting for setting in settings if setting is not None]
    if arguments["budget"] is not None:
        made = Settings([BudgetSetting(arguments), *found])
    else:
        preset = PresetSetting(arguments)
        made = Settings([*found, preset] if arguments["preset"] is None else [preset, *found])
    made.find(MicroBatchSetting).weights = made.find(LowPrecisionWeightsSetting)
    made.find(OffloadSetting).micro_batches = made.find(MicroBatchSetting)
    made.find(AccumulationSetting).micro_batches = made.find(MicroBatchSetting)
    return made


def _budget(arguments: Arguments) -> None:
    budget, preset = arguments["budget"], arguments["preset"]
    if budget is None:
        return
    from lightning_memsave.planning.budget import check_budget

    check_budget(budget)
    if preset is not None:
        raise ConfigurationError(
            f"`budget={budget!r}` chooses the settings that `preset={preset!r}` names. Remove one "
            "of the two; to fix some settings beside a budget, name them."
        )


def _report(arguments: Arguments) -> None:
    if not isinstance(arguments["report"], bool):
        raise ConfigurationError(
            f"`report={arguments['report']!r}` is not a valid value. Use one of `report=True`, "
            "`report=False`."
        )


def time_limit(predict: object) -> float | None:
    if isinstance(predict, bool):
        return TIME_LIMIT_S if predict else None
    if not isinstance(predict, int | float) or not 0 < predict < math.inf:
        raise ConfigurationError(
            f"`predict={predict!r}` is neither True, False nor a number of seconds. Use "
            "`predict=60` to let the prediction take a minute."
        )
    return float(predict)
