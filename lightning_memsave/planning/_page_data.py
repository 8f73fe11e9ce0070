"""What the HTML page is given: predictions without repetition, so that the file stays small."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from lightning_memsave.planning.prediction import MemoryPrediction, ModuleMemory, Timeline

CATEGORIES = {
    "parameter": "Parameters",
    "weight_copy": "Weight copies",
    "buffer": "Buffers",
    "gradient": "Gradients",
    "optimizer_state": "Optimizer state",
    "activation": "Activations",
    "input": "Inputs",
    "temporary": "Temporary",
    "other": "Other",
    "cuda_context": "CUDA context",
    "allocator_slack": "Allocator slack",
}

MAX_TENSORS = 50


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of texts, in which backticks mark code.

    Args:
        title: What is in it.
        columns: Headers.
        rows: Texts of each row, one for each column.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def page_data(
    predictions: Sequence[tuple[str, MemoryPrediction]],
    title: str,
    device_capacity_bytes: int | None,
    notes: Sequence[str],
    tables: Sequence[PageTable] = (),
    *,
    device_name: str = "",
    max_points: int,
    max_modules: int,
) -> dict[str, Any]:
    """Give what the scripts of the page read.

    Args:
        predictions: Name and prediction of each setting.
        title: Headline.
        device_capacity_bytes: Memory of the device, if known.
        notes: Lines to print on the page.
        tables: Tables to draw below the headline.
        device_name: What to call the device; empty for its size.
        max_points: About as many points of each timeline are kept.
        max_modules: Of larger trees, the deepest modules are summed into those above.

    Returns:
        Plain values, for JSON. Each prediction as `MemoryPrediction.to_dict` gives it, but its
        modules as rows of figures and its timeline as differences.
    """
    names: dict[tuple[str, str], int] = {}
    compact = [
        {"name": name, **_compact(prediction, names, max_points, max_modules)}
        for name, prediction in predictions
    ]
    return {
        "title": title,
        "device_capacity_bytes": device_capacity_bytes,
        "device_name": device_name,
        "notes": list(notes),
        "tables": [asdict(table) for table in tables],
        "categories": list(CATEGORIES.items()),
        "module_names": list(names),
        "predictions": compact,
    }


def _compact(
    prediction: MemoryPrediction,
    names: dict[tuple[str, str], int],
    num_points: int,
    num_modules: int,
) -> dict[str, Any]:
    depth, modules = _folded(prediction.modules, num_modules)
    rows = []
    for module in modules:
        index = names.setdefault((module.name, module.class_name), len(names))
        figures = [module.memory.by_category()[category] for category in CATEGORIES]
        while figures and not figures[-1]:
            figures.pop()
        rows.append([index, module.num_parameters, *figures])
    merged, timeline = _thinned(prediction.timeline, num_points)
    small = replace(
        prediction,
        modules=(),
        timeline=Timeline(),
        largest_tensors=prediction.largest_tensors[:MAX_TENSORS],
    )
    return small.to_dict() | {
        "num_parameters": prediction.num_parameters,
        "host_bytes": prediction.peak.host_bytes,
        "modules": rows,
        "modules_depth": depth,
        "timeline": {
            "phases": [[phase, len(list(run))] for phase, run in groupby(timeline.phases)],
            "by_category": {k: _differences(v) for k, v in timeline.by_category.items() if any(v)},
            "peak_index": timeline.peak_index,
            "merged": merged,
        },
    }


def _differences(values: Sequence[int]) -> list[int]:
    return [b - a for a, b in zip((0, *values[:-1]), values, strict=True)]


def _thinned(timeline: Timeline, limit: int) -> tuple[int, Timeline]:
    # Of each few neighbours in one phase the largest stays; the first result is how many those are.
    num_points = len(timeline.phases)
    if num_points <= limit:
        return 1, timeline
    totals = [sum(values) for values in zip(*timeline.by_category.values(), strict=True)]
    totals[timeline.peak_index] += 1  # of equals, this one stays
    size = -(-num_points // limit)
    kept: list[int] = []
    for _, run in groupby(range(num_points), key=timeline.phases.__getitem__):
        points = list(run)
        parts = (points[start : start + size] for start in range(0, len(points), size))
        kept.extend(max(part, key=totals.__getitem__) for part in parts)
    return size, Timeline(
        tuple(timeline.phases[i] for i in kept),
        {name: tuple(v[i] for i in kept) for name, v in timeline.by_category.items()},
        kept.index(timeline.peak_index),
    )


def _folded(
    modules: Sequence[ModuleMemory], limit: int
) -> tuple[int | None, Sequence[ModuleMemory]]:
    # Sums the deepest modules into those above until few are left; the first result is the level.
    if len(modules) <= limit:
        return None, modules
    depths = [_depth(module.name) for module in modules]
    level = max(d for d in range(max(depths) + 1) if d <= 1 or sum(x <= d for x in depths) <= limit)
    kept: dict[str, ModuleMemory] = {}
    for module in modules:
        name = ".".join(module.name.split(".")[:level])
        found = kept.get(name)
        kept[name] = (
            replace(module, name=name)
            if found is None
            else replace(
                found,
                num_parameters=found.num_parameters + module.num_parameters,
                memory=found.memory + module.memory,
            )
        )
    return level, tuple(kept.values())


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0
