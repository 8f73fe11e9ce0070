"""Plans: settings with their predicted memory and time, and what is said of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rich.console import Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from lightning_memsave.core.plain_text import as_plain_text, figure_table, wrapped
from lightning_memsave.core.technique import Technique, as_config
from lightning_memsave.planning.constants import MENTIONED
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.training_step import changed_arguments
from lightning_memsave.techniques.registry import BARE, entries, values_of, with_preset
from lightning_memsave.units import MIB, format_bytes

_SETTINGS_WIDTH = 54
_CERTAINTY = (
    "Times are ratios to {}, estimated from its kernels, not measured; seconds are a range, as a "
    'GPU reaches more or less of its data sheet. Sizes with "about" are estimated from recorded '
    "blocks; the others are predictions of the whole step."
)


def step_in(precision: str) -> str:
    """Name the step that ratios of time are over."""
    name = {"32": "float32", "32-true": "float32"}.get(precision, precision)
    return f"the unchanged step in {name}" if name else "the unchanged step"


@dataclass(frozen=True, slots=True)
class Plan:
    settings: Mapping[str, Any]
    how: str
    exactness: str
    peak_bytes: int
    device_bytes: int
    time_ratio: float
    is_verified: bool = False
    host_bytes: int = 0
    prediction: MemoryPrediction | None = field(default=None, compare=False, repr=False)
    not_advised: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "prediction"}
        return found | {"settings": {n: plain(v) for n, v in self.settings.items()}}

    @property
    def short(self) -> str:
        return _listed(self._on) or "nothing on"

    @property
    def micro_batch_size(self) -> Any:
        return self.settings.get("micro_batch_size")

    @property
    def size(self) -> str:
        """Bytes on the device, with "about" if they are estimated."""
        return f"{'' if self.is_verified else 'about '}{format_bytes(self.device_bytes)}"

    @property
    def made_of(self) -> str:
        """What most of its bytes are, the largest first; empty if they are only estimated."""
        found = self.prediction
        if found is None:
            return ""
        sizes = found.peak.by_category() | {"CUDA context": found.context_bytes}
        return ", ".join(
            f"{format_bytes(size)} of {name.replace('_', ' ')}"
            for name, size in sorted(sizes.items(), key=lambda item: -item[1])
            if size > MENTIONED * self.device_bytes
        )

    @property
    def _on(self) -> dict[str, Any]:
        off: tuple[Any, ...] = (None, "auto", False, (), [])
        return {n: v for n, v in self.settings.items() if v not in off and n != "exactness"}

    def __str__(self) -> str:
        return f"{self.how}: {self.size}, {self.time_ratio:.2f} times the time ({self.exactness})"


@dataclass(frozen=True, slots=True, repr=False)
class MemoryPlan(JupyterMixin):
    """The fastest plan that fits a budget, and the others.

    ``print``, and the last line of a notebook cell, show the frontier and what to type.

    Args:
        budget_bytes: What the plan was to fit.
        margin_bytes: Part of it that is left free, as predictions for a GPU may be off.
        plan: The fastest that fits; among equally fast ones, the most exact.
        runner_up: The fastest that fits with other settings than recomputation; ``None`` if none
            does.
        frontier: Plans of which none is faster and needs less than another, the fastest first.
        seconds: Time that the search took.
        num_predictions: How many steps were predicted for it.
        unchanged_seconds: The least and the most that the unchanged step should take; zeros if that
            is not known.
        notes: What else there is to say of it: that the search was cut off, and why the host has
            things in a smaller form.
        ladder: In a fit with ``budget=``, the plans that can take its place when memory runs out.
        precision: That of the unchanged step, which ratios of time are over.

    Example:
        >>> how = 'MemSaveCallback(preset="off", optimizer="8bit")'
        >>> plan = Plan({"optimizer": "8bit"}, how, "approximate", 2**30, 2**30, 1.0, True)
        >>> found = MemoryPlan(2 * 2**30, 0, plan, None, (plan,))
        >>> found.fits(plan), found.plan.short
        (True, "optimizer='8bit'")
    """

    budget_bytes: int
    margin_bytes: int
    plan: Plan
    runner_up: Plan | None
    frontier: tuple[Plan, ...]
    seconds: float = 0.0
    num_predictions: int = 0
    unchanged_seconds: tuple[float, float] = (0.0, 0.0)
    notes: tuple[str, ...] = ()
    ladder: tuple[Plan, ...] = ()
    precision: str = ""

    def step_seconds(self, plan: Plan) -> tuple[float, float]:
        """Say how long a step of a plan should take.

        Args:
            plan: A plan of the same step.

        Returns:
            The least and the most, in seconds: wide, as only ratios can be estimated well.
        """
        least_s, most_s = self.unchanged_seconds
        return plan.time_ratio * least_s, plan.time_ratio * most_s

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
            The fields under their names; each plan with ``fits`` and ``step_seconds``.
        """

        def of(plan: Plan) -> dict[str, Any]:
            more = {"fits": self.fits(plan), "step_seconds": self.step_seconds(plan)}
            return plan.to_dict() | more

        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "ladder"}
        return found | {
            "plan": of(self.plan),
            "runner_up": None if self.runner_up is None else of(self.runner_up),
            "frontier": [of(plan) for plan in self.frontier],
        }

    def table(self) -> Table:
        """Make a table of the frontier, the fastest plan first.

        Returns:
            Bytes, whether they fit, time, exactness and settings; ``>`` marks the chosen plan.
        """
        numbers = ("on the device", "time")
        columns = ("", numbers[0], "fits", numbers[1], "exactness", "settings")
        table = figure_table(*columns, numbers=numbers)
        table.columns[-1].max_width = _SETTINGS_WIDTH
        shared = self.shared
        for plan in self.frontier:
            rest = {n: v for n, v in plan._on.items() if n not in shared}
            cells = (
                ">" if plan == self.plan else "",
                plan.size,
                "yes" if self.fits(plan) else "NO",
                f"{plan.time_ratio:.2f}",
                f"{plan.exactness}{', not advised' if plan.not_advised else ''}",
                _listed(rest) or ("nothing else" if shared else "nothing on"),
            )
            table.add_row(*map(Text, cells), style="bold" if plan == self.plan else "")
        return table

    @property
    def shared(self) -> dict[str, Any]:
        """What is on in each plan of the frontier; empty if there is only one plan."""
        first, *others = (plan._on for plan in self.frontier)
        return {n: v for n, v in first.items() if others and all(o.get(n) == v for o in others)}

    def _parts(self) -> list[RenderableType]:
        free = (
            f", of which {format_bytes(self.margin_bytes)} stay free" if self.margin_bytes else ""
        )
        host = format_bytes(self.plan.host_bytes)
        on_host = f" and {host} on the host" if self.plan.host_bytes >= MIB else ""
        head = (
            f"The fastest plan for {format_bytes(self.budget_bytes)}{free}: {self.plan.size} on "
            f"the device{on_host}, {self.plan.time_ratio:.2f} times the time of "
            f"{step_in(self.precision)}{self._range()}"
        )
        parts: list[RenderableType] = [
            Text(wrapped(head), style="bold"),
            Text(),
            self.table(),
        ]
        if self.shared:
            parts.append(Text(wrapped(f"each with {_listed(self.shared)}")))
        parts += [Text(), Text(wrapped(self.plan.how, indent="    ")), Text()]
        if self.runner_up is not None:
            parts.append(Text(wrapped(f"Next best with other settings: {self._second()}")))
        notes = [*self.notes, *self._assumed(), _CERTAINTY.format(step_in(self.precision))]
        return [*parts, *(Text(wrapped(note)) for note in notes)]

    def _assumed(self) -> list[str]:
        settings = self.plan.settings
        offload = settings.get("offload")
        limit = getattr(offload, "host_budget", None) or settings.get("host_budget")
        if self.plan.host_bytes < MIB or limit is not None:
            return []
        return ["Assumed: the host has the memory. `--set host_budget=32GiB` limits it."]

    def _range(self) -> str:
        least_s, most_s = self.step_seconds(self.plan)
        if not most_s:
            return ""
        work = None if self.plan.prediction is None else self.plan.prediction.work
        speed = "" if work is None else work.speed((least_s, most_s), work.throughput)
        return f" ({least_s:.2g} to {most_s:.2g} s){f': {speed}' if speed else ''}"

    def _second(self) -> str:
        assert self.runner_up is not None, "asked before"
        before, after = self.plan._on, self.runner_up._on
        settings = self.runner_up.settings
        changed = {n: v for n, v in settings.items() if after.get(n) != before.get(n)}
        return (
            f"{self.runner_up.size}, {self.runner_up.time_ratio:.2f} times the time, with "
            f"{_listed(changed)}"
        )

    def __rich__(self) -> Group:
        return Group(*self._parts())

    def __str__(self) -> str:
        return as_plain_text(self)

    def __repr__(self) -> str:
        return f"<MemoryPlan for {format_bytes(self.budget_bytes)}: {self.plan}>"


def short_settings(
    make_callback: Callable[..., Any], settings: Mapping[str, Any], exactness: str
) -> dict[str, Any]:
    """Leave out of a plan's settings what `MemSaveCallback` does without a word."""
    changed = changed_arguments(make_callback, settings)

    def effective(of: Mapping[str, Any]) -> dict[str, Any]:
        found = with_preset(make_callback(**of).arguments)
        return {n: v for n, v in found.items() if n not in ("preset", "from_preset")}

    # A technique that is on is written all the same: what comes from a preset may stay off.
    techniques = [entry.argument for entry in entries() if entry.technique is not None]

    def beside(preset: str | None) -> dict[str, Any]:
        values = values_of(preset or BARE)
        silent = {n: v for n, v in values.items() if v in (None, "auto") or n not in techniques}
        rest = {n: v for n, v in changed.items() if n not in silent or v != silent[n]}
        return rest if preset is None else {"preset": preset, **rest}

    presets = (None, "bitwise") if exactness == "bitwise" else (None,)
    same = [s for s in map(beside, presets) if effective(s) == effective(settings)]
    return min([*same, changed], key=lambda s: [*s.values()].count(None))


# Of functions and modules that the user has given: neither JSON nor pickle may take them.
def plain(value: Any) -> Any:
    if isinstance(value, Technique):
        found = as_config(value)
        return found | {"init_args": {n: plain(v) for n, v in found["init_args"].items()}}
    if isinstance(value, tuple | list):
        return tuple(map(plain, value))
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return value if isinstance(value, str | int | float | None) else repr(value)


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
