"""Draw the memory of one training step, and which setting lowers which part of it.

`python -m benchmarks.step_picture` predicts the step, on a CPU and without the model's memory, and
writes it to the result files, from which `make readme` draws.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks._common import RESULTS, markdown_table, write_results
from benchmarks.peak_picture import STYLE, text_at
from lightning_memsave import predict_memory
from lightning_memsave.prediction.result import Timeline

NAME = "training_step"
SETTINGS: dict[str, dict[str, Any]] = {"nothing": {}, "single_gpu": {"preset": "single_gpu"}}
_GIB, _MIB = 2**30, 2**20
_BIN = 8  # samples of the timeline for one point of the picture

# Bottom to top: category, color, what it is called, and the settings that lower it.
_AREAS = (
    (
        "parameter",
        "#0969da",
        "weights",
        ('low_precision_weights="stochastic"', 'offload="parameters"'),
    ),
    ("optimizer_state", "#8250df", "optimizer state", ('optimizer="8bit"', 'offload="optimizer"')),
    (
        "gradient",
        "#1a7f37",
        "gradients",
        ("optimizer_in_backward=True", "of the previous step: always freed early"),
    ),
    (
        "activation",
        "#bf8700",
        "activations",
        (
            'activation_checkpointing="all"',
            "micro_batch_size=2",
            'precision="bf16-mixed"',
            'offload="activations"',
            "chunked_cross_entropy=True (the logits)",
        ),
    ),
    ("temporary", "#cf222e", "temporary", ("optimizer_in_backward=True",)),
)
_WIDTH, _HEIGHT = 960, 470
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 640.0, 78.0, 410.0
_COLORS = "\n".join(f".area.{name} {{ fill: {color}; }}" for name, color, _, _ in _AREAS)
_OWN_STYLE = f"""{_COLORS}
.total {{ fill: none; stroke: #1f2328; stroke-width: 2; stroke-dasharray: 5 3; }}
.phase {{ stroke: #59636e; stroke-dasharray: 2 3; }}
@media (prefers-color-scheme: dark) {{ .total {{ stroke: #f0f6fc; }} }}
"""


def record() -> dict[str, Any]:
    """Predict the step with each of the settings.

    Returns:
        By settings: bytes of the peak, and MiB by category for each point of the picture.
    """
    tokens = torch.zeros(8, 1024, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    found = {}
    for name, settings in SETTINGS.items():
        prediction = predict_memory(_gpt2_xl, batch, settings=settings, gpu="RTX-3060-12GB")
        found[name] = {
            "peak_bytes": prediction.peak_bytes,
            "by_category": prediction.to_dict()["by_category"],
            **points(prediction.timeline),
        }
    return found


def _gpt2_xl() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25))


def points(timeline: Timeline) -> dict[str, Any]:
    """Of each few samples of one phase, the one with the most memory."""
    kept: list[int] = []
    for _, samples in groupby(range(len(timeline.phases)), lambda i: timeline.phases[i]):
        indices = list(samples)
        kept += (
            max(indices[start : start + _BIN], key=lambda i: _total(timeline, i))
            for start in range(0, len(indices), _BIN)
        )
    return {
        "phases": Counter(timeline.phases[i] for i in kept),
        "mib": {k: [v[i] // _MIB for i in kept] for k, v in timeline.by_category.items()},
    }


def _total(timeline: Timeline, index: int) -> int:
    return sum(sizes[index] for sizes in timeline.by_category.values())


def make_text(steps: Mapping[str, Any]) -> str:
    """Lay out the peaks, by category and settings."""
    categories = [name for name, *_ in _AREAS]
    rows = [
        [label, *(f"{steps[name]['by_category'][category] / _GIB:,.2f}" for name in SETTINGS)]
        for category, (_, _, label, _) in zip(categories, _AREAS, strict=True)
    ]
    rows.append(["peak", *(f"{steps[name]['peak_bytes'] / _GIB:,.2f}" for name in SETTINGS)])
    return (
        "Predicted tensors at the peak of a step of GPT-2 XL, 8 x 1024 tokens, on CUDA in GiB:\n\n"
        + markdown_table(["category", *SETTINGS], rows)
    )


def draw() -> str:
    """Draw the picture from the result file.

    Returns:
        SVG; the same text for the same figures.
    """
    steps = json.loads((RESULTS / f"{NAME}.json").read_text(encoding="utf-8"))["steps"]
    plain, saving = steps["nothing"], steps["single_gpu"]
    highest = max(_totals(plain))
    peaks = {name: f"{step['peak_bytes'] / _GIB:.1f} GiB" for name, step in steps.items()}
    shapes = [
        text_at(24, 32, "Memory of one training step", "title"),
        text_at(24, 50, "GPT-2 XL, 8 x 1024 tokens, AdamW, float32; predicted for CUDA", "small"),
        *_areas(plain, highest),
        *_line(saving, plain, highest),
        *_phases(plain),
        text_at(_LEFT, _TOP - 8, f"peak {peaks['nothing']}", "small"),
        *_legend(plain, peaks["single_gpu"]),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            f'width="{_WIDTH}" height="{_HEIGHT}" role="img">',
            "<title>Memory of one training step, and what lowers each part of it</title>",
            f"<style>{STYLE}{_OWN_STYLE}</style>",
            f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>',
            *shapes,
            "</svg>\n",
        ]
    )


def _totals(step: Mapping[str, Any]) -> list[int]:
    return [sum(sizes) for sizes in zip(*step["mib"].values(), strict=True)]


def _y(mib: float, highest: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * mib / highest


def _x(index: float, number: int) -> float:
    return _LEFT + (_RIGHT - _LEFT) * index / (number - 1)


def _areas(step: Mapping[str, Any], highest: int) -> list[str]:
    number = len(_totals(step))
    below = [0] * number
    shapes = []
    for category, *_ in _AREAS:
        above = [a + b for a, b in zip(below, step["mib"][category], strict=True)]
        corners = [*enumerate(above), *reversed([*enumerate(below)])]
        points = " ".join(f"{_x(i, number):.1f},{_y(mib, highest):.1f}" for i, mib in corners)
        shapes.append(f'<polygon class="area {category}" points="{points}"/>')
        below = above
    return shapes


def _line(step: Mapping[str, Any], plain: Mapping[str, Any], highest: int) -> list[str]:
    """The other step's total: each of its phases where the plain step has that phase."""
    totals, number = _totals(step), len(_totals(plain))
    points, start, from_index = [], 0, 0
    for phase, count in plain["phases"].items():
        own = step["phases"].get(phase, 0)
        sizes: Sequence[int] = totals[from_index : from_index + own] or totals[-1:] * 2
        last = max(len(sizes) - 1, 1)
        points += [(_x(start + (count - 1) * i / last, number), mib) for i, mib in enumerate(sizes)]
        start, from_index = start + count, from_index + own
    corners = " ".join(f"{x:.1f},{_y(mib, highest):.1f}" for x, mib in points)
    return [f'<polyline class="total" points="{corners}"/>']


def _phases(step: Mapping[str, Any]) -> list[str]:
    number, start, shapes = len(_totals(step)), 0, []
    for phase, count in step["phases"].items():
        middle = _x(start + (count - 1) / 2, number)
        shapes.append(text_at(middle, _BOTTOM + 20, phase, "small", "middle"))
        if start:
            x = _x(start, number)
            shapes.append(
                f'<line class="phase" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP:g}" y2="{_BOTTOM:g}"/>'
            )
        start += count
    shapes.append(
        text_at(_LEFT, _BOTTOM + 42, "operators of the step, in their order; not seconds", "small")
    )
    return shapes


def _legend(step: Mapping[str, Any], saving: str) -> list[str]:
    left, y = 664.0, 62.0
    shapes = []
    for category, _, label, settings in reversed(_AREAS):
        size = f"{max(step['mib'][category]) * _MIB / _GIB:.1f} GiB"
        shapes += [
            f'<rect class="area {category}" x="{left:g}" y="{y - 11:g}" width="12" height="12"/>',
            text_at(left + 20, y, f"{label}, up to {size}", "title"),
            *(text_at(left + 20, y + 16 * (i + 1), s, "small") for i, s in enumerate(settings)),
        ]
        y += 16 * len(settings) + 28
    return [
        *shapes,
        f'<line class="total" x1="{left:g}" x2="{left + 14:g}" y1="{y - 4:g}" y2="{y - 4:g}"/>',
        text_at(left + 20, y, f'preset="single_gpu", peak {saving}', "title"),
    ]


def main(folder: Path = RESULTS) -> None:
    """Predict the step, and write the result files."""
    steps = record()
    write_results(NAME, {"steps": steps}, make_text(steps), folder=folder)


if __name__ == "__main__":
    main()
