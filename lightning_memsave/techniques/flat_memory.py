"""Tensors that lie one behind the other in one piece of memory, so that they are copied at once."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT_BYTES = 512
"""Where tensors begin, on both sides: as torch's allocator has it on CUDA."""
_PIECE = "_memsave_piece"


def aligned(num_bytes: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """Round a size up to where the next tensor may begin."""
    return -(-num_bytes // alignment) * alignment


def note_piece(tensor: Tensor, piece: Tensor, offset: int) -> None:
    """Note that the storage of a tensor is a part of a piece of memory, from an offset in bytes."""
    setattr(tensor.untyped_storage(), _PIECE, (piece, offset))


def is_in_piece(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and hasattr(tensor.untyped_storage(), _PIECE)


class _Place(NamedTuple):
    """Where a tensor is: in a piece of memory, or only in its storage; in bytes."""

    key: int
    piece: Tensor | None
    start: int
    end: int

    def follows(self, other: "_Place") -> bool:
        """Return whether there is at most a gap for the alignment after another one."""
        return self.key == other.key and 0 <= self.start - other.end < ALIGNMENT_BYTES


def _place_of(tensor: Tensor) -> _Place:
    storage: Any = tensor.untyped_storage()
    piece, offset = getattr(storage, _PIECE, (None, 0))
    key = storage._cdata if piece is None else piece.untyped_storage()._cdata
    start = offset + int(tensor.storage_offset()) * tensor.element_size()
    return _Place(key, piece, start, start + tensor.nbytes)


def in_order(tensors: Sequence[Tensor]) -> list[int]:
    places = [_place_of(tensor) for tensor in tensors]
    return sorted(range(len(places)), key=lambda index: (places[index].key, places[index].start))


def empty_like_all(
    forms: Sequence[Tensor], dtypes: Sequence[torch.dtype], device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    pairs = list(zip(forms, dtypes, strict=True))
    are_same = all(form.dtype == dtype for form, dtype in pairs)
    starts, end, before = [], 0, None
    for form, dtype in pairs:
        place = _place_of(form)
        is_next = before is not None and are_same and place.piece is not None
        if before is not None and is_next and place.follows(before):
            start = end + place.start - before.end
        else:
            start = aligned(end)
        starts.append(start)
        end, before = start + form.numel() * dtype.itemsize, place
    piece = torch.empty(aligned(end), dtype=torch.uint8, device=device)
    views = {dtype: piece.view(dtype) for dtype in {*dtypes}}
    return piece, [
        views[dtype].as_strided(form.shape, form.stride(), start // dtype.itemsize)
        for start, (form, dtype) in zip(starts, pairs, strict=True)
    ]


def tensor_in(piece: Tensor, start: int, form: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor like a dense one, but of another type, in a piece of memory."""
    end = start + form.numel() * dtype.itemsize
    return piece[start:end].view(dtype).as_strided(form.shape, form.stride())


def joined(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Join tensors that lie one behind the other on both sides, with the gaps between them."""
    runs: list[list[tuple[Tensor, Tensor, _Place, _Place]]] = []
    for target, source in zip(targets, sources, strict=True):
        into, out_of = _place_of(target), _place_of(source)
        if runs:
            *_, last_into, last_out_of = runs[-1][-1]
            is_next = into.follows(last_into) and out_of.follows(last_out_of)
            if is_next and into.start - last_into.start == out_of.start - last_out_of.start:
                runs[-1].append((target, source, into, out_of))
                continue
        runs.append([(target, source, into, out_of)])
    return [
        (_all_bytes([(t, p) for t, _, p, _ in run]), _all_bytes([(s, p) for _, s, _, p in run]))
        for run in runs
    ]


def _all_bytes(run: Sequence[tuple[Tensor, _Place]]) -> Tensor:
    tensor, place = run[0]
    if len(run) == 1:
        return tensor
    end = run[-1][1].end
    if place.piece is not None:
        return place.piece[place.start : end]
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return flat.as_strided((end - place.start,), (1,), place.start)


def num_owners(tensors: Sequence[Tensor]) -> int:
    count = torch._C._storage_Use_Count
    return sum(count(tensor.untyped_storage()._cdata) for tensor in tensors)


def shares_memory(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
