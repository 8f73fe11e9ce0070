"""Does the detector find races of each kind, and nothing where somebody waits?"""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.offloading.host_worker import HostWorker
from tests.techniques.races import Races


def on_device() -> Tensor:
    return torch.ones(8)


def on_host() -> Tensor:
    memory = HostMemory()
    memory.lock()
    return memory.tensors_like([torch.empty(8)])[0].fill_(2.0)


def copy_on(stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> torch.cuda.Event:
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    return stream.record_event()


def computes_before_a_copy_ends(*, waits: bool) -> None:
    target, source, stream = on_device(), on_host(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    event = copy_on(stream, target, source)
    if waits:
        torch.cuda.current_stream().wait_event(event)
    target + 1
    event.synchronize()


def copies_to_new_memory(*, waits: bool) -> None:
    """The memory may have been freed a moment ago, and computations may still use it."""
    stream, source = torch.cuda.Stream(), on_host()
    target = torch.empty(8)
    if waits:
        stream.wait_stream(torch.cuda.current_stream())
    copy_on(stream, target, source).synchronize()


def waits_for_an_event_before_the_copy(*, waits: bool) -> None:
    target, source, stream = on_host(), on_device(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    early = stream.record_event()
    late = copy_on(stream, target, source)
    (late if waits else early).synchronize()
    target.add_(1)


def frees_what_is_copied(*, waits: bool) -> None:
    target, source, stream = on_host(), on_device(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    event = copy_on(stream, target, source)
    if waits:
        event.wait()
    del source
    event.synchronize()


def frees_host_memory_that_is_copied(*, waits: bool) -> None:
    target, source, stream = on_device(), on_host(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    event = copy_on(stream, target, source)
    if waits:
        event.synchronize()
    del source
    event.wait()


def the_host_reads_before_it_landed(*, waits: bool) -> None:
    target, source, stream = on_host(), on_device(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    copy_on(stream, target, source)
    if waits:
        stream.synchronize()
    target + 1


def a_thread_reads_before_it_landed(*, waits: bool) -> None:
    target, source, stream = on_host(), on_device(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    event = copy_on(stream, target, source)

    def work() -> None:
        if waits:
            event.synchronize()
        target.sum()

    HostWorker(in_background=True).submit(work).result()
    event.wait()


def changes_what_a_thread_reads(*, waits: bool) -> None:
    memory = on_host()

    def work() -> None:
        memory.sum()

    done = HostWorker(in_background=True).submit(work)
    if waits:
        done.result()
    memory.add_(1)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (computes_before_a_copy_ends, "device memory is read too early"),
        (copies_to_new_memory, "device memory is written too early"),
        (waits_for_an_event_before_the_copy, "host memory is written too early"),
        (frees_what_is_copied, "device memory is freed too early"),
        (frees_host_memory_that_is_copied, "host memory is freed too early"),
        (the_host_reads_before_it_landed, "host memory is read too early"),
        (a_thread_reads_before_it_landed, "host memory is read too early"),
        (changes_what_a_thread_reads, "host memory is (read|written) too early"),
    ],
)
def test_a_race_is_found_and_nothing_where_somebody_waits(
    run: Callable[..., None], problem: str, is_late: bool
) -> None:
    with Races(is_late=is_late).running():
        run(waits=True)
    with pytest.raises(AssertionError, match=problem), Races(is_late=is_late).running():
        run(waits=False)


@pytest.mark.parametrize("is_late", [False, True])
def test_work_is_done_in_its_order_when_somebody_waits(is_late):
    worker, seen = HostWorker(in_background=True), list[int]()
    with Races(is_late=is_late).running():
        works = [functools.partial(seen.append, number) for number in range(4)]
        dones = [worker.submit(work) for work in works]
        assert dones[1].done() != is_late
        dones[1].result()
        assert seen == ([0, 1] if is_late else [0, 1, 2, 3])
    assert seen == [0, 1, 2, 3]


def test_what_work_raises_comes_to_who_waits():
    def work() -> None:
        raise KeyError

    with Races().running(), pytest.raises(KeyError):
        HostWorker(in_background=True).submit(work).result()


def test_different_parts_of_a_memory_are_apart():
    with Races().running():
        memory, source, stream = on_host(), on_device(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        event = copy_on(stream, memory[:4], source[:4])
        memory[4:].add_(1)
        event.synchronize()
        memory[:4].add_(1)
