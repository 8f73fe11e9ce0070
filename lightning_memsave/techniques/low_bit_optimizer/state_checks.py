"""Refuse optimizer states that cannot be read, or have other shapes: kernels do not check them."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_memsave.errors import IncompatibleError, MemsaveError, Problem
from lightning_memsave.techniques.optimizer_kinds import BLOCKSIZE, KINDS
from lightning_memsave.techniques.optimizer_step import COMPENSATION

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


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Say what to do where something is not what an optimizer has written."""
    try:
        yield
    except MemsaveError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _malformed(f"it cannot be read ({type(error).__name__}: {error})") from error


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
    counts_steps = flat.keys() & {"state1", "exp_avg_sq", "square_avg"}
    if counts_steps and torch.as_tensor(flat["step"]).numel() != 1:
        raise _malformed(f"{where}: `step` is not one number")
    for key in sorted(flat.keys() & _MOMENTS, reverse=True):  # `state2` first: it has one shape
        moment = flat[key]
        if moment is None and key == "momentum_buffer":  # SGD's before its first step
            continue
        _check_shape(where, key, moment, param)
        if 0 in moment.stride() and moment.numel() > 1:
            raise _malformed(f"{where}: `{key}` repeats one value to any size")
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
        if flat[key].numel() != size:
            raise _malformed(f"{where}: `{key}` has {flat[key].numel()} values, not {size}")


def _malformed(why: str) -> IncompatibleError:
    why = f"{why}, so it is damaged or was not written by an optimizer"
    fix = f"Use an earlier checkpoint, or {WEIGHTS_ONLY}"
    return IncompatibleError("optimizer", [Problem(_WHAT, why, fix)])
