"""Copies between device and host, on CUDA beside the computation."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_memsave.core.memory import host_copies, is_fake, mark_as_host, on_cuda
from lightning_memsave.techniques.flat_memory import (
    aligned,
    empty_like_all,
    in_order,
    joined,
    tensor_in,
)
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.offloading.host_worker import HostWorker, wait_for

_MAX_HELD_BYTES = 2**25
_PIECE_BYTES = 2**24
_NUM_PIECES = 4


def nothing_to_wait_for() -> None:
    pass


class Copies:
    """Copies between the host and a device without streams, done when they are asked for."""

    def allocate(
        self, forms: Sequence[Tensor], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> list[Tensor]:
        """Allocate memory on the device for tensors that are copied together."""
        pairs = zip(forms, dtypes, strict=True)
        return [torch.empty_like(form, dtype=dtype, device=device) for form, dtype in pairs]

    def to_device(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
        """Start to copy tensors to the device."""
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return nothing_to_wait_for

    def to_host(self, target: Tensor, source: Tensor, *, adds: bool) -> None:
        """Copy a tensor to the host; the result is there after `finish`."""
        with host_copies():
            if adds:
                landed = torch.empty_like(source)
                mark_as_host(landed)
                target.add_(landed.copy_(source))
            else:
                target.copy_(source)

    def begin_group(self, group: object) -> None:
        """Note to which tensors, such as the gradients of a block, the next ones belong."""

    def finish(self) -> None:
        """Wait until all copies are done."""

    def land(self) -> None:
        """Wait until what `to_host` copies as it is has come."""

    def let_go(self) -> None:
        """Let go of what `to_host` copies, without a wait of the host."""

    def landing(self) -> Callable[[], None]:
        """Return a function that lets the host's thread wait for what `to_host` has begun."""
        return nothing_to_wait_for

    def send_to_host(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Start to copy tensors to the host, as they are."""
        with host_copies():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        return nothing_to_wait_for

    def synchronize(self) -> None:
        """Wait on the host until the device has done all copies."""


class _Moving(NamedTuple):
    """A tensor of the device that waits for others, to go to the host with them."""

    target: Tensor
    source: Tensor
    adds: bool

    @property
    def is_plain(self) -> bool:
        """Whether the host has nothing to compute."""
        return not self.adds and self.source.dtype == self.target.dtype


class FakeEvent:
    """The event of a copy of fake tensors, which is done when it has begun."""

    def synchronize(self) -> None:
        """Wait for it, as the host would for that of a GPU."""


class StreamCopies(Copies):
    """Copies on streams of their own, which exist as long as this object.

    Tensors that lie one behind the other are copied at once. Small ones on their way to the host
    wait for others of their group, up to 16 MiB, and are put together on the device. What is copied
    to the host stays alive until later computations wait for the copy, as its memory may be reused
    then: at most 32 MiB and one tensor at a time.

    The host waits only before it reads what has landed, or changes what may still be read, and one
    wait is for all copies before it.
    """

    def __init__(self, worker: HostWorker, memory: HostMemory, device: torch.device | None) -> None:
        self._worker = worker
        self._device = device
        self._memory = memory
        self._waiting: list[_Moving] = []
        self._group = 0
        self._held: list[tuple[Tensor, Any]] = []  # what copies read, and their events
        self._landings: list[Future[None]] = []
        self._pieces: list[tuple[Tensor, Future[None]]] = []
        # Events of the last copies, as long as the host does not know that they are done.
        self._last_up: Any = None
        self._last_down: Any = None
        # The last copy up for which the computation waits, now and when the last one down began.
        self._awaited: Any = None
        self._awaited_before: Any = None
        self._up, self._down = (
            None if device is None else torch.cuda.Stream(device) for _ in range(2)
        )

    def allocate(
        self, forms: Sequence[Tensor], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> list[Tensor]:
        return empty_like_all(forms, dtypes, device)[1]

    def to_device(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
        event = self._last_up = self._run_on(self._up, targets, sources)

        def wait() -> None:
            self._let_computation_wait(event)
            self._awaited = event

        return wait

    def to_host(self, target: Tensor, source: Tensor, *, adds: bool) -> None:
        num_bytes = aligned(source.nbytes)
        waiting_bytes = sum(aligned(each.source.nbytes) for each in self._waiting)
        if waiting_bytes + num_bytes > _PIECE_BYTES:
            self._send_waiting()
            waiting_bytes = 0
        if num_bytes > _PIECE_BYTES:
            self._let_go(source.nbytes)
            self._send_alone(_Moving(target, source, adds))
        else:
            self._let_go(2 * (waiting_bytes + num_bytes))  # again when they are put together
            self._waiting.append(_Moving(target, source, adds))

    # Putting together needs the memory twice: not of several blocks at once.
    def begin_group(self, group: object) -> None:
        if id(group) != self._group:
            self._send_waiting()
            self._group = id(group)

    def land(self) -> None:
        self._send_waiting()
        self._wait_for_down()

    def finish(self) -> None:
        self.land()
        self._held.clear()
        wait_for(self._landings)

    def let_go(self) -> None:
        self._send_waiting()
        self._let_go(_MAX_HELD_BYTES)
        landed = [*takewhile(Future.done, self._landings)]
        del self._landings[: len(landed)]
        wait_for(landed)  # raises what they have raised

    # The device's memory stays as it is. Pieces land in the host's thread, before what comes next.
    def landing(self) -> Callable[[], None]:
        self._send_waiting()
        event = self._last_down
        return nothing_to_wait_for if event is None else event.synchronize

    def send_to_host(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> Callable[[], None]:
        event = self._run_down(targets, sources)
        return lambda: self._let_computation_wait(event)

    def synchronize(self) -> None:
        self.land()
        if self._last_up is not None:
            self._last_up.synchronize()
            self._last_up = None

    # Copies up for which the computation had waited before are done, too.
    def _wait_for_down(self) -> None:
        if self._last_down is None:
            return
        self._last_down.synchronize()
        self._last_down = None
        if self._last_up is self._awaited_before:
            self._last_up = None

    def _let_go(self, num_bytes: int) -> None:
        while self._held and num_bytes + sum(t.nbytes for t, _ in self._held) > _MAX_HELD_BYTES:
            _, event = self._held.pop(0)
            self._let_computation_wait(event)

    def _let_computation_wait(self, event: Any) -> None:
        if self._device is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _run_on(self, stream: Any, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
        pairs = joined(targets, sources)
        if self._device is None:
            for target, source in pairs:
                target.copy_(source)
            return FakeEvent()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        # A host that waits for another event would spin, and take a core from the updates.
        return stream.record_event(torch.cuda.Event(blocking=True))

    def _run_down(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
        self._last_down = self._run_on(self._down, targets, sources)
        self._awaited_before = self._awaited
        return self._last_down

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        plain = [each for each in waiting if each.is_plain]
        self._send([plain[index] for index in in_order([each.target for each in plain])])
        self._send([each for each in waiting if not each.is_plain])

    def _send(self, moving: Sequence[_Moving]) -> None:
        if len(moving) < 2:
            for each in moving:
                self._send_alone(each)
            return
        forms, sources = [each.target for each in moving], [each.source for each in moving]
        dtypes = [source.dtype for source in sources]
        piece, together = empty_like_all(forms, dtypes, sources[0].device)
        for dtype in dict.fromkeys(dtypes):
            own = [index for index, each in enumerate(dtypes) if each == dtype]
            torch._foreach_copy_([together[i] for i in own], [sources[i] for i in own])
        if moving[0].is_plain:
            event = self._run_down(forms, together)
        else:
            event = self._land_together(piece, moving, together)
        self._held.append((piece, event))

    def _send_alone(self, moving: _Moving) -> None:
        target, source, adds = moving
        if source.stride() != target.stride():
            source = empty_like_all([target], [source.dtype], source.device)[1][0].copy_(source)
        if moving.is_plain:
            event = self._run_down([target], [source])
        else:
            event = self._land_alone(target, source, adds=adds)
        self._held.append((source, event))

    # Through small pieces of page-locked memory, as the host has to convert or to add.
    def _land_alone(self, target: Tensor, source: Tensor, *, adds: bool) -> Any:
        size = _PIECE_BYTES // source.element_size()
        flat_source, flat_target = (
            tensor.as_strided((tensor.numel(),), (1,)) for tensor in (source, target)
        )
        for part, into in zip(flat_source.split(size), flat_target.split(size), strict=True):
            memory = self._next_piece()
            landed = memory[: part.nbytes].view(part.dtype)
            self._land(memory, landed, part, [_Moving(into, landed, adds)])
        return self._last_down

    def _land_together(
        self, piece: Tensor, moving: Sequence[_Moving], together: Sequence[Tensor]
    ) -> Any:
        memory = self._next_piece()
        landed = []
        for each, source in zip(moving, together, strict=True):
            start = int(source.storage_offset()) * source.element_size()
            there = tensor_in(memory, start, source, source.dtype)
            landed.append(_Moving(each.target, there, each.adds))
        self._land(memory, memory[: piece.nbytes], piece, landed)
        return self._last_down

    def _land(
        self, memory: Tensor, into: Tensor, source: Tensor, landed: Sequence[_Moving]
    ) -> None:
        event = self._run_down([into], [source])

        def land() -> None:
            event.synchronize()
            for each in landed:
                if each.adds:
                    each.target.add_(each.source.to(each.target.dtype))
                else:
                    each.target.copy_(each.source)

        landing = self._worker.submit(land)
        self._landings.append(landing)
        self._pieces.append((memory, landing))

    def _next_piece(self) -> Tensor:
        if len(self._pieces) < _NUM_PIECES:
            like = torch.empty(_PIECE_BYTES, dtype=torch.uint8, device="meta")
            return self._memory.tensors_like([like])[0]
        memory, landing = self._pieces.pop(0)
        landing.result()
        return memory


def copies_for(tensor: Tensor, worker: HostWorker, memory: HostMemory) -> Copies:
    if not on_cuda(tensor):
        return Copies()
    if is_fake(tensor):
        return StreamCopies(worker, memory, None)
    worker.use_all_cores()  # pragma: no cover (gpu)
    worker.device = tensor.device  # pragma: no cover (gpu)
    memory.lock(tensor.device)  # pragma: no cover (gpu)
    return StreamCopies(worker, memory, tensor.device)  # pragma: no cover (gpu)
