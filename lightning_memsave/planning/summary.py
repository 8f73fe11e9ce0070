"""Make a prediction of what was recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.planning.caching_allocator import CachingAllocator, least_capacity
from lightning_memsave.planning.peaks import Peaks
from lightning_memsave.planning.prediction import MemoryPrediction, ModuleMemory
from lightning_memsave.planning.step_profile import Recording


def summarise(
    recording: Recording,
    *,
    device: str,
    model: str,
    extra: Sequence[tuple[str, int]] = (),
    workspaces: Sequence[int] = (),
    phase: str | None = None,
    settings: Mapping[str, str] | None = None,
    ineffective: Mapping[str, str] | None = None,
    assumptions: Sequence[str] = (),
    guesses: Sequence[str] = (),
    context_bytes: int = 0,
) -> MemoryPrediction:
    """Find the peak of a recording and what makes it.

    Args:
        recording: What was alive when.
        device: ``"cuda"`` or ``"cpu"``; on CUDA the allocator's blocks are followed too.
        model: Class name of the module.
        extra: Blocks that are there all the time and that the recording does not have: category
            and bytes of each.
        workspaces: Bytes of each block that cuBLAS holds.
        phase: As for `Peaks`.
        settings: Name and value of each setting.
        ineffective: The same of those without effect, with the reason.
        assumptions: What is taken for granted.
        guesses: What had to be guessed.
        context_bytes: What CUDA needs for itself.

    Returns:
        The prediction.
    """
    extra = [*extra, *(("other", num_bytes) for num_bytes in workspaces)]
    peaks = Peaks(recording, extra, phase)
    blocks: dict[str, Any] = {}
    if device == "cuda":
        changes = list(peaks.changes())
        allocator = CachingAllocator()
        allocator.replay(changes)
        allocated, reserved = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        blocks = {
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "least_reserved_bytes": least_capacity(changes, allocated, reserved),
        }
    by_module = peaks.by_module()
    return MemoryPrediction(
        device=device,
        model=model,
        peak=replace(peaks.peak, host_bytes=recording.host_bytes),
        by_phase=peaks.by_phase,
        modules=tuple(
            ModuleMemory(
                info.name,
                info.class_name,
                info.num_parameters,
                by_module.get(info.name, MemoryBreakdown()),
            )
            for info in recording.modules
        ),
        largest_tensors=peaks.largest(),
        peak_phase=peaks.event.phase,
        peak_module=peaks.event.module,
        peak_op=peaks.event.op,
        timeline=peaks.timeline(),
        **blocks,
        workspace_bytes=sum(workspaces),
        context_bytes=context_bytes,
        settings=dict(settings or {}),
        ineffective=dict(ineffective or {}),
        assumptions=tuple(assumptions),
        guesses=tuple(guesses),
    )
