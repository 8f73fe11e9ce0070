"""Measure how long the phases of training steps take."""

import statistics
import time
from itertools import pairwise
from typing import Any

import torch


class PhaseClock:
    """Seconds between marks, as the median of some steps.

    On CUDA marks are events, so that nothing waits for the device before `read`.

    Example:
        >>> clock = PhaseClock(torch.device("cpu"))
        >>> clock.begin_step()
        >>> for phase in ("", "forward", "backward"):
        ...     clock.mark(phase)
        >>> list(clock.read())
        ['forward', 'backward']
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[list[tuple[str, Any]]] = []
        self._is_on = False

    def begin_step(self) -> None:
        """Measure a step."""
        self._steps.append([])
        self._is_on = True

    def stop(self) -> None:
        """Ignore marks until the next step."""
        self._is_on = False

    def mark(self, phase: str = "") -> None:
        """Say of which phase the time since the mark before was; without one it is left out."""
        if self._is_on:
            self._steps[-1].append((phase, self._now()))

    def read(self) -> dict[str, float]:
        """Sum up, and forget."""
        steps, self._steps, self._is_on = self._steps, [], False
        sums = [self._sums_of(marks) for marks in steps]
        phases = dict.fromkeys(phase for one in sums for phase in one)
        return {p: statistics.median(one.get(p, 0.0) for one in sums) for p in phases}

    def _sums_of(self, marks: list[tuple[str, Any]]) -> dict[str, float]:
        found: dict[str, float] = {}
        for (_, before), (phase, after) in pairwise(marks):
            if phase:
                found[phase] = found.get(phase, 0.0) + self._between(before, after)
        return found

    def _now(self) -> Any:
        if self._device.type == "cuda":  # pragma: no cover (gpu)
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            return event
        return time.perf_counter()

    def _between(self, before: Any, after: Any) -> float:
        if self._device.type == "cuda":  # pragma: no cover (gpu)
            after.synchronize()
            return float(before.elapsed_time(after)) / 1000
        return float(after - before)
