"""`budget` of `MemSaveCallback`: the plan, the limit of the allocator, and smaller plans on OOM."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_memsave.callbacks.settings.activation_checkpointing import CheckpointingSetting
from lightning_memsave.callbacks.settings.micro_batch_size import MicroBatchSetting
from lightning_memsave.callbacks.settings.offload import OffloadSetting
from lightning_memsave.callbacks.settings.setting import Arguments, Setting, Settings
from lightning_memsave.errors import ConfigurationError, InfeasiblePlanError
from lightning_memsave.measure.allocator import read_allocator
from lightning_memsave.techniques.registry import current_settings
from lightning_memsave.trainer.hooks import log_info
from lightning_memsave.units import MIB, format_bytes

if TYPE_CHECKING:  # loaded by fits that plan
    from lightning_memsave.planning.plan import MemoryPlan, Plan

_CUT_OFF = (
    "the search for a better plan was cut off; a number of seconds for `predict=` allows more"
)


class BudgetSetting(Setting):
    """What was planned for a budget, and what takes its place when memory runs out.

    It is the `Relief` of micro-batches while its plan may change.
    """

    name = "budget"

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self.value, self.is_on = repr(arguments[self.name]), True
        self._made: MemoryPlan | None = None
        self._plan: Plan | None = None  # in force
        self._ladder: Sequence[Plan] = ()  # without what memory was short with
        self._note = ""
        self._settings: Settings | None = None  # what may change
        self._num_retries: int | None = None

    def use(self, made: "MemoryPlan") -> None:
        self._made, self._plan, self._ladder = made, made.plan, made.ladder
        other = made.runner_up
        if other is not None:
            self._note = f"next best: {other.short}, {other.time_ratio:.2f} times the time"
        elif not made.frontier:
            self._note = "the plan of the checkpoint"

    def _in_force(self) -> "tuple[MemoryPlan, Plan]":
        assert self._made is not None, "a fit has a plan"
        assert self._plan is not None, "a fit has a plan"
        return self._made, self._plan

    def report(self) -> dict[str, Any] | None:
        """Give what a report of the run shows: the plans, and which one is in force."""
        made, plan = self._made, self._plan
        if made is None or plan is None:
            return None
        found = made.to_dict() if made.frontier else _state(made, made.plan, made.ladder)
        return found | {"in_force": plan.to_dict()}

    def state(self) -> dict[str, Any]:
        return _state(*self._in_force(), self._ladder)

    def apply(self, trainer: Any, pl_module: Any) -> None:
        self._show()
        device = trainer.strategy.root_device
        if self._made is not None and device.type == "cuda":  # pragma: no cover (gpu)
            self._undo.append(put_up_wall(device, self._made.budget_bytes))

    def allow_changes(self, settings: Settings) -> None:
        micro_batches = settings.find(MicroBatchSetting)
        self._settings, micro_batches.relief = settings, self
        micro_batches.peak_bytes = self._in_force()[1].peak_bytes
        self._undo += [self._forget_settings, micro_batches.forget_relief]

    def _forget_settings(self) -> None:
        self._settings = None

    def relieve(self, trainer: Any, num_failures: int) -> bool:
        self._num_retries = None  # it retried before it failed
        # The first time the cache of the allocator was freed, which may have been enough.
        return num_failures == 1 or self.step_down(trainer, "memory ran out")

    def make_room(self, trainer: Any) -> bool:
        return self._offload_more(trainer, "memory ran out")

    def _offload_more(self, trainer: Any, why: str) -> bool:
        settings = self._settings
        return settings is not None and settings.find(OffloadSetting).leave(trainer, why)

    def step_down(self, trainer: Any, why: str, *, in_same_parts: bool = False) -> bool:
        if self._offload_more(trainer, why):
            return True
        limit = self._in_force()[1].device_bytes  # memory was short with it: never return to it
        self._ladder = [plan for plan in self._ladder if plan.device_bytes < limit]
        smaller = self._smaller(in_same_parts=in_same_parts)
        return smaller is not None and self._change_to(trainer, smaller, why)

    def _smaller(self, *, in_same_parts: bool = False) -> "Plan | None":
        _, now = self._in_force()
        smaller = [p for p in self._ladder if p.device_bytes < now.device_bytes]
        if in_same_parts:
            smaller = [p for p in smaller if p.micro_batch_size == now.micro_batch_size]
        # Where a loss cannot be split, batches stay whole.
        settings = self._settings
        if settings is not None and settings.find(MicroBatchSetting).proof.reason:
            smaller = [p for p in smaller if not _splits(p)]
        return _fastest(smaller)

    def stay_whole(self, trainer: Any, why: str) -> None:
        """Change to the fastest plan that fits with whole batches, as a loss cannot be split."""
        made, plan = self._in_force()
        if not _splits(plan):
            return
        whole = [other for other in self._ladder if not _splits(other)]
        room = made.budget_bytes - made.margin_bytes
        fitting = [other for other in whole if other.device_bytes <= room]
        if (best := _fastest(fitting)) is not None:
            self._change_to(trainer, best, "its loss cannot be split")
            return
        least = min(whole, key=lambda other: other.device_bytes, default=plan)
        budget = f", {_as_budget(least.device_bytes + made.margin_bytes)}" if whole else ""
        raise InfeasiblePlanError(
            f"`budget={self.value}`: the plan is {plan.short}, and {why}. With whole batches it "
            "does not fit. Use `micro_batch_size=None`, so that other settings are planned"
            f"{budget}, a smaller batch, or `MicroBatching(loss_weight=...)`, a function of a "
            "micro-batch that gives what its loss is divided by.",
            least,
        )

    def advise(self) -> str:
        (made, _), smaller = self._in_force(), self._smaller()
        budget = '`budget="free"`, which plans for the memory that is free'
        if smaller is not None:
            num_bytes = smaller.device_bytes + made.margin_bytes
            budget = f"a smaller budget, such as {_as_budget(num_bytes)}"
        return f"Use {budget}, shorter samples or a smaller model."

    def watch(self, trainer: Any, *, is_start: bool) -> None:
        """Change to a smaller plan where CUDA's allocator had to give memory back in a batch."""
        reading = None if self._made is None else read_allocator(trainer.strategy.root_device)
        if reading is not None:  # pragma: no cover (gpu)
            self._num_retries = None if is_start else self._num_retries
            self.note_retries(trainer, reading.num_alloc_retries)

    def note_retries(self, trainer: Any, num_retries: int) -> None:
        before, self._num_retries = self._num_retries, num_retries
        if before is not None and num_retries > before:
            # Other ranks do not know: they must see as many micro-batches.
            why = f"the allocator retried {num_retries - before} times"
            self.step_down(trainer, why, in_same_parts=trainer.world_size > 1)

    def _change_to(self, trainer: Any, plan: "Plan", why: str) -> bool:
        if self._settings is None:
            return False
        _, before = self._in_force()
        pl_module = trainer.lightning_module
        recomputation = self._settings.find(CheckpointingSetting)
        micro_batches = self._settings.find(MicroBatchSetting)
        # What the user has named is the same in all plans.
        which = plan.settings.get(recomputation.name)
        if which != before.settings.get(recomputation.name):
            recomputation.change(pl_module, which)
        if plan.micro_batch_size != before.micro_batch_size:
            micro_batches.change(trainer, pl_module, plan.micro_batch_size)
        micro_batches.peak_bytes = plan.peak_bytes
        self._plan, self._note = plan, f"changed, as {why}"
        self._show()
        log_info(trainer, f"budget={self.value}: {why}, so the plan is now {plan.short}.")
        return True

    def _show(self) -> None:
        from lightning_memsave.planning.plan import step_in

        plan, made = self._plan, self._made
        if plan is None or made is None:
            self.show("off", "only training is planned")
            return
        sure = "predicted" if plan.is_verified else "estimated"
        needs = (
            f"{sure} to need {format_bytes(plan.device_bytes)} and {plan.time_ratio:.2f} times the "
            f"time of {step_in(made.precision)}"
        )
        if made.frontier and not plan.is_verified and plan is made.plan:
            needs = f"{needs if made.num_predictions else 'not predicted'}: {_CUT_OFF}"
        details = [
            f"planned for {format_bytes(made.budget_bytes)}: {plan.short}",
            needs,
            self._note,
            *(f"`{name}` is advised against: {why}" for name, why in plan.not_advised.items()),
        ]
        self.show("on", *details, exactness=plan.exactness)


def _state(made: "MemoryPlan", plan: "Plan", ladder: "Sequence[Plan]") -> dict[str, Any]:
    return {
        "budget_bytes": made.budget_bytes,
        "margin_bytes": made.margin_bytes,
        "plan": plan.to_dict(),
        "ladder": [other.to_dict() for other in ladder],
    }


def read_plan(state: Any) -> "MemoryPlan | None":
    """Read the plan in a checkpoint; ``None`` if it cannot be read."""
    from lightning_memsave.planning.plan import MemoryPlan

    try:
        sizes, ladder = (state["budget_bytes"], state["margin_bytes"]), state["ladder"]
        plans = tuple(map(_plan_of, ladder))
        return MemoryPlan(*sizes, _plan_of(state["plan"]), None, (), ladder=plans)
    except (TypeError, KeyError, ConfigurationError):
        return None


def _plan_of(state: Mapping[str, Any]) -> "Plan":
    from lightning_memsave.planning.plan import Plan

    return Plan(**{**state, "settings": current_settings(state["settings"])})


def _fastest(plans: "Iterable[Plan]") -> "Plan | None":
    return min(plans, key=lambda plan: plan.time_ratio, default=None)


def _as_budget(num_bytes: int) -> str:
    return f'`budget="{math.ceil(num_bytes / MIB)}MiB"`'


def _splits(plan: "Plan") -> bool:
    return isinstance(plan.micro_batch_size, int)


def put_up_wall(device: torch.device, budget_bytes: int) -> Callable[[], None]:
    """Let allocations beyond a budget fail, before they take the memory of others."""
    from lightning_memsave.prediction.cuda.constants import context_bytes

    properties = torch.cuda.get_device_properties(device)
    own_bytes = budget_bytes - context_bytes((properties.major, properties.minor))
    # Newer versions of torch tell the limit; the default is none.
    before = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    share = min(before, own_bytes / properties.total_memory)
    torch.cuda.set_per_process_memory_fraction(share, device)
    return lambda: torch.cuda.set_per_process_memory_fraction(before, device)
