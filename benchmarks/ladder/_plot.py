"""The ladder as a picture."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.ladder._table import CATEGORIES

TITLES = {"lightning": "lightning-memsave", "hugging_face": "Hugging Face Trainer"}
COLORS = (
    *(
        "#4c72b0",
        "#937860",
        "#999999",
        "#c44e52",
        "#8172b3",
        "#dd8452",
        "#55a868",
        "#ccb974",
        "#64b5cd",
    ),
)


def plot(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the peaks by category and the losses, ours and theirs side by side.

    Args:
        rows: What was measured.
        path: Where to; its suffix says in which format.
    """
    # So that the same figures give the same file.
    with mpl.rc_context({"svg.hashsalt": "lightning-memsave", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 7), layout="constrained")
        peaks, losses = figure.subplots(2, 2, sharex="row", sharey="row", height_ratios=(3, 2))
        for axes, (who, title) in zip(peaks, TITLES.items(), strict=True):
            _draw_peaks(axes, {name: row[who]["by_category"] for name, row in rows.items()})
            axes.set_title(title)
        for axes, who in zip(losses, TITLES, strict=True):
            for name, row in rows.items():
                axes.plot(range(1, len(row[who]["losses"]) + 1), row[who]["losses"], label=name)
            axes.set_xlabel("step")
        losses[0].set_ylabel("loss")
        losses[1].legend(fontsize="x-small")
        peaks[1].legend(fontsize="x-small", loc="lower right")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_peaks(axes: Any, rows: dict[str, dict[str, int]]) -> None:
    names = list(rows)
    left = [0.0] * len(names)
    for category, color in zip(CATEGORIES, COLORS, strict=True):
        widths = [by_category[category] / 2**20 for by_category in rows.values()]
        if max(widths) < 0.01 * max(sum(by.values()) for by in rows.values()) / 2**20:
            continue  # too thin to be seen
        axes.barh(names, widths, left=left, color=color, label=category.replace("_", " "))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel("peak of live tensors (MiB)")
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
