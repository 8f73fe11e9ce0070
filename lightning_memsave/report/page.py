"""One HTML file that shows where the memory of a training step goes."""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from lightning_memsave.core.files import write_output
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.planning.plan import MemoryPlan
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.report.text import group_tensors
from lightning_memsave.report.tree import module_lines
from lightning_memsave.units import format_bytes

# The last two are not tensors: they are the rest of the device memory needed.
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


def write_page(
    path: str | Path,
    predictions: Sequence[tuple[str, MemoryPrediction]],
    *,
    title: str = "Memory of a training step",
    device_capacity_bytes: int | None = None,
    device_name: str = "",
    notes: Sequence[str] = (),
    plan: MemoryPlan | None = None,
    unchanged_bytes: int = 0,
) -> Path:
    """Write predictions as an HTML page.

    The page is one file that works without a network, about 100 KB per setting. It shows whether
    the step fits, memory over time, the tree of modules, the largest tensors, and the settings side
    by side.

    Args:
        path: Where to write, in a folder that exists.
        predictions: Name and prediction of each setting; all are compared with the first.
        title: Headline of the page.
        device_capacity_bytes: Memory of the device, to show whether the step fits.
        device_name: Name of the device, such as ``"RTX-3060-12GB"``; by default its size.
        notes: Lines of text for the section of notes.
        plan: Plans to draw as memory against time.
        unchanged_bytes: Beside them, what the unchanged step needs.

    Returns:
        The path of the file.

    Raises:
        ConfigurationError: If there is no prediction, two have the same name, or the path cannot be
            written.

    Note:
        It needs a browser from 2024 or later.

    Example:
        >>> import tempfile
        >>> from lightning_memsave.core.memory import MemoryBreakdown
        >>> prediction = MemoryPrediction("cpu", "Net", MemoryBreakdown(parameter_bytes=4000), {})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_page(f"{folder}/memory.html", [("plain", prediction)])
        ...     path.name, path.stat().st_size < 100_000
        ('memory.html', True)
    """
    page = make_page(
        predictions,
        title=title,
        device_capacity_bytes=device_capacity_bytes,
        device_name=device_name,
        notes=notes,
        frontier=None if plan is None else _frontier(plan, unchanged_bytes),
    )
    write_output(path, page, "page", "memory.html")
    return Path(path)


def make_page(predictions: Sequence[tuple[str, MemoryPrediction]], **shown: Any) -> bytes:
    if not predictions:
        raise ConfigurationError(
            "`predictions` is empty: there is nothing to show. Pass for example "
            '`[("plain", predict_memory(module, batch))]`.'
        )
    names = [name for name, _ in predictions]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigurationError(
            f"`predictions` has the name {repeated[0]!r} {len(repeated)} times. Give each setting "
            "its own name."
        )
    data: dict[str, Any] = {
        "title": "",
        "device_capacity_bytes": None,
        "device_name": "",
        "notes": (),
        "frontier": None,
        **shown,
        "categories": list(CATEGORIES.items()),
        "predictions": [{"name": name, **_plain(found)} for name, found in predictions],
    }
    folder = files(__package__).joinpath("_page")
    files_of_page = ("page.js", "frontier.js", "page.css", "page.html")
    page_script, frontier_script, style, template = (
        folder.joinpath(name).read_text("utf-8") for name in files_of_page
    )
    script = page_script + frontier_script
    page = Template(template).substitute(
        # The browser runs this script and no other, and loads nothing.
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}",
        version=version("lightning-memsave"),
        title=html.escape(data["title"]),
        style=style,
        script=script,
        data=_json_for_html(data),
        table=_table_without_script(predictions),
    )
    return page.encode("utf-8", "replace")


def _frontier(found: MemoryPlan, unchanged_bytes: int) -> dict[str, Any]:
    plans = [
        plan.to_dict() | {"fits": found.fits(plan), "is_chosen": plan == found.plan}
        for plan in found.frontier
    ]
    sizes = {"budget_bytes": found.budget_bytes, "unchanged_bytes": unchanged_bytes}
    return {"plans": plans, **sizes}


def _plain(prediction: MemoryPrediction) -> dict[str, Any]:
    tensors = [
        {
            **asdict(members[0]),
            "module": template if len(members) > 1 else members[0].module,
            "modules": [tensor.module for tensor in members],
            "total_bytes": sum(tensor.num_bytes for tensor in members),
        }
        for template, members in group_tensors(prediction.largest_tensors)
    ]
    lines = module_lines(prediction.modules, max_depth=None) if prediction.modules else []
    return replace(prediction, modules=(), largest_tensors=()).to_dict() | {
        "num_parameters": prediction.num_parameters,
        "largest_tensors": sorted(tensors, key=lambda tensor: -int(tensor["total_bytes"])),
        "modules": [
            asdict(line) | {"memory": {k: n for k, n in line.memory.by_category().items() if n}}
            for line in lines
        ],
    }


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json_for_html(data: dict[str, Any]) -> str:
    # Escaped, so that no text can close the <script> element around it.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _table_without_script(predictions: Sequence[tuple[str, MemoryPrediction]]) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{format_bytes(found.device_bytes)}</td></tr>"
        for name, found in predictions
    )
    return f"<table><tr><th>Setting</th><td>Needs</td></tr>{rows}</table>"
