"""As many blocks on the device as are predicted to fit, of those that `Offloading` would move."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_memsave.core.blocks import find_blocks
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.training_step import TrainingStep
from lightning_memsave.prediction.user_code import build_without_data
from lightning_memsave.techniques.low_precision_weights.technique import (
    ON_HOST,
    LowPrecisionWeights,
)
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.offloading.weights import AUTO
from lightning_memsave.techniques.registry import unused_details
from lightning_memsave.units import format_bytes

_MOST = 8
"""Predictions, at most: bytes are nearly proportional to the number, so that three are enough."""


@dataclass(frozen=True, slots=True)
class Filled:
    """What takes the place of a step's settings, its prediction, and the choice in words."""

    settings: dict[str, Any]
    prediction: MemoryPrediction
    note: str
    block_bytes: int = 0
    """What one block more on the device needs, at most; 0 if nothing is offloaded."""


def is_open(step: TrainingStep) -> bool:
    """Return whether a prediction decides how many blocks stay on the device."""
    return getattr(step.effective_settings["offload"], "resident", None) == AUTO


def fill(
    step: TrainingStep, room: int, predict: Callable[[TrainingStep], MemoryPrediction]
) -> Filled:
    """Find the most blocks that fit a number of bytes, or nothing to offload if all do."""
    offload = step.effective_settings["offload"]
    room_text = f"`resident={AUTO!r}`, for {format_bytes(room)}"

    def filled(number: int | None, note: str = "") -> Filled:
        value = None if number is None else replace(offload, resident=number)
        settings = {Offloading.argument: value}
        # Without weights on the host there is none to round from.
        low = step.settings.get(LowPrecisionWeights.argument)
        if value is None and getattr(low, "rounding", low) in ON_HOST:
            settings[LowPrecisionWeights.argument] = None
        off = unused_details({**step.effective_settings, **settings}, settings)
        settings |= {name: None for name in off if value is None}
        return Filled(settings, predict(step.with_settings(settings)), f"{room_text}: {note}")

    plain = filled(None, "everything fits the device")
    if plain.prediction.device_bytes <= room:
        return plain
    given = step.model
    model = given if isinstance(given, nn.Module) else build_without_data(given)
    selectors = offload.blocks or step.effective_settings["blocks"]
    num_blocks = len(find_blocks(model, selectors))
    best = filled(0, f"0 of {num_blocks} blocks stay there")
    # Between a number that fits and one that does not, on a straight line.
    low, high, num_bytes = 0, num_blocks + 1, plain.prediction.device_bytes
    for _ in range(_MOST):
        free = room - best.prediction.device_bytes
        each = (num_bytes - best.prediction.device_bytes) / (high - low)
        if high - low < 2 or free < each:
            break
        number = min(low + int(free / each), high - 1)
        found = filled(number, f"{number} of {num_blocks} blocks stay there")
        if found.prediction.device_bytes <= room:
            low, best = number, found
        else:
            high, num_bytes = number, found.prediction.device_bytes
    # All blocks may need more for each than the next one does.
    of_all = plain.prediction.device_bytes - best.prediction.device_bytes
    each = max(
        (num_bytes - best.prediction.device_bytes) / (high - low), of_all / (num_blocks - low or 1)
    )
    return replace(best, block_bytes=math.ceil(each))
