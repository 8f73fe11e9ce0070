"""What every callback of this package derives from, and how it speaks."""

import importlib
import importlib.util
import logging
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_memsave.trainer.trainer import PACKAGES, package_of

if TYPE_CHECKING:
    from lightning.pytorch import Callback as CallbackBase
else:

    def _callback_classes() -> tuple[type[Any], ...]:
        # find_spec of a submodule imports its parent, so look for the top level only.
        installed = [name for name in PACKAGES if importlib.util.find_spec(name.split(".")[0])]
        return tuple(importlib.import_module(name).Callback for name in installed)

    # Both packages refuse callbacks of the other one on the command line and, where it stands alone
    # and not in a list, in the Trainer; a class with both bases is at home in both.
    CallbackBase = types.new_class(
        "CallbackBase",
        _callback_classes(),
        exec_body=lambda namespace: namespace.update(
            __module__=__name__,
            __doc__="A callback of ``lightning.pytorch`` and of ``pytorch_lightning`` at once.",
        ),
    )


def log_info(trainer: Any, message: str) -> None:
    """Say something on rank zero, as Lightning says what it found.

    Args:
        trainer: The Trainer, whose package's logger is used.
        message: One line.
    """
    if trainer.is_global_zero:
        logging.getLogger(f"{package_of(trainer).__name__}.memsave").info(message)


__all__ = ["CallbackBase", "log_info"]


_OURS = ("lightning_memsave.", *(f"{package}." for package in PACKAGES))


def has_foreign(one: Any, hook: str) -> bool:
    """Say whether a module or a callback has a hook that is not Lightning's or this package's.

    Args:
        one: A LightningModule or a callback.
        hook: Name of the method.

    Returns:
        True if its class overrides the hook, or the object itself does, as ``LambdaCallback``.
    """
    method = getattr(type(one), hook, None)
    is_inherited = method is None or getattr(method, "__module__", "").startswith(_OURS)
    return hook in vars(one) or not is_inherited


def owners_of(trainer: Any, pl_module: Any, hook: str) -> list[str]:
    """Find out who has a hook of their own.

    Args:
        trainer: The Trainer.
        pl_module: Its LightningModule.
        hook: Name of a method of modules and callbacks.

    Returns:
        Their classes and the hook, each once, such as ``"Lit.on_after_backward"``.
    """
    owners = [one for one in (pl_module, *trainer.callbacks) if has_foreign(one, hook)]
    return list(dict.fromkeys(f"{type(one).__name__}.{hook}" for one in owners))


def owner_of(trainer: Any, pl_module: Any, hook: str) -> str:
    """Find out who is the first to have a hook of their own.

    Args:
        trainer: The Trainer.
        pl_module: Its LightningModule.
        hook: Name of a method of modules and callbacks.

    Returns:
        The class and the hook; an empty string if nobody has.
    """
    return next(iter(owners_of(trainer, pl_module, hook)), "")


def find_zero_grad_override(trainer: Any, pl_module: Any) -> str:
    """Find who looks at old gradients where Lightning zeroes them, or zeroes in a way of its own.

    Args:
        trainer: The Trainer.
        pl_module: Its LightningModule.

    Returns:
        Class and hook; an empty string if nobody does.
    """
    hooks = ("on_before_zero_grad", "optimizer_zero_grad")
    return next(filter(None, (owner_of(trainer, pl_module, hook) for hook in hooks)), "")


class GradientVersions:
    """What the gradients are at one moment, to see later whether anybody has added to them.

    Nothing is computed and nothing copied: a sum in place counts a tensor's version up, and any
    other one makes another tensor.

    Args:
        parameters: Of a model.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._marks = [(p, p.grad, _version(p.grad)) for p in parameters]

    def have_changed(self) -> bool:
        """Compare with what the gradients are now.

        Returns:
            True if one of them is another one, or has other values.
        """
        return any(p.grad is not grad or _version(grad) != seen for p, grad, seen in self._marks)


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else grad._version
