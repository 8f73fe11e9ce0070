"""Show the modules of a model as a tree, with parameters or memory at the peak."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.core.plain_text import figure_table
from lightning_memsave.measure.parameters import ModuleParameters, ParameterTable, ancestors
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
    rows: list[Any]
    size: int
    children: list["_Node"] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ModuleLine:
    """One line of a tree: a module or equal blocks, submodules included."""

    depth: int
    label: str
    class_name: str
    num_parameters: int
    memory: MemoryBreakdown


def module_lines(modules: Sequence[ModuleMemory], *, max_depth: int | None = 2) -> list[ModuleLine]:
    """Arrange the modules as a tree, submodules included, largest first.

    Equal neighbours in a list share a line.
    """
    own = {module.name: replace(module, class_name="") for module in modules}
    builder = _TreeBuilder(
        size_of=lambda module: module.memory.total_bytes,
        kind_of=lambda module: (module.class_name, module.num_parameters),
        own_of=lambda module: own.get(module.name),
    )
    root = builder.build(_with_insides(modules), ModuleMemory("", "", 0, MemoryBreakdown()))
    return [
        ModuleLine(
            depth,
            node.label,
            "" if node.label.endswith(" smaller)") else _class_of(node),
            sum(row.num_parameters for row in node.rows),
            sum((row.memory for row in node.rows), MemoryBreakdown()),
        )
        for depth, node in _visible_lines(root, max_depth, 0.01)
    ]


def module_tree(modules: Sequence[ModuleMemory], *, max_depth: int | None = 2) -> Table:
    lines = module_lines(modules, max_depth=max_depth)
    found = lines[0].memory.by_category()
    columns = [(name, parts) for name, parts in _COLUMNS if any(found[part] for part in parts)]
    numbers = ("total", *(name for name, _ in columns))
    table = figure_table("module", "class", *numbers, numbers=numbers)
    for line in lines:
        figures = line.memory.by_category()
        total = format_bytes(line.memory.total_bytes)
        cells = ["  " * line.depth + line.label, line.class_name, total]
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
    builder = _TreeBuilder(
        size_of=lambda row: row.num_parameters,
        kind_of=lambda row: (row.class_name, row.num_parameters, row.num_bytes, row.num_trainable),
        own_of=_own_parameters,
    )
    root = builder.build(table.modules, ModuleParameters("", ""))
    numbers = ("parameters", "share", "memory")
    shown = figure_table("module", "class", *numbers, numbers=numbers)
    shown.add_column("dtype", no_wrap=True)
    shown.add_column("trained", no_wrap=True)
    for depth, node in _visible_lines(root, max_depth, min_share):
        # As `Text`: rich would read brackets as its markup.
        shown.add_row(*(Text(cell) for cell in _parameter_cells(node, depth, root.size)))
    return Group(_title(table), shown)


@dataclass(frozen=True)
class _TreeBuilder:
    """Builds the tree; equal neighbours named by numbers become one node."""

    size_of: Callable[[Any], int]
    kind_of: Callable[[Any], object]
    own_of: Callable[[Any], Any | None]

    def build(self, rows: Sequence[Any], missing_root: Any) -> _Node:
        children: dict[str, list[Any]] = {}
        for row in rows:
            if row.name:
                children.setdefault(row.name.rpartition(".")[0], []).append(row)
        root = [row for row in rows if not row.name] or [missing_root]
        return self._node("(whole)", root, children)

    def _node(self, label: str, rows: list[Any], children: dict[str, list[Any]]) -> _Node:
        inside: dict[str, list[Any]] = {}
        for row in rows:
            for child in children.get(row.name, ()):
                inside.setdefault(child.name.rpartition(".")[2], []).append(child)
        node = self._leaf(label, rows)
        node.children = [self._node(*group, children) for group in self._groups(inside)]
        own = [found for row in rows if (found := self.own_of(row)) is not None]
        if node.children and own:
            node.children.append(self._leaf("(its own)", own))
        return node

    def _leaf(self, label: str, rows: list[Any]) -> _Node:
        return _Node(label, rows, sum(map(self.size_of, rows)))

    def _groups(self, inside: dict[str, list[Any]]) -> Iterator[tuple[str, list[Any]]]:
        names: list[str] = []
        kind: object = None
        for name, rows in inside.items():
            kind_before, kind = kind, [self.kind_of(row) for row in rows]
            if names and not (name.isdigit() and kind == kind_before):
                yield _range(names), [row for n in names for row in inside[n]]
                names = []
            names.append(name)
        if names:
            yield _range(names), [row for n in names for row in inside[n]]


def _range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"


def _visible_lines(
    root: _Node, max_depth: int | None, min_share: float
) -> Iterator[tuple[int, _Node]]:
    def lines(node: _Node, depth: int) -> Iterator[tuple[int, _Node]]:
        yield depth, node
        if max_depth is not None and depth >= max_depth:
            return
        filled = sorted((n for n in node.children if n.size), key=lambda n: -n.size)
        small = [child for child in filled if child.size < min_share * root.size]
        for child in filled[: len(filled) - len(small)]:
            yield from lines(child, depth + 1)
        if len(small) == 1:
            yield depth + 1, small[0]
        elif small:
            rows = [row for child in small for row in child.rows]
            size = sum(child.size for child in small)
            yield depth + 1, _Node(f"({len(small)} smaller)", rows, size)

    return lines(root, 0)


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


def _title(table: ParameterTable) -> Text:
    title = f"{table.model}: {table.num_parameters:,} parameters, {format_bytes(table.num_bytes)}"
    if table.buffer_bytes:
        title += f", and {format_bytes(table.buffer_bytes)} of buffers"
    if table.num_lazy:
        title += f"; {table.num_lazy} more have no shape before the first forward pass"
    return Text(title)


# Only the number of a module's own parameters is known: split the bytes in proportion.
def _own_parameters(row: ModuleParameters) -> ModuleParameters | None:
    if not row.own_parameters:
        return None
    part = row.own_parameters / max(row.num_parameters, 1)
    return replace(
        row,
        class_name="",
        num_parameters=row.own_parameters,
        num_bytes=round(row.num_bytes * part),
        num_trainable=None if row.num_trainable is None else round(row.num_trainable * part),
    )


def _parameter_cells(node: _Node, depth: int, num_parameters: int) -> tuple[str, ...]:
    return (
        "  " * depth + node.label,
        _class_of(node),
        f"{node.size:,}",
        f"{node.size / max(num_parameters, 1):.1%}",
        format_bytes(sum(row.num_bytes for row in node.rows)),
        ", ".join(dict.fromkeys(dtype for row in node.rows for dtype in row.dtypes)),
        _trained([row.num_trainable for row in node.rows], node.size),
    )


def _trained(counts: Sequence[int | None], num_parameters: int) -> str:
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return ""
    number = sum(known)
    return "yes" if number == num_parameters else "no" if not number else f"{number:,}"
