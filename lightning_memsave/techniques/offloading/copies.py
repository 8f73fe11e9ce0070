"""Copies between device and host, on CUDA beside the computation."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.core.memory import host_copies, is_fake, mark_as_host, on_cuda
from lightning_memsave.techniques.offloading.host_memory import HostMemory
from lightning_memsave.techniques.offloading.host_worker import HostWorker, wait_for

_MAX_HELD_BYTES = 2**25
_PIECE_BYTES = 2**24
_NUM_PIECES = 4


def _nothing_to_wait_for() -> None:
    pass


class Copies:
    """Copies between the host and a device without streams, done when they are asked for.

    Args:
        worker: What works on the host beside the computation.
    """

    def __init__(self, worker: HostWorker) -> None:
        self._worker = worker

    def to_device(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
        """Start to copy tensors to the device.

        Args:
            targets: On the device; what is computed there until now may still read them.
            sources: On the host; unchanged until everything computed with the copies is done.

        Returns:
            A function that lets everything that is computed next on the device wait for the copies.
        """
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return _nothing_to_wait_for

    def to_host(self, target: Tensor, source: Tensor, *, adds: bool) -> None:
        """Copy a tensor to the host; the result is there after `finish`.

        Args:
            target: On the host.
            source: On the device, not changed by anybody any more.
            adds: Add it to the target, in the target's type.
        """
        with host_copies():
            if adds:
                landed = torch.empty_like(source)
                mark_as_host(landed)
                target.add_(landed.copy_(source))
            else:
                target.copy_(source)

    def finish(self) -> None:
        """Wait until all copies are done."""

    def landing(self) -> Callable[[], None]:
        """Return a function that lets the host's thread wait for what `to_host` has begun."""
        self.finish()
        return _nothing_to_wait_for

    def send_to_host(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Start to copy tensors to the host, as they are.

        Args:
            targets: On the host, of the types and the memory order of the sources.
            sources: On the device; the caller holds them until later computations wait.

        Returns:
            A function that lets everything that is computed next on the device wait for the copies,
            also copies back.
        """
        with host_copies():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        return _nothing_to_wait_for

    def synchronize(self) -> None:
        """Wait on the host until the device has done all copies."""


@dataclass(frozen=True)
class _Held:
    """A device tensor that a copy reads."""

    tensor: Tensor
    event: Any = None


class StreamCopies(Copies):
    """Copies on streams of their own, which exist as long as this object.

    A tensor that is copied to the host stays alive until later computations wait for the copy, as
    its memory may be reused then. At most 32 MiB and one tensor wait at a time.

    Args:
        worker: What works on the host beside the computation.
        memory: Page-locked host memory.
        device: The CUDA device; ``None`` for fake tensors, where only the memory matters.
    """

    def __init__(self, worker: HostWorker, memory: HostMemory, device: torch.device | None) -> None:
        super().__init__(worker)
        self._device = device
        self._memory = memory
        self._held: list[_Held] = []
        self._landings: list[Future[None]] = []
        self._pieces: list[tuple[Tensor, Future[None] | None]] = []
        if device is not None:
            self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def to_device(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
        """Start to copy tensors to the device."""
        if self._device is None:
            return super().to_device(targets, sources)
        return self._run_on(self._up, targets, sources)

    def to_host(self, target: Tensor, source: Tensor, *, adds: bool) -> None:
        """Copy a tensor to the host; the result is there after `finish`."""
        self._let_go(source.nbytes)
        event = None
        if self._device is None:
            super().to_host(target, source, adds=adds)
        else:
            event = self._run_down(target, source, adds=adds)
        self._held.append(_Held(source, event))

    def finish(self) -> None:
        """Wait until all copies are done."""
        for held in self._held:
            if held.event is not None:
                held.event.synchronize()
        self._held.clear()
        wait_for(self._landings)

    # The device's memory stays as it is. Pieces land in the host's thread, before what comes next.
    def landing(self) -> Callable[[], None]:
        """Return a function that lets the host's thread wait for what `to_host` has begun."""
        if self._device is None:
            return _nothing_to_wait_for
        event = _record(self._down)
        return event.synchronize  # type: ignore[no-any-return]

    def send_to_host(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Start to copy tensors to the host, as they are."""
        if self._device is None:
            return super().send_to_host(targets, sources)
        return self._run_on(self._down, targets, sources)

    def synchronize(self) -> None:
        """Wait on the host until the device has done all copies."""
        if self._device is not None:
            for stream in (self._up, self._down):
                _record(stream).synchronize()

    def _let_go(self, num_bytes: int) -> None:
        while self._held and num_bytes + sum(h.tensor.nbytes for h in self._held) > _MAX_HELD_BYTES:
            oldest = self._held.pop(0)
            if oldest.event is not None:
                torch.cuda.current_stream(self._device).wait_event(oldest.event)

    def _run_on(
        self, stream: Any, targets: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> Callable[[], None]:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        event = stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)

    def _run_down(self, target: Tensor, source: Tensor, *, adds: bool) -> Any:
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        is_plain = source.stride() == target.stride() and source.dtype == target.dtype
        with torch.cuda.stream(self._down):
            if is_plain and not adds:
                target.copy_(source, non_blocking=True)
            else:
                self._land(target, source, adds=adds)
        return _record(self._down)

    # Through small pieces of page-locked memory, as the host has to convert or to add.
    def _land(self, target: Tensor, source: Tensor, *, adds: bool) -> None:
        if source.stride() != target.stride():
            source = torch.empty_strided(
                target.shape, target.stride(), dtype=source.dtype, device=source.device
            ).copy_(source)
        size = _PIECE_BYTES // source.element_size()
        flat_source, flat_target = (
            tensor.as_strided((tensor.numel(),), (1,)) for tensor in (source, target)
        )
        for part, into in zip(flat_source.split(size), flat_target.split(size), strict=True):
            memory = self._next_piece()
            piece = memory[: part.nbytes].view(part.dtype)
            piece.copy_(part, non_blocking=True)
            event = _record(self._down)

            def land(into: Tensor = into, piece: Tensor = piece, event: Any = event) -> None:
                event.synchronize()
                if adds:
                    into.add_(piece.to(into.dtype))
                else:
                    into.copy_(piece)

            landing = self._worker.submit(land)
            self._landings.append(landing)
            self._pieces.append((memory, landing))

    def _next_piece(self) -> Tensor:
        if len(self._pieces) < _NUM_PIECES:
            like = torch.empty(_PIECE_BYTES, dtype=torch.uint8, device="meta")
            return self._memory.tensors_like([like])[0]
        memory, landing = self._pieces.pop(0)
        if landing is not None:
            landing.result()
        return memory


# A host that waits for another event would spin, and take a core from the updates.
def _record(stream: Any) -> Any:
    return stream.record_event(torch.cuda.Event(blocking=True))


def copies_for(tensor: Tensor, worker: HostWorker, memory: HostMemory) -> Copies:
    """Make what copies between the host and the device of a tensor.

    Args:
        tensor: Any tensor of the device.
        worker: What works on the host beside the computation.
        memory: Host memory; its pages are locked for CUDA.

    Returns:
        Copies with streams for CUDA.
    """
    if not on_cuda(tensor):
        return Copies(worker)
    if is_fake(tensor):
        return StreamCopies(worker, memory, None)
    worker.use_all_cores()  # pragma: no cover (gpu)
    worker.device = tensor.device  # pragma: no cover (gpu)
    memory.lock(tensor.device)  # pragma: no cover (gpu)
    return StreamCopies(worker, memory, tensor.device)  # pragma: no cover (gpu)
