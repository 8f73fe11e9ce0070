"""Show a parameter table as a tree of modules."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lightning_memsave.core.plain_text import as_plain_text
from lightning_memsave.explain.parameters import ModuleParameters, ParameterTable
from lightning_memsave.report.tree import check_limits
from lightning_memsave.units import format_bytes


@dataclass(slots=True)
class _Node:
    """Modules that are shown in one line: a single one, or equal blocks."""

    label: str
    rows: list[ModuleParameters]
    children: list["_Node"] = field(default_factory=list)

    @property
    def num_parameters(self) -> int:
        return sum(row.num_parameters for row in self.rows)


def parameter_tree(
    table: ParameterTable,
    *,
    max_depth: int | None = None,
    min_share: float = 0.005,
    is_sorted: bool = True,
) -> Group:
    """Draw the modules as a tree, with equal blocks in one line.

    Args:
        table: What to draw.
        max_depth: Levels below the whole; ``None`` for all.
        min_share: Modules with less of all parameters than this are summed up in one line.
        is_sorted: Whether the largest come first; if not, they come as they are in the model.

    Returns:
        A line with the totals and a table, for a rich console.

    Raises:
        ConfigurationError: If ``max_depth`` is negative or ``min_share`` not between 0 and 1.
    """
    check_limits(max_depth, min_share)
    shown = Table(box=None, pad_edge=False)
    shown.add_column("module", overflow="fold")
    shown.add_column("class", overflow="fold")
    for column in ("parameters", "share", "memory"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("dtype", no_wrap=True)
    shown.add_column("trained", no_wrap=True)
    root = _tree(table)
    for depth, node in _visible(root, 0, max_depth, min_share * table.num_parameters, is_sorted):
        # As `Text`: rich would read brackets as its markup.
        shown.add_row(*(Text(cell) for cell in _cells(node, depth, table)))
    return Group(_title(table), shown)


def plain_tree(
    table: ParameterTable,
    *,
    max_depth: int | None = None,
    min_share: float = 0.005,
    is_sorted: bool = True,
) -> str:
    """Write the tree as plain text.

    Args:
        table: What to draw.
        max_depth: As for `parameter_tree`.
        min_share: As for `parameter_tree`.
        is_sorted: As for `parameter_tree`.

    Returns:
        Lines of at most 110 characters.

    Example:
        >>> from torch import nn
        >>> from lightning_memsave.explain.parameters import parameter_table
        >>> model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(3)))
        >>> print(plain_tree(parameter_table(model)))
        Sequential: 7,650 parameters, 29.88 KiB
        module    class       parameters   share     memory  dtype    trained
        (whole)   Sequential       7,650  100.0%  29.88 KiB  float32  yes
          0-2     3 x Linear       7,650  100.0%  29.88 KiB  float32  yes
    """
    tree = parameter_tree(table, max_depth=max_depth, min_share=min_share, is_sorted=is_sorted)
    return as_plain_text(tree)


def _title(table: ParameterTable) -> Text:
    title = f"{table.model}: {table.num_parameters:,} parameters, {format_bytes(table.num_bytes)}"
    if table.buffer_bytes:
        title += f", and {format_bytes(table.buffer_bytes)} of buffers"
    if table.num_lazy:
        title += f"; {table.num_lazy} more have no shape before the first forward pass"
    return Text(title)


def _tree(table: ParameterTable) -> _Node:
    children: dict[str, list[ModuleParameters]] = {}
    for row in table.modules:
        if row.name:
            children.setdefault(row.name.rpartition(".")[0], []).append(row)
    root = [row for row in table.modules if not row.name] or [ModuleParameters("", "")]
    return _node("(whole)", root, children)


def _node(
    label: str, rows: list[ModuleParameters], children: dict[str, list[ModuleParameters]]
) -> _Node:
    inside: dict[str, list[ModuleParameters]] = {}
    for row in rows:
        for child in children.get(row.name, ()):
            inside.setdefault(child.name.rpartition(".")[2], []).append(child)
    node = _Node(label, rows)
    for merged, members in _merged(inside):
        node.children.append(_node(merged, members, children))
    if node.children and (own := [row for row in rows if row.own_parameters]):
        node.children.append(_Node("(its own)", [_only_own(row) for row in own]))
    return node


# Bytes of a module's own parameters are not known apart from those inside it; shares of them are.
def _only_own(row: ModuleParameters) -> ModuleParameters:
    part = row.own_parameters / max(row.num_parameters, 1)
    return ModuleParameters(
        row.name,
        "",
        row.own_parameters,
        row.own_parameters,
        round(row.num_bytes * part),
        0,
        None if row.num_trainable is None else round(row.num_trainable * part),
        row.dtypes,
        row.share * part,
    )


# Neighbours with numbers for names and equal contents become one.
def _merged(
    inside: dict[str, list[ModuleParameters]],
) -> Iterator[tuple[str, list[ModuleParameters]]]:
    names: list[str] = []
    for name, rows in inside.items():
        if names and not (name.isdigit() and _kind(rows) == _kind(inside[names[-1]])):
            yield _range(names), [row for n in names for row in inside[n]]
            names = []
        names.append(name)
    if names:
        yield _range(names), [row for n in names for row in inside[n]]


def _kind(rows: Sequence[ModuleParameters]) -> tuple[object, ...]:
    return tuple(
        (row.class_name, row.num_parameters, row.num_bytes, row.num_trainable) for row in rows
    )


def _range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"


def _visible(
    node: _Node, depth: int, max_depth: int | None, minimum: float, is_sorted: bool
) -> Iterator[tuple[int, _Node]]:
    yield depth, node
    if max_depth is not None and depth >= max_depth:
        return
    filled = [child for child in node.children if child.num_parameters]
    if is_sorted:
        filled.sort(key=lambda child: -child.num_parameters)
    small = [child for child in filled if child.num_parameters < minimum]
    for child in filled:
        if child.num_parameters >= minimum:
            yield from _visible(child, depth + 1, max_depth, minimum, is_sorted)
    if len(small) == 1:
        yield depth + 1, small[0]
    elif small:
        rows = [row for child in small for row in child.rows]
        yield depth + 1, _Node(f"({len(small)} smaller)", rows)


def _cells(node: _Node, depth: int, table: ParameterTable) -> tuple[str, ...]:
    classes = {row.class_name for row in node.rows}
    kind = classes.pop() if len(classes) == 1 else ""
    if kind and len(node.rows) > 1 and not node.label.startswith("("):
        kind = f"{len(node.rows)} x {kind}"
    share = node.num_parameters / max(table.num_parameters, 1)
    trained: list[int | None] = [row.num_trainable for row in node.rows]
    return (
        "  " * depth + node.label,
        kind,
        f"{node.num_parameters:,}",
        f"{share:.1%}",
        format_bytes(sum(row.num_bytes for row in node.rows)),
        ", ".join(dict.fromkeys(dtype for row in node.rows for dtype in row.dtypes)),
        _trained(trained, node.num_parameters),
    )


def _trained(counts: Sequence[int | None], num_parameters: int) -> str:
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return ""
    number = sum(known)
    return "yes" if number == num_parameters else "no" if not number else f"{number:,}"
