"""Update what waits on the host with the device's kernels, tile by tile."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave.core.memory import counted_as
from lightning_memsave.techniques.flat_memory import aligned, is_in_piece, tensor_in
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.offloading.part import Part, join_weight, split_weight
from lightning_memsave.techniques.optimizer_kinds import BLOCKSIZE, is_low_bit
from lightning_memsave.techniques.optimizer_step import group_of
from lightning_memsave.techniques.tiled_steps import each_tile, step_values

MIN_TILE_NUMEL, MAX_TILE_NUMEL = 2**21, 2**22
"""A tile is an eighth of its parameter between these limits. Smaller ones take longer to launch
than to copy; larger ones need more memory, and are no faster on an H200."""
_NUM_SLOTS = 2  # one comes or goes while the other one is updated
_BYTES_8BIT = 4 + 4 + 2 * (1 + 4 / BLOCKSIZE)  # weight and gradient, two moments, their scales
_BYTES_32BIT = 4 + 4 + 2 * 4


def is_updated_in_tiles(optimizer: Any) -> bool:
    """Return whether the device updates what an optimizer has on the host.

    bitsandbytes' kernels for a CPU are made for tests: 16 cores take 17 to 20 s for a billion
    parameters, the bus of an H200 0.17 s to bring them and their state to the device and back.
    """
    return is_low_bit(optimizer) and not optimizer.is_paged


def lock_state(state: dict[str, Any], memory: HostMemory) -> None:
    """Move moments and their scales to page-locked memory, unless they are there already."""
    keys = [key for key, value in state.items() if _is_cut(key, value) and not is_in_piece(value)]
    for key, locked in zip(keys, memory.tensors_like([state[key] for key in keys]), strict=True):
        state[key] = locked.copy_(state[key])


class DeviceTiles:
    """Room on the device for tiles, of which one is updated while others come and go."""

    def __init__(self, optimizer: Any, params: Sequence[Tensor], device: torch.device) -> None:
        sizes = [(_tile_numel(p.numel(), is_8bit=optimizer.uses_8bit(p)), p) for p in params]
        needed = [
            numel * (_BYTES_8BIT if optimizer.uses_8bit(p) else _BYTES_32BIT) for numel, p in sizes
        ]
        num_bytes, numel = int(max(needed)) + 8 * aligned(1), max(numel for numel, _ in sizes)
        self._device, self._known = device, {id(param) for param in params}
        # Kept, so that the memory which a step needs does not depend on when an update runs.
        with counted_as("temporary"), torch.inference_mode(mode=False):
            self._slots = [
                torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(_NUM_SLOTS)
            ]
            self._values, self._gradient = torch.empty(2, numel, device=device).unbind()
        self._freed: list[Any] = [None] * _NUM_SLOTS
        self._tables: dict[int, Tensor] = {}
        self._up, self._down = (
            torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)
        )
        if self._up is not None:  # the memory may still be used by what was there before
            for stream in (self._up, torch.cuda.default_stream(device)):
                stream.wait_stream(torch.cuda.current_stream(device))

    def has_room_for(self, param: Tensor) -> bool:
        """Return whether a parameter was there when the room was made, unlike one added later."""
        return id(param) in self._known

    def step(self, optimizer: Optimizer, stand_in: nn.Parameter, part: Part, param: Tensor) -> None:
        """Update one parameter; its new values are on the host after `synchronize`."""
        state, group, grad = optimizer.state[stand_in], group_of(optimizer, stand_in), stand_in.grad
        assert grad is not None, "only parameters with a gradient are updated"
        moments = [key for key, value in state.items() if _is_cut(key, value)]
        rest = {key: self._on_device(state[key]) for key in state.keys() - {*moments}}
        weights = part.halves_of(param)
        flat = [t.view(-1) for t in (grad, *weights, *(state[key] for key in moments))]
        counts = set()

        def step_tile(tile: slice, index: int) -> None:
            sources = [_cut(tensor, tile, param.numel()) for tensor in flat]
            slot = self._bring(sources, index)
            small, *own = slot[: 1 + len(weights)]
            room = slice(len(small))
            values = own[0]
            if len(own) > 1:
                values = join_weight(own[0], own[1], self._values[room])
            full = self._gradient[room].copy_(small)
            before = rest | dict(zip(moments, slot[1 + len(weights) :], strict=True))
            counts.add(step_values(optimizer, group, values, full, before)["step"])
            if len(own) > 1:
                split_weight(values, own[0], own[1])
            self._return(sources[1:], slot[1:], index)

        with counted_as(""):  # the device's, though the host's thread is here
            each_tile(param, _tile_numel(param.numel(), is_8bit="absmax1" in state), step_tile)
        (state["step"],) = counts

    def synchronize(self) -> None:
        """Wait until all tiles are on the host again."""
        for event in self._freed:
            if event is not None:
                event.synchronize()

    def _bring(self, sources: list[Tensor], index: int) -> list[Tensor]:
        slot, start, found = self._slots[index % _NUM_SLOTS], 0, []
        for source in sources:
            found.append(tensor_in(slot, start, source, source.dtype))
            start += aligned(source.nbytes)
        freed = self._freed[index % _NUM_SLOTS]
        if self._up is not None and freed is not None:
            self._up.wait_event(freed)
        self._copy(self._up, found, sources)
        if self._up is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._up)
        return found

    def _return(self, targets: list[Tensor], slot: list[Tensor], index: int) -> None:
        if self._down is not None:
            self._down.wait_stream(torch.cuda.current_stream(self._device))
        self._copy(self._down, targets, slot)
        if self._down is not None:
            event = torch.cuda.Event(blocking=True)
            self._freed[index % _NUM_SLOTS] = self._down.record_event(event)

    # All in one call, without Python's lock, which the thread that launches the step needs.
    def _copy(self, stream: Any, targets: list[Tensor], sources: list[Tensor]) -> None:
        with torch.cuda.stream(stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)

    # Tables of 256 values, which all parameters share.
    def _on_device(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        key = value.untyped_storage()._cdata
        if key not in self._tables:
            with counted_as("temporary"):
                self._tables[key] = value.to(self._device, copy=True)
        return self._tables[key]


def _is_cut(key: str, value: Any) -> bool:
    return isinstance(value, Tensor) and not key.startswith("qmap")


def _tile_numel(numel: int, *, is_8bit: bool) -> int:
    # Tiles must not split a block of 8-bit state.
    share = min(max(numel // 8 // BLOCKSIZE * BLOCKSIZE, MIN_TILE_NUMEL), MAX_TILE_NUMEL)
    return min(numel, share if is_8bit else int(share * _BYTES_8BIT / _BYTES_32BIT))


def _cut(flat: Tensor, tile: slice, numel: int) -> Tensor:
    if len(flat) == numel:
        return flat[tile]
    return flat[tile.start // BLOCKSIZE : -(-tile.stop // BLOCKSIZE)]
