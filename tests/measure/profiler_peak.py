"""Peak memory of a step from the events of torch's own allocator."""

import gc
from collections.abc import Callable, Iterable

from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function


def profiler_peak_bytes(step: Callable[[], object], alive_before: Iterable[Tensor]) -> int:
    """Peak of the second of two steps, as torch's CPU allocator tells the profiler.

    ``alive_before`` must be all that is alive before the first step and outlive both: the profiler
    does not hear of the end of memory that is older than itself. That is also why the first step,
    which makes gradients and optimizer state, is profiled too.
    """
    # The allocator remembers what earlier profilers saw, and would tell this one of its end.
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
        with record_function("second step"):
            step()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    start_ns = next(event.start_ns() for event in events if event.name() == "second step")
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in alive_before}
    now = sum(storage.nbytes() for storage in storages.values())
    peak = 0
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            if event.start_ns() >= start_ns:
                peak = max(peak, now)
    return peak
