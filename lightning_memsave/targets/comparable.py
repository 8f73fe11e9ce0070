"""Read what can be compared: models in any form, predictions, and reports of runs."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.measure.parameters import ParameterTable, parameter_table
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.user_code import build_without_data
from lightning_memsave.targets.find import load_target


@dataclass(frozen=True, slots=True)
class SavedPrediction:
    prediction: MemoryPrediction
    measured_bytes: int | None = None


def read_saved(path: str | os.PathLike[str]) -> SavedPrediction | None:
    text, file = os.fspath(path), Path(path)
    if file.suffix != ".json" or not file.is_file():
        return None
    try:
        return as_saved(json.loads(file.read_text(encoding="utf-8")), text)
    except (ValueError, RecursionError) as error:  # also what is no text at all
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            f"`{text}` is not JSON ({error}). Pass a report, a prediction or a config."
        ) from error


def as_saved(found: Any, name: str) -> SavedPrediction | None:
    """Read a prediction or a report; ``None`` if it is neither."""
    keys = found.keys() if isinstance(found, Mapping) else set()
    if {"changes", "settings"} <= keys:
        predicted = _section(found, "predicted")
        if "by_phase" not in predicted:
            why = f" ({predicted['note']})" if "note" in predicted else ""
            raise ConfigurationError(
                f"`{name}` is the report of a run without a prediction{why}, by which runs are "
                "compared. Run it again with `MemSaveCallback(predict=True)`, or predict the "
                "model: `memsave predict MODEL --batch SIZES --json`."
            )
        measured = _section(found, "measured")
        # On CUDA a run measures blocks of the allocator.
        peak_bytes = measured.get("allocated_bytes") or measured.get("peak_bytes")
        return SavedPrediction(_prediction(predicted, name), peak_bytes)
    if {"by_phase", "modules"} <= keys:
        return SavedPrediction(_prediction(found, name))
    return None


def _section(report: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = report.get(name)
    return section if isinstance(section, Mapping) else {}


def _prediction(found: Mapping[str, Any], name: str) -> MemoryPrediction:
    try:
        prediction = MemoryPrediction.from_dict(found)
        if wrong := next(_wrong_values(prediction.to_dict()), ""):
            raise TypeError(wrong)
        return prediction
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"`{name}` is an incomplete prediction ({error}). Write it again with "
            "`memsave predict --json`, or `MemoryPrediction.to_dict()`."
        ) from error


_TEXTS = ("device", "model", "name", "class_name", "module", "op", "phase")
_MAPPINGS = ("settings", "ineffective")


# JSON may have anything where a size or a name is expected.
def _wrong_values(found: Any, name: str = "") -> Iterator[str]:
    is_size = name.endswith(("_bytes", "num_parameters", "by_category"))
    if isinstance(found, Mapping):
        for key, value in found.items():
            yield from _wrong_values(value, name if is_size else key)
    elif isinstance(found, list):
        for value in found:
            yield from _wrong_values(value, name)
    elif is_size and found is not None and not (type(found) is int and 0 <= found < 2**63):
        yield f"{name} is {str(found)[:20]!r}, not a size"
    elif (name in _TEXTS and not isinstance(found, str)) or name in _MAPPINGS:
        yield f"{name} is {str(found)[:20]!r}"


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
