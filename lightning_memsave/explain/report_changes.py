"""Compare what runs reported, with each other and with predictions."""

from collections.abc import Mapping
from typing import Any

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
    """Find what is different between two runs, or between a run and a prediction.

    Args:
        a: What ``memsave_report.json`` has, or a prediction.
        b: The other one.
        labels: What to call them.

    Returns:
        The comparison, in bytes at the peak: measured ones where there are any. Modules are those
        of the predictions, where both sides have one.

    Raises:
        ConfigurationError: If a report has neither measured nor predicted bytes.
    """
    (peak_a, how_a), (peak_b, how_b) = (_peak(s, n) for s, n in zip((a, b), labels, strict=True))
    notes = [] if how_a == how_b else [f"{labels[0]} was {how_a}, {labels[1]} {how_b}"]
    first, second = _device(a), _device(b)
    if first and second and first != second:
        notes.insert(0, other_devices(first, second))
    modules, roots = _module_changes(a, b)
    if modules and "measured" in (how_a, how_b):
        notes.append("modules are those of the predictions: only the sum of them is measured")
    if not peak_a.get("by_category") or not peak_b.get("by_category"):
        notes.append("categories are not known on both sides: on CUDA only the sum is measured")
        categories: tuple[Change, ...] = ()
    else:
        categories = category_changes(peak_a["by_category"], peak_b["by_category"])
    return MemoryComparison(
        kind="reports",
        a=labels[0],
        b=labels[1],
        total=Change("peak_bytes", peak_a["peak_bytes"], peak_b["peak_bytes"]),
        modules=modules,
        categories=categories,
        settings=differing(*_settings(a, b)) + _other_versions(a, b),
        notes=(*notes, *roots),
    )


def _peak(side: Mapping[str, Any] | MemoryPrediction, label: str) -> tuple[Mapping[str, Any], str]:
    if isinstance(side, MemoryPrediction):
        sizes = {"peak_bytes": side.measurable_bytes, "by_category": side.peak.by_category()}
        return sizes, "predicted"
    for how in ("measured", "predicted"):
        found = side.get(how)
        if isinstance(found, Mapping) and found.get("peak_bytes") is not None:
            # On CUDA a run measures blocks of the allocator.
            return {**found, "peak_bytes": found.get("allocated_bytes") or found["peak_bytes"]}, how
    raise ConfigurationError(
        f"The report {label} has no bytes to compare: nothing was measured or predicted in that "
        "run. Run it again with `MemSaveCallback(monitor=True)`."
    )


# A report says what was asked for and a prediction what was on: only what was on can be compared.
def _settings(
    a: Mapping[str, Any] | MemoryPrediction, b: Mapping[str, Any] | MemoryPrediction
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    if not isinstance(a, MemoryPrediction) and not isinstance(b, MemoryPrediction):
        return a.get("settings", {}), b.get("settings", {})
    first, second = _switched_on(a), _switched_on(b)
    # Runs do not say it where the Trainer has set it.
    if not {"precision"} <= first.keys() & second.keys():
        first, second = ({n: v for n, v in s.items() if n != "precision"} for s in (first, second))
    return first, second


def _switched_on(side: Mapping[str, Any] | MemoryPrediction) -> dict[str, str]:
    if isinstance(side, MemoryPrediction):
        return dict(side.settings)
    rows = (*side.get("changes", ()), *side.get("refusals", ()))
    return {
        row["name"]: row["value"]
        for row in rows
        if row.get("status") == "on" or row["name"] == "precision"
    }


def _device(side: Mapping[str, Any] | MemoryPrediction) -> str:
    if isinstance(side, MemoryPrediction):
        return side.device
    return str(side.get("device", "")).partition(":")[0]


# A prediction does not say which versions it is about.
def _other_versions(
    a: Mapping[str, Any] | MemoryPrediction, b: Mapping[str, Any] | MemoryPrediction
) -> tuple[tuple[str, str, str], ...]:
    if isinstance(a, MemoryPrediction) or isinstance(b, MemoryPrediction):
        return ()
    first, second = (
        {f"version of {name}": v for name, v in side.get("versions", {}).items()} for side in (a, b)
    )
    return tuple(row for row in differing(first, second) if row[0] in first.keys() & second.keys())


def _module_changes(
    a: Mapping[str, Any] | MemoryPrediction, b: Mapping[str, Any] | MemoryPrediction
) -> tuple[tuple[Change, ...], list[str]]:
    first, second = _modules(a), _modules(b)
    return predicted_changes(first, second) if first and second else ((), [])


def _modules(side: Mapping[str, Any] | MemoryPrediction) -> tuple[ModuleMemory, ...]:
    if isinstance(side, MemoryPrediction):
        return side.modules
    rows = (side.get("predicted") or {}).get("modules", ())
    return tuple(
        ModuleMemory(
            row["name"],
            row["class_name"],
            row["num_parameters"],
            MemoryBreakdown.from_categories(row["by_category"]),
        )
        for row in rows
    )
