"""What every callback of this package derives from, and how it speaks."""

import importlib
import importlib.util
import logging
import types
from typing import TYPE_CHECKING, Any

from lightning_memsave import host

if TYPE_CHECKING:
    from lightning.pytorch import Callback as CallbackBase
else:

    def _callback_classes() -> tuple[type[Any], ...]:
        # find_spec of a submodule imports its parent, so look for the top level only.
        installed = [name for name in host.PACKAGES if importlib.util.find_spec(name.split(".")[0])]
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


def inform(trainer: Any, message: str) -> None:
    """Say something on rank zero, as Lightning says what it found.

    Args:
        trainer: The Trainer, whose package's logger is used.
        message: One line.
    """
    if trainer.is_global_zero:
        logging.getLogger(f"{host.package_of(trainer).__name__}.memsave").info(message)


__all__ = ["CallbackBase", "inform"]
