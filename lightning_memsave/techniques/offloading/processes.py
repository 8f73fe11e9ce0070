"""One copy of weights and optimizer state for all processes of a machine, which train as DDP."""

import contextlib
import fcntl
import mmap
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave.core.memory import host_copies
from lightning_memsave.techniques.flat_memory import shares_memory
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.offloading.part import Part

_SHARED = "_memsave_is_shared"
_NUM_AT_ONCE = 2**18  # elements that stay in the cache while gradients are averaged
_POLL_S, _LIVENESS_S = 1e-4, 0.2


class SharedMemory(HostMemory):
    """Allocates memory that all processes have; all of them call it, in the same order.

    It has no name in the file system: when the last process ends, in any way, the memory is free.
    Nor does a limit of `/dev/shm` count, which in containers may be 64 MiB.
    """

    def __init__(self, group: Any) -> None:
        super().__init__()
        self._group = group

    def tensors_like(
        self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None = None
    ) -> list[Tensor]:
        made = super().tensors_like(tensors, dtypes)
        for tensor in made:
            setattr(tensor.untyped_storage(), _SHARED, True)
        return made

    def _allocate(self, num_bytes: int) -> Any:
        if not num_bytes:
            return super()._allocate(num_bytes)
        with open_by_all(self._group, num_bytes) as file:
            pages = mmap.mmap(file, num_bytes)  # shared, unlike that of a process
        return np.frombuffer(pages, np.uint8)


@contextlib.contextmanager
def open_by_all(group: Any, num_bytes: int) -> Any:
    """Open a file of zeros in memory, the same in all processes, until all have used it."""
    is_first = dist.get_rank(group) == 0
    file = os.memfd_create("memsave") if is_first else -1
    try:
        if is_first:
            os.truncate(file, num_bytes)
        found = [(f"/proc/{os.getpid()}/fd/{file}", num_bytes)]
        dist.broadcast_object_list(found, 0, group)
        place, expected = found[0]
        if expected != num_bytes:
            raise RuntimeError(
                f"This process needs {num_bytes} bytes of host memory where the first one needs "
                f"{expected}: they do not train the same model with the same optimizer."
            )
        if not is_first:
            file = os.open(place, os.O_RDWR)
        yield file
        dist.barrier(group)
    finally:
        if file >= 0:
            os.close(file)


def is_shared(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), _SHARED, False)


class Processes:
    """The processes of one machine: what they share, who updates what, and how far they are.

    Each has gradients of its own, which it sums, clips and lets hooks change as under DDP, and
    updates a share of the parameters for all. They meet where gradients are averaged; until then
    none updates what another one may still read.
    """

    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo")
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self.memory = SharedMemory(self._group)
        self._owners: dict[Tensor, int] = {}
        self._gradients: dict[nn.Parameter, tuple[Tensor, ...]] = {}
        """Of each process."""
        self._indices: dict[Part, int] = {}
        self._sums: list[int] | None = None
        self._num_begun: Any = None
        self._num_done: Any = None
        # The system gives the lock of a process back when it ends.
        with open_by_all(self._group, self.size) as file:
            self._locks = os.dup(file)
        fcntl.lockf(self._locks, fcntl.LOCK_EX, 1, self.rank)

    def close(self) -> None:
        """Leave the others; they do not wait for this process any more."""
        os.close(self._locks)
        with contextlib.suppress(ValueError, RuntimeError):  # it has been destroyed with all others
            dist.destroy_process_group(self._group)

    @property
    def is_first(self) -> bool:
        """Whether all begin with the weights of this process, as under DDP."""
        return self.rank == 0

    def start(self, parts: Sequence[Part]) -> None:
        """Share the work of updates and allocate gradients, when all have the weights."""
        loads = [0] * self.size
        for index, part in enumerate(parts):
            self._indices[part] = index
            trained = [param for param in part.params if param.requires_grad]
            for param in sorted(trained, key=lambda each: -each.numel()):
                owner = loads.index(min(loads))
                self._owners[param] = owner
                loads[owner] += param.numel()
            forms = [part.form_of(param) for param in trained] * self.size
            made = self.memory.tensors_like(forms)
            groups = [made[start :: len(trained)] for start in range(len(trained))]
            for param, group in zip(trained, groups, strict=True):
                self._gradients[param] = tuple(group)
                part.gradients.use(param, group[self.rank])
        table = torch.empty(self.size, len(parts), dtype=torch.int64, device="meta")
        self._num_done = self.memory.tensors_like([table])[0].numpy()
        self._num_begun = np.zeros(len(parts), np.int64)

    def owns(self, param: Tensor) -> bool:
        """Whether this process updates a parameter."""
        return self._owners[param] == self.rank

    def is_known(self, param: Tensor) -> bool:
        return param in self._owners

    @torch.no_grad()
    def average(self) -> None:
        """Average the gradients of all processes, in place, as DDP does in backward."""
        for param, gradients in self._gradients.items():
            own = gradients[self.rank]
            if param.grad is not None and not shares_memory(param.grad, own):
                param.grad = own.copy_(param.grad)
        with host_copies():
            flags = [param.grad is not None for param in self._gradients]
            own_flags = torch.tensor(flags, dtype=torch.uint8, device="cpu")
            found = [torch.empty_like(own_flags) for _ in range(self.size)]
        dist.all_gather(found, own_flags, self._group)  # all gradients are complete
        who_has = zip(*(each.tolist() for each in found), strict=True)
        for (param, gradients), has in zip(self._gradients.items(), who_has, strict=True):
            if any(has):
                if self.owns(param):
                    _average(gradients, has)
                param.grad = gradients[self.rank]
        dist.barrier(self._group)

    def share_state(self, optimizer: Optimizer, params: Iterable[Tensor]) -> None:
        """Move optimizer state, which all processes have, to memory that they share."""
        states = [(param, optimizer.state[param]) for param in params]
        counts = Counter(id(value) for _, state in states for value in state.values())
        private = [
            (param, state, key, value)
            for param, state in states
            for key, value in state.items()
            # Several parameters have constants in common.
            if isinstance(value, Tensor) and counts[id(value)] == 1 and not is_shared(value)
        ]
        if not private:
            return
        shared = self.memory.tensors_like([value for *_, value in private])
        for (param, state, key, value), into in zip(private, shared, strict=True):
            if self.owns(param):
                into.copy_(value)
            state[key] = into
        dist.barrier(self._group)

    def remember_weights(self) -> None:
        """Note what this process has updated, where hooks between steps might change it."""
        self._sums = [_sum_of(part.weight_of(param)) for part, param in self._own_share()]

    def forget_weights(self) -> None:
        """Let weights change that `remember_weights` has noted."""
        self._sums = None

    def find_changed(self) -> list[nn.Parameter]:
        """Return the parameters that have changed since `remember_weights`."""
        sums, self._sums = self._sums, None
        pairs = zip(self._own_share(), sums or (), strict=False)
        return [param for (part, param), total in pairs if _sum_of(part.weight_of(param)) != total]

    def _own_share(self) -> Iterator[tuple[Part, nn.Parameter]]:
        for part in self._indices:
            for param in part.params:
                if self._owners.get(param) == self.rank:
                    yield part, param

    def begin_update(self, part: Part) -> None:
        """Note that each process begins to update its share of a part."""
        self._num_begun[self._indices[part]] += 1

    def end_update(self, part: Part) -> None:
        self._num_done[self.rank, self._indices[part]] += 1

    def are_done(self, part: Part) -> bool:
        """Whether all others have updated their shares of a part."""
        return not self._late(part)

    def wait(self, part: Part) -> None:
        """Wait until all others have updated their shares of a part."""
        start_s = time.monotonic()
        while late := self._late(part):
            time.sleep(_POLL_S)
            if time.monotonic() - start_s > _LIVENESS_S:
                ended = [rank for rank in late if self._has_ended(rank)]
                if ended and ended[0] in self._late(part):
                    raise RuntimeError(f"Rank {ended[0]} has ended before it updated its weights.")
                start_s = time.monotonic()

    def _late(self, part: Part) -> list[int]:
        if self._num_done is None:
            return []
        index = self._indices[part]
        is_late = self._num_done[:, index] < self._num_begun[index]
        return [rank for rank in range(self.size) if is_late[rank] and rank != self.rank]

    def _has_ended(self, rank: int) -> bool:
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        return True


_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_of(tensor: Tensor) -> int:
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return int(flat.view(_WHOLE_NUMBERS[tensor.element_size()]).sum())


# In the order of the processes, whose sum of two is that of any all-reduce.
def _average(gradients: Sequence[Tensor], has: Sequence[int]) -> None:
    flat = [each.as_strided((each.numel(),), (1,)) for each in gradients]
    for pieces in zip(*(each.split(_NUM_AT_ONCE) for each in flat), strict=True):
        for piece, is_there in zip(pieces, has, strict=True):
            if is_there:
                piece.mul_(1 / len(pieces))  # before the sum, as DDP does
            else:
                piece.zero_()
        for piece in pieces[1:]:
            pieces[0].add_(piece)
        for piece in pieces[1:]:
            piece.copy_(pieces[0])
