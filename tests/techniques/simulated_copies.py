"""Copies between host and device that take their time, simulated on the CPU.

What CUDA does beside the computation, and shows as wrong numbers now and then, shows here each
time: a copy happens late, memory that waits for a copy holds NaN, and memory that was given back
before its copy is noticed. So is host memory that the host changes while a copy to the device may
still read it, and work of the host happens late, too.
"""

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

from lightning_memsave.core.memory import host_copies
from lightning_memsave.techniques.offloading import residence, technique
from lightning_memsave.techniques.offloading.copies import Copies
from lightning_memsave.techniques.offloading.host_memory import HostMemory
from lightning_memsave.techniques.offloading.host_worker import HostWorker

_NAN_BYTE = 0xFF  # a NaN of each floating-point type, and a large number of integers


class SimulatedCopies(Copies):
    """Copies in two lanes, up and down, each in its own order.

    A copy is done when somebody waits for it or for a later one of its lane; with a seed, at some
    moment between its start and that. Waiting for one lane does not make the other one go on. What
    is computed is done at once, though the host does not know that before it waits itself.

    Args:
        worker: As of all copies.
        seed: For the moments; ``None`` for the last possible one.
    """

    def __init__(self, worker: HostWorker, seed: int | None = None) -> None:
        super().__init__(worker)
        self.problems: list[str] = []
        """What was given back before a copy of it was done, or changed."""
        self.num_started = 0
        self._random = None if seed is None else random.Random(seed)
        self._up: list[Callable[[], None]] = []
        self._down: list[Callable[[], None]] = []
        self._true: dict[int, tuple[Tensor, list[None]]] = {}
        # What the device waited for, and may be reading, as far as the host knows.
        self._read: list[_Read] = []
        self._known: list[_Read] = []  # that it is done, once the host has waited for what is down

    @override
    def to_device(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
        run = self._start(self._up, targets, sources, "on the way up")
        read = [_Read(source, source.detach().clone()) for source in sources]

        def wait() -> None:
            run()
            self._read += read
            read.clear()

        return wait

    @override
    def send_to_host(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> Callable[[], None]:
        # The device does it after what it waits for.
        own = {target.untyped_storage()._cdata for target in targets}
        self._read = [r for r in self._read if r.source.untyped_storage()._cdata not in own]
        return self._start(self._down, targets, sources, "on the way down")

    @override
    def to_host(self, target: Tensor, source: Tensor, *, adds: bool) -> None:
        with torch.no_grad(), host_copies():
            key = target.data_ptr()
            value, waiting = self._true.setdefault(key, (target.clone(), []))
            waiting.append(None)
            spoil(target)

        def copy() -> None:
            with torch.no_grad(), host_copies():
                if adds:
                    value.add_(source)
                else:
                    value.copy_(source)
                waiting.pop()
                if not waiting:
                    target.copy_(value)
                    del self._true[key]

        self._down.append(copy)
        self._known, self._read = [*self._known, *self._read], []
        self._go_on()

    @override
    def finish(self) -> None:
        _run(self._down)
        self._look_for_changes(self._known)

    @override
    def synchronize(self) -> None:
        _run(self._down)
        _run(self._up)
        self._look_for_changes(self._known)
        self._look_for_changes(self._read)

    def _look_for_changes(self, read: list["_Read"]) -> None:
        if not all(torch.equal(each.source, each.before) for each in read):
            self.problems.append("host memory was changed while a copy of it may have run")
        read.clear()

    def _start(
        self,
        lane: list[Callable[[], None]],
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        where: str,
    ) -> Callable[[], None]:
        self.num_started += 1
        for target, source in zip(targets, sources, strict=True):
            assert (target.shape, target.dtype) == (source.shape, source.dtype)
            spoil(target)
        pairs = [(Place(t), Place(s)) for t, s in zip(targets, sources, strict=True)]

        def copy() -> None:
            for target, source in pairs:
                into, found = target.find(), source.find()
                if into is None or found is None:
                    name = "target" if into is None else "source"
                    self.problems.append(f"the {name} of a copy {where} was given back too early")
                else:
                    with torch.no_grad(), host_copies():
                        into.copy_(found)

        lane.append(copy)
        self._go_on()
        return lambda: _run(lane, copy)

    def _go_on(self) -> None:
        if self._random is None:
            return
        for lane in self._random.sample((self._up, self._down), 2):
            for _ in range(self._random.randint(0, len(lane))):
                lane.pop(0)()


@dataclass(frozen=True)
class _Read:
    """Host memory, and what was there when a copy of it began."""

    source: Tensor
    before: Tensor


class SimulatedWorker(HostWorker):
    """Works without a thread: when somebody waits for it, or with a seed at some moment before.

    Args:
        seed: For the moments; ``None`` for the last possible one.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(in_background=False)
        self._random = None if seed is None else random.Random(seed)
        self._late: list[tuple[Callable[[], None], Future[None]]] = []

    @override
    def submit(self, work: Callable[[], None]) -> "Future[None]":
        done = _Late(self)
        self._late.append((work, done))
        if self._random is not None:
            self._do(self._random.randint(0, len(self._late)))
        return done

    def do_until(self, done: "Future[None]") -> None:
        waiting = [each for _, each in self._late]
        self._do(waiting.index(done) + 1 if done in waiting else 0)

    def _do(self, number: int) -> None:
        for _ in range(number):
            work, done = self._late.pop(0)
            try:
                with _disable_current_modes():  # which a thread would not have either
                    super().submit(work).result()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)


class _Late(Future[None]):
    def __init__(self, worker: SimulatedWorker) -> None:
        super().__init__()
        self._worker = worker

    @override
    def result(self, timeout: float | None = None) -> None:
        self._worker.do_until(self)
        super().result(timeout)


@dataclass
class Simulation:
    """Simulated copies and a simulated worker in place of those of the technique.

    ``make_copies`` makes the copies, of weights and gradients and of activations apart; with
    ``locks`` the pages of host memory are locked, as for CUDA.
    """

    seed: int | None = None
    make_copies: Callable[..., SimulatedCopies] = SimulatedCopies
    locks: bool = False
    copies: list[SimulatedCopies] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let all that is offloaded inside use it; fails if anything has gone wrong."""

        def make(_: Tensor, worker: HostWorker, memory: HostMemory) -> SimulatedCopies:
            if self.locks:
                memory.lock()
            self.copies.append(self.make_copies(worker, self.seed))
            return self.copies[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(residence, "copies_for", make)
            patch.setattr(technique, "copies_for", make)
            patch.setattr(technique, "HostWorker", lambda **_: SimulatedWorker(self.seed))
            yield
        for copies in self.copies:
            copies.synchronize()
        problems = [problem for copies in self.copies for problem in copies.problems]
        assert problems == [], problems


class Place:
    """Where a tensor is, without holding on to it: a copy does not keep memory alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._layout = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def find(self) -> Tensor | None:
        storage = self._storage()
        empty = torch.empty_like(self._like)
        return None if storage is None else empty.set_(storage, *self._layout)


def _run(lane: list[Callable[[], None]], last: Callable[[], None] | None = None) -> None:
    if last is not None and last not in lane:
        return
    while lane:
        copy = lane.pop(0)
        copy()
        if copy is last:
            return


# Not noticed by autograd, as it would not be on a GPU.
def spoil(tensor: Tensor) -> None:
    with torch.no_grad():
        num_bytes = tensor.nbytes
        flat = tensor.data.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        assert flat.numel() == num_bytes
        flat.fill_(_NAN_BYTE)
