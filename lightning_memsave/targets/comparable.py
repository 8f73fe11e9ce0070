"""Read what can be compared: models in any form, predictions, and reports of runs."""

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import nn

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.measure.parameters import ParameterTable, parameter_table
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.user_code import build_without_data
from lightning_memsave.targets.find import load_target
from lightning_memsave.targets.saved import SavedPrediction, as_saved, read_saved

Comparable: TypeAlias = (
    nn.Module
    | Callable[[], nn.Module]
    | ParameterTable
    | MemoryPrediction
    | Mapping[str, Any]
    | str
    | os.PathLike[str]
)
"""Models in any form, predictions, and reports of runs."""

_FORMS = (
    "Pass a module, a function that returns one, a prediction, a mapping of names to shapes, or "
    "the path of a config, checkpoint, prediction or `memsave_report.json`."
)


def read_comparable(side: Comparable) -> tuple[ParameterTable | SavedPrediction, str]:
    if isinstance(side, MemoryPrediction):
        return SavedPrediction(side), side.model
    if isinstance(side, ParameterTable):
        return side, side.model
    if isinstance(side, nn.Module):
        return parameter_table(side), type(side).__name__
    if isinstance(side, Mapping):
        return as_saved(side, "mapping") or parameter_table(side, "mapping"), "mapping"
    if isinstance(side, str | os.PathLike):
        text = os.fspath(side)
        saved = read_saved(text)
        return saved or parameter_table(load_target(text).parameter_source(), text), text
    if not callable(side):
        raise ConfigurationError(f"A {type(side).__name__} cannot be compared. {_FORMS}")
    label = getattr(side, "__name__", type(side).__name__)
    return parameter_table(build_without_data(side)), label
