"""Show the memory of each module at the peak as a tree."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.prediction.result import ModuleMemory
from lightning_memsave.units import format_bytes

# Heading, and the categories that are summed up under it.
_COLUMNS = (
    ("weights", ("parameter", "weight_copy", "buffer")),
    ("gradients", ("gradient",)),
    ("state", ("optimizer_state",)),
    ("activations", ("activation",)),
    ("rest", ("input", "temporary", "other", "cuda_context", "allocator_slack")),
)


@dataclass(slots=True)
class _Node:
    """Modules that are shown in one line, with all that is inside them."""

    label: str
    modules: list[ModuleMemory]
    children: list["_Node"] = field(default_factory=list)
    memory: MemoryBreakdown = field(default_factory=MemoryBreakdown)
    num_parameters: int = 0


def module_tree(
    modules: Sequence[ModuleMemory], *, max_depth: int | None = 2, min_share: float = 0.01
) -> Table:
    """Draw the modules as a tree, each with all that is inside it, largest first.

    Neighbours in a list with as many parameters each share a line.

    Args:
        modules: Those of a `MemoryPrediction`.
        max_depth: Levels below the whole; ``None`` for all.
        min_share: Modules with less of the whole than this are summed up in one line.

    Returns:
        A table for a rich console.

    Raises:
        ConfigurationError: If ``max_depth`` is negative or ``min_share`` not between 0 and 1.
    """
    check_limits(max_depth, min_share)
    root = _tree(modules)
    found = root.memory.by_category()
    columns = [(name, parts) for name, parts in _COLUMNS if any(found[part] for part in parts)]
    table = Table(box=None, pad_edge=False)
    table.add_column("module", overflow="fold")
    table.add_column("class", overflow="fold")
    for name in ("all", *(name for name, _ in columns)):
        table.add_column(name, justify="right", no_wrap=True)
    for depth, node in _visible(root, 0, max_depth, min_share * root.memory.total_bytes):
        figures = node.memory.by_category()
        cells = ["  " * depth + node.label, _class_of(node), format_bytes(node.memory.total_bytes)]
        for _, parts in columns:
            num_bytes = sum(figures[part] for part in parts)
            cells.append(format_bytes(num_bytes) if num_bytes else "-")
        # As `Text`: rich would read brackets as its markup.
        table.add_row(*(Text(cell) for cell in cells))
    return table


def check_limits(max_depth: int | None, min_share: float) -> None:
    """Refuse limits with which no tree can be drawn.

    Args:
        max_depth: Levels below the whole; ``None`` for all.
        min_share: Modules with less of the whole than this are summed up in one line.

    Raises:
        ConfigurationError: If ``max_depth`` is negative or ``min_share`` not between 0 and 1.
    """
    if max_depth is not None and max_depth < 0:
        raise ConfigurationError(
            f"`max_depth={max_depth}` is no depth: it must be at least 0. Use `None` to see all."
        )
    if not 0 <= min_share <= 1:
        raise ConfigurationError(
            f"`min_share={min_share}` is no share: it must be from 0 to 1. Use 0.01 for 1 %."
        )


def _tree(modules: Sequence[ModuleMemory]) -> _Node:
    children: dict[str, list[ModuleMemory]] = {}
    for module in modules:
        if module.name:
            children.setdefault(module.name.rpartition(".")[0], []).append(module)
    root = [module for module in modules if not module.name] or [
        ModuleMemory("", "", 0, MemoryBreakdown())
    ]
    return _node("(whole)", root, children)


def _node(
    label: str, modules: list[ModuleMemory], children: dict[str, list[ModuleMemory]]
) -> _Node:
    inside: dict[str, list[ModuleMemory]] = {}
    for module in modules:
        for child in children.get(module.name, ()):
            inside.setdefault(child.name.rpartition(".")[2], []).append(child)
    nodes = [_node(name, members, children) for name, members in inside.items()]
    own = _summed(label="(its own)", nodes=[_leaf(modules)])
    if not nodes:
        return _Node(label, modules, [], own.memory, own.num_parameters)
    merged = _merged(nodes)
    whole = _summed(label, [own, *merged])
    if own.memory.total_bytes:
        merged.append(own)
    return _Node(label, modules, merged, whole.memory, whole.num_parameters)


def _leaf(modules: Sequence[ModuleMemory]) -> _Node:
    memory = sum((module.memory for module in modules), MemoryBreakdown())
    return _Node("", [], [], memory, sum(module.num_parameters for module in modules))


def _summed(label: str, nodes: Sequence[_Node]) -> _Node:
    memory = sum((node.memory for node in nodes), MemoryBreakdown())
    return _Node(label, [], [], memory, sum(node.num_parameters for node in nodes))


# Neighbours with numbers for names and as many parameters become one, with their insides.
def _merged(nodes: Sequence[_Node]) -> list[_Node]:
    found: list[list[_Node]] = []
    for node in nodes:
        if found and node.label.isdigit() and _kind(node) == _kind(found[-1][-1]):
            found[-1].append(node)
        else:
            found.append([node])
    return [group[0] if len(group) == 1 else _united(group) for group in found]


def _united(group: Sequence[_Node]) -> _Node:
    whole = _summed(f"{group[0].label}-{group[-1].label}", group)
    insides: dict[str, list[_Node]] = {}
    for node in group:
        for child in node.children:
            insides.setdefault(child.label, []).append(child)
    whole.modules = [module for node in group for module in node.modules]
    for label, members in insides.items():
        united = members[0] if len(members) == 1 else _united(members)
        united.label = label
        whole.children.append(united)
    return whole


def _kind(node: _Node) -> tuple[object, ...]:
    return (*{module.class_name for module in node.modules}, node.num_parameters)


def _visible(
    node: _Node, depth: int, max_depth: int | None, minimum: float
) -> Iterator[tuple[int, _Node]]:
    yield depth, node
    if max_depth is not None and depth >= max_depth:
        return
    filled = [child for child in node.children if child.memory.total_bytes]
    filled.sort(key=lambda child: -child.memory.total_bytes)
    small = [child for child in filled if child.memory.total_bytes < minimum]
    for child in filled:
        if child.memory.total_bytes >= minimum:
            yield from _visible(child, depth + 1, max_depth, minimum)
    if len(small) == 1:
        yield depth + 1, small[0]
    elif small:
        yield depth + 1, _summed(f"({len(small)} smaller)", small)


def _class_of(node: _Node) -> str:
    classes = list(dict.fromkeys(module.class_name for module in node.modules))
    if len(classes) != 1:
        return ""
    return f"{len(node.modules)} x {classes[0]}" if len(node.modules) > 1 else classes[0]
