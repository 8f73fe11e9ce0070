"""When the host updates weights, beside the steps of the device: a picture."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from benchmarks._models import MaskedLM
from lightning_memsave import ActivationCheckpointing, Offloading

Span = tuple[str, float, float]
"""What ran, and when it began and ended in seconds."""
_COLORS = {"forward": "#4c72b0", "backward": "#64b5cd", "step()": "#c44e52", "update": "#55a868"}


def record(size: MaskedLM, batch: Any, num_steps: int = 3) -> list[Span]:
    """Train with offloaded parameters, and note when what ran.

    Args:
        size: Of the model.
        batch: For every step; a small one, as updates take as long for any.
        num_steps: Steps that are noted, after two that are not.

    Returns:
        Passes and steps of the main thread, and updates of single blocks in the host's thread.
    """
    model = size.build()
    ActivationCheckpointing().apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    technique = Offloading("parameters")
    handle = technique.apply(model)
    technique.update_in_background(optimizer)
    assert handle.residence is not None, "there are weights"
    spans: list[Span] = []
    worker: Any = handle.residence.worker
    submit = worker.submit

    def timed(name: str, function: Callable[[], Any]) -> Any:
        start_s = time.monotonic()
        found = function()
        spans.append((name, start_s, time.monotonic()))
        return found

    worker.submit = lambda work: submit(lambda: timed("update", work))
    for number in range(num_steps + 2):
        if number == 2:
            handle.wait()
            spans.clear()
        loss = timed("forward", lambda: model(**batch).loss)
        timed("backward", loss.backward)
        timed("step()", optimizer.step)
        optimizer.zero_grad()
    handle.wait()
    handle.undo()
    first = min(start for _, start, _ in spans)
    return [(name, start - first, end - first) for name, start, end in spans]


def overlap(spans: list[Span]) -> float:
    """Return the share of the time of updates in which the main thread worked as well."""
    passes = [(start, end) for name, start, end in spans if name != "update"]
    updates = [(start, end) for name, start, end in spans if name == "update"]
    shared = sum(max(0.0, min(e, f) - max(s, t)) for s, e in updates for t, f in passes)
    return shared / sum(end - start for start, end in updates)


def plot(spans: list[Span], path: Path) -> None:
    """Draw what ran as bars over time.

    Args:
        spans: What `record` has returned.
        path: Where to; its suffix says in which format.
    """
    # So that the same figures give the same file.
    with mpl.rc_context({"svg.hashsalt": "lightning-memsave", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 2.2), layout="constrained")
        axes = figure.subplots()
        for name, color in _COLORS.items():
            bars = [(1e3 * s, 1e3 * (e - s)) for found, s, e in spans if found == name]
            axes.broken_barh(
                bars,
                (0 if name == "update" else 1, 0.8),
                color=color,
                edgecolor="white",
                linewidth=0.5,
                label=name,
            )
        axes.set_yticks([0.4, 1.4], ["host's thread", "main thread"])
        axes.set_xlabel("ms")
        axes.legend(fontsize="x-small", ncols=4, loc="upper right")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
