"""Refuse optimizer states of other shapes: kernels do not check them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.optimizer_kinds import BLOCKSIZE, KINDS

# bitsandbytes hides its tensors from FSDP under this key since 0.49.
NESTED = "__bnb_optimizer_quant_state__"
_MOMENTS = frozenset({"state1", "state2"}).union(*(kind.state_keys for kind in KINDS))
_TABLE_SIZE = 256
_WHAT = "The checkpoint's optimizer state"
WEIGHTS_ONLY = (
    "load its weights only: `MyModule.load_from_checkpoint(path)` and `trainer.fit(module)` "
    "without `ckpt_path`."
)


def flat_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter without bitsandbytes' nesting, as a new dictionary."""
    outer = {key: value for key, value in state.items() if key != NESTED}
    return {**outer, **state.get(NESTED, {})}


def check_states(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise if states do not fit the parameters of these groups; kernels do not check that."""
    for saved, own in zip(state_dict["param_groups"], groups, strict=True):
        for key, param in zip(saved["params"], own["params"], strict=True):
            if state := state_dict["state"].get(key):
                _check_state(f"`state[{key!r}]`", flat_state(state), param)


def _check_state(where: str, flat: Mapping[str, Any], param: torch.Tensor) -> None:
    for key in sorted(flat.keys() & _MOMENTS, reverse=True):  # `state2` first: it has one shape
        moment = flat[key]
        if moment is None and key == "momentum_buffer":  # SGD's before its first step
            continue
        _check_shape(where, key, moment, param)
        if 0 in moment.stride() and moment.numel() > 1:
            raise _malformed(f"{where}: `{key}` repeats one value to any size")
        if moment.dtype is torch.uint8:
            _check_scales(where, key[-1], flat, moment)


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


# Older versions of bitsandbytes had larger blocks.
def _check_scales(where: str, number: str, flat: Mapping[str, Any], moment: torch.Tensor) -> None:
    rows = 2 if flat.get("state2") is not None and moment.ndim > flat["state2"].ndim else 1
    num_blocks = rows * -(-moment.numel() // rows // BLOCKSIZE)
    for key, size in ((f"absmax{number}", num_blocks), (f"qmap{number}", _TABLE_SIZE)):
        if flat[key].numel() != size:
            why = f"{where}: `{key}` has {flat[key].numel()} values, not {size}"
            fix = f"Use an earlier checkpoint, or {WEIGHTS_ONLY}"
            raise IncompatibleError("optimizer", [Problem(_WHAT, why, fix)])
