"""Plan the settings of a training step for a budget of memory."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from lightning_memsave.analysis.explain import make_what_if
from lightning_memsave.analysis.predict import OFF
from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.core.technique import Exactness
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.planning.budget import read_budget
from lightning_memsave.planning.plan import MemoryPlan
from lightning_memsave.planning.search import PlanSearch, search_for
from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.prediction.predict import predict
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.training_step import MakeOptimizer
from lightning_memsave.prediction.what_if import WhatIf
from lightning_memsave.targets.target import Target
from lightning_memsave.techniques.registry import entries, unused_details

TIME_LIMIT_S = 300.0
PLANNED: Mapping[str, Any] = {"budget": "auto"}
"""Arguments of `MemSaveCallback` with which everything is open; details of it may be given."""


def plan_memory(
    model: nn.Module | Callable[[], nn.Module] | Target | str,
    batch: Any,
    optimizer: MakeOptimizer | None = None,
    settings: Mapping[str, Any] | MemSaveCallback | None = None,
    *,
    budget: str | float | None = None,
    gpu: str | Gpu | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    exactness: Literal["bitwise", "rounding", "approximate"] = "approximate",
    loss: Callable[[Any, Any], Tensor] | None = None,
    attention: str | None = None,
    trainer_arguments: Mapping[str, Any] | None = None,
    time_limit_s: float = TIME_LIMIT_S,
) -> MemoryPlan:
    """Find the fastest settings that fit a budget of memory, without a GPU.

    Steps of the model with some settings on are recorded on fake tensors, with few of its blocks.
    From these, peak and time follow for any number of recomputed blocks. The fastest plan that fits
    is then predicted whole, and corrected until it does.

    Args:
        model: As for `explain_memory`.
        batch: As for `explain_memory`.
        optimizer: As for `predict_memory`.
        settings: Arguments of `MemSaveCallback` that are fixed; the others are chosen.
        budget: Bytes that the process may use on the device, with the CUDA context: a number, a
            text such as ``"12GiB"``, or a share of ``gpu``; ``None`` or ``"auto"`` is all of it.
        gpu: The GPU, such as ``"RTX 3060"``; its throughput decides what is fast.
        device: Device to plan for; ``"cpu"`` measures the throughput of this machine.
        exactness: How far results may move.
        loss: As for `predict_memory`.
        attention: As for `predict_memory`.
        trainer_arguments: As for `predict_memory`.
        time_limit_s: Seconds after which nothing more is predicted.

    Returns:
        The plan, the next best one with other settings, and the frontier.

    Raises:
        ConfigurationError: If an argument is wrong.
        InfeasiblePlanError: If no settings fit; it says what the smallest peak is made of.
        MemsaveError: If the step cannot be predicted.
        TimeoutError: If there is no plan after ``time_limit_s``.

    Note:
        Times are ratios to the unchanged step, estimated from its kernels: see `docs/plan.md`.

    Example:
        >>> import torch
        >>> layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(6)]
        >>> model, batch = nn.Sequential(*layers), torch.ones(16, 32, 32)
        >>> found = plan_memory(
        ...     model, batch, budget="6MiB", device="cpu", exactness="bitwise"
        ... )
        >>> found.plan.device_bytes <= 6 * 2**20, found.plan.exactness
        (True, 'bitwise')
    """
    what_if = make_what_if(
        model,
        batch,
        optimizer,
        settings,
        device=device,
        gpu=gpu,
        loss=loss,
        attention=attention,
        trainer_arguments=trainer_arguments,
        time_limit_s=time_limit_s,
        base=PLANNED,
    )
    return plan_what_if(what_if, budget, exactness, time_limit_s)


def plan_what_if(
    what_if: WhatIf, budget: Any, exactness: str, limit_s: float = math.inf
) -> MemoryPlan:
    """Do what `plan_memory` does, after its arguments are read."""
    budget_bytes = budget_of(what_if, budget)
    return search_of(what_if, exactness, limit_s).find(budget_bytes)


def budget_of(what_if: WhatIf, budget: Any) -> int:
    """Read a budget in bytes for the device of a step; ``None`` is all memory of its GPU."""
    gpu = what_if.gpu
    if budget is None and gpu is None:
        raise ConfigurationError(
            'A plan needs a budget. Use `budget="12GiB"`, or `gpu="RTX 3060"` for all of its '
            "memory."
        )
    total_bytes, name = (None, "") if gpu is None else (gpu.total_bytes, gpu.known_name)
    return read_budget("auto" if budget is None else budget, total_bytes, name)


def unchanged_step(what_if: WhatIf) -> MemoryPrediction:
    """Predict a step with nothing on but what is fixed."""
    settings = {n: v for n, v in what_if.step.settings.items() if n != "budget" and v != "auto"}
    settings |= unused_details(settings, [entry.argument for entry in entries()])
    return predict(replace(what_if.step, settings={**settings, **OFF}))


def search_of(what_if: WhatIf, exactness: str, limit_s: float = math.inf) -> PlanSearch:
    """Prepare the search for plans of a step, for any budget."""
    if not what_if.can_predict:
        raise ConfigurationError("A plan needs a batch. Pass one that the model trains on.")
    stack = what_if.step.settings.get("stack")
    if stack not in (None, "off"):
        raise ConfigurationError(
            f"`stack={stack!r}` chooses all settings and leaves none to plan. Use `stack='off'`, "
            "and name the settings that are fixed."
        )
    try:
        limit = Exactness(exactness)
    except ValueError as error:
        choices = ", ".join(f'"{e.value}"' for e in Exactness)
        raise ConfigurationError(f"`exactness={exactness!r}` is not one of {choices}.") from error
    return search_for(what_if, limit, limit_s)
