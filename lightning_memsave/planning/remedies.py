"""Single settings that lower the peak of a step, and the plan where it does not fit a GPU."""

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lightning_memsave.core.clock import processor_time_s
from lightning_memsave.core.technique import Exactness
from lightning_memsave.errors import InfeasiblePlanError
from lightning_memsave.planning.candidates import MICRO_BATCH, OFFLOAD, candidates_of
from lightning_memsave.planning.constants import SHARE_OF_SINGLE_SETTINGS
from lightning_memsave.planning.plan import Plan, short_settings
from lightning_memsave.planning.plan_step import search_for
from lightning_memsave.planning.step_time import Rates, step_seconds
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.training_step import as_code
from lightning_memsave.prediction.what_if import ImpossibleVariantError, WhatIf
from lightning_memsave.techniques.registry import frees_early
from lightning_memsave.units import format_bytes

FASTEST_PLAN = "the fastest plan that fits"
EARLY_RELEASE = "`MemSaveCallback` with nothing else"
"""Any of its settings frees gradients and outputs of the previous step before the next one."""


@dataclass(frozen=True, slots=True)
class Remedy:
    name: str
    how: str
    peak_bytes: int
    device_bytes: int
    saved_bytes: int
    exactness: str
    cost: str
    fits: bool | None = None
    time_ratio: float | None = None
    prediction: MemoryPrediction | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "prediction"}

    def __str__(self) -> str:
        fits = {None: "", True: "; fits", False: "; does not fit"}[self.fits]
        ratio = self.time_ratio
        time = "" if ratio is None else f"; {ratio:.2f} times the time of the step as given"
        return (
            f"{self.name}: -{format_bytes(self.saved_bytes)}, to {format_bytes(self.device_bytes)} "
            f"on the device{fits}{time} ({self.exactness}; {self.cost}): {self.how}"
        )


def best_that_fits(remedies: Sequence[Remedy]) -> Remedy | None:
    """Find the remedy to take: the plan, if there is one, or else the cheapest setting."""
    fitting = [remedy for remedy in remedies if remedy.fits]
    plans = [remedy for remedy in fitting if remedy.name == FASTEST_PLAN]
    return next(iter((*plans, *fitting)), None)


def remedies_of(
    what_if: WhatIf,
    written: Mapping[str, Any] | None = None,
    limit_s: float = math.inf,
    refused: Collection[str] = (),
) -> list[Remedy]:
    written = what_if.step.settings if written is None else written
    start_s, gpu = processor_time_s(), what_if.step.gpu
    base, found = what_if.base(), list[Remedy]()
    released = base if MICRO_BATCH in refused else _with_early_release(what_if)
    if released.peak_bytes < base.peak_bytes:
        how = as_code(what_if.step.make_callback, {**written, MICRO_BATCH: "halve"})
        ratio, bitwise = _time_ratio(what_if, released), Exactness.BITWISE.value
        said = {"exactness": bitwise, "cost": "nothing", "prediction": released}
        found.append(_remedy(what_if, base, EARLY_RELEASE, how, released, time_ratio=ratio, **said))
    for one in candidates_of(what_if):
        left_s = start_s + SHARE_OF_SINGLE_SETTINGS * limit_s - processor_time_s()
        is_needed = one.argument != OFFLOAD or not best_that_fits(found)
        if is_needed and one.changes.keys().isdisjoint(refused):
            with contextlib.suppress(ImpossibleVariantError):
                after = what_if.predict(one.changes, limit_s=left_s)
                how = as_code(what_if.step.make_callback, {**written, **one.changes})
                said = {"exactness": one.exactness.value, "cost": one.cost, "prediction": after}
                ratio = _time_ratio(what_if, after)
                remedy = _remedy(what_if, released, one.name, how, after, time_ratio=ratio, **said)
                found += [remedy] if remedy.saved_bytes > 0 else []
    if gpu is not None and not _fits(what_if, base):
        left_s = start_s + limit_s - processor_time_s()
        plan = _plan(what_if, written, left_s, refused)
        found += [] if plan is None else [_as_remedy(what_if, released, plan)]
    return found


# Any setting frees what the previous step has left: this one does nothing else, unless memory runs
# out.
def _with_early_release(what_if: WhatIf) -> MemoryPrediction:
    if not frees_early(what_if.step.effective_settings):
        with contextlib.suppress(ImpossibleVariantError):
            found = what_if.predict({MICRO_BATCH: "halve"})
            return found if MICRO_BATCH in found.settings else what_if.base()
    return what_if.base()


# As `memsave predict` says it.
def _fits(what_if: WhatIf, found: MemoryPrediction | Plan) -> bool | None:
    gpu = what_if.step.gpu
    if gpu is None:
        return None
    prediction = found.prediction if isinstance(found, Plan) else found
    if prediction is None:
        return found.device_bytes <= gpu.total_bytes
    return prediction.fits(gpu).fits


def _time_ratio(what_if: WhatIf, after: MemoryPrediction) -> float | None:
    if what_if.step.gpu is None or what_if.step.gpu.throughput is None:
        return None
    rates = Rates.of_gpu(what_if.step.gpu.throughput)
    seconds, base_seconds = (
        sum(step_seconds(p.work, rates).values()) for p in (after, what_if.base())
    )
    return seconds / base_seconds


# What is written stays; what a preset would set is planned.
def _plan(
    what_if: WhatIf, written: Mapping[str, Any], limit_s: float, refused: Collection[str]
) -> Plan | None:
    gpu = what_if.step.gpu
    assert gpu is not None, "called with a GPU to fit"
    settings = {n: v for n, v in written.items() if n not in ("preset", "budget")}
    what_if = replace(what_if, step=replace(what_if.step, settings=settings))
    exactness = Exactness(written.get("exactness", Exactness.APPROXIMATE.value))
    try:
        search = search_for(what_if, exactness, limit_s, refused)
        plan: Plan = search.find(gpu.total_bytes).plan
    except InfeasiblePlanError as error:
        plan = error.smallest
    except TimeoutError:
        return None
    make = what_if.step.make_callback
    beside = {n: v for n, v in written.items() if n in ("monitor", "report", "predict")}
    short = short_settings(make, plan.settings, plan.exactness)
    return replace(plan, how=as_code(make, beside | short))


def _as_remedy(what_if: WhatIf, released: MemoryPrediction, plan: Plan) -> Remedy:
    name = FASTEST_PLAN if _fits(what_if, plan) else "the smallest plan"
    ratio = None if _time_ratio(what_if, what_if.base()) is None else plan.time_ratio
    said: dict[str, Any] = {"exactness": plan.exactness, "cost": "the sum of their costs"}
    said |= {"time_ratio": ratio, "prediction": plan.prediction}
    return _remedy(what_if, released, name, plan.how, plan, **said)


def _remedy(
    what_if: WhatIf,
    before: MemoryPrediction,
    name: str,
    how: str,
    found: MemoryPrediction | Plan,
    **said: Any,
) -> Remedy:
    saved_bytes = before.peak_bytes - found.peak_bytes
    fits = _fits(what_if, found)
    sizes = found.peak_bytes, found.device_bytes, saved_bytes
    return Remedy(name, how, *sizes, fits=fits, **said)
