"""Which blocks of a model wait on the host; between two steps, more or fewer of them may."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave.core.blocks import Block
from lightning_memsave.core.memory import host_copies
from lightning_memsave.core.technique import undo_all
from lightning_memsave.techniques.offloading.activations import OffloadedActivations
from lightning_memsave.techniques.offloading.device_tiles import SCALARS, has_scalars_on_device
from lightning_memsave.techniques.offloading.module_hooks import move_blocks
from lightning_memsave.techniques.offloading.part import Part
from lightning_memsave.techniques.offloading.residence import Residence
from lightning_memsave.techniques.optimizer_step import group_of


class BlocksOnHost:
    """The first blocks of a model wait on the host, the others stay on the device.

    Their weights do, of which ``weights_of`` gives those of a block, what they save, or both.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        number: int,
        residence: Residence | None,
        weights_of: Callable[[Block], list[nn.Parameter]] | None,
        offload_activations: Callable[[Sequence[Block]], OffloadedActivations] | None,
    ) -> None:
        self.blocks, self.number = blocks, number
        self._residence, self._weights_of = residence, weights_of
        self._offload_activations = offload_activations
        self._parts: list[Part] = [] if residence is None else residence.parts[1:]
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        if self._residence is not None:
            self._undo += move_blocks(self._residence, self.blocks, self._parts)
        if self._offload_activations is not None:
            self._undo += self._offload_activations(self.blocks[: self.number]).start()

    def stop(self) -> None:
        undo_all(self._undo)

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def change(self, number: int, optimizers: Sequence[Optimizer]) -> None:
        """Let another number of blocks wait on the host, with what belongs to their weights.

        If a device has no memory for one more block, that block waits on.
        """
        assert self._residence is not None, "nothing else tells when a pass is over"
        self._residence.wait()
        self.stop()
        try:
            while self.number > number:
                self._keep_last(self._residence, optimizers)
            while self.number < number:
                self._send_next(self._residence, optimizers)
        finally:
            self.start()

    def _keep_last(self, residence: Residence, optimizers: Sequence[Optimizer]) -> None:
        if self._weights_of is not None:
            part = self._parts[-1]
            moved = _moved_state(optimizers, part.params, residence.device)
            residence.let_go(part)
            self._parts.pop()
            for state, values in moved:
                state.update(values)
        self.number -= 1

    def _send_next(self, residence: Residence, optimizers: Sequence[Optimizer]) -> None:
        if self._weights_of is not None:
            params = self._weights_of(self.blocks[self.number])
            with host_copies():
                moved = _moved_state(optimizers, params, torch.device("cpu"))
            self._parts.append(residence.take_in(params))
            for state, values in moved:
                state.update(values)
        self.number += 1


# Copies, also where host and device are one: memory is marked as the one's or the other's.
def _moved_state(
    optimizers: Sequence[Optimizer], params: Sequence[nn.Parameter], device: torch.device
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    moved: dict[int, Tensor] = {}  # each once: parameters share tables of 8-bit state
    found = []
    for optimizer in optimizers:
        for param in params:
            state = optimizer.state.get(param)
            if not state:
                continue
            group, values = group_of(optimizer, param), {}
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                stays = key in SCALARS and not has_scalars_on_device(optimizer, group)
                if id(value) not in moved:
                    moved[id(value)] = value.to("cpu" if stays else device, copy=True)
                values[key] = moved[id(value)]
            found.append((state, values))
    return found
