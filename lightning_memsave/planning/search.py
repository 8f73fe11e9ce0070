"""Which settings would lower the peak, and by how much."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_memsave.explain.dominant_parts import dominant_embedding
from lightning_memsave.explain.what_if import Trials
from lightning_memsave.planning.candidates import (
    Candidate,
    Situation,
    joint_candidates,
    part_candidates,
    single_candidates,
)
from lightning_memsave.prediction.result import MemoryPrediction
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
    """

    name: str
    how: str
    peak_bytes: int
    device_bytes: int
    saved_bytes: int
    exactness: str
    cost: str
    fits: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain values, for JSON.

        Returns:
            The fields under their names.
        """
        return asdict(self)

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


def remedies_of(trials: Trials) -> list[Remedy]:
    """Predict what would lower the peak.

    Args:
        trials: What predicts.

    Returns:
        The remedies, the cheapest first; `cheapest_that_fits` finds the one to take.
    """
    now = Situation(
        trials.in_force,
        trials.precision,
        trials.gpu is None or trials.gpu.has_bf16,
        trials.num_samples or 0,
        dominant_embedding(trials.table),
        trials.device == "cuda",
    )
    found: list[tuple[Candidate, Remedy]] = []
    for candidate in single_candidates(now):
        _try(trials, candidate, found)
    _try_parts(trials, part_candidates(now), found)
    for candidate in joint_candidates(now, [helped for helped, _ in found]):
        _try(trials, candidate, found)
        # Of a large embedding most can be saved by the stack, which comes last.
        if any(r.fits for _, r in found) or (trials.gpu is None and not now.embedding):
            break
    return [remedy for _, remedy in found]


def _try(trials: Trials, candidate: Candidate, found: list[tuple[Candidate, Remedy]]) -> bool:
    base = trials.base()
    prediction = trials.attempt(candidate.changes)
    if isinstance(prediction, str) or prediction.peak_bytes >= base.peak_bytes:
        return False
    found.append((candidate, _remedy(trials, candidate, base, prediction)))
    return True


# Where one sample at once does not help, larger parts do not either; and where half of the batch
# does as much, smaller ones are of no use.
def _try_parts(
    trials: Trials, parts: Sequence[Candidate], found: list[tuple[Candidate, Remedy]]
) -> None:
    if not parts or not _try(trials, parts[-1], found):
        return
    last = found.pop()
    for candidate in parts[:-1]:
        helped = _try(trials, candidate, found)
        if helped and found[-1][1].peak_bytes <= last[1].peak_bytes:
            return
    found.append(last)


def _remedy(
    trials: Trials, candidate: Candidate, base: MemoryPrediction, prediction: MemoryPrediction
) -> Remedy:
    return Remedy(
        candidate.name,
        trials.callback_with(candidate.changes),
        prediction.peak_bytes,
        prediction.device_bytes,
        base.peak_bytes - prediction.peak_bytes,
        candidate.exactness,
        candidate.cost,
        None if trials.gpu is None else prediction.device_bytes <= trials.gpu.total_bytes,
    )
