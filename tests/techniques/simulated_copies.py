"""Copies between host and device that take their time, simulated on the CPU.

What CUDA does beside the computation, and shows as wrong numbers now and then, shows here each
time: a copy happens late, memory that waits for a copy holds NaN, and memory that was given back
before its copy is noticed.
"""

import random
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_memsave.core.memory import host_copies
from lightning_memsave.techniques.offloading.copies import Copies
from lightning_memsave.techniques.offloading.host_worker import HostWorker

_NAN_BYTE = 0xFF  # a NaN of each floating-point type, and a large number of integers


class SimulatedCopies(Copies):
    """Copies in two lanes, up and down, each in its own order.

    A copy is done when somebody waits for it or for a later one of its lane; with a seed, at some
    moment between its start and that. Waiting for one lane does not make the other one go on. What
    is computed is done at once.

    Args:
        worker: As of all copies.
        seed: For the moments; ``None`` for the last possible one.
    """

    def __init__(self, worker: HostWorker, seed: int | None = None) -> None:
        super().__init__(worker)
        self.problems: list[str] = []
        """What was given back before a copy of it was done."""
        self.num_started = 0
        self._random = None if seed is None else random.Random(seed)
        self._up: list[Callable[[], None]] = []
        self._down: list[Callable[[], None]] = []
        self._true: dict[int, tuple[Tensor, list[None]]] = {}

    @override
    def to_device(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
        return self._start(self._up, targets, sources, "on the way up")

    @override
    def send_to_host(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> Callable[[], None]:
        return self._start(self._down, targets, sources, "on the way down")

    @override
    def to_host(self, target: Tensor, source: Tensor, *, adds: bool) -> None:
        with torch.no_grad(), host_copies():
            key = target.data_ptr()
            value, waiting = self._true.setdefault(key, (target.clone(), []))
            waiting.append(None)
            _spoil(target)

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
        self._go_on()

    @override
    def finish(self) -> None:
        _run(self._down)

    @override
    def synchronize(self) -> None:
        _run(self._down)
        _run(self._up)

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
            _spoil(target)
        pairs = [(_Place(t), _Place(s)) for t, s in zip(targets, sources, strict=True)]

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


class _Place:
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
def _spoil(tensor: Tensor) -> None:
    with torch.no_grad():
        num_bytes = tensor.nbytes
        flat = tensor.data.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        assert flat.numel() == num_bytes
        flat.fill_(_NAN_BYTE)
