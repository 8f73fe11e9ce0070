"""Draw README's picture from the result files: peak memory, and the losses beside it."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

# What is drawn: label, row of the ladder, trainer, class of the bar.
_BARS = (
    ("Lightning, nothing switched on", "nothing", "lightning", "without"),
    ("Hugging Face Trainer, all its flags", "all", "hugging_face", "other"),
    ("MemSaveCallback, the same techniques", "all", "lightning", "ours"),
    ('MemSaveCallback(preset="single_gpu")', "single_gpu", "lightning", "ours"),
)
_WIDTH, _HEIGHT = 960, 330
_MIB = 2**20

# A picture follows the system's color scheme, whatever its page does: it has its own background.
STYLE = """
text { font: 13px -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1f2328; }
.title { font-weight: 600; }
.small { font-size: 11px; fill: #59636e; }
.page { fill: #ffffff; }
.grid { stroke: #d1d9e0; }
.bar.without { fill: #8c959f; }
.bar.other { fill: #bf8700; }
.bar.ours { fill: #0969da; }
.line { fill: none; stroke-width: 1.5; }
.line.without { stroke: #8c959f; stroke-width: 4; opacity: 0.55; }
.line.ours { stroke: #0969da; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  .small { fill: #9198a1; }
  .page { fill: #0d1117; }
  .grid { stroke: #3d444d; }
  .bar.other { fill: #d29922; }
  .bar.ours { fill: #4493f8; }
  .line.ours { stroke: #4493f8; }
}
"""

Curve = Mapping[str, float]  # loss by step, as JSON has it


def draw() -> str:
    """Draw the picture from `RESULTS`.

    Returns:
        SVG; the same text for the same figures.
    """
    ladder = _read("ladder_cpu.json")["rows"]
    curves = _read("learning_curves_cpu.json")["curves"]
    losses = _read("convergence_cpu.json")["losses"]

    def learned(name: str) -> list[Curve]:
        return [seed["validation_losses"] for seed in curves[name].values()]

    shapes = [
        *_bars(ladder, 24, 440),
        *_curves(
            "The same techniques",
            "that RoBERTa on real text",
            learned("nothing"),
            learned("all"),
            520,
        ),
        *_curves(
            'preset="single_gpu"',
            "a small GPT-2 on real text",
            list(losses["float32"].values()),
            list(losses["single_gpu"].values()),
            756,
        ),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            f'width="{_WIDTH}" height="{_HEIGHT}" role="img">',
            "<title>Peak memory of a training step, and validation losses</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>',
            *shapes,
            "</svg>\n",
        ]
    )


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def text_at(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """Write a text at a place."""
    kind = kind and f' class="{kind}"'
    return f'<text x="{x:g}" y="{y:g}"{kind} text-anchor="{anchor}">{escape(text)}</text>'


def _bars(rows: dict[str, Any], left: float, width: float) -> list[str]:
    peaks = [rows[row][trainer]["peak_live_bytes"] for _, row, trainer, _ in _BARS]
    shapes = [
        text_at(left, 32, "Peak memory of a training step", "title"),
        text_at(left, 50, "tensors of a RoBERTa, 7 M parameters, batch 16 x 128", "small"),
    ]
    for index, ((label, row, trainer, kind), peak) in enumerate(zip(_BARS, peaks, strict=True)):
        top = 74 + 60 * index
        length = width * peak / max(peaks)
        time = rows[row]["time"]["cpu"].get(f"{trainer} / nothing", {}).get("median", 1.0)
        shapes += [
            text_at(left, top + 11, label),
            text_at(
                left + width, top + 11, f"{peak / _MIB:.0f} MiB, {time:.1f} x the time", "", "end"
            ),
            f'<rect class="bar {kind}" x="{left:g}" y="{top + 18}" width="{length:.1f}" '
            'height="18" rx="2"/>',
        ]
    return shapes


def _curves(
    title: str, model: str, without: Sequence[Curve], ours: Sequence[Curve], left: float
) -> list[str]:
    top, bottom, width = 74.0, 256.0, 180.0
    values = [loss for curve in [*without, *ours] for loss in curve.values()]
    low, high = min(values), max(values)
    last = max(int(step) for step in without[0])

    def y(loss: float) -> float:
        return bottom - (bottom - top) * (loss - low) / (high - low)

    def line(curve: Curve, kind: str) -> str:
        points = (f"{left + width * int(s) / last:.1f},{y(loss):.1f}" for s, loss in curve.items())
        return f'<polyline class="line {kind}" points="{" ".join(points)}"/>'

    gap = abs(_mean_final(ours) - _mean_final(without))
    spread = _spread([_final(curve) for curve in without])
    return [
        text_at(left, 32, title, "title"),
        text_at(left, 50, model, "small"),
        *(
            f'<line class="grid" x1="{left:g}" x2="{left + width:g}" y1="{y(loss):.1f}" '
            f'y2="{y(loss):.1f}"/>'
            for loss in (low, high)
        ),
        text_at(left + width, y(high) - 4, f"{high:.2f}", "small", "end"),
        text_at(left, y(low) - 4, f"{low:.2f}", "small"),
        *(line(curve, "without") for curve in without),
        *(line(curve, "ours") for curve in ours),
        text_at(left, bottom + 20, f"validation loss, {last} steps, {len(ours)} seeds:", "small"),
        text_at(left, bottom + 35, "blue with it, gray without it;", "small"),
        text_at(left, bottom + 50, f"{gap:.4f} between the final means,", "small"),
        text_at(left, bottom + 65, f"{spread:.4f} between gray seeds", "small"),
    ]


def _final(curve: Curve) -> float:
    return curve[max(curve, key=int)]


def _mean_final(curves: Sequence[Curve]) -> float:
    return sum(_final(curve) for curve in curves) / len(curves)


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)
