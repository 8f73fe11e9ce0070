"""Arguments of ``MemSaveCallback``: checked all at once, and turned into settings."""

import math
from collections.abc import Callable
from typing import TypeVar

from lightning_memsave.callbacks._argument_values import Arguments, exactness_limit, read_flag
from lightning_memsave.callbacks._micro_batching import MicroBatches
from lightning_memsave.callbacks._run_prediction import TIME_LIMIT_S
from lightning_memsave.callbacks._settings import Settings, Stack
from lightning_memsave.callbacks._stacks import with_stack
from lightning_memsave.callbacks._technique_arguments import TECHNIQUE_MAKERS
from lightning_memsave.callbacks._trainer_arguments import TRAINER_MAKERS
from lightning_memsave.callbacks._weight_precision import WeightPrecision
from lightning_memsave.callbacks.memory_monitor import GPUMemoryMonitor
from lightning_memsave.errors import ConfigurationError, Problem

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
    settings = [attempt(make) for make in (*TRAINER_MAKERS, *TECHNIQUE_MAKERS)]
    monitor = attempt(_monitor)
    attempt(_report)
    attempt(_prediction)
    if problems:
        failure = ConfigurationError.from_problems(owner, list(dict.fromkeys(problems)))
        raise failure
    found = [setting for setting in settings if setting is not None]
    stack = Stack(arguments)
    made = Settings([*found, stack] if arguments["stack"] is None else [stack, *found])
    made.find(MicroBatches).weights = made.find(WeightPrecision)
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
