"""Peak memory of a step from the events of torch's own allocator."""

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._profiler import _ExtraFields_Allocation, _ProfilerEvent
from torch.profiler import ProfilerActivity, profile, record_function


class ProfilerPeak(NamedTuple):
    """Peaks of the same step."""

    num_bytes: int
    """All that the allocator gave."""
    between_kernels_bytes: int
    """Without what a kernel allocates and frees inside: its scratch depends on the CPU."""


def profiler_peak(step: Callable[[], object], alive_before: Iterable[Tensor]) -> ProfilerPeak:
    """Peaks of the second of two steps, as torch's CPU allocator tells the profiler.

    ``alive_before`` must be all that is alive before the first step and outlive both: the profiler
    does not know the size of memory that is older than itself. That is also why the first step,
    which makes gradients and optimizer state, is profiled too.
    """
    gc.collect()  # Garbage of the caller would end within the steps, and is not of theirs.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
        with record_function("second step"):
            step()
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    events = sorted(_with_children(roots), key=lambda event: event.start_time_ns)
    start_ns = next(event.start_time_ns for event in events if event.name == "second step")
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in alive_before}
    now = sum(storage.nbytes() for storage in storages.values())
    peak = between_kernels = kernel_end_ns = 0
    allocated: set[int] = set()
    for event in events:
        if event.start_time_ns >= max(start_ns, kernel_end_ns):
            between_kernels = max(between_kernels, now)
        if isinstance(event.extra_fields, _ExtraFields_Allocation):
            now += _change(event.extra_fields, allocated)
            if event.start_time_ns >= start_ns:
                peak = max(peak, now)
        elif _is_kernel(event.name):
            kernel_end_ns = max(kernel_end_ns, event.end_time_ns)
    return ProfilerPeak(peak, max(between_kernels, now))


def _with_children(events: Iterable[_ProfilerEvent]) -> Iterator[_ProfilerEvent]:
    for event in events:
        yield event
        yield from _with_children(event.children)


def _change(memory: _ExtraFields_Allocation, allocated: set[int]) -> int:
    """Bytes that the event adds, where the addresses allocated in this profile are given."""
    if memory.alloc_size > 0:
        allocated.add(memory.ptr)
    elif memory.ptr not in allocated:
        # The allocator kept the address of an earlier profile, with the size that it had then.
        return 0
    else:
        allocated.remove(memory.ptr)
    return memory.alloc_size


@functools.cache
def _is_kernel(name: str) -> bool:
    """Whether a dispatch mode sees the operator itself, not the operators that it is made of."""
    namespace, _, operator = name.partition("::")
    packet = getattr(torch.ops.aten, operator, None) if namespace == "aten" else None
    if packet is None:
        return False
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    known = (o for o in overloads if torch._C._dispatch_has_kernel(o.name()))  # not TorchScript's
    return not any(overload.has_kernel_for_dispatch_key(composite) for overload in known)
