"""What a GradScaler must know of gradients that were taken away in backward."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_memsave.core.patching import (
    is_patched_with,
    patch_method,
    previous_method,
    unpatch,
)
from lightning_memsave.techniques._updates.gradient_updates import IN_BACKWARD, GradientUpdates


def tell_scaler(scaler: GradScaler) -> Callable[[], None]:
    """Let a scaler count the gradients that hooks have taken among those that it checks.

    Args:
        scaler: What scales the loss; ``unscale_``, ``step`` and ``update`` are used as ever.

    Returns:
        A function that restores it, once no optimizer needs it any more.
    """
    if not is_patched_with(scaler, unscale_):
        patch_method(scaler, unscale_)
        patch_method(scaler, update)

    def restore() -> None:
        if not _updates_with(scaler):
            unpatch(scaler)

    return restore


# The names are those of the methods, as `patch_method` asks.
def unscale_(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Report overflows of gradients that were taken, beside those that are still there."""
    previous_method(scaler, "unscale_")(optimizer)
    updates = IN_BACKWARD.get(optimizer)
    if updates is None or updates.held is None or not scaler.is_enabled():
        return
    flags: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
    for device, flag in updates.held.found_inf.items():
        flags[device] = flags[device] + flag if device in flags else flag


def update(scaler: GradScaler, new_scale: object = None) -> None:
    """Adjust the scale; a step that the scaler has left out is over."""
    previous_method(scaler, "update")(new_scale)
    for updates in _updates_with(scaler):
        updates.forget()


def _updates_with(scaler: GradScaler) -> list[GradientUpdates]:
    every = IN_BACKWARD.values()
    return [u for u in every if u.held is not None and u.held.scaler is scaler]
