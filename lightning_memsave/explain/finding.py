"""A finding: how much one factor contributes to the peak."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.prediction.result import MemoryPrediction

MATTERS = 0.05
"""A factor matters from this share of the peak on."""

Figure: TypeAlias = int | float | bool | str | None
Verdict = Literal["matters", "does not matter", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    verdict: Verdict
    num_bytes: int | None
    sentence: str
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def finding_of(
    name: str,
    num_bytes: int,
    sentence: str,
    base: MemoryPrediction,
    **figures: Figure,
) -> Finding:
    return Finding(name, verdict_of(num_bytes, base.peak_bytes), num_bytes, sentence, figures)


def verdict_of(num_bytes: int, whole_bytes: int) -> Verdict:
    return "matters" if num_bytes >= MATTERS * whole_bytes and num_bytes else "does not matter"


def unknown_finding(name: str, why: str) -> Finding:
    return Finding(name, "unknown", None, why)


def label_of(gpu: Gpu) -> str:
    return "the GPU" if gpu.compute_capability is None else gpu.name
