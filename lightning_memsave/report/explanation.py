"""What uses the memory, why, and what would lower it: the result of `explain_memory`."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from lightning_memsave.core.plain_text import as_plain_text, figure_table, wrapped
from lightning_memsave.explain.dominant_parts import explain_parameters
from lightning_memsave.explain.factors import (
    Finding,
    explain_factors,
    label_of,
    model_states_of,
)
from lightning_memsave.measure.parameters import ParameterTable
from lightning_memsave.planning.plan import step_in
from lightning_memsave.planning.remedies import (
    EARLY_RELEASE,
    Remedy,
    best_that_fits,
    remedies_of,
)
from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.prediction.result import MemoryPrediction, ModuleMemory
from lightning_memsave.prediction.what_if import WhatIf
from lightning_memsave.report.text import tensor_table
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
        precision: That of the unchanged step.
    """

    table: ParameterTable
    sentences: tuple[str, ...]
    factors: tuple[Finding, ...]
    prediction: MemoryPrediction | None = None
    remedies: tuple[Remedy, ...] | None = None
    gpu: Gpu | None = None
    num_predictions: int = 0
    precision: str = ""

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
        if self.prediction is not None:
            shown += [Text(), tensor_table(self.prediction.largest_tensors, _SHOWN_TENSORS)]
        shown += [Text(), Text(_FACTORS), self._findings()]
        if self.remedies is not None:
            shown += [Text(), Text(_REMEDIES)]
            shown += self._remedies(self.remedies)
        return shown

    def _findings(self) -> Table:
        table = figure_table(*_FACTOR_COLUMNS, numbers=("memory",))
        mark = {"matters": "!", "unknown": "?", "does not matter": ""}
        for factor in sorted(self.factors, key=lambda s: (_ORDER[s.verdict], -(s.num_bytes or 0))):
            size = "-" if factor.num_bytes is None else format_bytes(factor.num_bytes)
            row = (mark[factor.verdict], factor.name, size, factor.sentence)
            table.add_row(*map(Text, row))
        return table

    def _remedies(self, remedies: tuple[Remedy, ...]) -> list[RenderableType]:
        if not remedies:
            return [Text("No setting of `MemSaveCallback` lowers it.")]
        table = figure_table(*_REMEDY_COLUMNS, numbers=_REMEDY_COLUMNS[:4])
        for number, remedy in enumerate(remedies, 1):
            table.add_row(
                *(str(number), format_bytes(remedy.saved_bytes), format_bytes(remedy.device_bytes)),
                "" if remedy.time_ratio is None else f"x {remedy.time_ratio:.2f}",
                _fits(remedy, self.gpu),
                *(remedy.name, remedy.exactness, remedy.cost),
            )
        shown: list[RenderableType] = [table]
        shown += [Text(wrapped(note)) for note in self._notes(remedies)]
        shown += [Text(), Text("What to type")]
        shown.append(_items((f"{number:>2}.", r.how) for number, r in enumerate(remedies, 1)))
        return [*shown, *self._verdict(self.gpu)]

    def _notes(self, remedies: tuple[Remedy, ...]) -> Iterator[str]:
        if any(remedy.name == EARLY_RELEASE for remedy in remedies):
            yield (
                "Any setting also frees gradients and outputs of the previous step early, as the "
                'first row does; "saves" of the others is what they save beyond it.'
            )
        if any(remedy.time_ratio is not None for remedy in remedies):
            yield f"Times are ratios to {step_in(self.precision)}, estimated from its kernels."

    def _verdict(self, gpu: Gpu | None) -> list[RenderableType]:
        if gpu is None:
            return []
        if self.prediction is not None and self.prediction.fits(gpu):
            return [Text(f"It fits {label_of(gpu)} without changes.")]
        best = best_that_fits(self.remedies or ())
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
    factors: Collection[str] | None = None,
    remedies: bool = True,
) -> MemoryExplanation:
    sentences = _sentences_of(what_if)
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
        what_if.step.precision,
    )


def _fits(remedy: Remedy, gpu: Gpu | None) -> str:
    if gpu is None or not remedy.fits:
        return "" if remedy.fits is None else "no"
    is_tight = remedy.prediction is not None and remedy.prediction.fits(gpu).is_tight
    return "barely" if is_tight else "yes"


# Long lines continue below the text, not below the mark.
def _items(marked: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 1), pad_edge=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for mark, text in marked:
        grid.add_row(mark, Text(text))
    return grid


_MIN_SHARE = 0.1
_NAMES = {
    "parameter": "the parameters",
    "weight_copy": "copies of weights in another precision",
    "buffer": "buffers",
    "gradient": "gradients",
    "optimizer_state": "the state of the optimizer",
    "activation": "activations",
    "input": "the batch",
    "temporary": "temporary tensors",
    "other": "other tensors",
}


def _sentences_of(what_if: WhatIf) -> tuple[str, ...]:
    of_parameters = explain_parameters(what_if.table, model_states_of(what_if))
    if not what_if.can_predict:
        return tuple(of_parameters)
    base = what_if.base()
    return (
        _peak(base),
        *_on_gpu(what_if, base),
        _categories(base),
        *_modules(base),
        *of_parameters,
    )


def _peak(base: MemoryPrediction) -> str:
    where = f" in `{base.peak_module}`" if base.peak_module else ""
    on_device = ""
    if base.device_bytes != base.peak_bytes:
        on_device = (
            f" Device memory needed: {format_bytes(base.device_bytes)}, with CUDA's context and "
            "gaps between the allocator's blocks."
        )
    return (
        f"The tensors of a step need {format_bytes(base.peak_bytes)} at the peak, which is in "
        f"{base.peak_phase}{where} (`{base.peak_op}`).{on_device}"
    )


def _on_gpu(what_if: WhatIf, base: MemoryPrediction) -> list[str]:
    if what_if.step.gpu is None:
        return []
    spare = base.fits(what_if.step.gpu).spare_bytes
    name = label_of(what_if.step.gpu)
    has = f"{name[0].upper()}{name[1:]} has {format_bytes(what_if.step.gpu.total_bytes)}"
    if spare >= 0:
        return [f"{has}: it fits, with {format_bytes(spare)} to spare."]
    return [f"{has}: it does not fit, {format_bytes(-spare)} are missing."]


def _categories(base: MemoryPrediction) -> str:
    sizes = sorted(base.peak.by_category().items(), key=lambda item: -item[1])
    large = [(name, n) for name, n in sizes if n >= _MIN_SHARE * base.peak_bytes and n]
    parts = [
        f"{_NAMES.get(name, name)} {format_bytes(n)} ({n / base.peak_bytes:.0%})"
        for name, n in large
    ]
    return f"The peak holds {', '.join(parts)}."


# Equal modules of all blocks count together: `encoder.layer.0.mlp` is `encoder.layer.*`.
def _modules(base: MemoryPrediction) -> list[str]:
    def made(module: ModuleMemory) -> int:
        return module.memory.activation_bytes + module.memory.temporary_bytes

    total = sum(made(module) for module in base.modules)
    if total < _MIN_SHARE * base.peak_bytes:
        return []
    groups = _grouped(base.modules, made)
    name, (num_blocks, num_bytes) = max(groups.items(), key=lambda item: item[1][1])
    if not name:
        return []
    each = f", {format_bytes(num_bytes // num_blocks)} in each" if num_blocks > 1 else ""
    what = f"the {num_blocks} blocks of `{name}`" if num_blocks > 1 else f"`{name}`"
    return [
        f"Of the tensors made in forward and backward, {num_bytes / total:.0%} "
        f"({format_bytes(num_bytes)}) belongs to {what}{each}."
    ]


def _grouped(
    modules: tuple[ModuleMemory, ...], made: Callable[[ModuleMemory], int]
) -> dict[str, tuple[int, int]]:
    blocks: dict[str, set[str]] = {}
    sizes: dict[str, int] = {}
    for module in modules:
        match = re.match(r"(.*?)(?:^|\.)(\d+)(?:\.|$)", module.name)
        group = f"{match[1]}.*".removeprefix(".") if match else module.name
        if match and made(module):
            blocks.setdefault(group, set()).add(match[2])
        sizes[group] = sizes.get(group, 0) + made(module)
    return {group: (len(blocks.get(group, "1")), size) for group, size in sizes.items()}
