"""Say in sentences which part of a model dominates its parameters, why, and what that costs."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.measure.parameters import ParameterTable, TensorEntry, ancestors
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.units import format_bytes


@dataclass(frozen=True, slots=True)
class ModelStates:
    optimizer: str
    by_module: Mapping[str, int]
    parts: tuple[str, ...] = ("parameters", "gradients", "optimizer state")
    remark: str = ""

    @property
    def summary(self) -> str:
        return " and ".join(filter(None, (", ".join(self.parts[:-1]), self.parts[-1])))

    @property
    def total_bytes(self) -> int:
        return sum(self.by_module.values())

    def of(self, modules: Iterable[str]) -> int:
        return sum(self.by_module.get(name, 0) for name in set(modules))

    @classmethod
    def from_prediction(cls, prediction: MemoryPrediction, optimizer: str) -> Self:
        found = {m.name: sum(_sizes(m.memory).values()) for m in prediction.modules}
        parts = tuple(part for part, size in _sizes(prediction.peak).items() if size)
        alive = prediction.peak.gradient_bytes
        whole = max([m.gradient_bytes for m in prediction.by_phase.values()], default=0)
        remark = ""
        if not alive and whole:
            remark = f"the gradients, {format_bytes(whole)}, are not alive then"
        elif alive < whole:
            remark = f"of the gradients {format_bytes(alive)} of {format_bytes(whole)} are alive"
        return cls(optimizer, found, parts or ("parameters",), remark)


def _sizes(memory: MemoryBreakdown) -> dict[str, int]:
    return {
        "parameters": memory.parameter_bytes,
        "copies of weights": memory.weight_copy_bytes,
        "gradients": memory.gradient_bytes,
        "optimizer state": memory.optimizer_state_bytes,
    }


# Of AdamW: gradient and two moments, as large as the parameter, and the number of the step.
_COPIES, _STEP_BYTES = 3, 4


def model_states(table: ParameterTable) -> ModelStates:
    """Say what each module costs in training with AdamW, all in the types of the parameters."""
    by_module: dict[str, int] = {}
    for entry in table.parameters:
        num_bytes = entry.num_bytes
        is_float = getattr(torch, entry.dtype).is_floating_point
        if num_bytes and is_float and entry.is_trainable is not False:
            num_bytes += _COPIES * num_bytes + _STEP_BYTES
        by_module[entry.module] = by_module.get(entry.module, 0) + num_bytes
    return ModelStates("AdamW", by_module)


# An embedding table below this share of the parameters does not count as one of those that do.
_MIN_TABLE_SHARE = 0.01
_MAX_NAMED = 3
_EMBEDDING_NAMES = re.compile(r"(embed|\bw[tp]e\b)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    entries: tuple[TensorEntry, ...]
    sentence: str
    is_several: bool = True

    @property
    def num_parameters(self) -> int:
        return sum(entry.num_elements for entry in self.entries)


def dominant_parts(table: ParameterTable, tables: Sequence[TensorEntry]) -> list[ParameterGroup]:
    """Divide the parameters into embedding tables, families of equal blocks, and what is left."""
    parts = [_embedding_group(table, tables)] if tables else []
    taken = {entry.name for entry in tables}
    for names in _blocks(table):
        chosen = set(names)
        inside = [
            entry
            for entry in table.parameters
            if entry.name not in taken and chosen.intersection(ancestors(entry.module))
        ]
        taken |= {entry.name for entry in inside}
        parts.append(_block_group(table, names, inside))
    rest = [entry for entry in table.parameters if entry.name not in taken]
    parts += [_single_group(table, entry) for entry in rest]
    return sorted(parts, key=lambda part: -part.num_parameters)


def embedding_tables(table: ParameterTable) -> list[TensorEntry]:
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


def _embedding_group(table: ParameterTable, tables: Sequence[TensorEntry]) -> ParameterGroup:
    share = f"{percent_of(table, tables)} of the {table.num_parameters:,} parameters"
    named = ", ".join(_described(entry) for entry in tables[:_MAX_NAMED])
    if len(tables) == 1:
        return ParameterGroup((tables[0],), f"The embedding table {named} holds {share}.", False)
    more = f" and {len(tables) - _MAX_NAMED} more" if len(tables) > _MAX_NAMED else ""
    return ParameterGroup(tuple(tables), f"The embedding tables {named}{more} hold {share}.")


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


def _block_group(
    table: ParameterTable, names: Sequence[str], inside: Sequence[TensorEntry]
) -> ParameterGroup:
    each = sum(entry.num_elements for entry in inside) // len(names)
    kind = table.class_names.get(names[0], "")
    where = f"`{names[0]}` to `{names[-1]}`" + (f", {kind}" if kind else "")
    share = f"{percent_of(table, inside)} of the {table.num_parameters:,} parameters"
    sentence = f"{len(names)} blocks of {each:,} parameters ({where}) hold {share}."
    return ParameterGroup(tuple(inside), sentence)


def _single_group(table: ParameterTable, entry: TensorEntry) -> ParameterGroup:
    kind = table.class_names.get(entry.module, "")
    sentence = (
        f"`{entry.name}` ({kind + ', ' if kind else ''}{shape_of(entry)}) alone holds "
        f"{percent_of(table, [entry])} of the {table.num_parameters:,} parameters."
    )
    return ParameterGroup((entry,), sentence, is_several=False)


def _described(entry: TensorEntry) -> str:
    return f"`{entry.module or entry.name}` ({shape_of(entry)})"


def shape_of(entry: TensorEntry) -> str:
    return " x ".join(f"{size:,}" for size in entry.shape or ())


def percent_of(table: ParameterTable, entries: Iterable[TensorEntry]) -> str:
    part = sum(entry.num_elements for entry in entries)
    return f"{100 * part / max(table.num_parameters, 1):.1f} %"


# A part below this share of the parameters is not said to hold much of them.
_MIN_SHARE = 0.1
_MIN_BUFFER_SHARE = 0.01


def explain_parameters(table: ParameterTable, costs: ModelStates | None = None) -> list[str]:
    if table.num_parameters == 0:
        return _lazy(table) or [f"{table.model} has no parameters."]
    tables = embedding_tables(table)
    parts = dominant_parts(table, tables)
    large = [part for part in parts if part.num_parameters >= _MIN_SHARE * table.num_parameters]
    sentences = []
    for i, part in enumerate(large):
        # Only the first one says of how many.
        of_all = f" of the {table.num_parameters:,} parameters"
        sentences.append(part.sentence.replace(of_all, "") if i else part.sentence)
        if costs is not None:
            sentences.append(_cost(part, costs, is_first=i == 0))
    if not large:
        largest = max(table.parameters, key=lambda entry: entry.num_elements)
        sentences.append(
            f"Nothing dominates the {table.num_parameters:,} parameters: the largest, "
            f"`{largest.name}` ({shape_of(largest)}), holds {percent_of(table, [largest])}."
        )
    return [*sentences, *_remarks(table, large), *_lazy(table)]


def _cost(part: ParameterGroup, costs: ModelStates, *, is_first: bool) -> str:
    verb = "they need" if part.is_several else "it needs"
    own = format_bytes(costs.of(entry.module for entry in part.entries))
    if not is_first:
        return f"With {costs.optimizer} {verb} {own}."
    remark = f" at the peak; {costs.remark}" if costs.remark else ""
    return (
        f"With {costs.optimizer} {verb} {own} of the {format_bytes(costs.total_bytes)} that "
        f"{costs.summary} take together{remark}."
    )


def _remarks(table: ParameterTable, large: Sequence[ParameterGroup]) -> Iterator[str]:
    for entry in (entry for part in large for entry in part.entries if entry.aliases):
        also = "`, `".join(entry.aliases)
        yield f"`{entry.name}` is also `{also}`: it is one tensor and counts once."
    frozen = [entry for entry in table.parameters if entry.is_trainable is False]
    if any(entry.num_elements for entry in frozen):
        share = percent_of(table, frozen)
        yield f"{share} of the parameters are frozen: they need neither gradient nor state."
    if table.buffer_bytes >= _MIN_BUFFER_SHARE * table.num_bytes:
        yield f"Buffers take {format_bytes(table.buffer_bytes)} more."


def _lazy(table: ParameterTable) -> list[str]:
    if not table.num_lazy:
        return []
    return [
        f"{table.num_lazy} lazy parameters have no shape before the first forward pass, and do not "
        "count."
    ]
