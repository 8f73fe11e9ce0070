"""Compare the memory of two models, predictions or runs."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch import nn

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.explain.memory_changes import MemoryComparison
from lightning_memsave.explain.model_changes import compare_parameters, compare_predictions
from lightning_memsave.explain.parameters import ParameterTable, parameter_table
from lightning_memsave.explain.report_changes import compare_reports
from lightning_memsave.prediction.fake.tensors import allow_construction, fake_tensors
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.targets.code import explained
from lightning_memsave.targets.find import load_target

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

_WORDS = {
    "parameters": "the parameters of a model",
    "prediction": "a prediction",
    "report": "the report of a run",
}
_FORMS = (
    "Pass a module, a function that returns one, a prediction, a mapping of names to shapes, or "
    "the path of a config, checkpoint, prediction or `memsave_report.json`."
)


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a comparison."""

    kind: Literal["parameters", "prediction", "report"]
    label: str
    value: Any


def compare_memory(
    a: Comparable, b: Comparable, *, labels: tuple[str, str] | None = None
) -> MemoryComparison:
    """Show why the second model, prediction or run needs more memory than the first.

    Models are compared by their parameters, module by module, without running or allocating them.
    Predictions are compared in bytes by category, phase and module; reports of runs in bytes by
    category, and by the settings that were on.

    Args:
        a: The first side: a module; a function or class that returns one without arguments; a
            `MemoryPrediction`; a mapping of names to tensors or shapes, such as a ``state_dict``;
            or the path of a Hugging Face config, a YAML file for LightningCLI, a checkpoint, a
            prediction in JSON or a ``memsave_report.json``. Also ``"package.module:Class"``.
        b: The second side.
        labels: Names of the two sides; by default the class or the path.

    Returns:
        The differences, largest first; ``print`` shows them.

    Raises:
        ConfigurationError: If a side cannot be read, or if the two cannot be compared.

    Note:
        Modules are matched by name; an additional prefix on one side does not matter, but a renamed
        module counts as removed and added. Code in a checkpoint is never run
        (``weights_only=True``).

    Example:
        >>> print(compare_memory(nn.Linear(10, 1000), nn.Linear(10, 3000), labels=("old", "new")))
        old -> new
        11,000 -> 33,000 parameters (+22,000, 3.00 times).
        Memory of the parameters: 42.97 KiB -> 128.91 KiB.
        module   before   after  difference  what
        (whole)  11,000  33,000     +22,000  weight 1,000 x 10 -> 3,000 x 10; bias 1,000 -> 3,000
    """
    given: Any = labels
    if given is not None and not (isinstance(given, tuple | list) and len(given) == 2):
        raise ConfigurationError(
            f"`labels={labels!r}` does not name both sides. Write for example "
            '`labels=("before", "after")`.'
        )
    first, second = _read(a), _read(b)
    names = labels or (first.label, second.label)
    kinds = {first.kind, second.kind}
    if kinds == {"parameters"}:
        return compare_parameters(first.value, second.value, names)
    if kinds == {"prediction"}:
        return compare_predictions(first.value, second.value, names)
    if "parameters" not in kinds:
        return compare_reports(first.value, second.value, names)
    raise ConfigurationError(
        f"`{names[0]}` is {_WORDS[first.kind]} and `{names[1]}` is {_WORDS[second.kind]}: they "
        "cannot be compared. Compare two of the same kind: predict the model with "
        "`predict_memory(model, batch)`, or pass the model of the other side."
    )


def _read(side: Comparable) -> _Side:
    if isinstance(side, MemoryPrediction):
        return _Side("prediction", side.model, side)
    if isinstance(side, ParameterTable):
        return _Side("parameters", side.model, side)
    if isinstance(side, nn.Module):
        return _Side("parameters", type(side).__name__, parameter_table(side))
    if isinstance(side, Mapping):
        return _of_mapping(side, "mapping")
    if isinstance(side, str | os.PathLike):
        return _of_path(os.fspath(side))
    if not callable(side):
        raise ConfigurationError(f"A {type(side).__name__} cannot be compared. {_FORMS}")
    return _of_factory(side)


def _of_mapping(found: Mapping[str, Any], label: str) -> _Side:
    if "changes" in found and "settings" in found:
        return _Side("report", label, found)
    if "by_phase" in found and "modules" in found:
        try:
            prediction = MemoryPrediction.from_dict(found)
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                f"`{label}` is an incomplete prediction ({error}). Write it again with "
                "`MemoryPrediction.to_dict()`."
            ) from error
        return _Side("prediction", label, prediction)
    return _Side("parameters", label, parameter_table(found, label))


def _of_path(text: str) -> _Side:
    path = Path(text)
    if path.suffix == ".json" and path.is_file():
        try:
            found = json.loads(path.read_text())
        except ValueError as error:  # also what is no text at all
            raise ConfigurationError(
                f"`{text}` is not JSON ({error}). Pass a report, a prediction or a config."
            ) from error
        if isinstance(found, dict) and {"changes", "by_phase"} & found.keys():
            return _of_mapping(found, text)
    table = parameter_table(load_target(text).parameter_source(), text)
    return _Side("parameters", text, table)


def _of_factory(factory: Callable[[], nn.Module]) -> _Side:
    label = getattr(factory, "__name__", type(factory).__name__)
    fix = "Pass a function without arguments that returns the module, or the module itself."
    with fake_tensors(), explained(f"`{label}()`", fix), allow_construction():
        module = factory()
        if not isinstance(module, nn.Module):
            raise ConfigurationError(
                f"`{label}()` returned a {type(module).__name__}, not a module. {fix}"
            )
        # A LightningModule may create its layers here; a second call must do nothing.
        if callable(configure := getattr(module, "configure_model", None)):
            configure()
        return _Side("parameters", label, parameter_table(module))
