"""Plan the settings of a step for a budget; `plan_memory` reads its arguments."""

import math
from dataclasses import replace
from typing import Any

from lightning_memsave.core.technique import Exactness
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.planning.budget import read_budget
from lightning_memsave.planning.search import PlanSearch, search_for
from lightning_memsave.prediction.predict import predict
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.training_step import OFF
from lightning_memsave.prediction.what_if import WhatIf
from lightning_memsave.techniques.registry import entries, unused_details


def budget_of(what_if: WhatIf, budget: Any) -> int:
    """Read a budget in bytes for the device of a step; ``None`` is all memory of its GPU."""
    gpu = what_if.step.gpu
    if budget is None and gpu is None:
        raise ConfigurationError(
            'A plan needs a budget. Use `budget="12GiB"`, or `gpu="RTX 3060"` for all of its '
            "memory."
        )
    total_bytes, name = (None, "") if gpu is None else (gpu.total_bytes, gpu.known_name)
    return read_budget("free" if budget is None else budget, total_bytes, name)


def unchanged_step(what_if: WhatIf) -> MemoryPrediction:
    settings = {n: v for n, v in what_if.step.settings.items() if n != "budget" and v != "auto"}
    settings |= unused_details(settings, [entry.argument for entry in entries()])
    return predict(replace(what_if.step, settings={**settings, **OFF}))


def search_of(what_if: WhatIf, exactness: str, limit_s: float = math.inf) -> PlanSearch:
    if not what_if.can_predict:
        raise ConfigurationError("A plan needs a batch. Pass one that the model trains on.")
    preset = what_if.step.settings.get("preset")
    if preset not in (None, "off"):
        raise ConfigurationError(
            f"`preset={preset!r}` chooses all settings and leaves none to plan. Use "
            "`preset='off'`, and name the settings that are fixed."
        )
    try:
        limit = Exactness(exactness)
    except ValueError as error:
        choices = ", ".join(f'"{e.value}"' for e in Exactness)
        raise ConfigurationError(f"`exactness={exactness!r}` is not one of {choices}.") from error
    return search_for(what_if, limit, limit_s)
