"""How many blocks stay on the device, corrected by what the first steps have measured."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_memsave.callbacks.settings.micro_batches import PROBED_STEPS
from lightning_memsave.core.out_of_memory import free_unused
from lightning_memsave.measure.allocator import read_allocator
from lightning_memsave.techniques.offloading.handle import OffloadingHandle
from lightning_memsave.trainer.training_loop import has_open_window
from lightning_memsave.units import format_bytes


class ResidentCorrection:
    """Lets more blocks stay on the device if steps leave room for them, fewer if memory runs out.

    It is the `Relief` of micro-batches: a batch is repeated with fewer blocks before it is halved.
    """

    def __init__(
        self,
        handle: OffloadingHandle,
        change: Callable[[Any, int, str], bool],
        block_bytes: int,
        *,
        is_watched: bool,
    ) -> None:
        self._handle, self._change = handle, change  # which gets a number and the reason for it
        self._block_bytes = block_bytes  # what one more needs; 0: never more
        self._is_watched = is_watched  # in the first steps, and after a change
        self._first_step: int | None = None  # since the start, or the latest change
        self._num_retries = 0
        self._num_leaving = 1

    def watch(self, trainer: Any, *, is_start: bool) -> None:
        """Look at CUDA's allocator before a batch and after it, until nothing is to change."""
        device = trainer.strategy.root_device
        reading = read_allocator(device) if self._is_watched else None
        if reading is None:
            return
        if is_start:
            self._num_retries = reading.num_alloc_retries
            self._first_step = trainer.global_step if self._first_step is None else self._first_step
        elif self._first_step is None:  # blocks have left in this batch, when it ran out of memory
            return
        elif reading.num_alloc_retries > self._num_retries:
            self._is_watched = self.leave(trainer, "the allocator had to give memory back")
        # The second step is the first one with optimizer state from its beginning.
        elif trainer.global_step - self._first_step >= PROBED_STEPS and not has_open_window(
            trainer
        ):
            self.fill(trainer, _free_bytes(device, reading.reserved_bytes))

    def fill(self, trainer: Any, free_bytes: int) -> None:
        """Let as many more blocks stay as fit what steps have left free, and measure again."""
        more = max(free_bytes, 0) // self._block_bytes if self._block_bytes else 0
        number = min(self._handle.num_resident + more, self._handle.num_blocks)
        why = f"steps left {format_bytes(free_bytes)}" if more else ""
        self._first_step, self._is_watched = None, bool(why) and self._change(trainer, number, why)

    def leave(self, trainer: Any, why: str) -> bool:
        """Let blocks leave the device, each time twice as many; return whether any has left."""
        number = max(self._handle.num_resident - self._num_leaving, 0)
        self._num_leaving *= 2
        self._block_bytes, self._first_step = 0, None
        return self._change(trainer, number, why)

    def relieve(self, trainer: Any, num_failures: int) -> bool:
        return self.leave(trainer, "memory ran out")

    def make_room(self, trainer: Any) -> bool:
        found = self.leave(trainer, "memory ran out")
        free_unused()
        return found

    def stay_whole(self, trainer: Any, why: str) -> None:
        """Do nothing: a batch that cannot be split can be repeated with fewer blocks."""

    def advise(self) -> str:
        return ""  # other than micro-batches' own


# Cached memory counts as used, so that it may be split as it is.
def _free_bytes(device: torch.device, reserved_bytes: int) -> int:  # pragma: no cover (gpu)
    from lightning_memsave.prediction.cuda.constants import margin_bytes

    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    free_bytes = min(free_bytes, int(share * total_bytes) - reserved_bytes)
    return free_bytes - margin_bytes(free_bytes + reserved_bytes)
