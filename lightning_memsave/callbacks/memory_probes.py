"""How memory is measured during training: on CUDA by its allocator, elsewhere by counting."""

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.measure.allocator import read_allocator, read_host_memory
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.measure.nvml import NvmlDevice, NvmlReading
from lightning_memsave.measure.storages import tensors_in_batch
from lightning_memsave.trainer.trainer import is_compiled_whole
from lightning_memsave.units import GIB

PEAKS = ("memory/peak_allocated_gib", "memory/peak_reserved_gib", "memory/peak_live_gib")

# In the first step the optimizer makes its state, the second is like all that follow.
_NUM_EARLY_STEPS = 2
_MAX_PEAKS = 10_000


@dataclass
class PeakReadings:
    """Largest values so far, in bytes; ``None`` until there is one."""

    peak_bytes: int | None = None
    by_category: dict[str, int] = field(default_factory=dict)
    reserved_bytes: int | None = None
    nvml_process_bytes: int | None = None
    nvml_gpu_bytes: int | None = None
    num_counted_steps: int | None = None
    had_larger_batches: bool = False

    def raise_to(self, **sizes: int | None) -> None:
        for name, size in sizes.items():
            if size is not None:
                setattr(self, name, max(getattr(self, name) or 0, size))

    @property
    def nvml_bytes(self) -> int | None:
        """What the driver told for this process, or else for the whole GPU."""
        return self.nvml_gpu_bytes if self.nvml_process_bytes is None else self.nvml_process_bytes

    @property
    def is_nvml_of_gpu(self) -> bool:
        return self.nvml_process_bytes is None and self.nvml_gpu_bytes is not None


class Probe:
    """Measures one optimizer step after the other; `end_batch` is harmless at any time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.highest = PeakReadings()
        self.notes: list[str] = []
        # Number of the step, and the peak since the last reading.
        self.peaks: list[tuple[int, int]] = []
        self.idle_bytes = 0
        """Of this batch, in memory that is there and that no operator shows: DDP's buckets."""
        self._num_steps = 0
        self._largest_batch_bytes: int | None = None

    @property
    def name(self) -> str:
        return str(self.device)

    def is_larger(self, batch: object) -> bool:
        """Say whether a batch has more bytes than any before, and remember it."""
        num_bytes = sum(tensor.nbytes for tensor in tensors_in_batch(batch))
        largest = self._largest_batch_bytes
        if largest is not None and num_bytes <= largest:
            return False
        self.highest.had_larger_batches = largest is not None
        self._largest_batch_bytes = num_bytes
        return True

    def note_peak(self, peak_bytes: int) -> None:
        if len(self.peaks) == _MAX_PEAKS:  # the higher one of each two
            pairs = zip(self.peaks[::2], self.peaks[1::2], strict=True)
            self.peaks[:] = [max(pair, key=lambda peak: peak[1]) for pair in pairs]
        self.peaks.append((self._num_steps, peak_bytes))

    # Only an allocator measures by itself between batches.
    def end_batch(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def finish(self) -> None:
        """Take the rest into account, after training, while the module is still there."""


class CudaProbe(Probe):
    """Reads torch's allocator around the first two steps and logged ones, and the driver at them.

    Between them the allocator keeps the peak by itself.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._cleanup = contextlib.ExitStack()
        self._nvml = self._cleanup.enter_context(NvmlDevice(device))
        self._reading = read_allocator(device)
        self._is_read = False
        self._note(self._nvml.read().reason)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def _note(self, reason: str) -> None:
        if reason and reason not in self.notes:
            self.notes.append(reason)

    def begin_step(self, is_logged: bool) -> None:
        self._is_read = is_logged or self._num_steps < _NUM_EARLY_STEPS
        if self._is_read and self._num_steps:
            self._note_peaks()
        if self._is_read:
            torch.cuda.reset_peak_memory_stats(self.device)

    def begin_batch(self, module: nn.Module, optimizers: Any, batch: object) -> None:
        self.is_larger(batch)

    def end_step(self) -> None:
        self._num_steps += 1
        if not self._is_read:
            return
        self._note_peaks()
        if self._num_steps <= _NUM_EARLY_STEPS:
            self._read_nvml()

    def pause(self) -> None:
        if self._num_steps:  # validation before training has peaks of its own
            self._note_peaks()

    def resume(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)
        self._note_peaks()
        self._read_nvml()

    def _note_peaks(self) -> None:
        self._reading = reading = read_allocator(self.device)
        if reading is not None:
            peaks = (reading.peak_allocated_bytes, reading.peak_reserved_bytes)
            self.highest.raise_to(peak_bytes=peaks[0], reserved_bytes=peaks[1])
            self.note_peak(peaks[0])

    def _read_nvml(self) -> NvmlReading:
        nvml = self._nvml.read(None if self._reading is None else self._reading.reserved_bytes)
        self.highest.raise_to(nvml_process_bytes=nvml.process_bytes, nvml_gpu_bytes=nvml.used_bytes)
        self._note(nvml.reason)
        return nvml

    def metrics(self) -> dict[str, float]:
        reading = self._reading
        if reading is None:
            return _host_metrics()
        nvml = self._read_nvml()
        sizes = {
            "memory/allocated_gib": reading.allocated_bytes,
            "memory/reserved_gib": reading.reserved_bytes,
            "memory/peak_allocated_gib": reading.peak_allocated_bytes,
            "memory/peak_reserved_gib": reading.peak_reserved_bytes,
            "memory/nvml_used_gib": nvml.used_bytes,
            "memory/nvml_total_gib": nvml.total_bytes,
            "memory/nvml_process_gib": nvml.process_bytes,
            "memory/cuda_context_gib": nvml.context_bytes,
        }
        counts = {
            "memory/num_alloc_retries": float(reading.num_alloc_retries),
            "memory/num_ooms": float(reading.num_ooms),
        }
        return _in_gib(sizes) | counts | _host_metrics()

    def close(self) -> None:
        self._cleanup.close()


class LiveTensorsProbe(Probe):
    """Counts live tensors in the first two steps, in those that are logged and in larger ones."""

    def __init__(self, device: torch.device, module: nn.Module) -> None:
        super().__init__(device)
        self._can_count = not is_compiled(module)
        if not self._can_count:
            self.notes.append(
                "live tensors are not counted in a module with `torch.compile`, whose graphs "
                "allocate unseen: train without it, or on CUDA, to measure memory"
            )
        self._is_counted = False
        self._live: LiveTensors | None = None
        self._step_peak: MemoryBreakdown | None = None
        self._live_bytes: int | None = None

    def begin_step(self, is_logged: bool) -> None:
        self._step_peak = self._live_bytes = None
        self._is_counted = self._can_count and (is_logged or self._num_steps < _NUM_EARLY_STEPS)

    def begin_batch(self, module: nn.Module, optimizers: Any, batch: object) -> None:
        self.end_batch()
        if self._can_count and (self.is_larger(batch) or self._is_counted):
            live = LiveTensors(module, optimizers, self.device)
            live.__enter__()
            self._live = live
            live.track_input(batch)

    def end_batch(self) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        live.__exit__(None, None, None)
        idle = MemoryBreakdown(other_bytes=self.idle_bytes)
        self._live_bytes, peak = live.live_bytes + self.idle_bytes, live.peak + idle
        if self._step_peak is None or peak.total_bytes > self._step_peak.total_bytes:
            self._step_peak = peak

    def end_step(self) -> None:
        self._num_steps += 1
        peak = self._step_peak
        if peak is None:
            return
        self.note_peak(peak.total_bytes)
        self.highest.num_counted_steps = (self.highest.num_counted_steps or 0) + 1
        if peak.total_bytes > (self.highest.peak_bytes or 0):
            self.highest.peak_bytes = peak.total_bytes
            self.highest.by_category = peak.by_category()

    def metrics(self) -> dict[str, float]:
        peak_bytes = None if self._step_peak is None else self._step_peak.total_bytes
        sizes = {"memory/live_gib": self._live_bytes, "memory/peak_live_gib": peak_bytes}
        return _in_gib(sizes) | _host_metrics()

    close = end_batch


def is_compiled(module: nn.Module) -> bool:
    """Say whether ``torch.compile`` was applied to a module or to one inside it."""
    return is_compiled_whole(module) or any(
        # By name: importing torch._dynamo to compare classes takes seconds.
        type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None
        for part in module.modules()
    )


def _host_metrics() -> dict[str, float]:
    host = read_host_memory()
    sizes = {"memory/host_rss_gib": host.rss_bytes, "memory/host_pinned_gib": host.pinned_bytes}
    return _in_gib(sizes)


def _in_gib(sizes: dict[str, int | None]) -> dict[str, float]:
    return {name: n / GIB for name, n in sizes.items() if n is not None}
