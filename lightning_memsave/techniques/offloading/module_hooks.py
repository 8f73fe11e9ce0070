"""Hooks of modules whose parameters are offloaded."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from lightning_memsave.core.patching import patch_method, previous_method
from lightning_memsave.techniques.offloading.residence import Residence
from lightning_memsave.techniques.residences import residence_of, set_residence


def move_with(model: nn.Module, residence: Residence) -> list[Callable[[], None]]:
    """Let the passes of a model move its parameters."""
    params = [param for part in residence.all_parts for param in part.params]
    undo = set_residence(model.modules(), params, residence)
    blocks = [module for module in model.modules() if residence.is_block(module)]
    inside = {id(m) for block in blocks for m in block.modules()}
    for module in model.modules():
        undo += [
            module.register_state_dict_pre_hook(_wait).remove,
            module.register_load_state_dict_pre_hook(_wait).remove,
        ]
        if residence.is_block(module):
            hooks: tuple[Any, Any] = (_before_block, _after_block)
        elif id(module) not in inside and not isinstance(module, torch.jit.ScriptModule):
            hooks = (_before_module, _after_module)
        else:
            continue
        undo += [
            module.register_forward_pre_hook(hooks[0]).remove,
            module.register_forward_hook(hooks[1], always_call=True).remove,
        ]
    return [*undo, patch_method(model, _apply)]


# Module-level functions, which copies of a module share without moving the original's parameters.
def _wait(module: nn.Module, *_: object) -> None:
    residence = residence_of(module)
    if residence is not None:
        residence.wait()


def _before_block(module: nn.Module, _: object) -> None:
    residence = residence_of(module)
    if residence is not None:
        with _outside_of_transforms():
            residence.enter_block(module)


# In a transform of `torch.func` the weights stay on the device: it runs a backward pass of its own.
def _after_block(module: nn.Module, _: object, output: Any) -> Any:
    residence = residence_of(module)
    if residence is None or _is_in_transform():
        return output
    return residence.leave_block(module, output)


def _before_module(module: nn.Module, _: object) -> None:
    residence = residence_of(module)
    if residence is not None:
        with _outside_of_transforms():
            residence.begin()


def _after_module(module: nn.Module, *_: object) -> None:
    residence = residence_of(module)
    if residence is not None:
        with _outside_of_transforms():
            residence.end()


def _is_in_transform() -> bool:
    return bool(torch._C._are_functorch_transforms_active())


@contextlib.contextmanager
def _outside_of_transforms() -> Iterator[None]:
    """Move weights as they are, and not what `torch.func` transforms."""
    if _is_in_transform():
        with temporarily_clear_interpreter_stack(), torch.no_grad():
            yield
    else:
        yield


def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Convert what is not offloaded, and note the device; replaces ``Module._apply``."""
    residence = residence_of(self)
    if residence is None:
        return previous_method(self, "_apply")(fn, recurse)
    residence.finish()
    residence.follow(fn)
    with residence.hidden():
        return previous_method(self, "_apply")(fn, recurse)
