"""Update what waits on the host with the device's kernels, tile by tile."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_memsave.core.memory import counted_as, each_part
from lightning_memsave.techniques.flat_memory import aligned, is_in_piece, tensor_in
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.muon import has_momentum, is_of_muon
from lightning_memsave.techniques.offloading.halves import join_weight, split_weight
from lightning_memsave.techniques.offloading.part import Part
from lightning_memsave.techniques.optimizer_kinds import (
    BLOCKSIZE,
    ELEMENTWISE,
    STATE_KEYS,
    STATE_LIKE_WEIGHTS,
    is_low_bit,
    is_made_here,
)
from lightning_memsave.techniques.optimizer_step import allocates_all_state, group_of
from lightning_memsave.techniques.tiled_steps import Values, step_together

MIN_TILE_NUMEL, MAX_TILE_NUMEL = 2**21, 2**22
"""A tile is an eighth of its parameter between these limits. Smaller ones take longer to launch
than to copy; larger ones need more memory, and are no faster on an H200."""
_NUM_SLOTS = 2  # one comes or goes while the other one is updated
_8BIT, _32BIT = 1 + 4 / BLOCKSIZE, 4  # bytes of a moment, with its scales
_BYTES_8BIT, _BYTES_32BIT = 4 + 4 + 2 * _8BIT, 4 + 4 + 2 * _32BIT  # with weight and gradient
_NUM_TEMPORARIES = 4  # as large as the parameter: the most that torch's optimizers allocate
SCALARS = {"step", "mu_product", "eta", "mu"}  # of torch's optimizers, one for each parameter


def is_updated_in_tiles(optimizer: Any, param: Tensor) -> bool:
    """Return whether the device updates a parameter that an optimizer has on the host.

    bitsandbytes' kernels for a CPU are made for tests: 16 cores take 17 to 20 s for a billion
    parameters, the bus of an H200 0.17 s to bring them and their state to the device and back. Muon
    multiplies matrices. And what ``NamedOptimizer`` makes has the bits that it has without
    offloading where tiles have them, too.
    """
    return is_of_muon(optimizer, param) or is_low_bit(optimizer) or _is_elementwise(optimizer)


def _is_elementwise(optimizer: Any) -> bool:
    is_named = type(optimizer) in ELEMENTWISE and STATE_KEYS in vars(optimizer)
    return is_made_here(optimizer) or (is_named and allocates_all_state(optimizer))


def lock_state(state: dict[str, Any], memory: HostMemory) -> None:
    """Move moments and their scales to page-locked memory, unless they are there already."""
    keys = [key for key, value in state.items() if _is_cut(key, value) and not is_in_piece(value)]
    for key, locked in zip(keys, memory.tensors_like([state[key] for key in keys]), strict=True):
        state[key] = locked.copy_(state[key])


class Update(NamedTuple):
    """A parameter on the host, with what stands in for it in the optimizer."""

    stand_in: nn.Parameter
    part: Part
    param: nn.Parameter


class _Slots:
    """Memory on the device to which tensors come together, and from which they go back."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self._memory = [
            torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(_NUM_SLOTS)
        ]
        self._freed: list[Any] = [None] * _NUM_SLOTS
        self._index = 0
        self._up, self._down = (
            torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)
        )
        if self._up is not None:  # the memory may still be used by what was there before
            self._up.wait_stream(torch.cuda.current_stream(device))

    def bring(self, sources: list[Tensor]) -> list[Tensor]:
        self._index = (self._index + 1) % _NUM_SLOTS
        slot, start, found = self._memory[self._index], 0, []
        for source in sources:
            found.append(tensor_in(slot, start, source, source.dtype))
            start += aligned(source.nbytes)
        freed = self._freed[self._index]
        if self._up is not None and freed is not None:
            self._up.wait_event(freed)
        self._copy(self._up, found, sources)
        if self._up is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._up)
        return found

    def send_back(self, targets: list[Tensor], tensors: list[Tensor]) -> None:
        if self._down is not None:
            self._down.wait_stream(torch.cuda.current_stream(self._device))
        self._copy(self._down, targets, tensors)
        if self._down is not None:
            event = torch.cuda.Event(blocking=True)
            self._freed[self._index] = self._down.record_event(event)

    def synchronize(self) -> None:
        event = self._freed[self._index]  # the last one: those before it are of the same stream
        if event is not None:
            event.synchronize()

    # All in one call, without Python's lock, which the thread that launches the step needs.
    def _copy(self, stream: Any, targets: list[Tensor], sources: list[Tensor]) -> None:
        with torch.cuda.stream(stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)


class DeviceTiles:
    """Room on the device for tiles, of which one is updated while others come and go.

    Small parameters share a tile. A matrix of Muon is a tile. What torch's optimizers update is
    updated on another stream than what the device computes meanwhile, so that nobody else gets the
    memory that is kept for their temporaries.
    """

    def __init__(
        self,
        optimizer: Any,
        parts: Mapping[Any, Part],
        device: torch.device,
        *,
        are_narrow: bool,
    ) -> None:
        """Make room for parameters and, if ``are_narrow``, for gradients that are not float32."""
        matrices = [param for param in parts if is_of_muon(optimizer, param)]
        rest = [param for param in parts if not is_of_muon(optimizer, param)]
        self._device, self._known = device, {id(param) for param in parts}
        self._slot_bytes = max(_slot_bytes(optimizer, param) for param in parts)
        self._numel = max((_padded(_tile_numel(optimizer, param)) for param in rest), default=0)
        self._kept_bytes = max(
            (_muon_bytes(optimizer, p, are_narrow + parts[p].is_split(p)) for p in matrices),
            default=0,
        )
        if not is_low_bit(optimizer):
            self._kept_bytes = max(self._kept_bytes, _NUM_TEMPORARIES * 4 * self._numel)
        self._own = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Kept, so that the memory which a step needs does not depend on when an update runs.
        with counted_as("temporary"), torch.inference_mode(mode=False):
            self._slots = _Slots(self._slot_bytes, device)
            are_split = any(parts[param].is_split(param) for param in rest)
            self._values = torch.empty(self._numel * are_split, device=device)
            self._gradient = torch.empty(self._numel * are_narrow, device=device)
        self._are_narrow = are_narrow
        self._tables: dict[int, Tensor] = {}
        self._kept: Tensor | None = None
        self._keep_memory()
        if self._own is not None:  # it may still be used by what was there before
            for stream in (self._own, torch.cuda.default_stream(device)):
                stream.wait_stream(torch.cuda.current_stream(device))

    def has_room_for(self, optimizer: Any, param: Tensor, gradient: Tensor) -> bool:
        """Return whether the room was made for a parameter, unlike one added later."""
        is_wide = self._are_narrow or gradient.dtype is torch.float32
        fits = _slot_bytes(optimizer, param) <= self._slot_bytes
        return id(param) in self._known and is_wide and fits

    def step(self, optimizer: Any, updates: Sequence[Update]) -> None:
        """Update parameters; their new values are on the host after `synchronize`."""
        small: list[_Piece] = []
        for update in updates:
            stand_in, numel = update.stand_in, update.param.numel()
            size, whole = _tile_numel(optimizer, stand_in), _Piece(update, slice(0, numel))
            if is_of_muon(optimizer, stand_in):
                self._step_matrix(optimizer, whole)
            elif size < numel:
                self._step_tiles(optimizer, update, size)
            else:
                if not self._have_room(optimizer, [*small, whole]):
                    self._step_small(optimizer, small)
                    small = []
                small.append(whole)
        if small:
            self._step_small(optimizer, small)

    def synchronize(self) -> None:
        """Wait until all tiles are on the host again."""
        self._slots.synchronize()

    def _have_room(self, optimizer: Any, pieces: Sequence["_Piece"]) -> bool:
        numel = sum(_padded(piece.numel) for piece in pieces)
        num_bytes = sum(_slot_bytes(optimizer, piece.update.stand_in) for piece in pieces)
        return len(pieces) == 1 or (numel <= self._numel and num_bytes <= self._slot_bytes)

    def _step_small(self, optimizer: Any, pieces: Sequence["_Piece"]) -> None:
        # The device's, though the host's thread is here.
        with counted_as("") if is_low_bit(optimizer) else self._with_kept_memory():
            states = self._update(optimizer, pieces)
            for piece, after in zip(pieces, states, strict=True):
                _set_scalars(optimizer.state[piece.update.stand_in], after)

    def _step_tiles(self, optimizer: Any, update: Update, size: int) -> None:
        after: dict[str, Any] = {}

        def step_tile(tile: slice) -> None:
            nonlocal after
            (after,) = self._update(optimizer, [_Piece(update, tile)])

        with counted_as("") if is_low_bit(optimizer) else self._with_kept_memory():
            each_part(update.param, update.param.numel(), size, step_tile)
            _set_scalars(optimizer.state[update.stand_in], after)

    def _step_matrix(self, optimizer: Any, whole: "_Piece") -> None:
        with self._with_kept_memory():
            (after,) = self._update(optimizer, [whole], shape=whole.update.param.shape)
            _set_scalars(optimizer.state[whole.update.stand_in], after)

    @contextlib.contextmanager
    def _with_kept_memory(self) -> Iterator[None]:
        with torch.cuda.stream(self._own), counted_as("temporary"):
            self._kept = None
            try:
                yield
            finally:
                self._keep_memory()

    def _keep_memory(self) -> None:
        with (
            torch.cuda.stream(self._own),
            counted_as("temporary"),
            torch.inference_mode(mode=False),
        ):
            self._kept = torch.empty(self._kept_bytes, dtype=torch.uint8, device=self._device)

    def _update(
        self, optimizer: Any, pieces: Sequence["_Piece"], shape: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """Update pieces that fit one slot; give the states that they have then.

        With a ``shape`` it is a matrix, for which memory is kept.
        """
        sources = [piece.tensors(optimizer) for piece in pieces]
        here = iter(self._slots.bring([tensor for own in sources for tensor in own]))
        targets: list[Tensor] = []
        updated: list[Tensor] = []
        several, halves, start = [], [], 0
        for piece, (_, *own) in zip(pieces, sources, strict=True):
            grad, *found = next(here), *(next(here) for _ in own)
            targets += own
            updated += found
            room = slice(start, start + piece.numel) if shape is None else None
            start += _padded(piece.numel)
            weights, moments = found[: piece.num_weights], found[piece.num_weights :]
            values = self._whole(weights, room)
            halves += [(values, weights[0], weights[1])] if len(weights) > 1 else []
            grad = self._in_float32(grad, room)
            if shape is not None:
                values, grad = values.view(shape), grad.view(shape)
                moments = [m.view(shape) if m.numel() == piece.numel else m for m in moments]
            stand_in = piece.update.stand_in
            group = group_of(optimizer, stand_in)
            are_here = has_scalars_on_device(optimizer, group)
            state = self._state_of(optimizer.state[stand_in], moments, are_here)
            several.append(Values(group, values, grad, state))
        after = step_together(optimizer, several)
        for each in halves:
            split_weight(*each)
        self._slots.send_back(targets, updated)
        return after

    def _whole(self, weights: Sequence[Tensor], room: slice | None) -> Tensor:
        if len(weights) == 1:
            return weights[0]
        return join_weight(weights[0], weights[1], None if room is None else self._values[room])

    def _in_float32(self, grad: Tensor, room: slice | None) -> Tensor:
        if grad.dtype is torch.float32:
            return grad
        return grad.float() if room is None else self._gradient[room].copy_(grad)

    def _state_of(
        self, state: Mapping[str, Any], moments: Sequence[Tensor], are_scalars_here: bool
    ) -> dict[str, Any]:
        keys, found = _moments(state), {}
        for key, value in state.items():
            if key in keys:
                found[key] = moments[keys.index(key)]
            elif not isinstance(value, Tensor):
                found[key] = value
            elif key in SCALARS:  # each tile begins with the same
                device = self._device if are_scalars_here else value.device
                found[key] = value.to(device, copy=True)
            else:
                found[key] = self._table(value)
        return found

    # Tables of 256 values, which all parameters share.
    def _table(self, value: Tensor) -> Tensor:
        key = value.untyped_storage()._cdata
        if key not in self._tables:
            with counted_as("temporary"):
                self._tables[key] = value.to(self._device, copy=True)
        return self._tables[key]


class _Piece(NamedTuple):
    """What of a parameter is updated at a time."""

    update: Update
    tile: slice

    @property
    def numel(self) -> int:
        return int(self.tile.stop - self.tile.start)

    @property
    def num_weights(self) -> int:
        return 1 + self.update.part.is_split(self.update.param)

    def tensors(self, optimizer: Any) -> list[Tensor]:
        """Give the gradient, the weight or its halves, and moments with their scales."""
        stand_in, part, param = self.update
        assert stand_in.grad is not None, "only parameters with a gradient are updated"
        state = optimizer.state[stand_in]
        whole = [stand_in.grad, *part.halves_of(param), *(state[key] for key in _moments(state))]
        return [_cut(tensor.view(-1), self.tile, param.numel()) for tensor in whole]


def _moments(state: Mapping[str, Any]) -> list[str]:
    return [key for key, value in state.items() if _is_cut(key, value)]


def _is_cut(key: str, value: Any) -> bool:
    return isinstance(value, Tensor) and not key.startswith("qmap") and key not in SCALARS


# Of processes that share state, tensors are in their memory.
def _set_scalars(state: dict[str, Any], after: Mapping[str, Any]) -> None:
    for key in SCALARS & state.keys():
        if isinstance(state[key], Tensor):
            state[key].copy_(after[key])
        else:
            state[key] = after[key]


def has_scalars_on_device(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Return whether torch has counts of steps and the like on the device, as on CUDA."""
    is_fused = group.get("fused")
    if is_fused is None and not group.get("foreach"):  # moments in bfloat16 are AdamW's, fused
        is_fused = not getattr(optimizer, STATE_LIKE_WEIGHTS, True)
    return bool(is_fused or group.get("capturable")) or type(optimizer) is torch.optim.ASGD


def _is_8bit(optimizer: Any, param: Tensor) -> bool:
    state = optimizer.state.get(param)
    return "absmax1" in state if state else is_low_bit(optimizer) and optimizer.uses_8bit(param)


def _tile_numel(optimizer: Any, param: Tensor) -> int:
    numel = param.numel()
    if is_of_muon(optimizer, param):
        return numel
    # Tiles must not split a block of 8-bit state.
    share = min(max(numel // 8 // BLOCKSIZE * BLOCKSIZE, MIN_TILE_NUMEL), MAX_TILE_NUMEL)
    if not _is_8bit(optimizer, param):
        share = int(share * _BYTES_8BIT / _BYTES_32BIT) // BLOCKSIZE * BLOCKSIZE
    return min(numel, share)


def _slot_bytes(optimizer: Any, param: Tensor) -> int:
    num_bytes = 4 + 4 + _moment_bytes(optimizer, param)
    return int(_tile_numel(optimizer, param) * num_bytes) + 8 * aligned(1)


def _moment_bytes(optimizer: Any, param: Tensor) -> float:
    """Give the bytes of moments for each number, also before there is state."""
    if is_low_bit(optimizer) or is_of_muon(optimizer, param):
        num_moments = 1 if is_of_muon(optimizer, param) else 2
        return num_moments * (_8BIT if _is_8bit(optimizer, param) else _32BIT)
    states = (state for state in optimizer.state.values() if state and not has_momentum(state))
    state = optimizer.state.get(param) or next(states, None)
    return 2 * _32BIT if state is None else sum(state[k].element_size() for k in _moments(state))


# What torch's Muon allocates beside weight, gradient and momentum: the update in float32, two of it
# in bfloat16 and three square matrices at a time; before it, momentum of 8 bits is made whole.
def _muon_bytes(optimizer: Any, param: Tensor, num_wide: int) -> int:
    num_copies = 1 + num_wide + _is_8bit(optimizer, param)
    num_bytes = param.numel() * (4 * num_copies + 2 * 2) + 3 * 2 * min(param.shape) ** 2
    return num_bytes + 16 * aligned(1)


# Where the next piece may begin in memory for float32.
def _padded(numel: int) -> int:
    return aligned(4 * numel) // 4


def _cut(flat: Tensor, tile: slice, numel: int) -> Tensor:
    if len(flat) == numel:
        return flat[tile]
    return flat[tile.start // BLOCKSIZE : -(-tile.stop // BLOCKSIZE)]
