"""Seconds between marks: their phases, sums within a step, and the median of steps."""

from types import SimpleNamespace

import pytest
import torch

from lightning_memsave.measure.phase_clock import PhaseClock
from tests.virtual_gpu import counters


@pytest.fixture
def now(monkeypatch):
    """The time, which stands still until it is set."""
    clock = SimpleNamespace(s=0.0)
    fake = SimpleNamespace(perf_counter=lambda: clock.s)
    monkeypatch.setattr("lightning_memsave.measure.phase_clock.time", fake)
    return clock


def test_micro_batches_are_summed_and_steps_give_their_median(now):
    clock = PhaseClock(torch.device("cpu"))
    for factor in (1, 9, 2):
        clock.begin_step()
        # Two micro-batches, and a wait for the second batch of the step.
        for phase, seconds in (
            *(("", 50), ("forward", 1), ("backward", 3), ("forward", 2), ("backward", 4)),
            *(("", 70), ("forward", 1), ("backward", 1), ("optimizer", 5)),
        ):
            now.s += factor * seconds
            clock.mark(phase)
        clock.stop()
        now.s += 30
        clock.mark("optimizer")
    assert clock.read() == {"forward": 8, "backward": 16, "optimizer": 10}
    assert clock.read() == {}


@pytest.mark.gpu
@pytest.mark.skipif(counters.is_on, reason="a virtual GPU shows no time")
def test_on_a_gpu_time_is_that_of_the_device():
    clock = PhaseClock(torch.device("cuda"))
    x = torch.randn(8192, 8192, device="cuda")
    assert (x @ x).isfinite().all()  # the first product loads libraries
    clock.begin_step()
    clock.mark()
    y = x @ x
    clock.mark("short")
    for _ in range(20):
        y = y @ x
    clock.mark("long")
    found = clock.read()
    assert found["long"] > 5 * found["short"] > 0
