"""A budget of device memory: the plan of a fit, the wall around it, and the way down its ladder."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from lightning_memsave.callbacks.settings.micro_batch_size import MicroBatchSetting
from lightning_memsave.callbacks.settings.modules import ActivationCheckpointingSetting
from lightning_memsave.callbacks.settings.setting import Setting, Settings
from lightning_memsave.core.technique import Row
from lightning_memsave.errors import InfeasiblePlanError
from lightning_memsave.planning.plan import Plan, RunPlan
from lightning_memsave.prediction.cuda.constants import context_bytes
from lightning_memsave.trainer.hooks import log_info
from lightning_memsave.units import MIB, format_bytes

_REFINED_AT = 4
_WORTH_IT = 0.95  # of the time of a step: a faster plan must save more to be changed to


class BudgetSetting(Setting):
    """What was planned for a budget, and what takes its place when memory runs out.

    Args:
        budget: As the user wrote it.
    """

    name = "budget"

    def __init__(self, budget: Any) -> None:
        super().__init__()
        self.value = repr(budget)
        self._made: RunPlan | None = None
        self._plan: Plan | None = None  # in force
        self._note = ""
        self._change: Callable[[Plan, Plan], None] | None = None
        self._is_possible: Callable[[Plan], bool] = lambda plan: True
        self._num_retries: int | None = None
        self._is_refined = False

    def use(self, made: RunPlan) -> None:
        """Remember what was planned, before it is applied.

        Args:
            made: The plan of this fit.
        """
        self._made, self._plan = made, made.plan
        other = None if made.found is None else made.found.runner_up
        if other is not None:
            self._note = f"next best: {other.short}, {other.time_ratio:.2f} times the time"
        elif made.found is None:
            self._note = "the plan of the checkpoint"

    def state(self) -> dict[str, Any]:
        """Give what a checkpoint keeps."""
        assert self._made is not None, "a fit has a plan"
        assert self._plan is not None, "a fit has a plan"
        return self._made.state(self._plan)

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Put up the wall, and show the plan."""
        self._show()
        device = trainer.strategy.root_device
        if self._made is not None and device.type == "cuda":  # pragma: no cover (gpu)
            self._undo.append(put_up_wall(device, self._made.budget_bytes))

    def allow_changes(self, trainer: Any, pl_module: Any, settings: Settings) -> None:
        """Allow the plan to be changed from now on.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
            settings: Those of the fit.
        """
        recomputation = settings.find(ActivationCheckpointingSetting)
        micro_batches = settings.find(MicroBatchSetting)

        # What the user has named is the same in all plans.
        def change(before: Plan, plan: Plan) -> None:
            which = plan.settings.get(recomputation.name)
            if which != before.settings.get(recomputation.name):
                recomputation.change(pl_module, which)
            size = plan.settings.get(micro_batches.name)
            if size != before.settings.get(micro_batches.name):
                micro_batches.resize(size if isinstance(size, int) else None)
            micro_batches.peak_bytes = plan.peak_bytes

        # Where a loss cannot be split, batches stay whole.
        def is_possible(plan: Plan) -> bool:
            return not (micro_batches.proof.reason and _splits(plan))

        def relieve(num_failures: int) -> bool:
            # The first time the cache of the allocator was freed, which may have been enough.
            return num_failures == 1 or self.step_down(trainer, "memory ran out")

        self._change, micro_batches.relieve = change, relieve
        self._is_possible = is_possible
        assert self._plan is not None, "called with a plan"
        micro_batches.peak_bytes = self._plan.peak_bytes
        micro_batches.stay_whole = functools.partial(self._stay_whole, trainer)
        micro_batches.advise = self._advise
        self._undo.append(self._forget_changes)
        self._undo.append(micro_batches.forget_relief)

    def step_down(self, trainer: Any, why: str) -> bool:
        """Change to the next plan that needs less.

        Args:
            trainer: The Trainer.
            why: A clause, for the log.

        Returns:
            Whether there was one.
        """
        smaller = self._smaller()
        return smaller is not None and self._change_to(trainer, smaller, why)

    def _smaller(self) -> Plan | None:
        assert self._made is not None, "called with a plan"
        assert self._plan is not None, "called with a plan"
        now = self._plan.device_bytes
        possible = [plan for plan in self._made.ladder if self._is_possible(plan)]
        return next((plan for plan in possible if plan.device_bytes < now), None)

    def _stay_whole(self, trainer: Any, why: str) -> None:
        """Change to the fastest plan that fits with whole batches, as a loss cannot be split."""
        made, plan = self._made, self._plan
        assert made is not None, "called with a plan"
        assert plan is not None, "called with a plan"
        if not _splits(plan):
            return
        whole = [other for other in made.ladder if not _splits(other)]
        room = made.budget_bytes - made.margin_bytes
        fitting = [other for other in whole if other.device_bytes <= room]
        if fitting:
            best = min(fitting, key=lambda other: other.time_ratio)
            self._change_to(trainer, best, "its loss cannot be split")
            return
        least = min(whole, key=lambda other: other.device_bytes, default=plan)
        budget = f", {_as_budget(least.device_bytes + made.margin_bytes)}" if whole else ""
        raise InfeasiblePlanError(
            f"`budget={self.value}`: the plan is {plan.short}, and {why}. With whole batches it "
            "does not fit. Use `micro_batch_size=None`, so that other settings are planned"
            f"{budget}, a smaller batch, or `loss_weight=`, a function of a micro-batch that gives "
            "what its loss is divided by.",
            least,
        )

    def _advise(self) -> str:
        made, smaller = self._made, self._smaller()
        budget = "a smaller `budget=`"
        if made is not None and smaller is not None:
            num_bytes = smaller.device_bytes + made.margin_bytes
            budget = f"a smaller budget, such as {_as_budget(num_bytes)}"
        return f"Use {budget}, shorter samples or a smaller model."

    def watch(self, trainer: Any) -> None:
        """Change to a smaller plan where CUDA's allocator had to give memory back in a step."""
        device = trainer.strategy.root_device
        if device.type == "cuda":  # pragma: no cover (gpu)
            statistics = torch.cuda.memory_stats(device)
            self.note_retries(trainer, int(statistics.get("num_alloc_retries", 0)))

    def note_retries(self, trainer: Any, num_retries: int) -> None:
        """Do the same, by the number of retries so far."""
        before, self._num_retries = self._num_retries, num_retries
        if before is not None and num_retries > before:
            self.step_down(trainer, f"the allocator retried {num_retries - before} times")

    def refine(self, trainer: Any, measured_bytes: int | None) -> None:
        """Correct the plan by the measured peak, once, after a few steps.

        Args:
            trainer: The Trainer.
            measured_bytes: The peak so far; ``None`` if it is not known.
        """
        if self._is_refined or trainer.global_step < _REFINED_AT:
            return
        self._is_refined = True
        made, plan = self._made, self._plan
        # Ranks measure different peaks.
        if plan is None or made is None or trainer.world_size > 1:
            return
        if plan.prediction is None or not measured_bytes:
            return
        offset = measured_bytes - plan.prediction.measurable_bytes
        room = made.budget_bytes - made.margin_bytes - offset
        possible = [other for other in made.ladder if self._is_possible(other)]
        fitting = [other for other in possible if other.device_bytes <= room]
        is_over = plan.device_bytes > room
        if fitting and (is_over or fitting[0].time_ratio < _WORTH_IT * plan.time_ratio):
            side = "above" if offset > 0 else "below"
            why = f"the measured peak is {format_bytes(abs(offset))} {side} the predicted one"
            self._change_to(trainer, fitting[0], why)

    def _change_to(self, trainer: Any, plan: Plan, why: str) -> bool:
        if self._change is None or self._plan is None:
            return False
        self._change(self._plan, plan)
        self._plan, self._note = plan, f"changed, as {why}"
        self._show()
        log_info(trainer, f"budget={self.value}: {why}, so the plan is now {plan.short}.")
        return True

    def _forget_changes(self) -> None:
        self._change, self._is_possible = None, lambda plan: True

    def _show(self) -> None:
        plan, made = self._plan, self._made
        if plan is None or made is None:
            self.rows = [Row(self.name, self.value, "off", ("only training is planned",))]
            return
        sure = "predicted" if plan.is_verified else "estimated"
        details = [
            f"planned for {format_bytes(made.budget_bytes)}: {plan.short}",
            f"{sure} to need {format_bytes(plan.device_bytes)} and {plan.time_ratio:.2f} times the "
            "time of a step without it",
            *([self._note] if self._note else []),
        ]
        self.rows = [Row(self.name, self.value, "on", tuple(details), plan.exactness)]


def _as_budget(num_bytes: int) -> str:
    return f'`budget="{math.ceil(num_bytes / MIB)}MiB"`'


def _splits(plan: Plan) -> bool:
    return isinstance(plan.settings.get(MicroBatchSetting.name), int)


def put_up_wall(device: torch.device, budget_bytes: int) -> Callable[[], None]:
    """Let allocations beyond a budget fail, before they take the memory of others.

    Args:
        device: A CUDA device.
        budget_bytes: With the CUDA context, which torch's allocator does not count.

    Returns:
        A function that restores the former limit.
    """
    properties = torch.cuda.get_device_properties(device)
    own_bytes = budget_bytes - context_bytes((properties.major, properties.minor))
    # Newer versions of torch tell the limit; the default is none.
    before = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    share = min(before, own_bytes / properties.total_memory)
    torch.cuda.set_per_process_memory_fraction(share, device)
    return lambda: torch.cuda.set_per_process_memory_fraction(before, device)
