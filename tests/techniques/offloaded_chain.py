"""A chain of blocks whose saved bytes are easy to tell, and ways to offload them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave import ActivationCheckpointing, find_blocks
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.offloading.activations import OffloadedActivations
from lightning_memsave.techniques.offloading.copies import copies_for
from lightning_memsave.techniques.offloading.host_worker import HostWorker

KINDS = (None, "all", "nested", "selective")
WIDTH, NUM_BLOCKS = 32, 5


class Block(nn.Module):
    """Its input has as many bytes as each of its two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.down(self.up(x).tanh())
        return x + (y if mask is None else y * mask)


class Chain(nn.Module):
    """The batch goes through a layer, so that each input of a block is an activation."""

    def __init__(self, *, is_masked: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.head = nn.Linear(WIDTH, 1)
        self.is_masked = is_masked

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full_like(x, 0.5) if self.is_masked else None
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x).mean()


def batch_of(num_rows: int = 1024) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(0))


INPUT = 1024 * WIDTH * 4  # bytes of a block's input


@contextmanager
def offloading(
    model: nn.Module,
    which: str | None = "all",
    *,
    min_bytes: int = WIDTH * WIDTH * 4,  # of a weight
    **settings: Any,
) -> Iterator[OffloadedActivations]:
    memory, worker = HostMemory(), HostWorker(in_background=False)
    blocks = find_blocks(model)
    checkpointing = None if which is None else ActivationCheckpointing(which).apply(model)
    offloaded = OffloadedActivations(
        blocks,
        lambda tensor: copies_for(tensor, worker, memory),
        memory,
        min_bytes=min_bytes,
        **settings,
    )
    undo = offloaded.start()
    try:
        yield offloaded
    finally:
        for function in reversed(undo):
            function()
        if checkpointing is not None:
            checkpointing.undo()


class Watched:
    """Activations while a chain's blocks and head run, forward and again in backward.

    As a number of inputs of blocks; what the loss needs does not count.
    """

    def __init__(self, model: Chain, live: LiveTensors) -> None:
        self.in_blocks: list[int] = []
        self._undo = [block.up.register_forward_pre_hook(self._look) for block in model.blocks]
        self._undo.append(model.head.register_forward_pre_hook(self._look_at_head))
        self._live, self.at_head = live, 0

    def _look(self, *_: object) -> None:
        self.in_blocks.append(self._live.breakdown.activation_bytes // INPUT)

    def _look_at_head(self, *_: object) -> None:
        self.at_head = self._live.breakdown.activation_bytes // INPUT

    def close(self) -> None:
        for hook in self._undo:
            hook.remove()


def watch(model: Chain, batch: Tensor) -> tuple[Watched, LiveTensors]:
    with LiveTensors(model) as live:
        live.track_input(batch)
        watched = Watched(model, live)
        model(batch).backward()
        watched.close()
    return watched, live


class Failing(nn.Module):
    """Fails in forward or in backward, as out of memory does."""

    def __init__(self, error: type[BaseException], *, in_backward: bool) -> None:
        super().__init__()
        self.error, self.in_backward = error, in_backward

    def forward(self, x: Tensor) -> Tensor:
        if not self.in_backward:
            raise self.error

        def fail(_: Tensor) -> None:
            raise self.error

        x.register_hook(fail)
        return x
