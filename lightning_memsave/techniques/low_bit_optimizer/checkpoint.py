"""Convert the optimizer states of a checkpoint to 8 or 32 bits, without the module."""

import glob
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import SGD, AdamW, Optimizer, RMSprop

from lightning_memsave.errors import ConfigurationError, IncompatibleError, NoEffectWarning, Problem
from lightning_memsave.techniques.low_bit_optimizer.state import (
    FAMILY_NAMES,
    convert_state_dict,
    family_of,
    is_bitsandbytes,
)
from lightning_memsave.techniques.low_bit_optimizer.state_checks import (
    flat_state,
    reading,
)
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.optimizer_step import OWN_STATE
from lightning_memsave.techniques.parameter_names import matches
from lightning_memsave.units import format_bytes

Width = Literal["8bit", "32bit"]
StateDict = Mapping[str, Any]

# A checkpoint has names and shapes, not classes: possible embeddings stay 32-bit. Resuming with
# `MemSaveCallback` converts the rest; the other way round, precision would be lost.
KEPT_32BIT = ("*bias", "*emb*", "*wte*", "*wpe*")

_TORCH_CLASSES: dict[str, type[Optimizer]] = {"adam": AdamW, "momentum": SGD, "rmsprop": RMSprop}
# Other optimizers (RAdam, LAMB, Muon) have state of the same names, but not this setting.
_MARKS = {"adam": "amsgrad", "momentum": "dampening", "rmsprop": "centered"}


@dataclass(frozen=True, slots=True)
class StateChange:
    """How a state was converted, or why it stays unchanged."""

    text: str
    state_dict: StateDict | None = None
    has_format: bool = False
    """Whether it has the requested format already."""

    @property
    def is_converted(self) -> bool:
        return self.state_dict is not None


@reading()
def convert_optimizer_states(
    checkpoint: Mapping[str, Any], to: Width, keep_32bit: Sequence[str] | None = None
) -> tuple[dict[str, Any], list[StateChange]]:
    """Convert the optimizer states of a Lightning checkpoint."""
    states = checkpoint["optimizer_states"]
    names = [_names(state_dict, checkpoint) for state_dict in states]
    if keep_32bit is not None:
        _refuse_unmatched(keep_32bit, names)
    patterns = KEPT_32BIT if keep_32bit is None else keep_32bit
    changes = [
        _to_32bit(state_dict) if to == "32bit" else _to_8bit(state_dict, own_names, patterns)
        for state_dict, own_names in zip(states, names, strict=True)
    ]
    kept = {i: change for i, change in enumerate(changes) if not change.is_converted}
    # An optimizer without an 8-bit form stays unchanged under `MemSaveCallback` too.
    refused = {i: k for i, k in kept.items() if to == "32bit" and not k.has_format}
    if len(kept) == len(changes):
        refused = kept
    if refused:
        problems = [Problem(f"optimizer {i}", k.text, _fix(to, k)) for i, k in refused.items()]
        raise IncompatibleError(f"Conversion to {to}", problems)
    new = [change.state_dict or old for old, change in zip(states, changes, strict=True)]
    return {**checkpoint, "optimizer_states": new}, changes


_NO_STATE = StateChange("it has no state, or has made no step yet", has_format=True)


def _fix(to: Width, kept: StateChange) -> str:
    if to == "8bit" or kept.has_format:
        return "Resume from the original checkpoint."
    return "Resume from the original checkpoint, with `MemSaveCallback` and the same settings."


def _to_32bit(state_dict: StateDict) -> StateChange:
    states = [flat_state(state) for state in state_dict["state"].values() if state]
    if not states:
        return _NO_STATE
    if not any(map(is_bitsandbytes, states)):
        return StateChange("its state has the 32-bit format of torch already", has_format=True)
    stand_in = _stand_in(state_dict)
    if isinstance(stand_in, StateChange):
        return stand_in
    converted = convert_state_dict(dict(state_dict), stand_in)
    num_8bit = sum("absmax1" in state for state in states)
    before, after = (format_bytes(_num_bytes(d["state"])) for d in (state_dict, converted))
    text = (
        f"{type(stand_in).__name__}: {num_8bit} of {len(states)} tensors were 8-bit, "
        f"optimizer state {before} -> {after}"
    )
    return StateChange(text, converted)


def _to_8bit(
    state_dict: StateDict, names: Mapping[Any, Sequence[str]], keep_32bit: Sequence[str]
) -> StateChange:
    states = [state for state in state_dict["state"].values() if state]
    if not states:
        return _NO_STATE
    if any(map(is_bitsandbytes, states)):
        return StateChange("its state has the 8-bit format already", has_format=True)
    stand_in = _stand_in(state_dict)
    if isinstance(stand_in, StateChange):
        return stand_in
    for group, saved in zip(stand_in.param_groups, state_dict["param_groups"], strict=True):
        group["param_names"] = [str(key) for key in saved["params"]]
    kept = (glob.escape(str(key)) for key, own in names.items() if matches(own, keep_32bit))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEffectWarning)
        handle = LowBitOptimizer(keep_32bit=tuple(kept)).apply(stand_in)
    if not handle.changes:
        return StateChange("; ".join(handle.skipped))
    for group in handle.target.param_groups:
        del group["param_names"]  # added above, not in the checkpoint
    return StateChange(handle.summary, convert_state_dict(dict(state_dict), handle.target))


def _stand_in(state_dict: StateDict) -> Optimizer | StateChange:
    """Return a torch optimizer like the one that wrote this, over meta parameters."""
    saved, states = state_dict["param_groups"], state_dict["state"]
    pairs = [(states[key], g) for g in saved for key in g["params"] if states.get(key)]
    families = {family_of(state, group) for state, group in pairs}
    if len(families) > 1:
        return StateChange(f"it has state of several kinds ({', '.join(sorted(families))})")
    if not families:
        return StateChange("its state belongs to no parameter of its groups")
    family = families.pop()
    if family not in _TORCH_CLASSES:
        why = f"its state was written by {FAMILY_NAMES.get(family, family)}"
        return StateChange(why + ", which torch.optim does not have" * (family in FAMILY_NAMES))
    cls: Any = _TORCH_CLASSES[family]
    is_from_torch = not any(is_bitsandbytes(state) for state, _ in pairs)
    if is_from_torch and not all(_MARKS[family] in group for _, group in pairs):
        return StateChange(f"its settings are not those of torch's {cls.__name__}")
    if family == "adam" and not pairs[0][1].get("decoupled_weight_decay", True):
        cls = torch.optim.Adam
    groups = [
        {
            **{key: value for key, value in group.items() if key != "param_names"},
            "params": [_empty_parameter(states.get(key)) for key in group["params"]],
        }
        for group in saved
    ]
    optimizer: Optimizer = cls(groups)
    return optimizer


def _empty_parameter(state: Mapping[str, Any] | None) -> torch.nn.Parameter:
    """Return a meta parameter with the shape of its state; without state a frozen one."""
    flat = flat_state(state or {})
    other = ("step", *OWN_STATE)
    tensors = (v for k, v in flat.items() if k not in other and isinstance(v, torch.Tensor))
    moment = flat.get("state1", next(tensors, None))
    if moment is None:
        return torch.nn.Parameter(torch.empty(0), requires_grad=False)
    dtype = moment.dtype if moment.is_floating_point() else torch.float32
    return torch.nn.Parameter(torch.empty(moment.shape, dtype=dtype, device="meta"))


def _names(state_dict: StateDict, checkpoint: Mapping[str, Any]) -> dict[Any, Sequence[str]]:
    by_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, tensor in checkpoint.get("state_dict", {}).items():
        if isinstance(tensor, torch.Tensor):
            by_shape[tuple(tensor.shape)].append(name)
    names: dict[Any, Sequence[str]] = {}
    for group in state_dict["param_groups"]:
        # FSDP uses names instead of indices.
        known = group.get("param_names", group["params"])
        for key, name in zip(group["params"], known, strict=True):
            shape = tuple(_empty_parameter(state_dict["state"].get(key)).shape)
            names[key] = [name] if isinstance(name, str) else by_shape.get(shape, [])
    return names


def _refuse_unmatched(
    patterns: Sequence[str], names: Sequence[Mapping[Any, Sequence[str]]]
) -> None:
    every = sorted({name for own in names for found in own.values() for name in found})
    unmatched = [pattern for pattern in patterns if not matches(every, (pattern,))]
    if unmatched:
        raise ConfigurationError(
            f"{', '.join(map(repr, unmatched))} matches no parameter of the checkpoint. "
            f"Use a pattern over names such as {', '.join(every[:3]) or 'these: there are none'}."
        )


def _num_bytes(states: Mapping[Any, Any]) -> int:
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in states.values()
        for value in flat_state(state).values()
        if isinstance(value, torch.Tensor)
    }
    return sum(storages.values())
