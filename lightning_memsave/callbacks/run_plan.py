"""The plan that a run makes for its budget, from its first batch, before anything is set up."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memsave.callbacks.run_prediction import obstacle, step_of
from lightning_memsave.callbacks.settings.arguments import make_settings
from lightning_memsave.callbacks.settings.micro_batch_size import MicroBatchSetting
from lightning_memsave.callbacks.settings.optimizer_in_backward import OptimizerInBackwardSetting
from lightning_memsave.callbacks.settings.setting import Arguments
from lightning_memsave.core.technique import Exactness, Technique
from lightning_memsave.errors import IncompatibleError, InfeasiblePlanError, MemsaveError, Problem
from lightning_memsave.planning.budget import margin_of, read_budget
from lightning_memsave.planning.plan import MemoryPlan, Plan
from lightning_memsave.planning.plan_step import search_for
from lightning_memsave.planning.search import PlanSearch
from lightning_memsave.prediction.cuda.constants import context_bytes
from lightning_memsave.prediction.cuda.gpus import local_gpu
from lightning_memsave.prediction.predict import predict
from lightning_memsave.prediction.resident_blocks import fill
from lightning_memsave.prediction.what_if import ImpossibleVariantError, WhatIf, what_if_of
from lightning_memsave.techniques.registry import entries, leaves_open, values_of
from lightning_memsave.trainer.distributed import broadcast_from_rank_zero
from lightning_memsave.trainer.first_batch import first_batch

_ANY = Exactness.APPROXIMATE.value
LIMIT_S = 120.0
"""Of the search, unless `predict=` is a number of seconds."""


def plan_fit(
    trainer: Any, make_callback: Callable[..., Any], arguments: Arguments, saved: MemoryPlan | None
) -> MemoryPlan:
    """Plan a fit, on rank zero, for all ranks."""
    plan = functools.partial(_plan, trainer, make_callback, arguments, saved)
    found: MemoryPlan = _of_first_batch(trainer, arguments, plan)
    return found


def fill_device(
    trainer: Any, make_callback: Callable[..., Any], arguments: Arguments
) -> tuple[dict[str, Any], str, int]:
    """Choose on rank zero how many blocks stay on the device.

    Give the settings, a note, and what one block more needs in bytes.
    """

    def choose(batch: Any) -> tuple[dict[str, Any], str, int]:
        device, pl_module = trainer.strategy.root_device, trainer.lightning_module
        room = _free_bytes(device)
        room -= margin_of(room, device.type)
        step = step_of(trainer, pl_module, batch, make_callback, arguments, has_started=False)
        with _disable_current_modes():
            found = fill(replace(step, time_limit_s=_limit_s(arguments)), room, predict)
        return found.settings, found.note, found.block_bytes

    chosen: tuple[dict[str, Any], str, int] = _of_first_batch(trainer, arguments, choose)
    return chosen


def _of_first_batch(trainer: Any, arguments: Arguments, choose: Callable[[Any], Any]) -> Any:
    why = obstacle(trainer, trainer.lightning_module)
    batch = None if why else first_batch(trainer)
    outcome: Any = None
    if trainer.is_global_zero:
        try:
            if why:
                outcome = _refusal(arguments, f"the fit cannot be planned ({why})")
            elif batch is None:
                outcome = _refusal(arguments, "there is no batch to plan with")
            else:
                outcome = choose(batch)
        # All ranks have to end, and the user's code may raise anything on fake tensors.
        except MemsaveError as error:
            outcome = error
        except Exception as error:
            what = " ".join(f"{type(error).__name__}: {error}".split())
            outcome = _refusal(arguments, f"planning failed ({what})")
    outcome = broadcast_from_rank_zero(trainer, outcome)
    if isinstance(outcome, Exception):
        raise outcome
    assert outcome is not None, "rank zero has planned"
    return outcome


def _refusal(arguments: Arguments, why: str) -> IncompatibleError:
    fix = 'Name the settings instead, such as `preset="single_gpu"`, or remove `budget`.'
    problem = Problem(f"`budget={arguments['budget']!r}`", why, fix)
    if arguments["budget"] is None:
        fix = "Use a number of blocks, such as `resident=4`."
        problem = Problem("`resident='auto'`", why, fix)
    return IncompatibleError("MemSaveCallback", [problem])


def _limit_s(arguments: Arguments) -> float:
    limit = arguments["predict"]
    return LIMIT_S if isinstance(limit, bool) else float(limit)


def _plan(
    trainer: Any, make_callback: Any, arguments: Arguments, saved: MemoryPlan | None, batch: Any
) -> MemoryPlan:
    device, pl_module = trainer.strategy.root_device, trainer.lightning_module
    gpu = local_gpu(device) if device.type == "cuda" else None
    budget = arguments["budget"]
    total_bytes = psutil.virtual_memory().total if gpu is None else gpu.total_bytes
    if budget == "free":
        budget = _free_bytes(device)
    budget_bytes = read_budget(budget, total_bytes, gpu.name if gpu else "")
    exactness = Exactness(arguments["exactness"])
    is_exact = saved is not None and exactness.allows(Exactness(saved.plan.exactness))
    is_enough = saved is not None and saved.budget_bytes <= budget_bytes
    limit_s = _limit_s(arguments)
    step = step_of(trainer, pl_module, batch, make_callback, arguments, has_started=False)
    what_if = what_if_of(replace(step, time_limit_s=limit_s), pl_module)
    if saved is not None and is_exact and is_enough and _has_as_given(saved.plan, arguments):
        exact = (p for p in saved.ladder if exactness.allows(Exactness(p.exactness)))
        kept = replace(saved, budget_bytes=budget_bytes, ladder=tuple(exact))
        kept = _with_batch(kept, what_if, limit_s)
        if kept.fits(kept.plan):
            return kept
    closed = _conflicting(trainer, pl_module, arguments)
    # The user's own modes, such as one that counts operations, must not see it.
    with _disable_current_modes():
        search = search_for(what_if, exactness, limit_s, closed)
        try:
            return _find(search, budget_bytes)
        except InfeasiblePlanError as error:
            if not closed:
                raise
            off = ", ".join(f"`{name}` ({why})" for name, why in closed.items())
            raise InfeasiblePlanError(f"{error} Not planned: {off}.", error.smallest) from error


def _with_batch(saved: MemoryPlan, what_if: WhatIf, limit_s: float) -> MemoryPlan:
    """Predict the plan of a checkpoint for the batch of this fit, which may be another one."""
    try:
        with _disable_current_modes():
            settings = {**saved.plan.settings, "budget": None}
            found = what_if.predict(settings, limit_s=limit_s)
    except ImpossibleVariantError:  # it has trained with it
        return saved
    plan = replace(
        saved.plan,
        peak_bytes=found.peak_bytes,
        device_bytes=found.device_bytes,
        is_verified=True,
        prediction=found,
    )
    return replace(saved, plan=plan)


# What a plan has on may be given otherwise now. Objects hold functions, which cannot be compared.
def _has_as_given(plan: Plan, arguments: Arguments) -> bool:
    given = {e.argument: arguments[e.argument] for e in entries()}
    return all(
        value == plan.settings.get(name)
        for name, value in given.items()
        if plan.settings.get(name) not in (None, "auto")
        and not (leaves_open(value) or value == "halve" or isinstance(value, Technique))
    )


# A slow search must not end a fit that might train: the wall, and smaller micro-batches when memory
# runs out, are there all the same.
def _find(search: PlanSearch, budget_bytes: int) -> MemoryPlan:
    try:
        found = search.find(budget_bytes)
    except TimeoutError:
        if not search.is_out_of_time:
            raise
        found = search.least(budget_bytes)
    return replace(found, ladder=tuple(search.ladder()) or (found.plan,))


# What stands against the strategy or the module stays off; the settings know it.
def _conflicting(trainer: Any, pl_module: Any, arguments: Arguments) -> dict[str, str]:
    found = {}
    for entry in entries():
        values = [offer.value for offer in entry.offers]
        if entry.argument == MicroBatchSetting.name:
            values = ["auto"]
        if arguments[entry.argument] != "auto" or not values:
            continue
        plan = values_of("single_gpu") | {entry.argument: values[0]}
        settings = make_settings("MemSaveCallback", {**arguments, "exactness": _ANY}, plan)
        # Overrides that may do what updates in backward do not stand are not for a plan to judge.
        settings.find(OptimizerInBackwardSetting).is_asked = False
        if problems := settings.conflicts_of(entry.argument, trainer, pl_module):
            found[entry.argument] = problems[0].why
    return found


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":  # pragma: no cover (gpu)
        properties = torch.cuda.get_device_properties(device)
        context = context_bytes((properties.major, properties.minor))
        # The context exists by now, and is part of a budget.
        own_bytes = torch.cuda.memory_reserved(device) + context
        return min(torch.cuda.mem_get_info(device)[0] + own_bytes, properties.total_memory)
    return math.floor(psutil.virtual_memory().available)
