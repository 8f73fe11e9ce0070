"""Compare what runs reported, with each other and with predictions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.explain.memory_changes import Change, MemoryComparison, differing
from lightning_memsave.explain.model_changes import (
    category_changes,
    other_devices,
    predicted_changes,
)
from lightning_memsave.prediction.result import MemoryPrediction, ModuleMemory


def compare_reports(
    a: Mapping[str, Any] | MemoryPrediction,
    b: Mapping[str, Any] | MemoryPrediction,
    labels: tuple[str, str] = ("first", "second"),
) -> MemoryComparison:
    """Find what is different between two runs, or between a run and a prediction."""
    first, second = (_Run.read(side, name) for side, name in zip((a, b), labels, strict=True))
    notes = []
    if first.device and second.device and first.device != second.device:
        notes.append(other_devices(first.device, second.device))
    if first.how != second.how:
        notes.append(f"{labels[0]} was {first.how}, {labels[1]} {second.how}")
    modules: tuple[Change, ...] = ()
    if first.modules and second.modules:
        modules = predicted_changes(first.modules, second.modules)
    if modules and "measured" in (first.how, second.how):
        notes.append("modules are those of the predictions: only the sum of them is measured")
    categories: tuple[Change, ...] = ()
    if first.by_category and second.by_category:
        categories = category_changes(first.by_category, second.by_category)
    else:
        notes.append("categories are not known on both sides: on CUDA only the sum is measured")
    versions = differing(first.versions, second.versions)
    return MemoryComparison(
        kind="reports",
        a=labels[0],
        b=labels[1],
        total=Change("peak_bytes", first.peak_bytes, second.peak_bytes),
        modules=modules,
        categories=categories,
        settings=(
            *_other_settings(first, second),
            # A prediction does not say which versions it is about.
            *(row for row in versions if "-" not in row[1:]),
        ),
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Run:
    """What is known of one side."""

    how: str
    peak_bytes: int
    by_category: Mapping[str, int]
    device: str
    modules: tuple[ModuleMemory, ...]
    switched_on: Mapping[str, str]
    asked_for: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, side: Mapping[str, Any] | MemoryPrediction, label: str) -> Self:
        if isinstance(side, MemoryPrediction):
            sizes = side.peak.by_category()
            found = (side.measurable_bytes, sizes, side.device, side.modules, side.settings)
            return cls("predicted", *found)
        for how in ("measured", "predicted"):
            peak = side.get(how)
            if isinstance(peak, Mapping) and peak.get("peak_bytes") is not None:
                break
        else:
            raise ConfigurationError(
                f"The report {label} has no bytes to compare: nothing was measured or predicted in "
                "that run. Run it again with `MemSaveCallback(report=True)`."
            )
        rows = (*side.get("changes", ()), *side.get("refusals", ()))
        return cls(
            how,
            # On CUDA a run measures blocks of the allocator.
            peak.get("allocated_bytes") or peak["peak_bytes"],
            peak.get("by_category") or {},
            str(side.get("device", "")).partition(":")[0],
            tuple(map(_module, (side.get("predicted") or {}).get("modules", ()))),
            {
                row["name"]: row["value"]
                for row in rows
                if row.get("status") == "on" or row["name"] == "precision"
            },
            side.get("settings", {}),
            {f"version of {name}": v for name, v in side.get("versions", {}).items()},
        )


def _module(row: Mapping[str, Any]) -> ModuleMemory:
    memory = MemoryBreakdown.from_categories(row["by_category"])
    return ModuleMemory(row["name"], row["class_name"], row["num_parameters"], memory)


# A report says what was asked for and a prediction what was on: only what was on can be compared.
def _other_settings(a: _Run, b: _Run) -> tuple[tuple[str, str, str], ...]:
    if a.asked_for is not None and b.asked_for is not None:
        return differing(a.asked_for, b.asked_for)
    found = differing(a.switched_on, b.switched_on)
    # Runs do not say it where the Trainer has set it.
    is_known = "precision" in a.switched_on and "precision" in b.switched_on
    return tuple(row for row in found if is_known or row[0] != "precision")
