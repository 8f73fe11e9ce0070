"""Offloading to the memory of the host."""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self

import psutil
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memsave.core.blocks import BlockSelector, as_selectors, find_blocks
from lightning_memsave.core.memory import is_fake
from lightning_memsave.core.technique import Exactness, Handle, Offer, Technique
from lightning_memsave.core.trainer_facts import TrainerFacts
from lightning_memsave.errors import ConfigurationError, IncompatibleError, Problem
from lightning_memsave.techniques.offloading.host_updates import HostUpdates, host_updates_of
from lightning_memsave.techniques.offloading.host_worker import HostWorker, threads_for_host_steps
from lightning_memsave.techniques.offloading.residence import Residence, residence_of
from lightning_memsave.units import format_bytes, parse_bytes

KINDS = ("optimizer",)
_STATE_BYTES = 8  # of AdamW, for each parameter


class OffloadingHandle(Handle[nn.Module]):
    """The handle of ``Offloading.apply``."""

    residence: Residence | None = None

    def wait(self) -> None:
        """Let all weights and gradients be on the host, up to date."""
        if self.residence is not None:
            self.residence.wait()


@dataclass(frozen=True)
class Offloading(Technique[nn.Module]):
    """Keep what a step does not need at once in the memory of the host."""

    name: ClassVar[str] = "offloading"
    argument: ClassVar[str] = "offload"
    examples: ClassVar[str] = '"optimizer"'
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    source: ClassVar[str] = "Ren et al. (2021), ZeRO-Offload, arXiv:2101.06840"

    what: str = "optimizer"
    _: KW_ONLY
    blocks: BlockSelector | Sequence[BlockSelector] | None = None
    host_budget: int | str | None = None
    in_background: bool = True
    num_threads: int | None = None

    def check(self, target: nn.Module) -> list[Problem]:
        return []

    def apply(self, target: nn.Module) -> OffloadingHandle:
        handle = super().apply(target)
        assert isinstance(handle, OffloadingHandle), "`_apply` makes it"
        return handle

    def _apply(self, target: nn.Module) -> OffloadingHandle:
        params = [p for p in target.parameters() if p.requires_grad]
        worker = HostWorker(in_background=self.in_background and not any(map(is_fake, params)))
        residence = Residence(target, find_blocks(target, self.blocks), params, worker)
        undo = [worker.close, residence.release, *residence.start()]
        handle = OffloadingHandle(target, [f"{len(params)} parameters"], undo=undo)
        handle.residence = residence
        return handle

    def update_in_background(self, optimizer: Optimizer) -> Handle[Optimizer]:
        param = next(p for group in optimizer.param_groups for p in group["params"])
        from lightning_memsave.techniques.offloading.residence import offloaded

        found = offloaded(param)
        assert found
        return Handle(optimizer, ["x"], undo=HostUpdates(optimizer, found[0]).start())
