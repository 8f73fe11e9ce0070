"""Show a prediction in a terminal, or as plain text."""

import re
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_memsave.core.plain_text import as_plain_text
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.prediction.cuda.gpus import GpuFit
from lightning_memsave.prediction.result import PHASES, MemoryPrediction, TensorMemory
from lightning_memsave.report.tree import module_tree
from lightning_memsave.units import format_bytes

_WORDS = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "matmul"), "a matrix product"),
    **dict.fromkeys(("to_copy", "copy"), "a conversion or copy"),
    **dict.fromkeys(("zeros_like", "zeros", "empty_like", "empty", "new_zeros"), "new memory"),
    "cat": "a concatenation",
    "log_softmax": "the logarithm of softmax",
    "embedding_dense": "an embedding",
}


def in_words(op: str) -> str:
    """Say what an operator does, for people who do not know torch's names for it.

    Args:
        op: Such as ``"aten.mm"``.

    Returns:
        Words that may follow "in"; empty for no operator.

    Example:
        >>> in_words("aten.mm"), in_words("aten._foreach_sqrt")
        ('a matrix product', 'the square root of all parameters at once')
        >>> in_words("aten._softmax_backward_data"), in_words("aten.gelu")
        ('the gradient of `softmax`', '`gelu`')
    """
    name = op.rpartition(".")[2].strip("_")
    if not name:
        return ""
    if name.startswith("foreach_"):
        name = name.removeprefix("foreach_")
        words = {"sqrt": "the square root", "norm": "the norm"}.get(name, f"`{name}`")
        return f"{words} of all parameters at once"
    name = name.removesuffix("_forward")
    inner = re.sub(r"_backward(_data)?$", "", name)
    words = _WORDS.get(inner, f"`{inner.removeprefix('native_')}`")
    if "scaled_dot_product" in inner:
        words = "attention"
    return words if inner == name else f"the gradient of {words}"


def print_prediction(
    prediction: MemoryPrediction,
    *,
    fits: Sequence[GpuFit] = (),
    max_depth: int | None = 2,
    max_tensors: int = 10,
) -> None:
    """Print a prediction, in colour where the terminal has it.

    Args:
        prediction: What to show.
        fits: What is known about cards.
        max_depth: Levels of the tree of modules; ``None`` for all.
        max_tensors: Lines of the table of the largest tensors.
    """
    shown = rich_prediction(prediction, fits=fits, max_depth=max_depth, max_tensors=max_tensors)
    show(shown)


def plain_prediction(
    prediction: MemoryPrediction,
    *,
    fits: Sequence[GpuFit] = (),
    max_depth: int | None = 2,
    max_tensors: int = 10,
) -> str:
    """Write a prediction as text.

    Args:
        prediction: What to show.
        fits: As for `print_prediction`.
        max_depth: As for `print_prediction`.
        max_tensors: As for `print_prediction`.

    Returns:
        Lines of at most 110 characters.

    Example:
        >>> from lightning_memsave.core.memory import MemoryBreakdown
        >>> peak = MemoryBreakdown(parameter_bytes=3 * 2**20, activation_bytes=2**20)
        >>> print(plain_prediction(MemoryPrediction("cpu", "Net", peak, {"forward": peak})))
        Net: 4.00 MiB for a training step on cpu
        <BLANKLINE>
        category     at the peak  share   forward
        parameter       3.00 MiB  75.0%  3.00 MiB
        activation      1.00 MiB  25.0%  1.00 MiB
        together        4.00 MiB         4.00 MiB
    """
    return as_plain_text(
        rich_prediction(prediction, fits=fits, max_depth=max_depth, max_tensors=max_tensors)
    )


def rich_prediction(
    prediction: MemoryPrediction,
    *,
    fits: Sequence[GpuFit] = (),
    max_depth: int | None = 2,
    max_tensors: int = 10,
) -> Group:
    """Draw a prediction: what it takes, whether it fits, by category, phase and module.

    Args:
        prediction: What to show.
        fits: As for `print_prediction`.
        max_depth: As for `print_prediction`.
        max_tensors: As for `print_prediction`.

    Returns:
        Texts and tables, for a rich console.

    Raises:
        ConfigurationError: If ``max_depth`` or ``max_tensors`` is negative.
    """
    if max_tensors < 0:
        raise ConfigurationError(
            f"`max_tensors={max_tensors}` is no number of lines: it must be at least 0."
        )
    parts: list[list[RenderableType]] = [_head(prediction)]
    if prediction.reserved_bytes is not None:
        parts.append([_needs(prediction)])
    if fits:
        parts.append([fit_table(fits), *_fit_notes(fits)])
    parts.append([_categories(prediction)])
    if prediction.modules:
        parts.append([module_tree(prediction.modules, max_depth=max_depth)])
    if prediction.largest_tensors and max_tensors:
        parts.append([_tensors(prediction.largest_tensors, max_tensors)])
    remarks = [Text(f"assumed: {line}") for line in prediction.assumptions]
    remarks += [Text(f"guessed: {line}") for line in prediction.guesses]
    parts.append(list(remarks))
    shown: list[RenderableType] = []
    for part in parts:
        if part and shown:
            shown.append(Text(""))
        shown += part
    return Group(*shown)


def show(*parts: RenderableType) -> None:
    """Print to the terminal in colour, or as plain text to a file or pipe.

    Args:
        parts: Tables, texts and groups of them.
    """
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(*parts, sep="\n")
    else:
        console.file.write(as_plain_text(*parts) + "\n")


def fit_table(fits: Sequence[GpuFit]) -> Table:
    """Draw which cards are large enough.

    Args:
        fits: One line each.

    Returns:
        A table for a rich console.
    """
    table = _table("GPU", "fits", numbers=("has", "it takes", "left"))
    for fit in fits:
        cells = (fit.gpu.name, "yes" if fit.fits else "NO")
        figures = (fit.gpu.total_bytes, fit.needed_bytes, fit.spare_bytes)
        style = "" if fit.fits else "bold red"
        row = [*cells, *(format_bytes(figure) for figure in figures)]
        table.add_row(*(Text(cell) for cell in row), style=style)
    return table


def case_table(cases: Sequence[tuple[str, MemoryPrediction, Sequence[GpuFit]]]) -> Table:
    """Draw several settings side by side.

    Args:
        cases: Name, prediction, and what is known about cards; the first is what the others are
            compared with.

    Returns:
        A table for a rich console.
    """
    table = _table("settings", numbers=("it takes", "difference", "tensors"))
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


def _fit_notes(fits: Sequence[GpuFit]) -> list[Text]:
    return [Text(f"{fit.gpu.name}: {fit.note}.") for fit in fits if fit.note]


def _head(prediction: MemoryPrediction) -> list[RenderableType]:
    count = prediction.num_parameters
    parameters = f", {count:,} parameters" if count else ""
    title = (
        f"{prediction.model}{parameters}: {format_bytes(prediction.device_bytes)} for a training "
        f"step on {prediction.device}"
    )
    lines = [Text(title, style="bold")]
    if prediction.settings:
        values = (f"{name} {value}" for name, value in prediction.settings.items())
        lines.append(Text(f"with {', '.join(values)}"))
    lines += [Text(f"without {name} {why}") for name, why in prediction.ineffective.items()]
    if prediction.peak_phase:
        running = f", in {in_words(prediction.peak_op)}" if prediction.peak_op else ""
        where = f" of `{prediction.peak_module}`" if running and prediction.peak_module else ""
        lines.append(Text(f"most is alive in {prediction.peak_phase}{running}{where}"))
    if prediction.peak.host_bytes:
        host = format_bytes(prediction.peak.host_bytes)
        lines.append(
            Text(f"and {host} on the host: gradients, to repeat a batch when memory runs out")
        )
    return list(lines)


def _needs(prediction: MemoryPrediction) -> Table:
    context = prediction.context_bytes
    table = _table("what the device must have", numbers=("",))
    for name, num_bytes in (
        ("tensors, when most are alive", prediction.peak_bytes),
        ("gaps in torch's allocator", prediction.device_bytes - context - prediction.peak_bytes),
        ("CUDA context", context),
        ("together", prediction.device_bytes),
        ("used where there is room", (prediction.reserved_bytes or 0) + context),
    ):
        table.add_row(Text(name), Text(format_bytes(num_bytes)))
    return table


def _categories(prediction: MemoryPrediction) -> Table:
    phases = [phase for phase in PHASES if phase in prediction.by_phase]
    table = _table("category", numbers=("at the peak", "share", *phases))
    total = prediction.peak_bytes
    peak, *by_phase = (
        _with_workspaces(memory.by_category(), prediction)
        for memory in (prediction.peak, *(prediction.by_phase[phase] for phase in phases))
    )
    for name, num_bytes in sorted(peak.items(), key=lambda item: -item[1]):
        figures = [phase[name] for phase in by_phase]
        if not num_bytes and not any(figures):
            continue
        share = f"{num_bytes / total:.1%}" if total else ""
        cells = [_size(num_bytes), share, *map(_size, figures)]
        table.add_row(name.replace("_", " "), *cells)
    sums = [_size(sum(phase.values())) for phase in by_phase]
    table.add_row("together", _size(total), "", *sums)
    return table


def _with_workspaces(sizes: dict[str, int], prediction: MemoryPrediction) -> dict[str, int]:
    workspace_bytes = min(prediction.workspace_bytes, sizes["other"])
    return sizes | {"other": sizes["other"] - workspace_bytes, "cuBLAS": workspace_bytes}


def _tensors(tensors: Sequence[TensorMemory], limit: int) -> Table:
    groups: dict[tuple[str, str, int, tuple[int, ...], str, str], list[TensorMemory]] = {}
    for tensor in tensors:
        template = re.sub(r"(?<![^.])\d+(?![^.])", "*", tensor.module)
        size = (tensor.num_bytes, tensor.shape, tensor.dtype)
        key = (template, tensor.category, *size, tensor.op)
        groups.setdefault(key, []).append(tensor)
    table = _table("largest tensors", "shape", "of", "made by", numbers=("each",))
    for key, members in list(groups.items())[:limit]:
        first = members[0]
        times = f"{len(members)} x " if len(members) > 1 else ""
        shape = f"{first.dtype}[{','.join(map(str, first.shape))}]" if first.dtype else ""
        module = key[0] if times else first.module
        op = first.op.removeprefix("aten.")
        cells = (times + first.category.replace("_", " "), shape, module, op)
        table.add_row(*(Text(cell) for cell in (*cells, format_bytes(first.num_bytes))))
    return table


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def _table(*texts: str, numbers: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
