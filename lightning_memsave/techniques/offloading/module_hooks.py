"""Hooks of modules whose parameters are offloaded, and their ``device``."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from lightning_memsave.core.blocks import Block
from lightning_memsave.core.patching import (
    BEFORE_COPIES,
    patch_method,
    previous_method,
    set_own,
)
from lightning_memsave.techniques.offloading.part import Part
from lightning_memsave.techniques.offloading.residence import PART, Residence
from lightning_memsave.techniques.residences import residence_of, set_residence


def move_with(
    model: nn.Module, residence: Residence, blocks: Sequence[Block]
) -> list[Callable[[], None]]:
    """Let the passes of a model move its parameters, but for those of blocks: see `move_blocks`."""
    params = [param for part in (*residence.tables, residence.rest) for param in part.params]
    undo = set_residence(model.modules(), params, residence)
    in_blocks = {id(m) for block in blocks for m in block.module.modules()}
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):  # whose weights stay on the device
            continue
        undo += [
            set_own(module, BEFORE_COPIES, residence.complete),
            module.register_state_dict_pre_hook(_wait).remove,
            module.register_load_state_dict_pre_hook(_before_load).remove,
        ]
        if id(module) not in in_blocks:
            undo += _around_module(module)
    return [*undo, patch_method(model, _apply)]


def move_blocks(
    residence: Residence, blocks: Sequence[Block], parts: Sequence[Part]
) -> list[Callable[[], None]]:
    """Let the first blocks move their parts; the others are modules like all that are in none."""
    on_host, others = blocks[: len(parts)], blocks[len(parts) :]
    undo = set_residence((), [param for part in parts for param in part.params], residence)
    for block, part in zip(on_host, parts, strict=True):
        undo += [
            set_own(block.module, PART, part),
            block.module.register_forward_pre_hook(_before_block).remove,
            block.module.register_forward_hook(_after_block, always_call=True).remove,
        ]
    inside = {id(m) for block in on_host for m in block.module.modules()}
    for module in {id(m): m for block in others for m in block.module.modules()}.values():
        if id(module) not in inside:
            undo += _around_module(module)
    return undo


def _around_module(module: nn.Module) -> list[Callable[[], None]]:
    if isinstance(module, torch.jit.ScriptModule):
        return []
    return [
        module.register_forward_pre_hook(_before_module).remove,
        module.register_forward_hook(_after_module, always_call=True).remove,
    ]


# Module-level functions, which copies of a module share without moving the original's parameters.
def _wait(module: nn.Module, *_: object) -> None:
    residence = residence_of(module)
    if residence is not None:
        residence.wait()


def _before_load(module: nn.Module, *_: object) -> None:
    residence = residence_of(module)
    if residence is not None:
        residence.wait()
        if residence.processes is not None:
            residence.processes.forget_weights()


def _before_block(module: nn.Module, _: object) -> None:
    _tell(module, lambda residence: residence.enter_block(module))


# In a transform of `torch.func` the weights stay on the device: it runs a backward pass of its own.
def _after_block(module: nn.Module, _: object, output: Any) -> Any:
    residence = residence_of(module)
    if residence is None or _is_in_transform():
        return output
    return residence.leave_block(module, output)


def _before_module(module: nn.Module, _: object) -> None:
    _tell(module, Residence.begin)


def _after_module(module: nn.Module, *_: object) -> None:
    _tell(module, Residence.end)


# Weights are moved as they are, and not what `torch.func` transforms.
def _tell(module: nn.Module, what: Callable[[Residence], None]) -> None:
    residence = residence_of(module)
    if residence is not None:
        with contextlib.ExitStack() as stack:
            if _is_in_transform():
                stack.enter_context(temporarily_clear_interpreter_stack())
                stack.enter_context(torch.no_grad())
            what(residence)


def _is_in_transform() -> bool:
    return bool(torch._C._are_functorch_transforms_active())


def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Convert what is not offloaded, and note the device; replaces ``Module._apply``."""
    residence = residence_of(self)
    if residence is None:
        return previous_method(self, "_apply")(fn, recurse)
    residence.finish()
    residence.follow(fn)
    with residence.hidden():
        return previous_method(self, "_apply")(fn, recurse)


_PLAIN: dict[type, Any] = {}  # properties by class, while a module of it is offloaded
_NUM_MODULES: Counter[type] = Counter()


def tell_device(model: nn.Module) -> list[Callable[[], None]]:
    """Let ``device`` be where the model computes, not where its parameters wait.

    ``generate`` and users bring tokens there.
    """
    undo: list[Callable[[], None]] = []
    for module in model.modules():
        classes = type(module).__mro__
        owner = next((c for c in classes if isinstance(vars(c).get("device"), property)), None)
        if owner is None or hasattr(module, "_device"):  # Lightning notes it by itself
            continue
        _NUM_MODULES[owner] += 1
        if owner not in _PLAIN:
            _PLAIN[owner] = vars(owner)["device"]
            owner.device = property(_device)  # type: ignore[attr-defined]
        undo.append(functools.partial(_forget, owner))
    return undo


def _forget(owner: type) -> None:
    _NUM_MODULES[owner] -= 1
    if not _NUM_MODULES[owner]:
        owner.device = _PLAIN.pop(owner)  # type: ignore[attr-defined]


def _device(self: nn.Module) -> torch.device:
    residence = residence_of(self)
    if residence is not None and not hasattr(self, "_device"):
        return torch.device(residence.device)
    plain = next(_PLAIN[cls] for cls in type(self).__mro__ if cls in _PLAIN)
    device: torch.device = plain.fget(self)
    return device
