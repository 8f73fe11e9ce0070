"""The ladder as tables, and what is claimed of it."""

import itertools
from collections.abc import Mapping
from typing import Any

from benchmarks._common import markdown_table

CATEGORIES = (
    *("parameter", "weight_copy", "buffer", "gradient", "optimizer_state"),
    *("activation", "input", "temporary", "other"),
)
Rows = dict[str, dict[str, Any]]

PRESETS = ("classic", "bitwise", "single_gpu", "offload")
"""From much to little memory; of the first two either may need less."""
CLAIMED_SHARES = {"all": 1.0, "single_gpu": 0.55}
"""Of the peak of Hugging Face's Trainer with all its flags, by row."""


def peak_of(found: dict[str, Any]) -> int:
    """Give the peak that counts.

    Args:
        found: What one trainer needed for one row.

    Returns:
        What CUDA's allocator says, in bytes, or the peak of live tensors on a CPU.
    """
    peak: int = found.get("peak_allocated_bytes", found["peak_live_bytes"])
    return peak


def check_claims(rows: Rows, *, is_timed: bool) -> dict[str, bool]:
    """Say what holds of what is claimed.

    Args:
        rows: What was measured.
        is_timed: Whether the times mean anything.

    Returns:
        True or false for each claim that can be judged.
    """
    claims = {}
    for name, share in CLAIMED_SHARES.items():
        row = rows.get(name, {})
        if not row or any("error" in found for found in row.values()):
            continue
        least, theirs = peak_of(row["lightning"]), peak_of(row["hugging_face"])
        claims[f"{name}: the peak is at most {share} of that of Hugging Face's Trainer"] = (
            least <= share * theirs
        )
        if is_timed:
            ratio = _time_ratios(rows, name)["lightning / hugging_face"]
            # The interval: a median of 1.001 may be chance, but not one that begins there.
            claims[f"{name}: a step takes no longer than there"] = ratio["confidence_low"] <= 1.0
    ours = {name: rows[name]["lightning"] for name in PRESETS if name in rows}
    peaks = {name: peak_of(found) for name, found in ours.items() if "error" not in found}
    for larger, smaller in itertools.combinations(peaks, 2):
        if (larger, smaller) != PRESETS[:2]:
            claims[f"{smaller} needs no more than {larger}"] = peaks[smaller] <= peaks[larger]
    return claims


def make_text(rows: Rows, calls: Mapping[str, str]) -> str:
    """Lay out the ladder.

    Args:
        rows: What was measured.
        calls: What a user types, by row.

    Returns:
        Markdown: the table of peaks and times, that of categories, and errors.
    """
    complete = {
        name: row for name, row in rows.items() if not any("error" in f for f in row.values())
    }
    errors = [
        f"`{name}`, {key}: {found['error']}"
        for name, row in rows.items()
        for key, found in row.items()
        if "error" in found
    ]
    notes = (
        "HF is Hugging Face's Trainer with its own flags for the same row. Sizes in MiB; last loss "
        "of the measured steps. `time` is a step's against Lightning's without anything, `HF time` "
        "that of Hugging Face's against the same, `time / HF` of ours against theirs."
    )
    typed = markdown_table(
        ["row", "what is typed"], [[name, f"`{calls[name]}`"] for name in complete if calls[name]]
    )
    return "\n\n".join(
        [notes, _peaks(complete), typed, *_device(complete), _by_category(complete), *errors]
    )


def _peaks(rows: Rows) -> str:
    reference = peak_of(rows["nothing"]["lightning"]) if "nothing" in rows else None
    lines = []
    for name, row in rows.items():
        ours, theirs = row["lightning"], row["hugging_face"]
        times = _time_ratios(rows, name)
        lines.append(
            [
                name,
                _mib(peak_of(ours)),
                _ratio(peak_of(ours), reference),
                _mib(peak_of(theirs)),
                _ratio(peak_of(ours), peak_of(theirs)),
                *(f"{ratio['median']:.2f}" for ratio in list(times.values())[:2]),
                _with_interval(times["lightning / hugging_face"]),
                f"{ours['losses'][-1]:.4f}",
                f"{theirs['losses'][-1]:.4f}",
            ]
        )
    header = ["row", "peak", "ratio", "HF peak", "peak / HF", "time", "HF time", "time / HF"]
    return markdown_table([*header, "loss", "HF loss"], lines)


def _device(rows: Rows) -> list[str]:
    # What else each device can say of the same: on a GPU reserved bytes and NVML, on a CPU the
    # allocator.
    columns = {
        "peak_reserved_bytes": "reserved",
        "nvml_process_bytes": "NVML, process",
        "nvml_used_bytes": "NVML, device",
        "peak_allocator_bytes": "peak by the allocator, with kernels' scratch",
    }
    known = [key for key in columns if any(key in row["lightning"] for row in rows.values())]
    if not known:
        return []
    lines = [
        [name, *(_mib(row[who].get(key)) for key in known for who in ("lightning", "hugging_face"))]
        for name, row in rows.items()
    ]
    header = [prefix + columns[key] for key in known for prefix in ("", "HF ")]
    return [markdown_table(["row", *header], lines)]


def _by_category(rows: Rows) -> str:
    lines = [
        [f"{name}{suffix}", *(_mib(row[who]["by_category"][key]) for key in CATEGORIES)]
        for name, row in rows.items()
        for who, suffix in (("lightning", ""), ("hugging_face", ", HF"))
    ]
    header = [key.replace("_", " ") for key in CATEGORIES]
    return markdown_table(["peak of live tensors", *header], lines)


def _time_ratios(rows: Rows, name: str) -> dict[str, dict[str, float]]:
    row = rows[name]
    if "time" in row:
        # Processor time, which other processes disturb little.
        ratios: dict[str, dict[str, float]] = row["time"]["cpu"]
        return ratios
    nothing = rows.get("nothing", row)["lightning"]["median_step_s"]
    ours, theirs = row["lightning"]["median_step_s"], row["hugging_face"]["median_step_s"]
    return {
        "lightning / nothing": {"median": ours / nothing},
        "hugging_face / nothing": {"median": theirs / nothing},
        "lightning / hugging_face": {"median": ours / theirs, "confidence_low": ours / theirs},
    }


def _with_interval(ratio: dict[str, float]) -> str:
    if "confidence_high" not in ratio:
        return f"{ratio['median']:.3f}"
    low, high = ratio["confidence_low"], ratio["confidence_high"]
    return f"{ratio['median']:.3f} ({low:.3f} to {high:.3f})"


def _mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:,.1f}"


def _ratio(num_bytes: int, reference: int | None) -> str:
    return "-" if reference is None else f"{num_bytes / reference:.3f}"
