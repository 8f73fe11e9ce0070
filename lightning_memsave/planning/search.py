"""Which settings would lower the peak, and by how much."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lightning_memsave.explain.dominant_parts import dominant_embedding
from lightning_memsave.explain.what_if import ImpossibleVariantError, WhatIf
from lightning_memsave.planning.candidates import (
    Candidate,
    CurrentSettings,
    joint_candidates,
    part_candidates,
    single_candidates,
)
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.training_step import as_code
from lightning_memsave.units import format_bytes


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something that lowers the peak.

    Args:
        name: Such as ``"recompute all blocks"``.
        how: What to type.
        peak_bytes: Predicted with it.
        device_bytes: What the device must have then.
        saved_bytes: Off the peak without it.
        exactness: How far numbers may move: ``"bitwise"``, ``"rounding"`` or ``"approximate"``.
        cost: Roughly what it costs: counted in passes, not measured.
        fits: Whether that fits the GPU; ``None`` if none was named.
        prediction: Of the step with it.
    """

    name: str
    how: str
    peak_bytes: int
    device_bytes: int
    saved_bytes: int
    exactness: str
    cost: str
    fits: bool | None = None
    prediction: MemoryPrediction | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain values, for JSON.

        Returns:
            The fields under their names, without the prediction.
        """
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "prediction"}

    def __str__(self) -> str:
        fits = {None: "", True: "; fits", False: "; does not fit"}[self.fits]
        return (
            f"{self.name}: -{format_bytes(self.saved_bytes)}, to {format_bytes(self.device_bytes)} "
            f"on the device{fits} ({self.exactness}; {self.cost}): {self.how}"
        )


def cheapest_that_fits(remedies: list[Remedy]) -> Remedy | None:
    """Find the remedy to take.

    Args:
        remedies: From `remedies_of` with a GPU.

    Returns:
        The first that fits; ``None`` if none does.
    """
    return next((remedy for remedy in remedies if remedy.fits), None)


def remedies_of(what_if: WhatIf) -> list[Remedy]:
    """Predict what would lower the peak.

    Args:
        what_if: What predicts.

    Returns:
        The remedies, the cheapest first; `cheapest_that_fits` finds the one to take.
    """
    now = CurrentSettings(
        what_if.step.effective_settings,
        what_if.step.precision,
        what_if.gpu is None or what_if.gpu.has_bf16,
        what_if.num_samples or 0,
        dominant_embedding(what_if.table),
    )
    found: list[tuple[Candidate, Remedy]] = []
    for candidate in single_candidates(now):
        _try(what_if, candidate, found)
    _try_parts(what_if, part_candidates(now), found)
    for candidate in joint_candidates(now, [helped for helped, _ in found]):
        _try(what_if, candidate, found)
        # Of a large embedding most can be saved by the stack, which comes last.
        if any(r.fits for _, r in found) or (what_if.gpu is None and not now.embedding):
            break
    return [remedy for _, remedy in found]


def _try(what_if: WhatIf, candidate: Candidate, found: list[tuple[Candidate, Remedy]]) -> bool:
    base = what_if.base()
    try:
        prediction = what_if.predict(candidate.changes)
    except ImpossibleVariantError:
        return False
    if prediction.peak_bytes >= base.peak_bytes:
        return False
    found.append((candidate, _remedy(what_if, candidate, base, prediction)))
    return True


# Where one sample at once does not help, larger parts do not either; and where half of the batch
# does as much, smaller ones are of no use.
def _try_parts(
    what_if: WhatIf, parts: Sequence[Candidate], found: list[tuple[Candidate, Remedy]]
) -> None:
    if not parts or not _try(what_if, parts[-1], found):
        return
    last = found.pop()
    for candidate in parts[:-1]:
        helped = _try(what_if, candidate, found)
        if helped and found[-1][1].peak_bytes <= last[1].peak_bytes:
            return
    found.append(last)


def _remedy(
    what_if: WhatIf, candidate: Candidate, base: MemoryPrediction, prediction: MemoryPrediction
) -> Remedy:
    return Remedy(
        candidate.name,
        as_code(what_if.step.make_callback, {**what_if.step.settings, **candidate.changes}),
        prediction.peak_bytes,
        prediction.device_bytes,
        base.peak_bytes - prediction.peak_bytes,
        candidate.exactness,
        candidate.cost,
        None if what_if.gpu is None else prediction.fits(what_if.gpu).fits,
        prediction,
    )
