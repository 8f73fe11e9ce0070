"""The base class of callbacks, and overrides of hooks by the user's code."""

import contextlib
import functools
import importlib
import importlib.util
import logging
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import TensorWeakRef

from lightning_memsave.core.gradient_reads import reads_gradients
from lightning_memsave.core.memory import is_fake
from lightning_memsave.core.patching import has_foreign_method
from lightning_memsave.trainer.trainer import PACKAGES, package_of

if TYPE_CHECKING:
    from lightning.pytorch import Callback as CallbackBase
else:

    def _callback_classes() -> tuple[type[Any], ...]:
        # find_spec of a submodule imports its parent, so look for the top level only.
        installed = [name for name in PACKAGES if importlib.util.find_spec(name.split(".")[0])]
        return tuple(importlib.import_module(name).Callback for name in installed)

    # Both packages reject callbacks of the other one on the command line and, outside of a list, in
    # the Trainer; a class with both bases works in both.
    CallbackBase = types.new_class(
        "CallbackBase",
        _callback_classes(),
        exec_body=lambda namespace: namespace.update(
            __module__=__name__,
            __doc__="A callback of ``lightning.pytorch`` and of ``pytorch_lightning`` at once.",
        ),
    )


def log_info(trainer: Any, message: str) -> None:
    """Log a message on rank zero, with the logger of the Trainer's package."""
    if trainer.is_global_zero:
        logging.getLogger(f"{package_of(trainer).__name__}.memsave").info(message)


__all__ = ["CallbackBase", "log_info"]


_OURS = (
    "lightning_memsave.",
    "lightning.fabric.",
    "lightning_fabric.",
    *(f"{package}." for package in PACKAGES),
)


def has_foreign(one: Any, hook: str) -> bool:
    method = getattr(type(one), hook, None)
    is_inherited = method is None or getattr(method, "__module__", "").startswith(_OURS)
    return not is_inherited or has_foreign_method(one, hook)


def find_owners(trainer: Any, pl_module: Any, hook: str) -> list[Any]:
    """List the module and callbacks of a Trainer that override a hook."""
    return [one for one in (pl_module, *trainer.callbacks) if has_foreign(one, hook)]


def owners_of(trainer: Any, pl_module: Any, hook: str) -> list[str]:
    """Name the overrides of a hook in the module and callbacks of a Trainer."""
    owners = find_owners(trainer, pl_module, hook)
    return list(dict.fromkeys(f"{type(one).__name__}.{hook}" for one in owners))


def gradient_readers(trainer: Any, pl_module: Any, hook: str) -> list[str]:
    """Name the overrides of a hook whose code reads gradients."""
    return [
        f"{type(one).__name__}.{hook}"
        for one in find_owners(trainer, pl_module, hook)
        if reads_gradients(getattr(one, hook), pl_module)
    ]


def owner_of(trainer: Any, pl_module: Any, hook: str) -> str:
    return next(iter(owners_of(trainer, pl_module, hook)), "")


def find_zero_grad_override(trainer: Any, pl_module: Any) -> str:
    """Return the first override of ``on_before_zero_grad`` or ``optimizer_zero_grad``, if any."""
    hooks = ("on_before_zero_grad", "optimizer_zero_grad")
    return next(filter(None, (owner_of(trainer, pl_module, hook) for hook in hooks)), "")


# Once for each backward pass, of which a batch that is split has several; or between the first
# forward and backward pass, so that later parts see what they change.
_OF_PARTS = ("on_before_backward", "backward", "on_before_zero_grad", "optimizer_zero_grad")


def hooks_of_parts(trainer: Any, pl_module: Any) -> list[str]:
    """List the overrides of hooks that do not do for the parts of a batch what they do for it."""
    return [owner for hook in _OF_PARTS for owner in owners_of(trainer, pl_module, hook)]


@contextlib.contextmanager
def without_after_backward(trainer: Any) -> Iterator[None]:
    """Leave ``on_after_backward`` to the last of several backward passes."""
    plugin = trainer.precision_plugin
    before = vars(plugin).get("post_backward")
    plugin.post_backward = lambda loss, module: loss.detach()
    try:
        yield
    finally:
        del plugin.post_backward
        if before is not None:
            plugin.post_backward = before


class GradientVersions:
    """Identities and versions of gradients, to detect changes without copying.

    In-place accumulation bumps the version counter; otherwise ``.grad`` is replaced. Gradients are
    not held: updates in backward free them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [*parameters]
        self.renew()

    def renew(self) -> None:
        grads = ((param, param.grad) for param in self._parameters)
        self._marks = [(p, None if g is None else (TensorWeakRef(g), g._version)) for p, g in grads]

    def have_changed(self) -> bool:
        return any(_differs(param.grad, seen) for param, seen in self._marks)


def _differs(grad: Tensor | None, seen: tuple[TensorWeakRef, int] | None) -> bool:
    if grad is None or seen is None:
        return grad is not None or seen is not None
    return seen[0]() is not grad or seen[1] != grad._version


class FreedGradients:
    """Gradients that were freed before the forward pass, where Lightning frees them after it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        self._is_known = first is not None and not is_fake(first)
        self._number = _num_backward_passes() if self._is_known else 0

    def zero(self, zero_grad: Callable[[], None]) -> None:
        """Zero as Lightning does, but visit parameters only if a backward pass has run since."""
        if not self._is_known or _num_backward_passes() != self._number + 1:
            zero_grad()
            return
        own = vars(self._optimizer)
        before = {name: own[name] for name in ("zero_grad",) if name in own}
        own["zero_grad"] = lambda *_, **__: None
        try:
            zero_grad()
        finally:
            del own["zero_grad"]
            own.update(before)


# Each backward pass of a process has a number, which can be asked for inside of one only.
def _num_backward_passes() -> int:
    root, leaf, gradient, numbers = _counting_graph()
    torch.autograd.grad(root, leaf, gradient, retain_graph=True)
    return numbers.pop()


# Made once, so that counting allocates nothing.
@functools.cache
def _counting_graph() -> tuple[Tensor, Tensor, Tensor, list[int]]:
    numbers: list[int] = []
    # Modes such as one that counts tensors must not see it.
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        leaf = torch.ones((), device="cpu", requires_grad=True)
        # The gradient of a copy is itself: no operator runs, which a mode would see.
        root, gradient = leaf.clone(), torch.ones((), device="cpu")
        root.register_hook(lambda _: numbers.append(torch._C._current_graph_task_id()))
    return root, leaf, gradient, numbers
