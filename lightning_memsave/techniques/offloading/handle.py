"""The handle of `Offloading`."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memsave.core.technique import Handle
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.offloading.blocks_on_host import BlocksOnHost
from lightning_memsave.techniques.offloading.residence import Residence


class OffloadingHandle(Handle[nn.Module]):
    residence: Residence | None = None
    """What moves the parameters; ``None`` if there are none."""
    memory: HostMemory
    """What holds weights, gradients and activations."""
    blocks: BlocksOnHost
    """The blocks, the first of which wait on the host."""
    describe: Callable[[int], tuple[list[str], list[str]]]
    """Gives ``changes`` and ``skipped`` where so many blocks stay on the device."""

    def wait(self) -> None:
        """Let all weights and gradients be on the host, after all updates."""
        if self.residence is not None:
            self.residence.wait()

    @property
    def num_blocks(self) -> int:
        return len(self.blocks.blocks)

    @property
    def num_resident(self) -> int:
        """How many blocks stay on the device."""
        return self.num_blocks - self.blocks.number

    def keep_on_device(self, number: int, optimizers: Sequence[Optimizer]) -> None:
        """Let another number of blocks stay on the device, between two steps.

        Weights, gradients and the state of all optimizers of the model move as they are. If the
        device has no room for all of them, ``num_resident`` says how many have come.
        """
        self.wait()  # an update that runs out of memory is none that can be repeated
        try:
            self.blocks.change(self.num_blocks - number, optimizers)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        self.changes, self.skipped = map(tuple, self.describe(self.num_resident))
        self.summary = "; ".join(self.changes)
