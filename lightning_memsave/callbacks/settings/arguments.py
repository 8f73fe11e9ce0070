"""Arguments of ``MemSaveCallback``: checked all at once, and turned into settings."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lightning_memsave.callbacks.run_prediction import TIME_LIMIT_S
from lightning_memsave.callbacks.settings.accumulate_grad_batches import AccumulationSetting
from lightning_memsave.callbacks.settings.budget import BudgetSetting
from lightning_memsave.callbacks.settings.early_release import EarlyReleaseSetting
from lightning_memsave.callbacks.settings.evaluation import EvaluationSetting
from lightning_memsave.callbacks.settings.low_precision_weights import LowPrecisionWeightsSetting
from lightning_memsave.callbacks.settings.micro_batch_size import MicroBatchSetting
from lightning_memsave.callbacks.settings.modules import (
    ActivationCheckpointingSetting,
    BlockMicroBatchSetting,
    read_module_setting,
)
from lightning_memsave.callbacks.settings.offload import OffloadSetting
from lightning_memsave.callbacks.settings.optimizer import OptimizerSetting
from lightning_memsave.callbacks.settings.optimizer_in_backward import OptimizerInBackwardSetting
from lightning_memsave.callbacks.settings.precision import PrecisionSetting
from lightning_memsave.callbacks.settings.setting import Setting, Settings
from lightning_memsave.callbacks.settings.values import Arguments, exactness_limit, read_flag
from lightning_memsave.core.technique import Row
from lightning_memsave.errors import ConfigurationError, Problem
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.registry import (
    BARE,
    SMALLER_PRESET,
    entries,
    preset_forms,
    values_of,
    with_plan,
    with_preset,
)
from lightning_memsave.units import format_bytes

_SETTINGS = (
    PrecisionSetting,
    MicroBatchSetting,
    ActivationCheckpointingSetting,
    OptimizerSetting,
    OffloadSetting,
    LowPrecisionWeightsSetting,
    OptimizerInBackwardSetting,
)
"""Those that read their own arguments; all others are techniques that change the module."""


def _readers() -> list[Callable[[Arguments], Setting]]:
    """Give what reads each argument, in the order in which settings are applied."""
    own: Mapping[str, type[Any]] = {setting.name: setting for setting in _SETTINGS}
    found: list[Callable[[Arguments], Setting]] = [
        AccumulationSetting.read,
        EarlyReleaseSetting.read,
        EvaluationSetting.read,
    ]
    for entry in entries():
        is_own = entry.argument in own
        read = own[entry.argument].read if is_own else functools.partial(read_module_setting, entry)
        found.append(read)
        if entry.argument == ActivationCheckpointingSetting.name:  # of the same blocks
            found.append(BlockMicroBatchSetting.read)
    return found


T = TypeVar("T")


def host_form(
    before: Settings, arguments: Arguments, trainer: Any, pl_module: Any
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
        setting.why_form = f"{_named(form)}: {why}" if form else ""
        needed_bytes, limit_bytes = setting.host_bytes(pl_module)
        tried.append((needed_bytes, settings, form))
        if needed_bytes <= limit_bytes:
            break
        why = (
            f"without, the host needs {format_bytes(needed_bytes)}, and `host_budget` is "
            f"{format_bytes(int(limit_bytes))}"
        )
    else:
        tried.sort(key=lambda one: one[0])
        tried.append(tried[0])
    _, settings, form = tried[-1]
    setting = settings.find(OffloadSetting)
    size = before.find(MicroBatchSetting).size
    settings.find(MicroBatchSetting).size = size
    problems = [] if setting.is_asked else setting.check(trainer, pl_module)
    if not problems:
        return settings, with_preset(arguments, form)
    instead = {**arguments, "preset": SMALLER_PRESET, setting.name: None, "host_budget": None}
    settings = make_settings("MemSaveCallback", instead)
    settings.find(MicroBatchSetting).size = size
    reasons = "; ".join(f"{problem.what}: {problem.why}" for problem in problems)
    settings.find(OffloadSetting).off_reason = f"{reasons}; as `preset={SMALLER_PRESET!r}`"
    return settings, with_preset(instead)


def _named(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in settings.items())


def make_settings(
    owner: str,
    arguments: Arguments,
    plan: Mapping[str, Any] | None = None,
    form: Mapping[str, Any] | None = None,
) -> Settings:
    """Check every argument and make what the callback works with."""
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
    settings = [attempt(read) for read in _readers()]
    attempt(_report)
    attempt(_prediction)
    if problems:
        failure = ConfigurationError.from_problems(owner, list(dict.fromkeys(problems)))
        raise failure
    found = [setting for setting in settings if setting is not None]
    if arguments["budget"] is not None:
        made = Settings([BudgetSetting(arguments["budget"]), *found])
    else:
        preset = PresetSetting(arguments)
        made = Settings([*found, preset] if arguments["preset"] is None else [preset, *found])
    made.find(MicroBatchSetting).weights = made.find(LowPrecisionWeightsSetting)
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


def _report(arguments: Arguments) -> bool:
    return bool(read_flag(arguments, "report", (True, False)))


def _prediction(arguments: Arguments) -> float | None:
    return time_limit(arguments["predict"])


def time_limit(predict: object) -> float | None:
    """Read how long a prediction may take."""
    if isinstance(predict, bool):
        return TIME_LIMIT_S if predict else None
    if not isinstance(predict, int | float) or not 0 < predict < math.inf:
        raise ConfigurationError(
            f"`predict={predict!r}` is neither True, False nor a number of seconds. Use "
            "`predict=60` to let the prediction take a minute."
        )
    return float(predict)


# The argument's default is "auto": whether it was written cannot be told.
_NOT_REPEATED = (
    '`micro_batch_size="auto"` is off, too: `micro_batch_size=MicroBatching("auto")` repeats a '
    "batch that runs out of memory"
)


class PresetSetting(Setting):
    """Shows the settings of a preset; the settings themselves do the work."""

    name = "preset"

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        given = arguments["preset"]
        own = [n for n in values_of(given or BARE) if n not in arguments["from_preset"]]
        settings = {name: arguments[name] for name in arguments["from_preset"]}
        on = ", ".join(f"{name}={value!r}" for name, value in settings.items() if value is not None)
        off = ", ".join(name for name, value in settings.items() if value is None)
        beside = ", ".join(own)
        texts = {"": on, "off in this preset: ": off, "given beside it: ": beside}
        details = tuple(f"{prefix}{text}" for prefix, text in texts.items() if text)
        self._row = Row(self.name, repr(given), "on" if on else "off", details)
        if given is None:
            meaning = f'"auto" means the values of `preset={BARE!r}`'
            details = (f"{meaning}, without {off}" if off else meaning,)
            self._row = Row(self.name, "None", "unchanged", details)
        if given == "off":
            details = ("everything is off that is not given",)
            if "micro_batch_size" in arguments["from_preset"]:
                details += (_NOT_REPEATED,)
            self._row = Row(self.name, "'off'", "unchanged", details)

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Show the settings of the preset."""
        self.rows = [self._row]
