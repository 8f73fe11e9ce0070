"""A detector of races between the streams of a GPU and the threads of the host, on the CPU.

Everything runs at once and in order, so that all numbers are right. What is checked is the order
that waits and events *guarantee*: each stream and thread has a vector clock, as in
``torch.cuda._sanitizer``, and each access to memory has to come after those that it conflicts with.
Unlike there, host memory, host threads, and memory that is freed while another stream may still
use it are checked, too.
"""

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_memsave.core.memory import HOST, category_in_context, host_copies, is_fake, is_host
from lightning_memsave.techniques.chunked_cross_entropy import kernel
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.offloading import copies, host_table
from lightning_memsave.techniques.offloading.host_worker import HostWorker
from lightning_memsave.techniques.optimizer_in_backward import held_gradients

aten: Any = torch.ops.aten
_ALLOCATIONS = {
    *(aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default),
    *(aten.new_empty.default, aten.new_empty_strided.default),
}
_READ_BY_THE_HOST = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}

_Tensors = Sequence[Tensor]
Clock = Counter[str]  # how far each actor has come, as far as somebody knows


class _Actor:
    """A thread of the host, or a stream with what is used of ``torch.cuda.Stream``."""

    def __init__(self, races: "Races", name: str, *, is_host: bool = False) -> None:
        self.races, self.name, self.is_host = races, name, is_host
        self.clock: Clock = Counter()

    def tick(self) -> None:
        if not self.is_host:  # what is queued comes after what the host has done
            self.clock |= self.races.host.clock
        self.clock[self.name] += 1

    def wait_stream(self, other: "_Actor") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: "_Event") -> None:
        self.clock |= event.clock

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        event = _Event(self.races) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class _Event:
    """What is used of ``torch.cuda.Event``; one that was never recorded is done."""

    def __init__(self, races: "Races", *, blocking: bool = False) -> None:
        self._races, self._is_blocking = races, blocking
        self.clock: Clock = Counter()

    def record(self, stream: _Actor | None = None) -> None:
        stream = stream or self._races.stream
        stream.tick()
        self.clock = stream.clock.copy()

    def wait(self, stream: _Actor | None = None) -> None:
        (stream or self._races.stream).wait_event(self)

    def synchronize(self) -> None:
        self._races.num_spins += not self._is_blocking
        self._races.host.clock |= self.clock


class _Done(Future[None]):
    """Of work on the host: done when somebody asks for it, or known to be done from the start."""

    def __init__(self, races: "Races") -> None:
        super().__init__()
        self._races, self.clock = races, Counter[str]()

    @override
    def done(self) -> bool:
        self._races.host.clock |= self.clock
        return super().done()

    @override
    def result(self, timeout: float | None = None) -> None:
        self._races.work_until(self)
        self._races.host.clock |= self.clock
        super().result(timeout)


@dataclass(frozen=True)
class _Access:
    start: int
    end: int
    actor: _Actor
    time: int
    writes: bool
    what: Any
    place: str

    def __str__(self) -> str:
        return f"{self.what} of {self.actor.name} in {self.place}"

    def is_known_by(self, clock: Clock) -> bool:
        return clock[self.actor.name] >= self.time


@dataclass
class _Memory:
    """Of the host, or of a stream; and who used it last."""

    is_host: bool
    stream: _Actor
    start: int
    end: int
    accesses: dict[Any, _Access] = field(default_factory=dict)


class Races(TorchDispatchMode):
    """Looks for accesses whose order nothing guarantees.

    Args:
        is_late: Work on the host is done when somebody waits for it; otherwise at once.
    """

    def __init__(self, *, is_late: bool = False) -> None:
        super().__init__()
        self.problems: Counter[str] = Counter()
        self.copied_bytes = 0
        """Between host and device, beside the computation."""
        self.num_spins = 0
        """How often the host waited for an event in a loop, which needs a core."""
        self.host = self._main = _Actor(self, "main", is_host=True)
        self._worker = _Actor(self, "worker", is_host=True)
        self.stream = self._computation = _Actor(self, "computation")
        self._is_late = is_late
        self._waiting: list[tuple[Callable[[], None], _Done, Clock]] = []
        self._storages: dict[int, tuple[weakref.ref[UntypedStorage], _Memory]] = {}
        self._locked: dict[int, _Memory] = {}  # pages, by their address
        self._num_streams = 0

    @property
    def device_bytes(self) -> int:
        """Bytes of all memory of the device that is alive."""
        alive = {id(memory): memory for reference, memory in self._storages.values() if reference()}
        return sum(m.end - m.start for m in alive.values() if not m.is_host)

    @contextmanager
    def running(self, piece_bytes: int = 8192, held_bytes: int = 40_000) -> Iterator["Races"]:
        """Let the CPU count as a GPU with streams, and copies go in small pieces.

        Fails if there is any problem.
        """
        lock = HostMemory.lock
        runtime = SimpleNamespace(cudaHostRegister=self._lock, cudaHostUnregister=self._unlock)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "Stream", self._class_of_streams())
            patch.setattr(torch.cuda, "Event", self._class_of_events())
            patch.setattr(torch.cuda, "current_stream", lambda *_: self.stream)
            patch.setattr(torch.cuda, "stream", self._in_stream)
            patch.setattr(torch.cuda, "cudart", lambda: runtime)
            patch.setattr(HostWorker, "submit", lambda _, work: self._submit(work))
            patch.setattr(
                HostMemory, "lock", lambda memory, *_: lock(memory)
            )  # for no other device
            for module in (copies, held_gradients, host_table, kernel):
                patch.setattr(module, "on_cuda", lambda _: True)
            patch.setattr(copies, "_PIECE_BYTES", piece_bytes)
            patch.setattr(copies, "_MAX_HELD_BYTES", held_bytes)
            with self:
                yield self
                self.work_until(None)
            self._storages.clear()  # what is freed from now on is nobody's
        assert not self.problems, "\n".join(f"{n} x {text}" for text, n in self.problems.items())

    # Classes, as somebody may import meanwhile what has them in its annotations.
    def _class_of_streams(races) -> type[_Actor]:  # noqa: N805
        class Stream(_Actor):
            def __init__(self, *_: object, **__: object) -> None:
                races._num_streams += 1
                super().__init__(races, f"stream {races._num_streams}")

        return Stream

    def _class_of_events(races) -> type[_Event]:  # noqa: N805
        class Event(_Event):
            def __init__(self, *, blocking: bool = False, **_: object) -> None:
                super().__init__(races, blocking=blocking)

        return Event

    @contextmanager
    def _in_stream(self, stream: _Actor) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def _submit(self, work: Callable[[], None]) -> "Future[None]":
        done = _Done(self)
        self._waiting.append((work, done, self.host.clock.copy()))
        if not self._is_late:
            self.work_until(done)
        return done

    def work_until(self, last: _Done | None) -> None:
        """Do what was submitted, up to something, as a thread would."""
        if last is not None and all(done is not last for _, done, _ in self._waiting):
            return
        is_done = False
        while self._waiting and not is_done:
            work, done, clock = self._waiting.pop(0)
            before = self.host, self.stream
            self.host, self.stream = self._worker, self._computation
            self._worker.clock |= clock
            _work_as_in_a_thread(work, done)
            self._worker.tick()
            done.clock = self._worker.clock.copy()
            self.host, self.stream = before
            is_done = done is last

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads, writes = _operands(func, args, kwargs)
        result = func(*args, **kwargs)
        known = {_key(tensor) for tensor in (*reads, *writes)}
        made = [tensor for tensor in _tensors(result) if _key(tensor) not in known]
        if func in _ALLOCATIONS:
            reads = []
        if made or writes or func in _READ_BY_THE_HOST:  # otherwise, a view
            is_async = func is aten.copy_.default and args[2:] == (True,)
            self._note_accesses(func, reads, writes, made, is_async=is_async)
        return result

    def _note_accesses(
        self, what: Any, reads: _Tensors, writes: _Tensors, made: _Tensors, *, is_async: bool
    ) -> None:
        on_host = [self._find(tensor).is_host for tensor in (*reads, *writes)]
        here = all(on_host) if on_host else category_in_context() == HOST
        here = here or self.host is self._worker
        for tensor in made:
            self._find(tensor, here=here)
        actor = self.host if here else self.stream
        actor.tick()
        for tensor in reads:
            self._touch(tensor, actor, what, writes=False)
        for tensor in (*writes, *made):
            self._touch(tensor, actor, what, writes=True)
        crosses = not here and any(on_host)
        if crosses and is_async:
            self.copied_bytes += writes[0].nbytes * (actor is not self._computation)
        elif crosses or what in _READ_BY_THE_HOST:
            self.host.clock |= actor.clock

    def _lock(self, address: int, num_bytes: int, _: int) -> int:
        made = self._locked[address] = _Memory(True, self.stream, address, address + num_bytes)
        known = self._storages.items()
        for key in [k for k, (_, m) in known if made.start <= m.start < made.end]:
            del self._storages[key]
        return 0

    # When pages are unlocked, their memory goes. What is not locked, torch guards itself, or copies
    # of it wait for the device.
    def _unlock(self, address: int) -> int:
        memory = self._locked.pop(address)
        for old in memory.accesses.values():
            if not old.is_known_by(self.host.clock):
                self._note(memory, "freed", old)
        return 0

    def _find(self, tensor: Tensor, *, here: bool = False) -> _Memory:
        storage = tensor.untyped_storage()
        key, start = storage._cdata, storage.data_ptr()
        reference, found = self._storages.get(key, (None, None))
        if reference is None or found is None or reference() is not storage:
            pages = (m for m in self._locked.values() if m.start <= start < m.end)
            found = next(pages, None) or _Memory(here, self.stream, start, start + storage.nbytes())
            free = functools.partial(self._free, key, found)
            self._storages[key] = weakref.ref(storage, free), found
        found.is_host = found.is_host or is_host(storage)
        return found

    def _touch(self, tensor: Tensor, actor: _Actor, what: Any, *, writes: bool) -> None:
        if not tensor.numel() or tensor.layout is not torch.strided:
            return
        memory, start = self._find(tensor), tensor.data_ptr()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        length = sum((size - 1) * stride for size, stride in steps) + 1
        end = start + length * tensor.element_size()
        new = _Access(start, end, actor, actor.clock[actor.name], writes, what, _place())
        for old in memory.accesses.values():
            overlaps = old.start < end and start < old.end
            if overlaps and (writes or old.writes) and not old.is_known_by(actor.clock):
                self._note(memory, "written" if writes else "read", old, new)
        memory.accesses[start, end, actor.name, writes] = new

    def _free(self, key: int, memory: _Memory, _: object) -> None:
        if self._storages.get(key, (None, None))[1] is not memory:
            return
        del self._storages[key]
        if memory.is_host:
            return
        # What is allocated next is used after what the stream of the memory waits for.
        known = memory.stream.clock | self.host.clock
        for old in memory.accesses.values():
            if old.actor is not memory.stream and not old.is_known_by(known):
                self._note(memory, "freed", old)

    def _note(self, memory: _Memory, what: str, old: _Access, new: _Access | None = None) -> None:
        kind = "host" if memory.is_host else "device"
        now = _place() if new is None else str(new)
        self.problems[f"{kind} memory is {what} too early, after {old}: {now}"] += 1


# Whoever waits may be in autocast, or in inference mode.
def _work_as_in_a_thread(work: Callable[[], None], done: _Done) -> None:
    if not done.set_running_or_notify_cancel():
        return
    autocast = torch.autocast("cpu", enabled=False)
    with torch.inference_mode(mode=False), torch.no_grad(), autocast, host_copies():
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(values: Any) -> list[Tensor]:
    """Return those that have memory."""
    several = values if isinstance(values, (list, tuple)) else [values]
    tensors = [each for each in several if isinstance(each, Tensor)]
    return [each for each in tensors if not each.is_meta and not is_fake(each)]


def _operands(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return what an operator reads, and what it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_written else reads).extend(_tensors(value))
    return reads, writes


def _place() -> str:
    """Return the innermost lines of the product that run."""
    found: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        if "/lightning_memsave/" in name:
            found.append(f"{name.rpartition('/')[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "a test"
