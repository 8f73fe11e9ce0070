"""Compare a fit with a setting with the plain one, and say how they disagree."""

import math
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from lightning_memsave.errors import MemsaveError
from tests.fuzz.exclusions import ALLOWED_REFUSALS
from tests.fuzz.fit import Outcome, run
from tests.fuzz.places import PER_MICRO_BATCH
from tests.fuzz.settings import PRESETS, splits_batches

ROUNDING = 2e-4


class Kind(StrEnum):
    """How a fit with a setting compares with the plain one."""

    EQUAL = "equal"
    REFUSED = "refused"
    WRONG = "wrong in silence"
    READINGS = "wrong readings in silence"
    RANDOM = "random state"
    WARNED = "wrong with a warning"
    LEFTOVERS = "leftovers"
    CRASH = "crash without words"
    NOTE = "crash with a note"
    LATE = "late refusal"
    PRESET = "refused by a preset"
    HANG = "hang"

    @property
    def is_fault(self) -> bool:
        return self not in (Kind.EQUAL, Kind.REFUSED)


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    details: str = ""


def plain_outcome(source: str) -> tuple[Outcome | None, str]:
    """Run a program twice without settings; return its outcome, or why it tests nothing."""
    first = run(source)
    outcomes = [first] if first.error is not None else [first, run(source)]
    for each in outcomes:
        if each.error is not None:
            return None, f"fails alone: {type(each.error).__name__}: {str(each.error)[:80]}"
    if _differences(first.values, outcomes[1].values, 0.0, is_split=False):
        return None, "does not repeat"
    return first, ""


def verdict(plain: Outcome, ours: Outcome, setting: str) -> Verdict:
    if ours.error is not None:
        return _of_error(ours.error, ours, setting)
    is_split, tolerance = splits_batches(setting), ROUNDING if ours.rounds() else 0.0
    apart = _differences(plain.values, ours.values, tolerance, is_split=is_split)
    if apart and not (tolerance and _grows_apart(plain)):
        warned = f" | warned: {ours.warned[0][:120]}" if ours.warned else ""
        return Verdict(_kind_of(apart, bool(warned)), "; ".join(apart[:6]) + warned)
    keys = sorted(k for k in plain.left.keys() | ours.left.keys() if _is_left(plain, ours, k))
    left = [f"{key}: {_apart(plain.left.get(key), ours.left.get(key))}" for key in keys]
    return Verdict(Kind.LEFTOVERS, "; ".join(left)[:400]) if left else Verdict(Kind.EQUAL)


def _grows_apart(plain: Outcome) -> bool:
    """Whether differences as small as those of rounding grow in a program by themselves."""
    other = run(plain.source, has_jitter=True)
    has_failed = other.error is not None
    return has_failed or bool(_differences(plain.values, other.values, ROUNDING, is_split=False))


def _is_left(plain: Outcome, ours: Outcome, key: str) -> bool:
    return bool(plain.left.get(key) != ours.left.get(key))


def _of_error(error: Exception, ours: Outcome, setting: str) -> Verdict:
    notes = " ".join(getattr(error, "__notes__", ()))
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    left = {name: each for name, each in ours.left.items() if each}
    if left:
        text += f"; leaves {str(left)[:200]}"
    if isinstance(error, TimeoutError):
        return Verdict(Kind.HANG, text)
    if isinstance(error, MemsaveError):
        is_late = ours.step > 1
        is_allowed = any(each.words in str(error) for each in ALLOWED_REFUSALS)
        if setting in PRESETS and not is_allowed:
            return Verdict(Kind.PRESET, text)
        kind = Kind.LEFTOVERS if left else Kind.LATE if is_late else Kind.REFUSED
        return Verdict(kind, text)
    has_words = bool(notes) or "memsave" in str(error).lower()
    return Verdict(
        Kind.NOTE if has_words else Kind.CRASH, text + (f" | note: {notes[:160]}" if notes else "")
    )


def _kind_of(apart: list[str], is_warned: bool) -> Kind:
    if apart == ["random state"]:
        return Kind.RANDOM
    if is_warned:
        return Kind.WARNED
    is_read = all(each.startswith("seen") and "loss" not in each for each in apart)
    return Kind.READINGS if is_read else Kind.WRONG


def _differences(
    plain: dict[str, Any], ours: dict[str, Any], tolerance: float, *, is_split: bool
) -> list[str]:
    """List what differs between the values of two fits."""
    found = []
    for key in ("weights", "optimizer", "metrics"):
        a, b = plain[key], ours[key]
        if a.keys() != b.keys():
            found.append(f"{key}: names {sorted(a.keys() ^ b.keys())[:3]}")
        found += [f"{key}: {n}" for n in a if n in b and not _is_same(a[n], b[n], tolerance)]
    # A mean over micro-batches is no fault.
    left_out = PER_MICRO_BATCH if is_split else ()
    first, second = (
        [(name, value) for name, value in each["seen"] if not name.startswith(left_out)]
        for each in (plain, ours)
    )
    one, two = (Counter(name for name, _ in each) for each in (first, second))
    if one != two:
        return [*found, f"seen: number of {dict((one - two) + (two - one))}"]
    pairs = zip(first, second, strict=True)
    seen = [n for (n, v), (m, w) in pairs if n != m or not _is_same(v, w, tolerance)]
    found += [f"seen: {name}" for name in dict.fromkeys(seen)]
    has_other_random = not is_split and not torch.equal(plain["random"], ours["random"])
    return found + ["random state"] * has_other_random


def _is_same(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not a.is_floating_point():
            return torch.equal(a, b)
        return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    if isinstance(a, float) and isinstance(b, float):
        is_nan = math.isnan(a) and math.isnan(b)
        return a == b or is_nan or abs(a - b) <= tolerance * max(1.0, abs(a), abs(b))
    return type(a) is type(b) and bool(a == b)


def _apart(a: Any, b: Any) -> Any:
    """Show only what differs of nested values."""
    if not (isinstance(a, tuple | list) and isinstance(b, tuple | list)):
        return f"{a} -> {b}"
    if len(a) == len(b):
        return [_apart(x, y) for x, y in zip(a, b, strict=True) if x != y]
    return [f"-{x}" for x in a if x not in b] + [f"+{y}" for y in b if y not in a]
