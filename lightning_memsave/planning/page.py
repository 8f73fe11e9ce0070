"""One HTML file that shows where the memory of a training step goes."""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from lightning_memsave.errors import ConfigurationError, Problem
from lightning_memsave.planning._page_data import CATEGORIES, PageTable, page_data
from lightning_memsave.planning.prediction import MemoryPrediction
from lightning_memsave.units import format_bytes

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
