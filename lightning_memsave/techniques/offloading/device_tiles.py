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
from lightning_memsave.techniques.tiled_steps import each_tile, step_values, tile_numel

_NUM_SLOTS = 2
# Of a number in a slot: weight and gradient in up to 32 bits, and two moments with their scales.
_BYTES_IN_SLOT = 4 + 4 + 2 * (1 + 4 / BLOCKSIZE)


def is_updated_in_tiles(optimizer: Any, param: Tensor) -> bool:
    """Return whether a parameter on the host is updated by the device.

    bitsandbytes quantizes 8-bit state on a CPU a hundred times more slowly than a GPU's bus brings
    it to the device and back ("streamed" in `benchmarks.gpu`).
    """
    return is_low_bit(optimizer) and not optimizer.is_paged and optimizer.uses_8bit(param)


def lock_state(state: dict[str, Any], memory: HostMemory) -> None:
    """Move 8-bit state to page-locked memory, unless it is there already."""
    keys = [key for key, value in state.items() if _is_cut(key, value) and not is_in_piece(value)]
    for key, locked in zip(keys, memory.tensors_like([state[key] for key in keys]), strict=True):
        state[key] = locked.copy_(state[key])


class DeviceTiles:
    """Room on the device for tiles, of which one is updated while others come and go.

    Args:
        params: The parameters that are updated in tiles, on the host.
        device: Where their tiles are updated.
    """

    def __init__(self, params: Sequence[Tensor], device: torch.device) -> None:
        numel = max(min(param.numel(), tile_numel(param.numel())) for param in params)
        num_bytes = int(_BYTES_IN_SLOT * numel) + 8 * aligned(1)
        self._device = device
        # Kept, so that the memory which a step needs does not depend on when an update runs.
        with counted_as("temporary"), torch.inference_mode(mode=False):
            self._slots = [
                torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(_NUM_SLOTS)
            ]
            self._values, self._gradient = torch.empty(2, numel, device=device).unbind()
            self._is_nan = torch.empty(numel, dtype=torch.bool, device=device)
        self._freed: list[Any] = [None] * _NUM_SLOTS
        self._tables: dict[int, Tensor] = {}
        self._up, self._down = (
            torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)
        )
        if self._up is not None:  # the memory may still be used by what was there before
            for stream in (self._up, torch.cuda.default_stream(device)):
                stream.wait_stream(torch.cuda.current_stream(device))

    def step(self, optimizer: Optimizer, stand_in: nn.Parameter, part: Part, param: Tensor) -> None:
        """Update one parameter, as `step_in_tiles` does it on the host."""
        state, group = optimizer.state[stand_in], group_of(optimizer, stand_in)
        assert stand_in.grad is not None, "only parameters with a gradient are updated"
        moments = [key for key, value in state.items() if _is_cut(key, value)]
        others = {key: self._on_device(state[key]) for key in state.keys() - {*moments}}
        on_host = [*part.halves_of(param), stand_in.grad, *(state[key] for key in moments)]
        flat = [tensor.view(-1) for tensor in on_host]
        num_weights, counts = len(flat) - 1 - len(moments), set()

        def step_tile(tile: slice, index: int) -> None:
            sources = [_cut(tensor, tile, param.numel()) for tensor in flat]
            slot = self._bring(sources, index)
            *weights, grad = slot[: num_weights + 1]
            values = weights[0]
            if num_weights > 1:
                values = join_weight(*weights, self._values[: len(grad)])
            own = others | dict(zip(moments, slot[num_weights + 1 :], strict=True))
            full = self._gradient[: len(grad)].copy_(grad)
            counts.add(step_values(optimizer, group, values, full, own)["step"])
            if num_weights > 1:
                split_weight(values, *weights, self._is_nan[: len(grad)])
            del slot[num_weights], sources[num_weights]
            self._return(sources, slot, index)

        each_tile(param, tile_numel(param.numel()), step_tile)
        (state["step"],) = counts
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until all tiles are on the host again."""
        for event in self._freed:
            if event is not None:
                event.synchronize()

    def _bring(self, sources: Sequence[Tensor], index: int) -> list[Tensor]:
        slot, start, found = self._slots[index % _NUM_SLOTS], 0, []
        for source in sources:
            found.append(tensor_in(slot, start, source, source.dtype))
            start += aligned(source.nbytes)
        with counted_as(""), torch.cuda.stream(self._up):
            freed = self._freed[index % _NUM_SLOTS]
            if self._up is not None and freed is not None:
                self._up.wait_event(freed)
            for target, source in zip(found, sources, strict=True):
                target.copy_(source, non_blocking=True)
        if self._up is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._up)
        return found

    def _return(self, targets: Sequence[Tensor], slot: Sequence[Tensor], index: int) -> None:
        if self._down is not None:
            self._down.wait_stream(torch.cuda.current_stream(self._device))
        with counted_as(""), torch.cuda.stream(self._down):
            for target, source in zip(targets, slot, strict=True):
                target.copy_(source, non_blocking=True)
        if self._down is not None:
            event = torch.cuda.Event(blocking=True)
            self._freed[index % _NUM_SLOTS] = self._down.record_event(event)

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


def _cut(flat: Tensor, tile: slice, numel: int) -> Tensor:
    if len(flat) == numel:
        return flat[tile]
    return flat[tile.start // BLOCKSIZE : -(-tile.stop // BLOCKSIZE)]
