"""Validate optimizer states: structure, types and shapes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.optimizer_kinds import BLOCKSIZE, KINDS
from lightning_memsave.techniques.optimizer_step import COMPENSATION, SEED

# bitsandbytes hides its tensors from FSDP under this key since 0.49.
NESTED = "__bnb_optimizer_quant_state__"
_MOMENTS = frozenset({"state1", "state2"}).union(*(kind.state_keys for kind in KINDS))
_TABLE_SIZE = 256
_SETTINGS = {"lr": int | float | torch.Tensor, "betas": Sequence, "param_names": Sequence}
_WHAT = "The checkpoint's optimizer state"
WEIGHTS_ONLY = (
    "load its weights only: `MyModule.load_from_checkpoint(path)` and `trainer.fit(module)` "
    "without `ckpt_path`."
)


def flat_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter without bitsandbytes' nesting, as a new dictionary."""
    outer = {key: value for key, value in state.items() if key != NESTED}
    return {**outer, **state.get(NESTED, {})}


def check_structure(state_dict: Any) -> None:
    """Raise unless this is the ``state_dict`` of an optimizer, with valid values for our keys."""
    check_type(state_dict, Mapping, "it")
    for key, kind in (("state", Mapping), ("param_groups", Sequence)):
        if key not in state_dict:
            raise _malformed(f"it has no `{key}`")
        check_type(state_dict[key], kind, f"`{key}`")
    for i, group in enumerate(state_dict["param_groups"]):
        _check_group(f"`param_groups[{i}]`", group)
    for key, state in state_dict["state"].items():
        where = f"`state[{key!r}]`"
        check_type(state, Mapping, where)
        check_type(state.get(NESTED, {}), Mapping, f"`state[{key!r}][{NESTED!r}]`")
        if SEED in state:
            check_type(state[SEED], int, f"{where}: `{SEED}`")
            if not 0 <= state[SEED] < 2**32:
                raise _malformed(f"{where}: `{SEED}` is {state[SEED]}, not from 0 to 2**32 - 1")
        if COMPENSATION in state:
            check_type(state[COMPENSATION], torch.Tensor, f"{where}: `{COMPENSATION}`")


def _check_group(where: str, group: Any) -> None:
    check_type(group, Mapping, where)
    if "params" not in group:
        raise _malformed(f"{where} has no `params`")
    check_type(group["params"], Sequence, f"{where}: `params`")
    for key in group["params"]:
        check_type(key, int | str, f"{where}: one of its `params`")
    for name, kind in _SETTINGS.items():
        if name in group:
            check_type(group[name], kind, f"{where}: `{name}`")
    num_names, num_params = len(group.get("param_names", group["params"])), len(group["params"])
    if num_names != num_params:
        raise _malformed(f"{where} has {num_names} `param_names` for {num_params} `params`")


def check_rests(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise if the state of rounding has another shape than its parameter."""
    for key, state, param in _pairs(state_dict, groups):
        rest = state.get(COMPENSATION)
        if rest is not None and rest.shape != param.shape:
            raise _malformed(
                f"`state[{key!r}]`: `{COMPENSATION}` has shape {tuple(rest.shape)}, not "
                f"{tuple(param.shape)}"
            )


def check_states(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise if states do not fit the parameters of these groups; kernels do not check that."""
    for key, state, param in _pairs(state_dict, groups):
        _check_state(f"`state[{key!r}]`", flat_state(state), param)


def _pairs(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Any, Mapping[str, Any], torch.Tensor]]:
    for saved, own in zip(state_dict["param_groups"], groups, strict=True):
        for key, param in zip(saved["params"], own["params"], strict=True):
            state = state_dict["state"].get(key)
            if state:
                yield key, state, param


def _check_state(where: str, flat: Mapping[str, Any], param: torch.Tensor) -> None:
    if flat.keys() & {"state1", "exp_avg_sq", "square_avg"}:
        if "step" not in flat:
            raise _malformed(f"{where} has no `step`")
        step = flat["step"]
        check_type(step, int | float | torch.Tensor, f"{where}: `step`")
        if isinstance(step, torch.Tensor) and step.numel() != 1:
            raise _malformed(f"{where}: `step` has {step.numel()} values, not 1")
    for key in sorted(flat.keys() & _MOMENTS, reverse=True):  # `state2` first: it has one shape
        moment = flat[key]
        if moment is None and key == "momentum_buffer":  # SGD's before its first step
            continue
        check_type(moment, torch.Tensor, f"{where}: `{key}`")
        _check_shape(where, key, moment, param)
        if moment.dtype is torch.uint8:
            _check_scales(where, key[-1], flat, moment)
        elif not moment.is_floating_point():
            raise _malformed(f"{where}: `{key}` is {moment.dtype}")


def _check_shape(where: str, key: str, moment: torch.Tensor, param: torch.Tensor) -> None:
    # AdEMAMix keeps two moments in its first tensor.
    allowed = [param.shape, (2, *param.shape)] if key == "state1" else [param.shape]
    if moment.shape in allowed:
        return
    why = (
        f"{where} belongs to a parameter of shape {tuple(moment.shape)}, but the parameter at this "
    )
    fix = "Give the optimizer its parameters in the order and with the sizes of the run that wrote "
    why, fix = (
        f"{why}position has shape {tuple(param.shape)}",
        f"{fix}the checkpoint, or {WEIGHTS_ONLY}",
    )
    raise IncompatibleError("optimizer", [Problem(_WHAT, why, fix)])


def _check_scales(where: str, number: str, flat: Mapping[str, Any], moment: torch.Tensor) -> None:
    rows = 2 if flat.get("state2") is not None and moment.ndim > flat["state2"].ndim else 1
    num_blocks = rows * -(-moment.numel() // rows // BLOCKSIZE)
    for key, size in ((f"absmax{number}", num_blocks), (f"qmap{number}", _TABLE_SIZE)):
        if key not in flat:
            raise _malformed(f"{where} has no `{key}`")
        check_type(flat[key], torch.Tensor, f"{where}: `{key}`")
        if flat[key].numel() != size:
            raise _malformed(f"{where}: `{key}` has {flat[key].numel()} values, not {size}")


def check_type(value: object, kind: Any, where: str) -> None:
    """Raise if a value of a checkpoint has another type; a string does not count as a sequence."""
    if isinstance(value, kind) and not (kind is Sequence and isinstance(value, str)):
        return
    name = type(value).__name__
    raise _malformed(f"{where} is {'an' if name[0] in 'aeiou' else 'a'} {name}")


def _malformed(why: str) -> IncompatibleError:
    why = f"{why}, so it is damaged or was not written by an optimizer"
    fix = f"Use an earlier checkpoint, or {WEIGHTS_ONLY}"
    return IncompatibleError("optimizer", [Problem(_WHAT, why, fix)])
