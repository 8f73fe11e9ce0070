"""Make a prediction of what was recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.planning.caching_allocator import CachingAllocator
from lightning_memsave.planning.peaks import Peaks
from lightning_memsave.planning.prediction import MemoryPrediction, ModuleMemory
from lightning_memsave.planning.step_profile import Recording


def summarise(
    recording: Recording,
    *,
    device: str,
    model: str,
    extra: MemoryBreakdown | None = None,
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
        extra: Bytes that are there all the time and that the recording does not have.
        settings: Name and value of each setting.
        ineffective: The same of those without effect, with the reason.
        assumptions: What is taken for granted.
        guesses: What had to be guessed.
        context_bytes: What CUDA needs for itself.

    Returns:
        The prediction.
    """
    peaks = Peaks(recording, extra)
    reserved_bytes = None
    if device == "cuda":
        allocator = CachingAllocator()
        allocator.replay(peaks.changes())
        reserved_bytes = allocator.peak_reserved_bytes
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
        reserved_bytes=reserved_bytes,
        context_bytes=context_bytes,
        settings=dict(settings or {}),
        ineffective=dict(ineffective or {}),
        assumptions=tuple(assumptions),
        guesses=tuple(guesses),
    )
