"""Optimizers with an equivalent 8-bit form in bitsandbytes, and their state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from lightning_memsave.errors import Problem

BLOCKSIZE = 256
"""Elements of a moment that share a scale."""
MIN_PAGED_NUMEL = 100_000
"""State of smaller parameters is not paged."""
PAGED_STATES = ("state1", "state2")
"""What of it is paged."""


@dataclass(frozen=True)
class Kind:
    word: str
    class_name: str
    paged_class_name: str | None
    family: str
    state_keys: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    has_step_tensor: bool = True
    own_name: str = ""
    """Where it does more than its class of bitsandbytes."""

    @property
    def name(self) -> str:
        return self.own_name or self.class_name

    @property
    def num_moments(self) -> int:
        """State tensors per parameter, each as large as the parameter."""
        return 2 if self.family == "adam" else 1


_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
_MOMENTS = ("exp_avg", "exp_avg_sq")
MUON: Mapping[str, Any] = {
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.7750, 2.0315),
    "ns_steps": 5,
    "ns_eps": 1e-7,
    "adjust_lr_fn": "match_rms_adamw",
}
"""Settings of Muon beside those of AdamW; ``ns_eps`` is its ``eps``."""

KINDS: tuple[Kind, ...] = (
    Kind("adamw", "AdamW8bit", "PagedAdamW8bit", "adam", _MOMENTS, {**_ADAM, "weight_decay": 0.01}),
    Kind("adam", "Adam8bit", "PagedAdam8bit", "adam", _MOMENTS, {**_ADAM, "weight_decay": 0.0}),
    Kind(
        "lion",
        "Lion8bit",
        "PagedLion8bit",
        "lion",
        ("exp_avg",),
        {"betas": (0.9, 0.99), "weight_decay": 0.0},
        has_step_tensor=False,
    ),
    Kind(
        "sgd",
        "SGD8bit",
        None,
        "momentum",
        ("momentum_buffer",),
        {"momentum": 0.9, "weight_decay": 0.0},
        has_step_tensor=False,
    ),
    Kind(
        "rmsprop",
        "RMSprop8bit",
        None,
        "rmsprop",
        ("square_avg",),
        {"alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0},
    ),
)
_MUON_8BIT = Kind(
    "muon",
    "AdamW8bit",
    None,
    "adam",
    _MOMENTS,
    {**_ADAM, **MUON, "weight_decay": 0.01},
    own_name="Muon8bit",
)
MOMENTUM = Kind("muon", "", None, "muon", ("momentum_buffer",), has_step_tensor=False)
"""What Muon keeps of a matrix; of the rest it keeps what AdamW does."""
OTHER_NAMES = ("muon", "adamw_bf16_state")
"""What ``NamedOptimizer`` makes, beside ``"package:Class"``."""
KIND_BY_WORD = MappingProxyType({kind.word: kind for kind in (*KINDS, _MUON_8BIT)})

# Exact types: a subclass may compute something else.
KIND_BY_TYPE = MappingProxyType(
    {
        torch.optim.AdamW: KIND_BY_WORD["adamw"],
        torch.optim.Adam: KIND_BY_WORD["adam"],
        torch.optim.SGD: KIND_BY_WORD["sgd"],
        torch.optim.RMSprop: KIND_BY_WORD["rmsprop"],
    }
)

_FLAGS = {
    "amsgrad": "bitsandbytes has no 8-bit AMSGrad",
    "nesterov": "bitsandbytes has no 8-bit Nesterov momentum",
    "centered": "bitsandbytes has no centered RMSprop",
    "maximize": "bitsandbytes only minimizes",
    "differentiable": "a bitsandbytes step cannot be differentiated",
    "capturable": "bitsandbytes counts steps outside the CUDA graph",
}
# Required values of settings, and why the optimizer stays 32-bit otherwise.
_NUMBERS: tuple[tuple[str, str, Callable[[float], bool], str], ...] = (
    ("sgd", "momentum", lambda x: x != 0, "without momentum it has no state"),
    ("sgd", "dampening", lambda x: x == 0, "bitsandbytes has no dampening"),
    ("rmsprop", "momentum", lambda x: x == 0, "bitsandbytes has no RMSprop with momentum"),
)


def find_kind(optimizer: torch.optim.Optimizer) -> Kind | str:
    name = type(optimizer).__name__
    if type(optimizer).__module__.startswith("bitsandbytes."):
        return f"`{name}` stays unchanged: it is a bitsandbytes optimizer already"
    if is_low_bit(optimizer):
        return f"`{name}` stays unchanged: its state has 8 bits already"
    kind = KIND_BY_TYPE.get(type(optimizer))
    if kind is None:
        return f"`{name}` stays 32-bit: {_why_unknown(optimizer)}"
    for group in optimizer.param_groups:
        problem = _why_not(kind, group)
        if problem is not None:
            setting, why = problem
            return f"`{name}({setting})` stays 32-bit: {why}"
    return kind


def is_low_bit(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer was made by ``LowBitOptimizer``."""
    return hasattr(optimizer, "memsave_kind")


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its class is torch's own; Muon's says that it is of ``torch.optim`` itself."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


STATE_KEYS = "memsave_state_keys"
"""Attribute of what ``NamedOptimizer`` gives: the keys that states of parameters have after a step;
empty if they are not known."""
EACH_ALONE = "memsave_each_alone"
"""Attribute of what ``NamedOptimizer`` gives: whether it updates each parameter alone, but for
counts in its groups; of classes that are not known, found by trying."""
STATE_LIKE_WEIGHTS = "memsave_state_like_weights"
"""Attribute of classes of ``NamedOptimizer``: whether state has the type of the weights."""


def is_made_here(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it is of one of the classes of ``NamedOptimizer``, which are made of torch's.

    Their state begins as that of torch's optimizers does, and each parameter is updated alone.
    """
    return hasattr(optimizer, STATE_LIKE_WEIGHTS)


def wrapper_problems(optimizer: torch.optim.Optimizer) -> list[Problem]:
    if not type(optimizer).__module__.endswith("fabric.wrappers"):
        return []
    inner = type(optimizer.optimizer).__name__  # type: ignore[attr-defined]
    why = f"it is the wrapper of `fabric.setup` around an `{inner}`, which makes the steps"
    fix = f"Apply the technique to the `{inner}` first, then call "
    fix += "`model, optimizer = fabric.setup(model, handle.target)`."
    return [Problem(f"`{type(optimizer).__name__}`", why, fix)]


def _why_unknown(optimizer: torch.optim.Optimizer) -> str:
    parent = next((t for t in type(optimizer).__mro__[1:] if t in KIND_BY_TYPE), None)
    if parent is not None:
        return f"it is a subclass of `{parent.__name__}` and may compute something else"
    if type(optimizer) is torch.optim.Adagrad:
        return "its sum of squares only grows, and 8 bits would lose the small gradients"
    return "bitsandbytes has no 8-bit form of this class"


def _why_not(kind: Kind, group: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the setting of this group that has no 8-bit form, and why."""
    refused = {flag: why for flag, why in _FLAGS.items() if group.get(flag)}
    if refused:
        flag, why = refused.popitem()
        return f"{flag}=True", why
    for key in ("lr", "betas", "weight_decay"):
        value = group.get(key)
        if any(
            isinstance(v, torch.Tensor) for v in (value if key == "betas" and value else [value])
        ):
            return f"{key}=tensor", "bitsandbytes needs Python numbers"
    for word, setting, fits, why in _NUMBERS:
        if kind.word == word and not fits(group[setting]):
            return f"{setting}={group[setting]}", why
    for param in group["params"]:
        if param.requires_grad and param.dtype not in {
            torch.float32,
            torch.bfloat16,
            torch.float16,
        }:
            dtype = str(param.dtype).removeprefix("torch.")
            return f"{dtype} parameters", "bitsandbytes computes in 32 bits"
    return None


# Optimizers with elementwise updates. Exact types: a subclass may differ.
ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)


Restore = Callable[[torch.optim.Optimizer], None]


def set_groups(
    target: torch.optim.Optimizer, kind: Kind, kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], Restore]:
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
            group["decoupled_weight_decay"] = kind.word != "adam"
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
