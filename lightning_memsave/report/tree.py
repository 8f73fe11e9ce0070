"""Show the modules of a model as a tree, with parameters or memory at the peak."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.core.plain_text import figure_table
from lightning_memsave.measure.parameters import ParameterTable, ancestors
from lightning_memsave.prediction.result import ModuleMemory
from lightning_memsave.units import format_bytes

# Heading, and the categories that are summed up under it.
_COLUMNS = (
    ("weights", ("parameter", "weight_copy", "buffer")),
    ("gradients", ("gradient",)),
    ("state", ("optimizer_state",)),
    ("activations", ("activation",)),
    ("rest", ("input", "temporary", "other")),
)


@dataclass(slots=True)
class _Node:
    label: str
    rows: list[ModuleMemory]  # a module or equal blocks, each with all inside
    children: list["_Node"] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(row.memory.total_bytes for row in self.rows)


@dataclass(frozen=True, slots=True)
class ModuleLine:
    """One line of a tree: a module or equal blocks, submodules included."""

    depth: int
    label: str
    class_name: str
    num_parameters: int
    memory: MemoryBreakdown


def module_lines(
    modules: Sequence[ModuleMemory], *, max_depth: int | None = 2, min_share: float = 0.01
) -> list[ModuleLine]:
    """Arrange the modules as a tree, submodules included, largest first.

    Equal neighbours in a list share a line.
    """
    own = {module.name: replace(module, class_name="") for module in modules}
    inside: dict[str, list[ModuleMemory]] = {}
    rows = _with_insides(modules)
    for row in rows:
        if row.name:
            inside.setdefault(row.name.rpartition(".")[0], []).append(row)
    root = _node("(whole)", [row for row in rows if not row.name], inside, own)
    return [
        ModuleLine(
            depth,
            node.label,
            "" if node.label.endswith(" smaller)") else _class_of(node),
            sum(row.num_parameters for row in node.rows),
            sum((row.memory for row in node.rows), MemoryBreakdown()),
        )
        for depth, node in _visible_lines(root, max_depth, min_share * root.size)
    ]


def module_tree(
    modules: Sequence[ModuleMemory],
    *,
    max_depth: int | None = 2,
    min_share: float = 0.01,
    with_parameters: bool = False,
) -> Table:
    lines = module_lines(modules, max_depth=max_depth, min_share=min_share)
    found = lines[0].memory.by_category()
    columns = [(name, parts) for name, parts in _COLUMNS if any(found[part] for part in parts)]
    numbers: tuple[str, ...] = ("total", *(name for name, _ in columns))
    if with_parameters:
        numbers, columns = ("parameters", "memory"), []
    table = figure_table("module", "class", *numbers, numbers=numbers)
    for line in lines:
        figures = line.memory.by_category()
        cells = ["  " * line.depth + line.label, line.class_name]
        cells += [f"{line.num_parameters:,}"] if with_parameters else []
        cells.append(format_bytes(line.memory.total_bytes))
        for _, parts in columns:
            num_bytes = sum(figures[part] for part in parts)
            cells.append(format_bytes(num_bytes) if num_bytes else "-")
        # As `Text`: rich would read brackets as its markup.
        table.add_row(*(Text(cell) for cell in cells))
    return table


def parameter_tree(
    table: ParameterTable, *, max_depth: int | None = None, min_share: float = 0.005
) -> Group:
    """Make a table of the parameters by module, equal blocks in one line, largest first."""
    rows = {name: ModuleMemory(name, kind, 0) for name, kind in table.class_names.items()}
    for entry in table.parameters:
        for name in ancestors(entry.module):  # of a checkpoint only names are known
            rows.setdefault(name, ModuleMemory(name, "", 0))
        row, own = rows[entry.module], MemoryBreakdown(parameter_bytes=entry.num_bytes)
        number = row.num_parameters + entry.num_elements
        rows[entry.module] = replace(row, num_parameters=number, memory=row.memory + own)
    title = f"{table.model}: {table.num_parameters:,} parameters, {format_bytes(table.num_bytes)}"
    if table.buffer_bytes:
        title += f", and {format_bytes(table.buffer_bytes)} of buffers"
    if table.num_lazy:
        title += f"; {table.num_lazy} more have no shape before the first forward pass"
    options: dict[str, Any] = {"max_depth": max_depth, "min_share": min_share}
    return Group(Text(title), module_tree([*rows.values()], with_parameters=True, **options))


_Inside = Mapping[str, Sequence[ModuleMemory]]


def _node(
    label: str, rows: list[ModuleMemory], inside: _Inside, own: Mapping[str, ModuleMemory]
) -> _Node:
    children: dict[str, list[ModuleMemory]] = {}
    for row in rows:
        for child in inside.get(row.name, ()):
            children.setdefault(child.name.rpartition(".")[2], []).append(child)
    nodes = [_node(*group, inside, own) for group in _groups(children)]
    of_itself = [own[row.name] for row in rows if row.name in own]
    if nodes and of_itself:
        nodes.append(_Node("(its own)", of_itself))
    return _Node(label, rows, nodes)


# Equal neighbours that are named by numbers are one.
def _groups(
    children: Mapping[str, list[ModuleMemory]],
) -> Iterator[tuple[str, list[ModuleMemory]]]:
    names: list[str] = []
    kind: object = None
    for name, rows in children.items():
        kind_before, kind = kind, [(row.class_name, row.num_parameters) for row in rows]
        if names and not (name.isdigit() and kind == kind_before):
            yield _range(names), [row for n in names for row in children[n]]
            names = []
        names.append(name)
    if names:
        yield _range(names), [row for n in names for row in children[n]]


def _range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"


def _visible_lines(
    node: _Node, max_depth: int | None, least_bytes: float, depth: int = 0
) -> Iterator[tuple[int, _Node]]:
    yield depth, node
    if max_depth is not None and depth >= max_depth:
        return
    filled = sorted((n for n in node.children if n.size), key=lambda n: -n.size)
    small = [child for child in filled if child.size < least_bytes]
    for child in filled[: len(filled) - len(small)]:
        yield from _visible_lines(child, max_depth, least_bytes, depth + 1)
    if len(small) == 1:
        yield depth + 1, small[0]
    elif small:
        rows = [row for child in small for row in child.rows]
        yield depth + 1, _Node(f"({len(small)} smaller)", rows)


def _class_of(node: _Node) -> str:
    classes = {row.class_name for row in node.rows}
    if len(classes) != 1 or not (name := classes.pop()):
        return ""
    is_several = len(node.rows) > 1 and not node.label.startswith("(")
    return f"{len(node.rows)} x {name}" if is_several else name


# Predictions give each module's memory without its submodules.
def _with_insides(modules: Sequence[ModuleMemory]) -> list[ModuleMemory]:
    totals = {module.name: module for module in modules}
    totals.setdefault("", ModuleMemory("", "", 0, MemoryBreakdown()))
    for module in modules:
        for name in ancestors(module.name):
            if name != module.name and name in totals:
                outer = totals[name]
                totals[name] = replace(
                    outer,
                    num_parameters=outer.num_parameters + module.num_parameters,
                    memory=outer.memory + module.memory,
                )
    return list(totals.values())
