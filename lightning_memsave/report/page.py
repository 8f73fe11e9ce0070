"""One HTML file that shows where the memory of a training step goes."""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

from lightning_memsave.errors import ConfigurationError, Problem
from lightning_memsave.prediction.result import MemoryPrediction, ModuleMemory, Timeline
from lightning_memsave.units import format_bytes

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


MAX_PAGE_BYTES = 2_000_000
MAX_POINTS = (2000, 1000, 500, 250, 100, 50, 25)


def write_page(
    path: str | Path,
    predictions: Sequence[tuple[str, MemoryPrediction]],
    *,
    title: str = "Memory of a training step",
    device_capacity_bytes: int | None = None,
    device_name: str = "",
    notes: Sequence[str] = (),
    tables: Sequence[PageTable] = (),
) -> Path:
    """Write predictions as a page to look at and to pass on.

    The file stands alone: it loads nothing, works without a network and stays below 2 MB. It shows
    whether the step fits, the live bytes through the step, the tree of modules, the largest tensors
    and the settings side by side.

    Args:
        path: Where to write, in a folder that exists.
        predictions: Name and prediction of each setting; the others are compared with the first.
        title: Headline of the page.
        device_capacity_bytes: Memory of the device, to say whether the step fits. ``None`` only
            says what it needs.
        device_name: What to call the device, such as ``"RTX-3060-12GB"``; by default its size.
        notes: Lines to print on the page, for example what went wrong.
        tables: Drawn below the headline, such as those of `MemoryExplanation.tables`.

    Returns:
        The path of the file.

    Raises:
        ConfigurationError: If there is no prediction, two have the same name, a timeline does not
            agree with itself, the capacity is not positive, or the path cannot be written.

    Note:
        Timelines and trees of very many settings are drawn with fewer points and levels; the page
        says so. It needs a browser from 2024 or later.

    Example:
        >>> import tempfile
        >>> from lightning_memsave.core.memory import MemoryBreakdown
        >>> prediction = MemoryPrediction("cpu", "Net", MemoryBreakdown(parameter_bytes=4000), {})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_page(f"{folder}/memory.html", [("plain", prediction)])
        ...     path.name, path.stat().st_size < 2_000_000
        ('memory.html', True)
    """
    page = make_page(
        predictions,
        title=title,
        device_capacity_bytes=device_capacity_bytes,
        device_name=device_name,
        notes=notes,
        tables=tables,
    )
    path = Path(path)
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"The page cannot be written to {str(path)!r}: the folder {str(path.parent)!r} does "
            f"not exist. Make it, or name a file in one that does, for example {path.name!r}."
        )
    try:
        path.write_bytes(page)
    except OSError as error:
        raise ConfigurationError(
            f"The page cannot be written to {str(path)!r}: {error.strerror}. "
            'Name a file in a folder that you may write to, for example "memory.html".'
        ) from error
    return path


def make_page(
    predictions: Sequence[tuple[str, MemoryPrediction]],
    *,
    title: str = "Memory of a training step",
    device_capacity_bytes: int | None = None,
    device_name: str = "",
    notes: Sequence[str] = (),
    tables: Sequence[PageTable] = (),
) -> bytes:
    """Make the page that `write_page` writes.

    Args:
        predictions: As for `write_page`.
        title: As for `write_page`.
        device_capacity_bytes: As for `write_page`.
        device_name: As for `write_page`.
        notes: As for `write_page`.
        tables: As for `write_page`.

    Returns:
        HTML in UTF-8.

    Raises:
        ConfigurationError: If an argument is wrong.
    """
    problems = _problems(predictions, device_capacity_bytes)
    if problems:
        error = ConfigurationError.from_problems("The page", problems)
        raise error
    # Most fit at once. Where not, drawings become coarser, for the file must stay easy to send.
    for points in MAX_POINTS:
        page = _page(
            page_data(
                predictions,
                title,
                device_capacity_bytes,
                notes,
                tables,
                device_name=device_name,
                max_points=points,
                max_modules=5 * points,
            )
        )
        if len(page) < MAX_PAGE_BYTES:
            break
    return page


def _problems(
    predictions: Sequence[tuple[str, MemoryPrediction]], capacity: int | None
) -> list[Problem]:
    problems = []
    if not predictions:
        problems.append(
            Problem(
                "`predictions` is empty",
                "there is nothing to show",
                'Pass for example `[("plain", predict_memory(module, batch))]`.',
            )
        )
    if capacity is not None and capacity <= 0:
        problems.append(
            Problem(
                f"`device_capacity_bytes={capacity}`",
                "a device has at least one byte",
                "Write for example `12 * 2**30`, or `None` if it is not known.",
            )
        )
    return problems + _problems_of_each(predictions)


def _problems_of_each(predictions: Sequence[tuple[str, MemoryPrediction]]) -> list[Problem]:
    names = [name for name, _ in predictions]
    repeated = [
        Problem(
            f"`predictions` has {name!r} {names.count(name)} times",
            "the reader could not tell them apart",
            "Give each setting a name of its own.",
        )
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    wrong = [
        Problem(
            f"the timeline of {name!r}",
            problem,
            "Predict again, or pass a prediction without a timeline.",
        )
        for name, prediction in predictions
        if (problem := _timeline_problem(prediction))
    ]
    return repeated + wrong


def _timeline_problem(prediction: MemoryPrediction) -> str | None:
    timeline = prediction.timeline
    num_points = len(timeline.phases)
    unknown = set(timeline.by_category) - set(CATEGORIES)
    if unknown:
        return f"has unknown categories: {', '.join(sorted(unknown))}"
    lengths = {len(values) for values in timeline.by_category.values()}
    if lengths - {num_points}:
        return f"has {num_points} phases but {max(lengths)} figures in a category"
    if num_points and not 0 <= timeline.peak_index < num_points:
        return f"has its peak at {timeline.peak_index} of {num_points} points"
    return None


def _page(data: dict[str, Any]) -> bytes:
    folder = files(__package__).joinpath("_page")
    parts = sorted((p for p in folder.iterdir() if p.name.endswith(".js")), key=lambda p: p.name)
    script = "\n".join(part.read_text("utf-8") for part in parts)
    style = folder.joinpath("page.css").read_text("utf-8")
    template = Template(folder.joinpath("page.html").read_text("utf-8"))
    page = template.substitute(
        # The browser runs this script and no other, and loads nothing.
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}",
        version=version("lightning-memsave"),
        title=html.escape(data["title"]),
        style=style,
        script=script,
        data=_json_for_html(data),
        table=_plain_table(data),
    )
    return page.encode("utf-8", "replace")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json_for_html(data: dict[str, Any]) -> str:
    # No text in it can end the element that it stands in.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain_table(data: dict[str, Any]) -> str:
    # For a reader without JavaScript.
    rows = "".join(
        f"<tr><th>{html.escape(p['name'])}</th><td>{format_bytes(p['device_bytes'])}</td></tr>"
        for p in data["predictions"]
    )
    return f"<table><tr><th>Setting</th><td>Needs</td></tr>{rows}</table>"
