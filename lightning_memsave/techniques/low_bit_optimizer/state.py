"""Convert optimizer state between torch's 32-bit and bitsandbytes' 8-bit format."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.low_bit_optimizer.package import import_bitsandbytes
from lightning_memsave.techniques.low_bit_optimizer.sharded import as_local, as_sharded
from lightning_memsave.techniques.low_bit_optimizer.state_checks import (
    NESTED,
    WEIGHTS_ONLY,
    check_rests,
    check_states,
    flat_state,
    reading,
)
from lightning_memsave.techniques.muon import has_momentum, is_of_muon
from lightning_memsave.techniques.optimizer_kinds import (
    BLOCKSIZE,
    KIND_BY_TYPE,
    KIND_BY_WORD,
    KINDS,
    MOMENTUM,
    STATE_KEYS,
    Kind,
)
from lightning_memsave.techniques.optimizer_step import OWN_STATE

StateDict = dict[str, Any]

FAMILY_NAMES = {
    "adam": "Adam or AdamW",
    "lion": "Lion",
    "momentum": "SGD with momentum",
    "muon": "Muon",
    "ademamix": "AdEMAMix",
    "rmsprop": "RMSprop",
}


@reading()
def convert_state_dict(state_dict: StateDict, target: torch.optim.Optimizer) -> StateDict:
    """Convert an optimizer's ``state_dict`` to the format of the optimizer that will load it.

    The state of each parameter gets the target's width, 8 or 32 bits. State that has that width
    already is unchanged, bit for bit.
    """
    states, groups = state_dict["state"], state_dict["param_groups"]
    from_bitsandbytes = any(is_bitsandbytes(state) for state in states.values())
    to_bitsandbytes = hasattr(target, "optimizer_name")
    sizes = [len(group["params"]) for group in groups]
    if sizes != [len(group["params"]) for group in target.param_groups]:
        return state_dict  # torch raises a good error for it
    check_rests(state_dict, target.param_groups)
    kind = _kind_of(target)
    if from_bitsandbytes == to_bitsandbytes and (not to_bitsandbytes or kind is None):
        _refuse_what_fails_in_a_step(state_dict, target)
        return state_dict
    check_states(state_dict, target.param_groups)
    converted = {}
    for group_index, (saved_group, own) in enumerate(zip(groups, target.param_groups, strict=True)):
        for param_index, saved_id in enumerate(saved_group["params"]):
            saved = states.get(saved_id)
            if not saved:
                continue
            family = family_of(saved, saved_group)
            of_muon = kind is not None and is_of_muon(target, own["params"][param_index])
            own_kind = MOMENTUM if of_muon else kind
            if own_kind is None or family != own_kind.family:
                problem = _other_family(family, target)
                raise IncompatibleError("low_bit_optimizer", [problem])
            wants = _wants_8bit(target, group_index, param_index) if to_bitsandbytes else None
            converted[saved_id] = _convert(saved, own_kind, own, wants)
    filled = [_fill_group(a, b, kind) for a, b in zip(groups, target.param_groups, strict=True)]
    if all(a is b for a, b in zip(filled, groups, strict=True)) and all(
        value is states[key] for key, value in converted.items()
    ):
        return state_dict
    return {**state_dict, "state": {**states, **converted}, "param_groups": filled}


def _refuse_what_fails_in_a_step(state_dict: StateDict, target: torch.optim.Optimizer) -> None:
    kind = KIND_BY_TYPE.get(type(target))
    known: set[frozenset[str]] = vars(target).get(STATE_KEYS, set())
    if kind is not None and kind.has_step_tensor:
        known = {frozenset(kind.state_keys)}
    for group in state_dict["param_groups"]:
        for key in group["params"]:
            state = state_dict["state"].get(key)
            if state and known and not any(state.keys() >= keys for keys in known):
                family = "muon" if "ns_steps" in group else family_of(state, group)
                raise IncompatibleError("optimizer", [_other_family(family, target)])


def sharded_state_dict(optimizer: Any, state_dict: StateDict) -> StateDict:
    """Convert the state of local shards to torch's 32-bit format, sharded as parameters are."""
    kind, found = KIND_BY_WORD[optimizer.memsave_kind], {}
    for saved, own in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        for key, param in zip(saved["params"], own["params"], strict=True):
            if state := state_dict["state"].get(key):
                found[key] = as_sharded(_convert(state, kind, own, None), param)
    return {**state_dict, "state": found}


def local_state_dict(optimizer: Any, state_dict: StateDict) -> StateDict:
    """Convert a state dict of `sharded_state_dict`, or of torch, to the format of local shards."""
    kind, found = KIND_BY_WORD[optimizer.memsave_kind], {}
    for i, saved in enumerate(state_dict["param_groups"]):
        for j, key in enumerate(saved["params"]):
            if state := state_dict["state"].get(key):
                own, wants = optimizer.param_groups[i], _wants_8bit(optimizer, i, j)
                found[key] = _convert(as_local(state), kind, own, wants)
    return {**state_dict, "state": found}


def is_bitsandbytes(state: object) -> bool:
    return isinstance(state, Mapping) and (NESTED in state or "state1" in state)


def _kind_of(optimizer: torch.optim.Optimizer) -> Kind | None:
    """Return the kind of an optimizer, also of a subclass."""
    word = getattr(optimizer, "memsave_kind", None)
    if word is not None:
        return KIND_BY_WORD[word]
    if hasattr(optimizer, "muon_matrices"):
        return KIND_BY_WORD["muon"]
    family = getattr(optimizer, "optimizer_name", None)
    if family is not None:
        return next((kind for kind in KINDS if kind.family == family), None)
    return next((KIND_BY_TYPE[t] for t in type(optimizer).__mro__ if t in KIND_BY_TYPE), None)


def family_of(state: Mapping[str, Any], group: Mapping[str, Any]) -> str:
    flat = flat_state(state)
    if "ns_steps" in group and has_momentum(flat):
        return "muon"
    if "state2" in flat:
        # AdEMAMix keeps two moments in its first tensor.
        return "ademamix" if flat["state1"].ndim > flat["state2"].ndim else "adam"
    if "state1" in flat:
        return _family_of_one_state(group)
    known = {
        frozenset({"exp_avg", "exp_avg_sq"}): "adam",
        frozenset({"exp_avg"}): "lion",
        frozenset({"square_avg"}): "rmsprop",
        frozenset({"momentum_buffer"}): "momentum",
    }
    moments = frozenset(flat.keys() - {"step", "max_exp_avg_sq", *OWN_STATE})
    return known.get(moments, f"an optimizer that keeps {', '.join(sorted(moments))}")


def _family_of_one_state(group: Mapping[str, Any]) -> str:
    # All three have one state tensor; only their settings differ. A named optimizer keeps settings
    # of the torch class whose groups it uses.
    has_betas = group.get("betas", (0.0, 0.0))[1] > 0
    if has_betas and ("nesterov" in group or "centered" in group):
        return "lion"
    if "centered" in group:  # RMSprop with momentum has no 8-bit form
        return "momentum" if group.get("momentum") else "rmsprop"
    if "momentum" in group:
        return "momentum"
    if has_betas:
        return "lion"
    return "momentum" if group.get("eps") == 0 else "rmsprop"


def _wants_8bit(target: Any, group_index: int, param_index: int) -> bool:
    group = target.param_groups[group_index]
    config = target.get_config(group_index, param_index, group)
    numel: int = group["params"][param_index].numel()
    return bool(config["optim_bits"] == 8 and numel >= config["min_8bit_size"])


def _convert(
    saved: Mapping[str, Any], kind: Kind, group: Mapping[str, Any], wants_8bit: bool | None
) -> Mapping[str, Any]:
    """Convert the state to 8 bits, to bitsandbytes' 32 bits, or (None) to torch's format."""
    flat = flat_state(saved)
    moments = _moments(flat, kind)
    if not moments:  # SGD writes `momentum_buffer=None` for a parameter without momentum
        return {}
    has_8bit = flat["state1"].dtype == torch.uint8 if "state1" in flat else None
    if has_8bit == wants_8bit:
        return saved
    # torch's SGD does not count steps; at step 0 bitsandbytes would discard the momentum.
    step = int(flat.get("step", 1))
    rounding = {key: flat[key] for key in OWN_STATE if key in flat}
    if wants_8bit is None:
        converted = rounding | dict(zip(kind.state_keys, moments, strict=True))
        if kind.has_step_tensor:
            converted["step"] = torch.tensor(float(step), device="cpu")
        if group.get("amsgrad"):
            converted["max_exp_avg_sq"] = converted["exp_avg_sq"].clone()
        return converted
    if not wants_8bit:
        return {"step": step, **rounding, **{f"state{i}": m for i, m in enumerate(moments, 1)}}
    return {"step": step, **rounding, **_quantized(moments)}


def _moments(flat: Mapping[str, Any], kind: Kind) -> list[torch.Tensor]:
    """Return the state tensors in float32, in bitsandbytes' order."""
    if "state1" not in flat:
        found = [flat.get(key) for key in kind.state_keys]
        return [tensor.float().contiguous() for tensor in found if tensor is not None]
    moments = []
    for i in ("1", "2"):
        tensor = flat.get(f"state{i}")
        if tensor is not None and tensor.dtype == torch.uint8:
            tensor = _dequantized(tensor.contiguous(), flat[f"absmax{i}"], flat[f"qmap{i}"])
        if tensor is not None:
            moments.append(tensor)
    return moments


def _dequantized(tensor: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    functional = import_bitsandbytes("8-bit optimizer state").functional
    result: torch.Tensor = functional.dequantize_blockwise(
        tensor, absmax=absmax, code=table, blocksize=BLOCKSIZE
    )
    return result


def _quantized(moments: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    functional = import_bitsandbytes("8-bit optimizer state").functional
    result: dict[str, torch.Tensor] = {}
    for i, moment in enumerate(moments, 1):
        # As in bitsandbytes: an unsigned table for the second moment, else the signed one.
        table = functional.create_dynamic_map(signed=i == 1).to(moment.device)
        values, scales = functional.quantize_blockwise(
            moment.contiguous(), code=table, blocksize=BLOCKSIZE
        )
        _keep_quantized(moment, table, values, scales.absmax)
        result |= {f"state{i}": values, f"absmax{i}": scales.absmax, f"qmap{i}": table}
    return result


def _keep_quantized(
    moment: torch.Tensor, table: torch.Tensor, values: torch.Tensor, absmax: torch.Tensor
) -> None:
    """Give blocks that were 8-bit before their values again, bit for bit.

    bitsandbytes rounds small values of a block to a neighbor of the nearest. And its signed table
    has 1, and -0.993 but not -1: a block whose largest value is negative comes back from 8 bits
    with a smaller one, which bitsandbytes would take for its scale.
    """
    padded = torch.nn.functional.pad(moment.flatten(), (0, -moment.numel() % BLOCKSIZE))
    blocks, codes = padded.view(-1, BLOCKSIZE), values.flatten()
    middles, largest = (table[1:] + table[:-1]) / 2, blocks.abs().amax(1)
    guesses = [largest]
    if table[0] < 0:
        scale = largest / -table[0]
        ways = (torch.full_like(scale, end) for end in (0.0, math.inf))
        guesses += [scale, *(torch.nextafter(scale, way) for way in ways)]
    known = torch.zeros_like(largest, dtype=torch.bool)
    for guess in guesses:
        found = torch.bucketize(blocks / guess[:, None], middles)
        same = (table[found] * guess[:, None] == blocks).all(1) & ~known
        known |= same
        absmax[same] = guess[same]
        chosen = same.repeat_interleave(BLOCKSIZE)[: codes.numel()]
        codes[chosen] = found.flatten()[: codes.numel()][chosen].to(torch.uint8)
    values.copy_(codes.view_as(values))


def _fill_group(
    saved: Mapping[str, Any], own: Mapping[str, Any], kind: Kind | None
) -> Mapping[str, Any]:
    """Return the saved group, completed with the keys of the target's group."""
    missing = {key: value for key, value in own.items() if key not in saved}
    if not missing:
        return saved
    # bitsandbytes stores the momentum of SGD and the decay of RMSprop as `betas[0]`.
    word = {"momentum": "momentum", "rmsprop": "alpha"}.get(kind.family if kind else "", "")
    if word in missing and "betas" in saved:
        missing[word] = saved["betas"][0]
    if word in saved and "betas" in missing:
        missing["betas"] = (saved[word], *missing["betas"][1:])
    return {**saved, **missing}


def _other_family(family: str, target: torch.optim.Optimizer) -> Problem:
    name, own = FAMILY_NAMES.get(family, family), type(target).__name__
    why = f"it was written by {name}, and this run uses {own}, which has other state"
    fix = f"Use the optimizer of the checkpoint, or {WEIGHTS_ONLY}"
    return Problem("The checkpoint's optimizer state", why, fix)
