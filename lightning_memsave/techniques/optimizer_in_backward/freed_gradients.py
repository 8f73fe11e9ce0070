"""Notice reads of gradients that updates in backward have freed."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_memsave.core.patching import is_of_this_package, named, patch_method, previous_method
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.optimizer_step import all_in_backward

READING_HOOKS = (
    *("on_before_zero_grad", "lr_scheduler_step", "on_train_batch_end", "on_train_epoch_end"),
    *("on_save_checkpoint", "on_train_end", "on_fit_end"),
)
"""Hooks between a step and the next zeroing."""
ZEROING_HOOK = "on_validation_model_zero_grad"
"""Hook that zeroes gradients before a validation."""
FREED = "which are freed in backward as soon as they have updated their parameters"
READ_BEFORE = "Read each gradient in a hook of `param.register_post_accumulate_grad_hook`"
_grad: Any = Tensor.grad


def refuse_reads(owner: Any, hook: str) -> Callable[[], None]:
    """Let a hook of a module or callback fail where it reads a gradient that was freed."""
    return patch_method(owner, _REPLACEMENTS[hook], is_outer=True)


def has_foreign_hook(param: Tensor, *, only_late: bool) -> bool:
    """Return whether a hook of others runs when the gradient is complete, or after the update."""
    hooks = [*(param._post_accumulate_grad_hooks or {}).values()]
    are_own = [is_of_this_package(hook) for hook in hooks]
    if only_late:
        return True in are_own and not all(are_own[are_own.index(True) :])
    return not all(are_own)


def _call(owner: Any, hook: str, *args: Any, **kwargs: Any) -> Any:
    with _FreedGradients(f"{type(owner).__name__}.{hook}"):
        return previous_method(owner, hook, is_outer=True)(*args, **kwargs)


_REPLACEMENTS = {hook: named(hook, _call) for hook in (*READING_HOOKS, ZEROING_HOOK)}


class _FreedGradients(TorchFunctionMode):
    """Raises where a gradient is read that an ordinary step would have left."""

    def __init__(self, reader: str) -> None:
        super().__init__()
        self._reader = reader
        self._freed: list[set[int]] = [updates.freed for _, updates in all_in_backward()]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func == _grad.__get__ and result is None:
            self._read(args[0], _reader_before(sys._getframe(1)))
        elif func in (_grad.__set__, _grad.__delete__):
            self._forget(args[0])
        return result

    def _read(self, param: Tensor, frame: FrameType) -> None:
        is_own = str(frame.f_globals.get("__name__", "")).startswith("lightning_memsave.")
        if frame.f_code.co_name == "zero_grad":  # of an optimizer or a module
            self._forget(param)
        elif not is_own and any(id(param) in freed for freed in self._freed):
            what = f"`{self._reader}`"
            why = f"it reads the gradient of a parameter of shape {tuple(param.shape)}, one of "
            fix = f"{READ_BEFORE}, or set `optimizer_in_backward=None`."
            problem = Problem(what, f"{why}those {FREED}", fix)
            raise IncompatibleError("optimizer_in_backward", [problem])

    def _forget(self, param: Tensor) -> None:
        for freed in self._freed:
            freed.discard(id(param))


# Modes that were entered later, such as that of weights on the host, pass the read on.
def _reader_before(frame: FrameType) -> FrameType:
    while isinstance(frame.f_locals.get("self"), TorchFunctionMode) and frame.f_back is not None:
        frame = frame.f_back
    return frame
