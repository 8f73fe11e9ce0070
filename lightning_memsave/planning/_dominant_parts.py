"""Divide the parameters of a model into parts that people have words for."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_memsave.planning._tensor_entries import TensorEntry
from lightning_memsave.planning.parameter_table import ParameterTable, ancestors

# An embedding table below this share of the parameters does not count as one of those that do.
_MIN_TABLE_SHARE = 0.01
# A matrix this much longer than wide is there for its many inputs or outputs.
_LONG = 4
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_EMBEDDING_NAMES = re.compile(r"(embed|\bw[tp]e\b)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Part:
    """What holds many parameters, and why."""

    entries: tuple[TensorEntry, ...]
    sentence: str
    is_several: bool = True

    @property
    def num_parameters(self) -> int:
        """Elements of all of them."""
        return sum(entry.num_elements for entry in self.entries)


def dominant_parts(table: ParameterTable, tables: Sequence[TensorEntry]) -> list[Part]:
    """Divide the parameters into embedding tables, families of equal blocks, and what is left.

    Args:
        table: What the model holds.
        tables: From `embedding_tables`.

    Returns:
        The parts, the largest first; every parameter is in one of them, small tables apart.
    """
    parts = [_embedding_part(table, tables)] if tables else []
    taken = {entry.name for entry in tables}
    for names in _blocks(table):
        chosen = set(names)
        inside = [
            entry
            for entry in table.parameters
            if entry.name not in taken and chosen.intersection(ancestors(entry.module))
        ]
        taken |= {entry.name for entry in inside}
        parts.append(_block_part(table, names, inside))
    rest = [entry for entry in table.parameters if entry.name not in taken]
    parts += [_single_part(table, entry) for entry in rest]
    return sorted(parts, key=lambda part: -part.num_parameters)


def embedding_tables(table: ParameterTable) -> list[TensorEntry]:
    """Find the embedding tables that matter.

    Args:
        table: What the model holds.

    Returns:
        Those with at least 1 % of all parameters, else the largest; largest first.
    """
    found = [entry for entry in table.parameters if _is_embedding(table, entry)]
    found.sort(key=lambda entry: -entry.num_elements)
    large = [e for e in found if e.num_elements >= _MIN_TABLE_SHARE * table.num_parameters]
    return large or found[:1]


def dominant_embedding(table: ParameterTable) -> str:
    """Name the embedding with at least half of all parameters; empty if there is none."""
    tables = embedding_tables(table)
    is_dominant = bool(tables) and 2 * tables[0].num_elements >= table.num_parameters
    return tables[0].name if is_dominant else ""


def _is_embedding(table: ParameterTable, entry: TensorEntry) -> bool:
    if entry.shape is None or len(entry.shape) != 2:
        return False
    kind = table.class_names.get(entry.module)
    if kind is None:  # a checkpoint: there are only names to go by
        return _EMBEDDING_NAMES.search(entry.module) is not None and entry.shape[0] > entry.shape[1]
    return kind.lower().endswith(("embedding", "embeddingbag"))


def _embedding_part(table: ParameterTable, tables: Sequence[TensorEntry]) -> Part:
    share = f"{percent_of(table, tables)} of the {table.num_parameters:,} parameters"
    largest = tables[0]
    if len(tables) == 1:
        sentence = f"The embedding table {_described(largest)} holds {share}."
        return Part(tuple(tables), sentence, is_several=False)
    number = _NUMBERS[len(tables)] if len(tables) < len(_NUMBERS) else str(len(tables))
    if len(tables) > 3:
        named = f"; the largest, {_described(largest)}, alone {percent_of(table, [largest])}"
        return Part(tuple(tables), f"The {number} embedding tables hold {share}{named}.")
    names = " and ".join(_described(entry) for entry in tables)
    rows = {entry.shape[0] for entry in tables if entry.shape}
    why = f": each has a row for every one of {rows.pop():,} entries" if len(rows) == 1 else ""
    return Part(tuple(tables), f"The {number} embedding tables {names} hold {share}{why}.")


# Modules with numbers for names, the same class (in a checkpoint: the same tensors) and the same
# size, under one parent; the largest families first, none inside another one.
def _blocks(table: ParameterTable) -> list[list[str]]:
    contents: dict[str, set[str]] = {}
    sizes = {row.name: row.num_parameters for row in table.modules}
    for entry in table.parameters:
        for name in ancestors(entry.module):
            contents.setdefault(name, set()).add(entry.name.removeprefix(name))
    families: dict[tuple[str, object, int], list[str]] = {}
    for name, inside in contents.items():
        parent, _, last = name.rpartition(".")
        if last.isdigit():
            kind = table.class_names.get(name) or frozenset(inside)
            families.setdefault((parent, kind, sizes[name]), []).append(name)
    several = [names for names in families.values() if len(names) > 1]
    several.sort(key=lambda names: -sum(sizes[name] for name in names))
    chosen: list[list[str]] = []
    for names in several:
        outer = {name for family in chosen for name in family}
        inner = {ancestor for name in names for ancestor in ancestors(name)}
        around = {a for name in outer for a in ancestors(name)}
        if not outer & inner and not around.intersection(names):
            chosen.append(names)
    return chosen


def _block_part(table: ParameterTable, names: Sequence[str], inside: Sequence[TensorEntry]) -> Part:
    each = format_count(sum(entry.num_elements for entry in inside) // len(names))
    kind = table.class_names.get(names[0], "")
    where = f"`{names[0]}` to `{names[-1]}`" + (f", {kind}" if kind else "")
    share = f"{percent_of(table, inside)} of the {table.num_parameters:,} parameters"
    sentence = f"{len(names)} blocks of {each} parameters ({where}) hold {share}."
    return Part(tuple(inside), sentence)


def _single_part(table: ParameterTable, entry: TensorEntry) -> Part:
    kind = table.class_names.get(entry.module, "")
    why = ""
    if entry.shape and len(entry.shape) == 2:
        outputs, inputs = entry.shape
        if outputs >= _LONG * inputs:
            why = (
                f": it makes {outputs:,} outputs of {inputs:,} inputs, one for each class or token"
            )
        elif inputs >= _LONG * outputs:
            why = f": it reads {inputs:,} inputs at once"
    described = f"`{entry.name}` ({kind + ', ' if kind else ''}{shape_of(entry)})"
    sentence = (
        f"{described} alone holds {percent_of(table, [entry])} of the {table.num_parameters:,} "
        f"parameters{why}."
    )
    return Part((entry,), sentence, is_several=False)


def format_count(number: int) -> str:
    """Write a number of parameters shortly.

    Args:
        number: How many.

    Returns:
        For example ``"12.6M"``; below a million all digits.

    Example:
        >>> format_count(12_596_224), format_count(1_557_611_200), format_count(50_257)
        ('12.6M', '1.6B', '50,257')
    """
    for size, letter in ((10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:,}"


def _described(entry: TensorEntry) -> str:
    return f"`{entry.module or entry.name}` ({shape_of(entry)})"


def shape_of(entry: TensorEntry) -> str:
    """Write a shape.

    Args:
        entry: Whose.

    Returns:
        For example ``"50,257 x 768"``.
    """
    return " x ".join(f"{size:,}" for size in entry.shape or ())


def percent_of(table: ParameterTable, entries: Iterable[TensorEntry]) -> str:
    """Write which part of all parameters some of them are.

    Args:
        table: What the model holds.
        entries: Some of it.

    Returns:
        For example ``"88.9 %"``.
    """
    part = sum(entry.num_elements for entry in entries)
    return f"{100 * part / max(table.num_parameters, 1):.1f} %"
