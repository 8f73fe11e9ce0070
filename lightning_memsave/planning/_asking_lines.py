"""Which line of code asks a tensor for its numbers."""

import sys
from pathlib import Path
from types import FrameType

import torch

# Code whose branches do not change what is allocated: it logs, counts and updates.
_NOT_REPORTED = (
    *("torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric"),
    *("lightning_utilities", "lightning_memsave"),
)


def is_asked_by_scaler() -> bool:
    """Say whether a ``GradScaler`` asks, and not the optimizer that it calls.

    Returns:
        True if it does.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == "torch.amp.grad_scaler" or name.startswith("torch.optim."):
            return bool(name == "torch.amp.grad_scaler")
        frame = frame.f_back
    return False


def asking_line() -> str | None:
    """Find the innermost line outside of torch and its helpers, which is the model's own.

    Returns:
        File and line, or module and line of an optimizer of torch; ``None`` for code whose
        branches do not change what is allocated.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        package = name.partition(".")[0]
        # What an optimizer does next may depend on it, such as whether it asks for more gradients.
        if package == "torch" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return f"{name}, line {frame.f_lineno}"
        if package not in ("torch", "lightning_memsave", "contextlib"):
            if package in _NOT_REPORTED:
                return None
            return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
        frame = frame.f_back
    return None
