"""The plan of a fit, the plans to which it can change, and what measurements say about them."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.planning.plan import MemoryPlan, Plan
from lightning_memsave.techniques.registry import current_settings
from lightning_memsave.units import format_bytes

_WORTH_IT = 0.95  # of the time of a step: a faster plan must save more to be changed to


@dataclass
class Correction:
    """What the measurements of a fit say about the model of its plans."""

    offset_bytes: int | None = None
    factors: dict[str, float] = field(default_factory=dict)
    num_checks: int = 0
    too_large_bytes: int | None = None

    def __str__(self) -> str:
        parts = []
        if self.offset_bytes is not None:
            size, side = format_bytes(abs(self.offset_bytes)), "below"
            if self.offset_bytes >= 0:
                side = "above"
            parts.append(f"the measured peak is {size} {side} the predicted one")
        if self.factors:
            factors = ", ".join(f"{phase} {f:.2f}" for phase, f in self.factors.items())
            parts.append(f"measured over estimated times are {factors}")
        return " and ".join(parts) or "nothing could be measured"


@dataclass
class RunPlan:
    """The plan of a fit."""

    plan: Plan
    budget_bytes: int
    margin_bytes: int
    ladder: tuple[Plan, ...]
    found: MemoryPlan | None = None
    unmeasured_bytes: int = 0
    correction: Correction = field(default_factory=Correction)

    def __post_init__(self) -> None:
        # Of a step, by the bytes of its plan; not in checkpoints, as devices differ.
        self._measured_s: dict[int, float] = {}

    def correct(self, now: Plan, peak_bytes: float | None, seconds: Mapping[str, float]) -> None:
        """Correct the model by what was measured with a plan, and count that."""
        self.correction.num_checks += 1
        if peak_bytes is not None:
            predicted_bytes = now.device_bytes - self.unmeasured_bytes
            self.correction.offset_bytes = int(peak_bytes) - predicted_bytes
        estimated = _phases_of(now)
        if estimated and estimated.keys() <= seconds.keys():
            self.correction.factors = {p: seconds[p] / s for p, s in estimated.items()}
            self._measured_s[now.device_bytes] = sum(seconds[p] for p in estimated)

    def seconds_of(self, plan: Plan) -> float:
        """Give the time of a step: as measured, or else as estimated and corrected."""
        factors = self.correction.factors
        corrected = sum(factors.get(p, 1.0) * s for p, s in _phases_of(plan).items())
        return self._measured_s.get(plan.device_bytes, corrected)

    def better_than(self, now: Plan, is_possible: Callable[[Plan], bool]) -> Plan | None:
        """Choose the fastest plan that fits, by all that is known."""
        room = self.budget_bytes - (self.correction.offset_bytes or 0)
        is_over = now.device_bytes > room  # the margin is for what is not measured yet
        if is_over:
            self.leave(now)
        room -= self.margin_bytes
        fitting = [p for p in self.usable if p.device_bytes <= room and is_possible(p)]
        if not is_over:  # what a clock says must not change results in the last digits
            fitting = [p for p in fitting if p.micro_batch_size == now.micro_batch_size]
        best = min(fitting, key=self.seconds_of, default=None)
        if best is None or is_over or self.seconds_of(best) < _WORTH_IT * self.seconds_of(now):
            return best
        return None

    def leave(self, plan: Plan) -> None:
        """Never return to a plan, nor to a larger one: memory was short with it."""
        known = self.correction.too_large_bytes
        self.correction.too_large_bytes = min(plan.device_bytes, known or plan.device_bytes)

    @property
    def usable(self) -> list[Plan]:
        """The plans of the ladder that need less than those that were left."""
        limit = self.correction.too_large_bytes
        return [plan for plan in self.ladder if limit is None or plan.device_bytes < limit]

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain values, for the report of a run."""
        return self.state(self.plan) if self.found is None else self.found.to_dict()

    def state(self, now: Plan) -> dict[str, Any]:
        """Give what a checkpoint keeps, with the plan that is in force by now."""
        return {
            "budget_bytes": self.budget_bytes,
            "margin_bytes": self.margin_bytes,
            "plan": now.to_dict(),
            "ladder": [plan.to_dict() for plan in self.ladder],
            "unmeasured_bytes": self.unmeasured_bytes,
            "correction": asdict(self.correction),
        }

    @classmethod
    def from_state(cls, state: Any) -> "RunPlan | None":
        """Read what `state` gave; ``None`` if it cannot be read."""
        try:
            return cls(
                _plan_of(state["plan"]),
                state["budget_bytes"],
                state["margin_bytes"],
                tuple(map(_plan_of, state["ladder"])),
                unmeasured_bytes=state["unmeasured_bytes"],
                correction=Correction(**state["correction"]),
            )
        except (TypeError, KeyError, ConfigurationError):
            return None


def _plan_of(state: Mapping[str, Any]) -> Plan:
    return Plan(**{**state, "settings": current_settings(state["settings"])})


# From outside, neither recomputation nor updates in it can be told from backward.
def _phases_of(plan: Plan) -> dict[str, float]:
    found: dict[str, float] = {}
    for phase, seconds in plan.seconds_by_phase.items():
        is_update = phase == "optimizer" and plan.settings.get("optimizer_in_backward")
        name = "backward" if is_update or phase == "recomputation" else phase
        found[name] = found.get(name, 0.0) + seconds
    return {phase: seconds for phase, seconds in found.items() if seconds}
