"""Write checkpoints as ``torch.save`` does, one storage after the other, and map them to load."""

import copy
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, BinaryIO

import torch
from torch import Tensor

PIECE_BYTES = 2**26
"""The most that is given to a file at once: files on the network buffer what they are given."""
_IS_STREAMING: ContextVar[bool] = ContextVar("is_streaming", default=False)


class LateStorage(torch.UntypedStorage):
    """Memory of a tensor that is made when it is written to a checkpoint, and freed after that."""

    make: Callable[[], torch.UntypedStorage]

    # `torch.save` calls it for each storage of another device, when it is its turn.
    def cpu(self) -> torch.UntypedStorage:
        """Make the memory."""
        return self.make()


def late_storage(num_bytes: int, make: Callable[[], Tensor]) -> LateStorage:
    kind: Any = LateStorage  # untyped in torch
    storage: LateStorage = kind(num_bytes, device="meta")
    storage.make = lambda: make().untyped_storage()
    return storage


def reduced(form: Tensor, storage: LateStorage) -> Any:
    """Return what a pickle holds of a plain tensor of the CPU, with memory that is made later."""
    template = torch.empty(0, dtype=form.dtype)
    rebuild, (_, _, _, _, *rest) = template.__reduce_ex__(2)
    typed: Any = torch.storage.TypedStorage(wrap_storage=storage, dtype=form.dtype, _internal=True)
    typed._fake_device = "cpu"  # the same object as of all others, so that the bytes are the same
    return rebuild, (typed, 0, tuple(form.size()), form.stride(), *rest)


def is_streaming() -> bool:
    """Return whether `write` runs, so that a pickle goes to its file."""
    return _IS_STREAMING.get()


class _Pieces:
    """A file that is written in pieces, and keeps the error that torch reports in other words."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            for start in range(0, len(data), PIECE_BYTES):
                self._file.write(data[start : start + PIECE_BYTES])
        except OSError as error:
            self.error = self.error or error
            raise
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def write(checkpoint: Any, file: BinaryIO) -> None:
    """Write the bytes that ``torch.save`` writes, without a copy of them in memory."""
    pieces = _Pieces(file)
    token = _IS_STREAMING.set(True)
    try:
        torch.save(checkpoint, pieces)  # type: ignore[arg-type] # it needs no more of a file
    except Exception:
        if pieces.error is not None:
            raise pieces.error from None
        raise
    finally:
        _IS_STREAMING.reset(token)


def load_mapped(path: str, **options: Any) -> dict[str, Any]:
    """Load a checkpoint whose weights stay in the file until something reads them.

    Only its ``state_dict``, which is copied into a module. What else there is may be kept for the
    rest of the run, and the file be overwritten meanwhile.
    """
    found: dict[str, Any] = torch.load(path, mmap=True, **options)
    memo: dict[int, Any] = {}
    return {k: v if k == "state_dict" else copy.deepcopy(v, memo) for k, v in found.items()}
