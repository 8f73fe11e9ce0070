"""Plans: settings with their predicted memory and time, and what is said of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.units import format_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a training step.

    Args:
        settings: Arguments of `MemSaveCallback` by name; those that stay off are ``None``.
        how: What to type.
        exactness: How far results may move: ``"bitwise"``, ``"rounding"`` or ``"approximate"``.
        peak_bytes: Predicted peak of live tensors.
        device_bytes: Predicted bytes that the device must have.
        time_ratio: Estimated time of a step over that of the unchanged one.
        is_verified: Whether the whole step was predicted with these settings; otherwise its bytes
            are estimated from recorded blocks.
        prediction: Of the step; ``None`` if it is only estimated.
    """

    settings: Mapping[str, Any]
    how: str
    exactness: str
    peak_bytes: int
    device_bytes: int
    time_ratio: float
    is_verified: bool = False
    prediction: MemoryPrediction | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain values, for JSON.

        Returns:
            The fields under their names, without the prediction.
        """
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "prediction"}

    @property
    def short(self) -> str:
        """What is on, such as ``"activation_checkpointing=6, optimizer='8bit'"``."""
        off = (None, "auto", False, ())
        on = {n: v for n, v in self.settings.items() if v not in off and n != "exactness"}
        return ", ".join(f"{name}={value!r}" for name, value in on.items()) or "nothing on"

    def __str__(self) -> str:
        sure = "" if self.is_verified else "about "
        return (
            f"{self.how}: {sure}{format_bytes(self.device_bytes)}, {self.time_ratio:.2f} times the "
            f"time ({self.exactness})"
        )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The fastest plan that fits a budget, and the others.

    Args:
        budget_bytes: What the plan was to fit.
        margin_bytes: Part of it that is left free, as predictions for a GPU may be off.
        plan: The fastest that fits; among equally fast ones, the most exact.
        runner_up: The fastest that fits with other settings than recomputation; ``None`` if none
            does.
        frontier: Plans of which none is faster and needs less than another, the fastest first.
        seconds: Time that the search took.
        num_predictions: How many steps were predicted for it.
    """

    budget_bytes: int
    margin_bytes: int
    plan: Plan
    runner_up: Plan | None
    frontier: tuple[Plan, ...]
    seconds: float = 0.0
    num_predictions: int = 0

    def fits(self, plan: Plan) -> bool:
        """Say whether a plan fits the budget.

        Args:
            plan: A plan of the same step.

        Returns:
            Whether its bytes and the margin are within the budget.
        """
        return plan.device_bytes + self.margin_bytes <= self.budget_bytes

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain values, for JSON.

        Returns:
            The fields under their names; each plan with ``fits``.
        """

        def of(plan: Plan) -> dict[str, Any]:
            return plan.to_dict() | {"fits": self.fits(plan)}

        return {
            "budget_bytes": self.budget_bytes,
            "margin_bytes": self.margin_bytes,
            "plan": of(self.plan),
            "runner_up": None if self.runner_up is None else of(self.runner_up),
            "frontier": [of(plan) for plan in self.frontier],
            "seconds": self.seconds,
            "num_predictions": self.num_predictions,
        }


@dataclass
class RunPlan:
    """The plan of a fit.

    Args:
        plan: The plan that the fit began with.
        budget_bytes: What it was made for.
        margin_bytes: Part of it that is left free.
        ladder: The plans to which the fit can change, the fastest first, and this one among them.
        found: All of the search; ``None`` if the plan comes from a checkpoint.
    """

    plan: Plan
    budget_bytes: int
    margin_bytes: int
    ladder: tuple[Plan, ...]
    found: MemoryPlan | None = None

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
        }

    @classmethod
    def from_state(cls, state: Any) -> "RunPlan | None":
        """Read what `state` gave; ``None`` if it cannot be read."""
        try:
            return cls(
                Plan(**state["plan"]),
                state["budget_bytes"],
                state["margin_bytes"],
                tuple(Plan(**plan) for plan in state["ladder"]),
            )
        except (TypeError, KeyError):
            return None
