"""Whether a predicted step fits a GPU."""

from dataclasses import dataclass
from typing import Any

from lightning_memsave.planning.gpus import Gpu
from lightning_memsave.planning.prediction import MemoryPrediction
from lightning_memsave.units import format_bytes

# A prediction is not more exact than this on CUDA; see its assumptions.
_TIGHT = 0.05


@dataclass(frozen=True, slots=True)
class GpuFit:
    """A prediction beside the memory of one GPU.

    Args:
        gpu: The GPU.
        needed_bytes: The least that the step runs with, the CUDA context included.
        tensor_bytes: What its tensors need with the context, if there were no gaps between them.
        used_bytes: What the process uses where there is room.
    """

    gpu: Gpu
    needed_bytes: int
    tensor_bytes: int
    used_bytes: int = 0

    @classmethod
    def of(cls, gpu: Gpu, prediction: MemoryPrediction) -> "GpuFit":
        """Put a prediction beside a card.

        Args:
            gpu: The card.
            prediction: Of a step on CUDA.

        Returns:
            Both together.

        Example:
            >>> from lightning_memsave.core.memory import MemoryBreakdown
            >>> from lightning_memsave.planning.gpus import parse_gpu
            >>> prediction = MemoryPrediction("cuda", "Net", MemoryBreakdown(2**30), {})
            >>> GpuFit.of(parse_gpu("2GiB"), prediction).fits
            True
        """
        tensor_bytes = prediction.measurable_bytes + prediction.context_bytes
        used_bytes = (prediction.reserved_bytes or 0) + prediction.context_bytes
        return cls(gpu, prediction.device_bytes, tensor_bytes, used_bytes)

    @property
    def fits(self) -> bool:
        """Whether the card has what the step takes."""
        return self.spare_bytes >= 0

    @property
    def spare_bytes(self) -> int:
        """What is left on the card; negative where it does not fit."""
        return self.gpu.total_bytes - self.needed_bytes

    @property
    def note(self) -> str:
        """What to know about a close result; empty if it is clear."""
        if self.fits and self.spare_bytes < _TIGHT * self.gpu.total_bytes:
            return "barely: less is left than the prediction may be wrong by"
        if self.fits and self.used_bytes > self.gpu.total_bytes:
            return (
                f"torch would reserve {format_bytes(self.used_bytes)} there, and returns cached "
                "memory to the driver instead, which costs time: try "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            )
        if not self.fits and self.tensor_bytes <= self.gpu.total_bytes:
            return (
                "its tensors would fit: try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, "
                "which leaves fewer gaps"
            )
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain values, for JSON.

        Returns:
            ``name``, ``total_bytes``, ``needed_bytes``, ``spare_bytes``, ``fits`` and ``note``.
        """
        return {
            "name": self.gpu.name,
            "total_bytes": self.gpu.total_bytes,
            "needed_bytes": self.needed_bytes,
            "spare_bytes": self.spare_bytes,
            "fits": self.fits,
            "note": self.note,
        }

    def __str__(self) -> str:
        verb = "fits" if self.fits else "does not fit"
        over = f"{format_bytes(abs(self.spare_bytes))} {'left' if self.fits else 'too much'}"
        return (
            f"{verb} {self.gpu.name} ({format_bytes(self.gpu.total_bytes)}): it takes "
            f"{format_bytes(self.needed_bytes)}, {over}"
        )
