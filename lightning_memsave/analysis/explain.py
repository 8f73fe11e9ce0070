"""Explain what uses the memory, why, and what would lower it."""

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from lightning_memsave.analysis.predict import (
    OFF,
    read_settings,
    with_instances,
)
from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.core.plain_text import as_plain_text, figure_table
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.explain.factors import explain_factors
from lightning_memsave.explain.finding import Finding, label_of
from lightning_memsave.explain.parameters import ParameterTable, parameter_table
from lightning_memsave.explain.sentences import sentences_of
from lightning_memsave.explain.what_if import WhatIf, attention_of
from lightning_memsave.measure.storages import tensors_in_batch
from lightning_memsave.planning.remedies import Remedy, best_that_fits, remedies_of
from lightning_memsave.prediction.batch_sizes import find_sequence
from lightning_memsave.prediction.cuda.gpus import Gpu, as_gpu
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.prediction.result import MemoryPrediction, TensorMemory
from lightning_memsave.prediction.training_step import TIME_LIMIT_S, MakeOptimizer, TrainingStep
from lightning_memsave.report.page import PageTable
from lightning_memsave.report.tree import parameter_tree
from lightning_memsave.targets.batches import BatchSpec
from lightning_memsave.targets.code import explained
from lightning_memsave.targets.find import load_target
from lightning_memsave.targets.target import Target, make_batch_spec
from lightning_memsave.trainer.precision import overflows_in_float16
from lightning_memsave.units import format_bytes


def make_what_if(
    model: Any,
    batch: Any = None,
    optimizer: Any = None,
    settings: Mapping[str, Any] | MemSaveCallback | None = None,
    *,
    device: str = "cuda",
    gpu: str | Gpu | None = None,
    sequence_axis: int | None = None,
    base: Mapping[str, Any] = OFF,
    **options: Any,
) -> WhatIf:
    """Read the arguments of `explain_memory`; predicts nothing yet."""
    if isinstance(model, str | os.PathLike):
        model = load_target(model)
    source: Any = model
    trainer_arguments = options.pop("trainer_arguments", None) or {}
    if isinstance(model, Target):
        if settings is None and model.settings is not None:
            settings = MemSaveCallback(**with_instances(model.settings))
        trainer_arguments = {**model.trainer_arguments, **trainer_arguments}
        if isinstance(batch, str | Mapping | list | tuple) and not _has_tensors(batch):
            batch = make_batch_spec(batch, model)
        source, model = model.parameter_source(), model.make
    elif not isinstance(model, nn.Module):
        source = _made_without_data(model)
    if isinstance(batch, str):
        batch = make_batch_spec(batch)
    if isinstance(batch, BatchSpec):
        batch = batch.build_for_prediction()
    elif inspect.isroutine(batch):
        batch = batch()
    step = TrainingStep(
        model,
        batch,
        MemSaveCallback,
        read_settings(settings, base),
        optimizer,
        device=device,
        gpu=as_gpu(gpu),
        trainer_arguments=trainer_arguments,
        **options,
    )
    return what_if_of(step, source, sequence_axis)


def what_if_of(step: TrainingStep, source: Any, sequence_axis: int | None = None) -> WhatIf:
    """Prepare predictions of variants of a step; ``source`` is for `parameter_table`."""
    return WhatIf(
        step,
        parameter_table(source),
        _name_of(step.optimizer, source),
        attention_of(source) if isinstance(source, nn.Module) else None,
        None if step.batch is None else find_sequence(step.batch, sequence_axis),
        isinstance(source, nn.Module) and bool(overflows_in_float16(source)),
    )


def _has_tensors(batch: Any) -> bool:
    return next(tensors_in_batch(batch), None) is not None


def _made_without_data(make: Any) -> nn.Module:
    name = getattr(make, "__name__", type(make).__name__)
    fix = "Pass a function without arguments that returns the module, or the module itself."
    if not callable(make):
        raise ConfigurationError(f"A {type(make).__name__} is not a model. {fix}")
    with fake_tensors(), explained(f"`{name}()`", fix):
        module = make()
        if not isinstance(module, nn.Module):
            raise ConfigurationError(
                f"`{name}()` returned a {type(module).__name__}, not a module. {fix}"
            )
        if callable(configure := getattr(module, "configure_model", None)):
            configure()
        return module


def _name_of(optimizer: Any, source: Any) -> str:
    if optimizer is not None:
        return str(getattr(optimizer, "__name__", type(optimizer).__name__))
    return "" if hasattr(source, "configure_optimizers") else "AdamW"


_SHOWN_TENSORS = 8
_SHOWN_DEPTH = 3
_FACTORS, _FACTOR_COLUMNS = "What the peak depends on", ("", "factor", "memory", "finding")
_REMEDIES = "What would lower the peak, cheapest first"
_REMEDY_COLUMNS = ("", "saves", "device needs", "time", "fits", "remedy", "exactness", "cost")
_ORDER = {"matters": 0, "unknown": 1, "does not matter": 2}


@dataclass(frozen=True)
class MemoryExplanation:
    """What uses the memory of a model; ``print`` shows it.

    Args:
        table: The parameters by module.
        sentences: What needs most memory and why, most important first.
        factors: What the peak depends on, with the bytes of each factor.
        prediction: Of the unchanged step; ``None`` without a batch.
        remedies: Settings that lower the peak, cheapest first, and last, where the step does not
            fit the GPU, the plan; ``None`` if not requested.
        gpu: The GPU that the step should fit.
        num_predictions: Number of predictions that this needed.
    """

    table: ParameterTable
    sentences: tuple[str, ...]
    factors: tuple[Finding, ...]
    prediction: MemoryPrediction | None = None
    remedies: tuple[Remedy, ...] | None = None
    gpu: Gpu | None = None
    num_predictions: int = 0

    @property
    def largest_tensors(self) -> tuple[TensorMemory, ...]:
        """Tensors alive at the peak, largest first; empty without a prediction."""
        return () if self.prediction is None else self.prediction.largest_tensors

    @property
    def best_that_fits(self) -> Remedy | None:
        """The remedy to take for the GPU, as a plan would; ``None`` if nothing fits."""
        return best_that_fits(self.remedies or ())

    def factor(self, name: str) -> Finding:
        """Look up the finding of a factor.

        Args:
            name: Such as ``"batch size"``.

        Returns:
            The finding.

        Raises:
            KeyError: If this factor was not computed.
        """
        for factor in self.factors:
            if factor.name == name:
                return factor
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, for JSON.

        Returns:
            The fields by name.
        """
        return {
            "model": self.table.model,
            "parameters": self.table.to_dict(),
            "sentences": list(self.sentences),
            "factors": [factor.to_dict() for factor in self.factors],
            "prediction": None if self.prediction is None else self.prediction.to_dict(),
            "remedies": None if self.remedies is None else [r.to_dict() for r in self.remedies],
            "gpu": None if self.gpu is None else asdict(self.gpu),
            "num_predictions": self.num_predictions,
        }

    def _parts(self) -> list[RenderableType]:
        shown: list[RenderableType] = [_items(("-", s) for s in self.sentences)]
        shown += [Text(), parameter_tree(self.table, max_depth=_SHOWN_DEPTH)]
        if self.largest_tensors:
            shown += [Text(), Text("Largest tensors at the peak"), self._tensors()]
        shown += [Text(), Text(_FACTORS), self._findings()]
        if self.remedies is not None:
            shown += [Text(), Text(_REMEDIES)]
            shown += self._remedies(self.remedies)
        return shown

    def _tensors(self) -> Table:
        table = figure_table("memory", "what", "shape", "module", "created by", numbers=("memory",))
        for tensor in self.largest_tensors[:_SHOWN_TENSORS]:
            table.add_row(
                format_bytes(tensor.num_bytes),
                tensor.category.replace("_", " "),
                f"{' x '.join(f'{size:,}' for size in tensor.shape)} {tensor.dtype}",
                Text(tensor.module or "(whole)"),
                tensor.op.removeprefix("aten."),
            )
        return table

    def tables(self) -> tuple[PageTable, ...]:
        """Return sentences, factors and remedies as tables, for `write_page`.

        Returns:
            The same tables as ``print`` shows, with the line to type beside each remedy.
        """
        sizes = tuple(factor.num_bytes for factor in self._sorted_factors())
        found = [
            PageTable("What needs most memory", ("",), tuple((text,) for text in self.sentences)),
            PageTable(_FACTORS, _FACTOR_COLUMNS, tuple(self._answers()), sizes),
        ]
        if self.remedies:
            columns = (*_REMEDY_COLUMNS, "what to type")
            rows = ((*_cells(n, r), f"`{r.how}`") for n, r in enumerate(self.remedies, 1))
            found.append(PageTable(_REMEDIES, columns, tuple(rows)))
        return tuple(found)

    def _sorted_factors(self) -> list[Finding]:
        return sorted(self.factors, key=lambda s: (_ORDER[s.verdict], -(s.num_bytes or 0)))

    def _answers(self) -> Iterator[tuple[str, str, str, str]]:
        mark = {"matters": "!", "unknown": "?", "does not matter": ""}
        for factor in self._sorted_factors():
            size = "-" if factor.num_bytes is None else format_bytes(factor.num_bytes)
            yield mark[factor.verdict], factor.name, size, factor.sentence

    def _findings(self) -> Table:
        table = figure_table(*_FACTOR_COLUMNS, numbers=("memory",))
        for row in self._answers():
            table.add_row(*map(Text, row))
        return table

    def _remedies(self, remedies: tuple[Remedy, ...]) -> list[RenderableType]:
        if not remedies:
            return [Text("No setting of `MemSaveCallback` lowers it.")]
        table = figure_table(*_REMEDY_COLUMNS, numbers=_REMEDY_COLUMNS[:4])
        for number, remedy in enumerate(remedies, 1):
            table.add_row(*_cells(number, remedy))
        shown: list[RenderableType] = [table, Text(), Text("What to type")]
        shown.append(_items((f"{number:>2}.", r.how) for number, r in enumerate(remedies, 1)))
        return [*shown, *self._verdict(self.gpu)]

    def _verdict(self, gpu: Gpu | None) -> list[RenderableType]:
        if gpu is None:
            return []
        if self.prediction is not None and self.prediction.fits(gpu):
            return [Text(f"It fits {label_of(gpu)} without changes.")]
        best = self.best_that_fits
        if best is None:
            return [Text(f"None of these fits {label_of(gpu)}.")]
        return [Text(f"The best for {label_of(gpu)}: {best.name}.")]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._parts()

    def __str__(self) -> str:
        return as_plain_text(*self._parts())


def explain_memory(
    model: nn.Module | Callable[[], nn.Module] | Target | str,
    batch: Any = None,
    optimizer: MakeOptimizer | None = None,
    settings: Mapping[str, Any] | MemSaveCallback | None = None,
    *,
    device: Literal["cuda", "cpu"] = "cuda",
    gpu: str | Gpu | None = None,
    cardinalities: Mapping[str, int] | None = None,
    sequence_axis: int | None = None,
    factors: Collection[str] | None = None,
    remedies: bool = True,
    loss: Callable[[Any, Any], Tensor] | None = None,
    attention: str | None = None,
    trainer_arguments: Mapping[str, Any] | None = None,
    time_limit_s: float | None = TIME_LIMIT_S,
) -> MemoryExplanation:
    """Explain what uses the memory of a model.

    Nothing is trained or allocated: the parameters are counted, and with a batch the training step
    is predicted, unchanged and with one thing changed at a time. So each figure is the difference
    of two predictions, or a count of tensors alive at the peak.

    Args:
        model: A module, a function that returns one, or a text as MODEL of ``memsave predict``,
            such as ``"package.module:Class"`` or the path of a config or checkpoint.
        batch: As for `predict_memory`; with a text as model also sizes such as ``"8x512"``. Without
            a batch only the parameters are explained, also of models that cannot run.
        optimizer: As for `predict_memory`.
        settings: As for `predict_memory`: settings that are already on.
        device: As for `predict_memory`.
        gpu: The GPU that the step should fit, such as ``"T4"`` or ``"12GiB"``.
        cardinalities: For tabular models: number of categories of each column.
        sequence_axis: Axis of the batch's tensors that is the sequence; ``None`` finds token ids.
        factors: Names of the factors to compute; ``None`` for all.
        remedies: Whether to look for settings that lower the peak, with about 15 predictions; for a
            GPU that the step does not fit, with a plan.
        loss: As for `predict_memory`.
        attention: As for `predict_memory`.
        trainer_arguments: As for `predict_memory`.
        time_limit_s: For each prediction, as for `predict_memory`.

    Returns:
        The explanation.

    Raises:
        ConfigurationError: If an argument is wrong.

    Note:
        Exceptions of the module on this batch are raised. If it fails only on a changed batch, that
        factor is unknown. Needs about 20 predictions, 6 without remedies.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Embedding(5000, 16), nn.Flatten(), nn.Linear(64, 2))
        >>> explain_memory(model).sentences[0]
        'The embedding table `0` (5,000 x 16) holds 99.8 % of the 80,130 parameters.'
        >>> ids = torch.zeros(8, 4, dtype=torch.long)
        >>> found = explain_memory(model, ids, device="cpu", factors=[])
        >>> found.prediction.peak.input_bytes
        256
    """
    what_if = make_what_if(
        model,
        batch,
        optimizer,
        settings,
        device=device,
        gpu=gpu,
        sequence_axis=sequence_axis,
        loss=loss,
        attention=attention,
        trainer_arguments=trainer_arguments,
        time_limit_s=time_limit_s,
    )
    return explain_what_if(what_if, cardinalities=cardinalities, factors=factors, remedies=remedies)


def explain_what_if(
    what_if: WhatIf,
    *,
    cardinalities: Mapping[str, int] | None = None,
    factors: Collection[str] | None = None,
    remedies: bool = True,
) -> MemoryExplanation:
    """Do what `explain_memory` does, after its arguments are read."""
    sentences = sentences_of(what_if, cardinalities)
    answers = explain_factors(what_if, factors)
    found = tuple(remedies_of(what_if)) if remedies and what_if.can_predict else None
    return MemoryExplanation(
        what_if.table,
        sentences,
        answers,
        what_if.base() if what_if.can_predict else None,
        found,
        what_if.gpu,
        what_if.num_predictions,
    )


# Long lines continue below the text, not below the mark.
def _cells(number: int, remedy: Remedy) -> tuple[str, ...]:
    return (
        *(str(number), format_bytes(remedy.saved_bytes), format_bytes(remedy.device_bytes)),
        "" if remedy.time_ratio is None else f"x {remedy.time_ratio:.2f}",
        {None: "", True: "yes", False: "no"}[remedy.fits],
        *(remedy.name, remedy.exactness, remedy.cost),
    )


def _items(marked: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 1), pad_edge=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for mark, text in marked:
        grid.add_row(mark, Text(text))
    return grid
