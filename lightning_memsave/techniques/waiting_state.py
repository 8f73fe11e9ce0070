"""Let optimizer state of a checkpoint wait in host memory until the first update.

A fresh run allocates its state in the first update, in memory that forward and backward have left.
A checkpoint's is there before them, and pushes apart what comes later: RoBERTa 7M, 64 x 128, needs
a GPU of 2,528 MiB when it resumes, and of 2,506 from the start (`benchmarks.virtual_gpu resuming`).
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_Waiting = dict[Tensor, list[tuple[str, torch.device]]]

_ATTRIBUTE = "memsave_waiting_state"


def leave_on_host(optimizers: Iterable[Any]) -> None:
    """Move state of optimizers from their GPU to the host, until an update needs it."""
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):  # DeepSpeed's have a state of their own
            continue
        initialize(optimizer)
        waiting = _move_to_host(optimizer)
        if waiting:
            hook = optimizer.register_step_pre_hook(_before_step)
            vars(optimizer)[_ATTRIBUTE] = (waiting, hook)
            torch.cuda.empty_cache()


def initialize(optimizer: Any) -> None:
    """Move all state of a bitsandbytes optimizer to its device, as its first step would."""
    if getattr(optimizer, "initialized", True) is False and hasattr(optimizer, "to_gpu"):
        optimizer.check_overrides()  # of all parameters, which an update in backward does not see
        optimizer.to_gpu()
        optimizer.initialized = True


def waiting_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Count the bytes of optimizer state that wait on the host."""
    return sum(
        optimizer.state[param][key].nbytes
        for optimizer in optimizers
        for param, places in vars(optimizer).get(_ATTRIBUTE, ({},))[0].items()
        for key, _ in places
    )


def bring(optimizer: Optimizer, params: Iterable[Tensor] | None = None) -> None:
    """Bring what waits to the device; may be called again after it ran out of memory."""
    if _ATTRIBUTE not in vars(optimizer):
        return
    waiting: _Waiting
    waiting, hook = vars(optimizer)[_ATTRIBUTE]
    for param in [*waiting] if params is None else params:
        places = waiting.get(param, [])
        while places:
            key, device = places[0]
            state = optimizer.state.get(param, {})
            if key in state:  # nobody has loaded another one meanwhile
                state[key] = state[key].to(device)
            del places[0]
        waiting.pop(param, None)
    if not waiting:
        hook.remove()
        del vars(optimizer)[_ATTRIBUTE]


def after_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], function: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call a function when the gradients of a step are complete, which its closure may compute."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        function()
        return None
    closure = functools.partial(_call_both, closure, function)
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


def _call_both(closure: Callable[[], Any], function: Callable[[], None]) -> Any:
    result = closure()
    function()
    return result


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    return after_closure(args, kwargs, functools.partial(bring, optimizer))


def _move_to_host(optimizer: Any) -> _Waiting:
    # State of weights on the host goes back there with the next update of `offload`.
    states = {
        param: state
        for param, state in optimizer.state.items()
        if isinstance(param, Tensor) and param.is_cuda and isinstance(state, dict)
    }
    owners = Counter(id(value) for state in states.values() for value in state.values())
    waiting: _Waiting = {}
    for param, state in states.items():
        for key, value in state.items():
            # Pages of bitsandbytes are on the host already; what parameters share is small.
            if type(value) is not Tensor or not value.is_cuda or hasattr(value, "is_paged"):
                continue
            if owners[id(value)] == 1:
                waiting.setdefault(param, []).append((key, value.device))
                state[key] = value.cpu()
    return waiting
