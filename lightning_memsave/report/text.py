"""Show a prediction in a terminal, or as plain text."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_memsave.core.names import block_template
from lightning_memsave.core.plain_text import as_plain_text, figure_table, print_to
from lightning_memsave.planning.constants import LEVEL
from lightning_memsave.planning.step_time import Rates, step_seconds
from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.prediction.result import (
    GpuFit,
    MemoryPrediction,
    TensorMemory,
    categories,
    headline,
    needed_memory,
)
from lightning_memsave.report.tree import module_tree
from lightning_memsave.units import format_bytes


def rich_prediction(
    prediction: MemoryPrediction,
    *,
    fits: Sequence[GpuFit] = (),
    max_depth: int | None = 2,
    max_tensors: int = 10,
) -> Group:
    parts: list[list[RenderableType]] = [headline(prediction)]
    if prediction.reserved_bytes is not None:
        parts.append([needed_memory(prediction)])
    if fits:
        notes = [Text(f"{fit.gpu.name}: {fit.note}.") for fit in fits if fit.note]
        speeds = [Text(line) for fit in fits if (line := _speed(prediction, fit.gpu))]
        parts.append([gpu_table(fits), *notes, *speeds])
    parts.append([categories(prediction)])
    if prediction.modules:
        parts.append([module_tree(prediction.modules, max_depth=max_depth)])
    if prediction.largest_tensors and max_tensors:
        parts.append([tensor_table(prediction.largest_tensors, max_tensors)])
    parts.append([Text(f"assumed: {line}") for line in prediction.assumptions])
    parts[-1] += [Text(f"guessed: {line}") for line in prediction.guesses]
    shown: list[RenderableType] = []
    for part in filter(None, parts):
        shown += [Text(""), *part] if shown else part
    return Group(*shown)


def show(*parts: RenderableType) -> None:
    """Print in colour to a terminal, or as plain text to a file or pipe."""
    print_to(Console(highlight=False), as_plain_text(*parts), *parts)


def gpu_table(fits: Sequence[GpuFit]) -> Table:
    numbers = ("has", "needs", "left")
    table = figure_table("GPU", "fits", *numbers, numbers=numbers)
    for fit in fits:
        cells = (fit.gpu.name, "yes" if fit.fits else "NO")
        figures = (fit.gpu.total_bytes, fit.needed_bytes, fit.spare_bytes)
        style = "" if fit.fits else "bold red"
        row = [*cells, *(format_bytes(figure) for figure in figures)]
        table.add_row(*(Text(cell) for cell in row), style=style)
    return table


def _speed(prediction: MemoryPrediction, gpu: Gpu) -> str:
    if gpu.throughput is None:
        return ""
    seconds = sum(step_seconds(prediction.work, Rates.of_gpu(gpu.throughput)).values())
    speed = prediction.work.speed([factor * seconds for factor in LEVEL], gpu.throughput)
    return speed and f"{gpu.name}: estimated {speed}."


def variants_table(cases: Sequence[tuple[str, MemoryPrediction, Sequence[GpuFit]]]) -> Table:
    numbers = ("needs", "difference", "tensors")
    table = figure_table("settings", *numbers, numbers=numbers)
    gpus = [fit.gpu.name for fit in cases[0][2]] if cases else []
    for name in gpus:
        table.add_column(f"fits {name}")
    for name, prediction, fits in cases:
        difference = prediction.device_bytes - cases[0][1].device_bytes
        signed = f"{'+' if difference > 0 else ''}{format_bytes(difference)}"
        figures = [format_bytes(prediction.device_bytes), signed if difference else ""]
        figures.append(format_bytes(prediction.peak_bytes))
        marks = ("yes" if fit.fits else "NO" for fit in fits)
        table.add_row(*(Text(cell) for cell in (name, *figures, *marks)))
    return table


def group_tensors(tensors: Sequence[TensorMemory]) -> list[tuple[str, list[TensorMemory]]]:
    groups: dict[tuple[object, ...], list[TensorMemory]] = {}
    for tensor in tensors:
        size = (tensor.num_bytes, tensor.shape, tensor.dtype)
        key = (block_template(tensor.module), tensor.category, *size, tensor.op)
        groups.setdefault(key, []).append(tensor)
    return [(str(template), members) for (template, *_), members in groups.items()]


def tensor_table(tensors: Sequence[TensorMemory], limit: int) -> Table:
    table = figure_table(
        "largest tensors", "shape", "module", "created by", "each", numbers=("each",)
    )
    for template, members in group_tensors(tensors)[:limit]:
        first = members[0]
        times = f"{len(members)} x " if len(members) > 1 else ""
        shape = f"{first.dtype}[{','.join(map(str, first.shape))}]" if first.dtype else ""
        module = template if times else first.module
        op = first.op.removeprefix("aten.")
        cells = (times + first.category.replace("_", " "), shape, module, op)
        table.add_row(*(Text(cell) for cell in (*cells, format_bytes(first.num_bytes))))
    return table
