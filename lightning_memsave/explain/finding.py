"""One answer to the question where the memory went."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.prediction.result import MemoryPrediction

MATTERS = 0.05
"""What is at least this part of the peak matters."""

Figure: TypeAlias = int | float | bool | str | None
Verdict = Literal["matters", "does not matter", "unknown"]


@dataclass(frozen=True, slots=True)
class Suspect:
    """One usual suspect, answered.

    Args:
        name: Such as ``"batch size"``.
        verdict: ``"matters"`` if it is at least 5 % of the peak, ``"does not matter"``, or
            ``"unknown"``.
        num_bytes: What it takes; ``None`` if unknown.
        sentence: The answer.
        figures: What was computed for it, under names with their units.
    """

    name: str
    verdict: Verdict
    num_bytes: int | None
    sentence: str
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain values, for JSON.

        Returns:
            The fields under their names.
        """
        return asdict(self)


def answered(
    name: str,
    num_bytes: int,
    sentence: str,
    base: MemoryPrediction,
    **figures: Figure,
) -> Suspect:
    """Make an answer whose verdict follows from the figure.

    Args:
        name: Of the suspect.
        num_bytes: What it takes.
        sentence: The answer.
        base: Whose peak it is a part of.
        **figures: What was computed.

    Returns:
        The answer.
    """
    verdict: Verdict = (
        "matters" if num_bytes >= MATTERS * base.peak_bytes and num_bytes else "does not matter"
    )
    return Suspect(name, verdict, num_bytes, sentence, figures)


def unknown(name: str, why: str) -> Suspect:
    """Say that there is no figure.

    Args:
        name: Of the suspect.
        why: In a sentence.

    Returns:
        The answer.
    """
    return Suspect(name, "unknown", None, why)


def label_of(gpu: Gpu) -> str:
    """Name a GPU in a sentence.

    Args:
        gpu: The GPU.

    Returns:
        Its name; for a mere size ``"the GPU"``.
    """
    return "the GPU" if gpu.compute_capability is None else gpu.name
