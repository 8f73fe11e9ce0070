"""Ask what optimizers do, allocate their state early, and replace the settings of groups."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from lightning_memsave.core.memory import host_copies, is_host
from lightning_memsave.techniques.low_bit_optimizer.optimizer_kinds import (
    KIND_BY_TYPE,
    Kind,
    is_low_bit,
)
from lightning_memsave.techniques.low_precision_weights.rounded_updates import RoundedStep
from lightning_memsave.techniques.low_precision_weights.tiled_steps import ELEMENTWISE
from lightning_memsave.techniques.waiting_state import bring

# Of torch's optimizers, only LBFGS couples parameters. Older versions do not have Muon.
_KNOWN = ELEMENTWISE | {
    getattr(torch.optim, name)
    for name in ("Adafactor", "Muon", "SparseAdam")
    if hasattr(torch.optim, name)
}


def updates_each_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to update each parameter on its own."""
    cls = type(optimizer)  # exact types: a subclass may couple parameters
    return (
        cls in _KNOWN
        or is_low_bit(optimizer)
        or cls.__module__.startswith("bitsandbytes.optim.")
        or (cls.__module__, cls.__name__) == ("transformers.optimization", "Adafactor")
    )


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state of every parameter that has a gradient and no state yet; bring what waits.

    Optimizers allocate it during the step, some parameter by parameter: if memory runs out, half of
    the parameters would be updated, and the step could be neither finished nor repeated. Optimizers
    of other packages are skipped, as their state is not known.
    """
    bring(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        stateless = [
            p for p in group["params"] if p.grad is not None and not optimizer.state.get(p)
        ]
        if not stateless:
            continue
        is_on_host = is_host(stateless[0].untyped_storage())
        try:
            with on_host() if is_on_host else contextlib.nullcontext():
                _allocate(optimizer, index, group, stateless)
                step = getattr(optimizer, "memsave_parameter_step", None)
                if isinstance(step, RoundedStep):
                    for param in stateless:
                        step.allocate(optimizer, param)
        except BaseException:
            # Optimizers would not complete a partial state.
            for param in stateless:
                optimizer.state.pop(param, None)
            raise


# torch makes the count of steps on the default device, which may be a GPU.
@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Let tensors that optimizers make inside be on the host, and count as memory there."""
    with host_copies(), torch.device("cpu"):
        yield


def _allocate(
    optimizer: torch.optim.Optimizer,
    index: int,
    group: dict[str, Any],
    stateless: list[torch.Tensor],
) -> None:
    if is_low_bit(optimizer):
        _allocate_low_bit(optimizer, index, group)
    elif type(optimizer) is torch.optim.SGD:
        _allocate_momentum(optimizer, group, stateless)
    elif type(optimizer) is torch.optim.Adafactor:
        # Its state has the type of the gradient, which is float32 where weights are rounded.
        if all(param.dtype is torch.float32 for param in stateless):
            _initialize(optimizer, group)
    elif type(optimizer).__module__.startswith("torch.optim."):
        _initialize(optimizer, group)


def _allocate_low_bit(optimizer: Any, index: int, group: dict[str, Any]) -> None:
    for param_index, param in enumerate(group["params"]):
        # Of a weight in two halves on the host, bitsandbytes would make a whole one.
        has_memory = param.untyped_storage().nbytes() >= param.nbytes
        if param.grad is not None and not optimizer.state[param] and has_memory:
            optimizer.init_state(group, param, index, param_index)


# torch starts with a copy of the gradient. Zeros give the same in the first step, unless there is
# dampening.
def _allocate_momentum(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], stateless: list[torch.Tensor]
) -> None:
    if group["momentum"] != 0 and group["dampening"] == 0:
        for param in stateless:
            if not param.grad.is_sparse:  # type: ignore[union-attr] # chosen for having one
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


# torch's optimizers call `_init_group` at the beginning of each step, with lists to fill.
def _initialize(optimizer: Any, group: dict[str, Any]) -> None:
    initialize = getattr(optimizer, "_init_group", None)
    if initialize is None:
        return
    parameters = list(inspect.signature(initialize).parameters.values())[1:]
    initialize(group, *([] for p in parameters if p.default is inspect.Parameter.empty))


# Their fused kernels run on a CPU, too, where they are several times as fast.
_FUSED_ON_CPU = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adagrad,
)


def choose_fused(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Choose the fused kernels of the host, unless the user has chosen."""
    is_open = all(not group.get(k) for k in ("foreach", "differentiable", "capturable"))
    if type(optimizer) in _FUSED_ON_CPU and group.get("fused") is None and is_open:
        group["fused"] = True


@contextlib.contextmanager
def scaling_on_host(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let what a ``GradScaler`` gives to fused optimizers be on the host inside, once landed."""
    own = vars(optimizer)
    before = {
        k: own[k] for k in ("grad_scale", "found_inf") if isinstance(own.get(k), torch.Tensor)
    }
    own.update({name: value.cpu() for name, value in before.items()})
    if "found_inf" in before:  # a sum over devices, while kernels look for 1
        own["found_inf"] = own["found_inf"].clamp(max=1.0)
    try:
        yield
    finally:
        own.update(before)


Restore = Callable[[torch.optim.Optimizer], None]


def double_of(
    optimizer: torch.optim.Optimizer,
    param_groups: list[dict[str, Any]],
    state: MutableMapping[torch.Tensor, Any],
) -> torch.optim.Optimizer:
    """Make an optimizer of the same kind, with the step of its class, for other parameters."""
    double: torch.optim.Optimizer = object.__new__(type(optimizer))
    own = {k: v for k, v in vars(optimizer).items() if k not in ("step", "zero_grad")}
    vars(double).update(own, param_groups=param_groups, state=state)
    return double


def set_groups(
    target: torch.optim.Optimizer, kind: Kind, kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], Restore]:
    """Write the settings of a named optimizer into the groups of another one."""
    old_kind = KIND_BY_TYPE.get(type(target))
    old = dict(target.defaults)
    if old_kind is None or old_kind.family != kind.family:
        # `betas` and `eps` have another meaning in other families.
        old = {key: value for key, value in old.items() if key == "weight_decay"}
    defaults = {key: old.get(key, value) for key, value in kind.defaults.items()} | dict(kwargs)
    if defaults.get("momentum") == 0:
        defaults["momentum"] = kind.defaults["momentum"]  # there is no 8-bit SGD without it

    before = [(group, dict(group)) for group in target.param_groups]
    for group in target.param_groups:
        own = {k for k in kind.defaults if k in old and group.get(k, old[k]) not in (old[k], 0.0)}
        if group.get("weight_decay", old.get("weight_decay")) != old.get("weight_decay"):
            own.add("weight_decay")
        group.update({key: value for key, value in defaults.items() if key not in own})
        if kind.family == "adam":
            group["decoupled_weight_decay"] = kind.word == "adamw"
    written = {*kind.defaults, "decoupled_weight_decay"}

    def restore(new: torch.optim.Optimizer) -> None:
        # The new optimizer may still be saved after this, with the settings that it trained with.
        new.param_groups = [dict(group) for group in new.param_groups]
        for group, was in before:
            for key in written & group.keys():
                if key in was:
                    group[key] = was[key]
                else:
                    del group[key]

    lr = target.defaults.get("lr", target.param_groups[0]["lr"])
    return {**defaults, "lr": lr}, restore
