"""Compare the memory of two models, predictions or runs."""

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import nn

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.explain.memory_changes import MemoryComparison
from lightning_memsave.explain.model_changes import compare_parameters, compare_predictions
from lightning_memsave.measure.parameters import ParameterTable, parameter_table
from lightning_memsave.prediction.fake.tensors import allow_construction, fake_tensors
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.targets.code import explained
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


def compare_memory(
    a: Comparable, b: Comparable, *, labels: tuple[str, str] | None = None
) -> MemoryComparison:
    """Show why the second model, prediction or run needs more memory than the first.

    Models are compared by their parameters, module by module, without running or allocating them.
    Predictions are compared in bytes by category, phase and module; so are the predictions in the
    reports of runs, beside the measured peaks.

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
    (first, name), (second, other) = _read(a), _read(b)
    names = labels or (name, other)
    if isinstance(first, ParameterTable) and isinstance(second, ParameterTable):
        return compare_parameters(first, second, names)
    if isinstance(first, SavedPrediction) and isinstance(second, SavedPrediction):
        measured = first.measured_bytes, second.measured_bytes
        return compare_predictions(first.prediction, second.prediction, names, measured)
    model, step = names if isinstance(first, ParameterTable) else names[::-1]
    raise ConfigurationError(
        f"`{model}` is the parameters of a model and `{step}` a prediction: they cannot be "
        "compared. Compare two of the same kind: predict the model with "
        "`predict_memory(model, batch)`, or pass the model of the other side."
    )


def _read(side: Comparable) -> tuple[ParameterTable | SavedPrediction, str]:
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
    return _of_factory(side)


def _of_factory(factory: Callable[[], nn.Module]) -> tuple[ParameterTable, str]:
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
        return parameter_table(module), label
