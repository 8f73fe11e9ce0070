"""What uses the memory, why, and what would lower it: the result of `explain_memory`."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from lightning_memsave.core.plain_text import as_plain_text, figure_table
from lightning_memsave.explain.factors import explain_factors
from lightning_memsave.explain.finding import Finding, label_of
from lightning_memsave.explain.sentences import sentences_of
from lightning_memsave.measure.parameters import ParameterTable
from lightning_memsave.planning.remedies import Remedy, best_that_fits, remedies_of
from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.prediction.result import MemoryPrediction, TensorMemory
from lightning_memsave.prediction.what_if import WhatIf
from lightning_memsave.report.tree import parameter_tree
from lightning_memsave.units import format_bytes

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

    def _answers(self) -> Iterator[tuple[str, str, str, str]]:
        mark = {"matters": "!", "unknown": "?", "does not matter": ""}
        for factor in sorted(self.factors, key=lambda s: (_ORDER[s.verdict], -(s.num_bytes or 0))):
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


def explain_what_if(
    what_if: WhatIf,
    *,
    cardinalities: Mapping[str, int] | None = None,
    factors: Collection[str] | None = None,
    remedies: bool = True,
) -> MemoryExplanation:
    sentences = sentences_of(what_if, cardinalities)
    answers = explain_factors(what_if, factors)
    found = tuple(remedies_of(what_if)) if remedies and what_if.can_predict else None
    return MemoryExplanation(
        what_if.table,
        sentences,
        answers,
        what_if.base() if what_if.can_predict else None,
        found,
        what_if.step.gpu,
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
