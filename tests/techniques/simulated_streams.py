"""Streams of a GPU in which copies happen late, for the code that is written for real ones."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memsave.core.memory import host_copies
from lightning_memsave.techniques.offloading import copies
from tests.techniques.simulated_copies import Place, spoil


class Streams:
    """Stands in for the streams of ``torch.cuda``.

    A copy in a stream is done when somebody waits for it or for a later one there; with a seed, at
    some moment between its start and that. Until then its target holds NaN. What is computed is
    done at once.

    Args:
        seed: For the moments; ``None`` for the last possible one.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.problems: list[str] = []
        """What was given back before a copy of it was done."""
        self.num_copies = 0
        self.random = None if seed is None else random.Random(seed)

    @contextmanager
    def running(self, piece_bytes: int = 1000, held_bytes: int = 50_000) -> Iterator[None]:
        """Replace those of ``torch.cuda``, and let copies go in small pieces."""
        computing = _Stream(self)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "Stream", lambda _: _Stream(self))
            patch.setattr(torch.cuda, "Event", lambda *, blocking: blocking)
            patch.setattr(torch.cuda, "current_stream", lambda _: computing)
            patch.setattr(torch.cuda, "stream", lambda stream: _Recording(self, stream))
            patch.setattr(copies, "_PIECE_BYTES", piece_bytes)
            patch.setattr(copies, "_MAX_HELD_BYTES", held_bytes)
            yield


class _Stream:
    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._waiting: list[Any] = []

    def add(self, copy: Callable[[], None]) -> None:
        self._waiting.append(copy)
        chance = self._streams.random
        for _ in range(0 if chance is None else chance.randint(0, len(self._waiting))):
            self._waiting.pop(0)()

    def record_event(self, is_blocking: bool = False) -> "_Event":
        event = _Event(self, is_blocking=is_blocking)
        self._waiting.append(event)
        return event

    def wait_stream(self, other: "_Stream") -> None:
        assert not other._waiting, "what is computed is done at once"

    def wait_event(self, event: "_Event") -> None:
        event.stream.run_until(event)

    def synchronize(self) -> None:
        while self._waiting:
            self._waiting.pop(0)()

    def run_until(self, event: "_Event") -> None:
        while event in self._waiting:
            self._waiting.pop(0)()


class _Event:
    def __init__(self, stream: _Stream, *, is_blocking: bool) -> None:
        self.stream, self._is_blocking = stream, is_blocking

    def __call__(self) -> None:
        """Nothing is left to do when a stream comes to it."""

    def synchronize(self) -> None:
        assert self._is_blocking, "a host that waits for it would spin"
        self.stream.run_until(self)


class _Recording(TorchDispatchMode):
    """Hands copies to a stream, also the memory that was allocated in it."""

    def __init__(self, streams: Streams, stream: _Stream) -> None:
        super().__init__()
        self._streams, self._stream = streams, stream
        self._own: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._copy(args[0], args[1])
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty_strided.default:
            self._own[result.untyped_storage()._cdata] = result
        return result

    def _copy(self, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape
        assert target.dtype is source.dtype, "the bus does not convert"
        self._streams.num_copies += 1
        spoil(target)
        places = [Place(target), Place(source)]
        own = [self._own.get(each.untyped_storage()._cdata) for each in (target, source)]

        def copy() -> None:
            into, found = (place.find() for place in places)
            own.clear()
            if into is None or found is None:
                name = "target" if into is None else "source"
                self._streams.problems.append(f"the {name} of a copy was given back too early")
                return
            with torch.no_grad(), host_copies():
                into.copy_(found)

        self._stream.add(copy)
