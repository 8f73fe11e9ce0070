"""Let optimizer state of a checkpoint wait in host memory until the first update.

A fresh run allocates its state in the first update, in memory that forward and backward have left.
A checkpoint's is there before them, and pushes apart what comes later: RoBERTa 7M, 64 x 128, needs
a GPU of 2,528 MiB when it resumes, and of 2,506 from the start (`benchmarks.virtual_gpu resuming`).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memsave.techniques.optimizer_step import (
    WAITING_STATE,
    around_step,
    bring,
    initialize,
)

_Places = dict[Tensor, list[tuple[str, torch.device]]]


@dataclass
class _WaitingState:
    places: _Places
    """Keys of the state of each parameter, and where it belongs."""
    undo: list[Callable[[], None]]

    def bring(self, optimizer: Optimizer, params: Iterable[Tensor] | None) -> None:
        for param in [*self.places] if params is None else params:
            places = self.places.get(param, [])
            while places:
                key, device = places[0]
                state = optimizer.state.get(param, {})
                if key in state:  # nobody has loaded another one meanwhile
                    state[key] = state[key].to(device)
                del places[0]
            self.places.pop(param, None)
        if not self.places:
            for function in self.undo:
                function()
            del vars(optimizer)[WAITING_STATE]


def leave_on_host(optimizers: Iterable[Any]) -> None:
    """Move state of optimizers from their GPU to the host, until an update needs it."""
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):  # DeepSpeed's have a state of their own
            continue
        initialize(optimizer)
        places = _move_to_host(optimizer)
        if places:
            vars(optimizer)[WAITING_STATE] = _WaitingState(places, around_step(optimizer, bring))
            torch.cuda.empty_cache()


def waiting_bytes(optimizers: Iterable[Optimizer]) -> int:
    waiting = ((each, vars(each).get(WAITING_STATE)) for each in optimizers)
    return sum(
        optimizer.state[param][key].nbytes
        for optimizer, state in waiting
        if state is not None
        for param, places in state.places.items()
        for key, _ in places
    )


def _move_to_host(optimizer: Any) -> _Places:
    # State of weights on the host goes back there with the next update of `offload`.
    states = {
        param: state
        for param, state in optimizer.state.items()
        if isinstance(param, Tensor) and param.is_cuda and isinstance(state, dict)
    }
    owners = Counter(id(value) for state in states.values() for value in state.values())
    places: _Places = {}
    for param, state in states.items():
        for key, value in state.items():
            # Pages of bitsandbytes are on the host already; what parameters share is small.
            if type(value) is not Tensor or not value.is_cuda or hasattr(value, "is_paged"):
                continue
            if owners[id(value)] == 1:
                places.setdefault(param, []).append((key, value.device))
                state[key] = value.cpu()
    return places
