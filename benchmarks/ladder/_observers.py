"""What looks on while either trainer trains: memory, time and losses, the same way for both."""

import gc
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks._paired import StepClock
from benchmarks._profiler import AllocationPeak
from benchmarks.gpu._lines import wait_for_turn
from benchmarks.ladder._rows import Workload
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.measure.nvml import NvmlDevice


class Observer(ABC):
    """Told by the trainer when training begins and when an optimizer step has ended."""

    @abstractmethod
    def begin(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Hear that the first step is about to begin.

        Args:
            module: What is trained.
            optimizers: Plain ones, not wrappers around them.
        """

    @abstractmethod
    def end_step(self, loss: float) -> None:
        """Hear that a step has ended, gradients and all.

        Args:
            loss: Of its batch.
        """

    def track_input(self, batch: object) -> None:  # noqa: B027 - few need it
        """Hear of a batch."""


class Timer(Observer):
    """Times the steps of a fit that runs in turns with others.

    Args:
        clock: Its part of the turns.
        num_steps: After this many the fit ends.
    """

    def __init__(self, clock: StepClock, num_steps: int) -> None:
        self.clock = clock
        self.num_left = num_steps

    def begin(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Wait for the first turn."""
        self.clock.begin()

    def end_step(self, loss: float) -> None:
        """Note the time and wait for the next turn."""
        self.clock.end()
        self.num_left -= 1
        if self.num_left:
            self.clock.begin()


class Allocations(Observer):
    """Counts what the CPU allocator gave out, scratch memory of kernels included.

    Args:
        peak: Entered before the model was made.
        workload: Says how many steps there are.
    """

    def __init__(self, peak: AllocationPeak, workload: Workload) -> None:
        self.peak = peak
        self.num_left = workload.num_steps - workload.num_counted

    def begin(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Nothing is needed of these."""

    def end_step(self, loss: float) -> None:
        """Begin with the steps that count when it is time."""
        self.num_left -= 1
        if self.num_left == 0:
            self.peak.start()


class Meter(Observer):
    """Measures one fit alone in its process: time first, then, in other steps, live tensors.

    The count begins between two steps and goes on through the optimizer steps and the gaps between
    steps: whatever a trainer keeps from one step to the next is counted as it is.

    Args:
        workload: Says how many steps each measurement takes.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.losses: list[float] = []
        self.step_times_s: list[float] = []
        self.memory: dict[str, Any] = {}
        self._live: LiveTensors | None = None
        self._start_s = 0.0

    def begin(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Remember what is trained, and let both trainers draw the same dropout."""
        wait_for_turn()
        self._module, self._optimizers = module, list(optimizers)
        torch.manual_seed(0)

    def end_step(self, loss: float) -> None:
        """Take the step into account and go on to the next measurement when it is time."""
        now_s = _now_s()
        self.losses.append(loss)
        first_timed = self.workload.num_warmup
        first_counted = first_timed + self.workload.num_timed
        done = len(self.losses)
        if first_timed < done <= first_counted:
            self.step_times_s.append(now_s - self._start_s)
        if done == first_timed and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        elif done == first_counted:
            self._read_allocator()
            gc.collect()  # so that nothing older goes away while it counts
            self._live = LiveTensors(self._module, self._optimizers).__enter__()
        elif done == self.workload.num_steps:
            self._stop_counting()
        self._start_s = _now_s()

    def track_input(self, batch: object) -> None:
        """Count a batch as input."""
        if self._live is not None:
            self._live.track_input(batch)

    def results(self) -> dict[str, Any]:
        """Give all figures.

        Returns:
            Memory, time and losses.
        """
        return {
            **self.memory,
            "median_step_s": statistics.median(self.step_times_s),
            "losses": self.losses,
        }

    def _stop_counting(self) -> None:
        assert self._live is not None
        live, self._live = self._live, None
        live.__exit__(None, None, None)
        self.memory["peak_live_bytes"] = live.peak.total_bytes
        self.memory["by_category"] = live.peak.by_category()

    def _read_allocator(self) -> None:
        # Not that of the module, whose weights may wait on the host.
        if not torch.cuda.is_available():
            return
        device = torch.device("cuda", torch.cuda.current_device())
        self.memory["peak_allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        self.memory["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        with NvmlDevice(device) as gpu:
            reading = gpu.read(torch.cuda.memory_reserved(device))
        self.memory["nvml_process_bytes"] = reading.process_bytes
        self.memory["nvml_used_bytes"] = reading.used_bytes
        self.memory["nvml_reason"] = reading.reason


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
