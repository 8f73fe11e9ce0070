"""Plan the settings of a step for a budget; `plan_memory` reads its arguments."""

import functools
import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from lightning_memsave.core.technique import Exactness
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.planning.budget import margin_of, rates_of, read_budget
from lightning_memsave.planning.candidates import OFFLOAD
from lightning_memsave.planning.search import PlanSearch
from lightning_memsave.planning.variants import Variants
from lightning_memsave.prediction.predict import predict
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.training_step import OFF
from lightning_memsave.prediction.what_if import WhatIf
from lightning_memsave.techniques.registry import entries, leaves_open, unused_details


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


# Not of what is trained, or not in a plan.
_NEITHER = ("preset", "budget", "report", "predict")


def search_for(
    what_if: WhatIf, exactness: Exactness, limit_s: float = math.inf, closed: Collection[str] = ()
) -> PlanSearch:
    step = what_if.step
    defaults = step.make_callback().arguments
    fixed = {
        name: value
        for name, value in step.settings.items()
        if name not in _NEITHER
        and value not in ("auto", defaults[name])
        and getattr(value, "micro_batch_size", value) != "halve"  # its size is planned
    }
    offload = fixed.pop(OFFLOAD) if leaves_open(fixed.get(OFFLOAD)) else None
    given = [entry for entry in entries() if fixed.get(entry.argument) not in (None, False)]
    fixed |= {name: None for name in closed if name not in fixed}
    open_arguments = [entry.argument for entry in entries() if entry.argument not in fixed]
    names = unused_details(fixed, open_arguments)
    details = {name: fixed.pop(name) for name in names if name in fixed}
    variants = Variants(
        replace(what_if, step=replace(step, settings=fixed), _known={}),
        open_arguments,
        exactness,
        rates_of(what_if.step.gpu, what_if.step.device, is_local=step.fit is not None),
        limit_s,
        details=details,
        offload=offload,
    )
    free = functools.partial(margin_of, device=what_if.step.device)
    return PlanSearch(variants, margin_of=free, given=given)
