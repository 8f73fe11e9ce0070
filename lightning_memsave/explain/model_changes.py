"""Compare parameter tables and predictions."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.explain.dominant_parts import shape_of
from lightning_memsave.explain.memory_changes import Change, MemoryComparison, differing
from lightning_memsave.measure.parameters import (
    ParameterTable,
    TensorEntry,
    ancestors,
    parameter_table,
)
from lightning_memsave.prediction.result import PHASES, MemoryPrediction, ModuleMemory
from lightning_memsave.units import format_bytes

# What torch puts between the names of a module and those inside it: compile, FSDP, checkpointing.
_WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
_MAX_PREFIX_DEPTH = 3


def align_names(a: Iterable[str], b: Iterable[str]) -> dict[str, str]:
    """Find which names mean the same.

    Equal names do, apart from those of torch's wrappers; and of what is then left, those that are
    equal but for one prefix, such as ``"model"``.
    """
    left, right = _cleaned(a), _cleaned(b)
    found = {left.pop(name): right.pop(name) for name in list(left) if name in right}
    more, fewer = _with_prefix(left, right), _with_prefix(right, left)
    if len(more) >= len(fewer):
        return found | {left[name]: right[other] for name, other in more.items()}
    return found | {left[other]: right[name] for name, other in fewer.items()}


def _cleaned(names: Iterable[str]) -> dict[str, str]:
    return {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): name for name in names
    }


# Names of the first side that have, behind the prefix that most have there, an equal on the second.
def _with_prefix(names: Collection[str], others: Collection[str]) -> dict[str, str]:
    parts = [name.split(".") for name in others]
    depths = range(1, _MAX_PREFIX_DEPTH + 1)
    prefixes = {".".join(p[:depth]) for p in parts for depth in depths if depth < len(p)}
    known = set(others)
    matches: list[dict[str, str]] = [{}]
    for prefix in sorted(prefixes):
        joined = {name: f"{prefix}.{name}" for name in names}
        matches.append({name: other for name, other in joined.items() if other in known})
    best = max(matches, key=len)
    return best if 2 * len(best) >= min(len(names), len(others)) else {}


_Pair = tuple[TensorEntry | None, TensorEntry | None]


def compare_parameters(
    a: ParameterTable | nn.Module | Mapping[str, Any],
    b: ParameterTable | nn.Module | Mapping[str, Any],
    labels: tuple[str, str] | None = None,
) -> MemoryComparison:
    """Find which modules have more or fewer parameters, or exist on one side only.

    Modules are told by their names; prefixes that wrappers add are ignored.
    """
    first, second = (
        side if isinstance(side, ParameterTable) else parameter_table(side) for side in (a, b)
    )
    pairs = _paired(first, second)
    notes = []
    if not any(old and new for old, new in pairs):
        notes.append("the two models have no parameter names in common")
    return MemoryComparison(
        kind="parameters",
        a=labels[0] if labels else first.model,
        b=labels[1] if labels else second.model,
        total=Change("parameters", first.num_parameters, second.num_parameters),
        modules=_sorted(_module_changes(pairs)),
        parameter_bytes=Change("parameter_bytes", first.num_bytes, second.num_bytes),
        notes=(*notes, *_dtype_notes(pairs), *_lazy_notes(first, second)),
    )


def compare_predictions(
    a: MemoryPrediction,
    b: MemoryPrediction,
    labels: tuple[str, str] | None = None,
    measured_bytes: tuple[int | None, int | None] = (None, None),
) -> MemoryComparison:
    notes = []
    if a.device != b.device:
        notes.append(
            f"one is for {a.device}, one for {b.device}: kernels and their temporaries differ "
            "there anyway"
        )
    return MemoryComparison(
        kind="predictions",
        a=labels[0] if labels else a.model,
        b=labels[1] if labels else b.model,
        total=Change("peak_bytes", a.peak_bytes, b.peak_bytes),
        modules=_predicted_changes(a.modules, b.modules),
        categories=_category_changes(a.peak.by_category(), b.peak.by_category()),
        phases=tuple(
            Change(phase, _phase_bytes(a, phase), _phase_bytes(b, phase))
            for phase in PHASES
            if phase in a.by_phase or phase in b.by_phase
        ),
        measured=None if measured_bytes == (None, None) else Change("measured", *measured_bytes),
        settings=differing(a.settings, b.settings),
        notes=tuple(notes),
    )


def _predicted_changes(a: Sequence[ModuleMemory], b: Sequence[ModuleMemory]) -> tuple[Change, ...]:
    mine = {module.name: module.memory for module in a}
    theirs = {module.name: module.memory for module in b}
    names = align_names(mine, theirs)
    old_of = {new: old for old, new in names.items()}
    changes = []
    for name, memory in theirs.items():
        before = mine[old_of[name]] if name in old_of else None
        # A module shows in its name what it is; the whole has code of many kinds.
        detail = "" if name or before is None else _moved(before, memory)
        total = None if before is None else before.total_bytes
        changes.append(Change(name, total, memory.total_bytes, detail))
    changes += [Change(n, memory.total_bytes, None) for n, memory in mine.items() if n not in names]
    return _sorted(change for change in changes if change.difference)


def _moved(before: MemoryBreakdown, after: MemoryBreakdown) -> str:
    old, new = before.by_category(), after.by_category()
    sizes = sorted(((name, new[name] - old[name]) for name in new), key=lambda item: -abs(item[1]))
    shown = [
        f"{name.replace('_', ' ')} {'+' if n > 0 else ''}{format_bytes(n)}"
        for name, n in sizes[:2]
        if n
    ]
    return f"outside of the modules: {', '.join(shown)}" if shown else ""


def _phase_bytes(prediction: MemoryPrediction, phase: str) -> int | None:
    memory = prediction.by_phase.get(phase)
    return None if memory is None else memory.total_bytes


def _category_changes(a: Mapping[str, int], b: Mapping[str, int]) -> tuple[Change, ...]:
    changes = (Change(name, a.get(name, 0), b.get(name, 0)) for name in dict.fromkeys((*a, *b)))
    return tuple(change for change in changes if change.before or change.after)


def _sorted(changes: Iterable[Change]) -> tuple[Change, ...]:
    different = [c for c in changes if c.difference or c.detail]
    return tuple(sorted(different, key=lambda change: -abs(change.difference)))


# Also by the other names of tied parameters: which one comes first may differ.
def _paired(a: ParameterTable, b: ParameterTable) -> list[_Pair]:
    owners = {name: entry for entry in b.parameters for name in (entry.name, *entry.aliases)}
    names_a = [name for entry in a.parameters for name in (entry.name, *entry.aliases)]
    names = align_names(names_a, owners)
    pairs: list[_Pair] = []
    taken: set[str] = set()
    for entry in a.parameters:
        others = (names.get(name) for name in (entry.name, *entry.aliases))
        found = (owners[name] for name in others if name is not None)
        other = next((e for e in found if e.name not in taken), None)
        if other is not None:
            taken.add(other.name)
        pairs.append((entry, other))
    pairs += [(None, entry) for entry in b.parameters if entry.name not in taken]
    return pairs


def _module_changes(pairs: Iterable[_Pair]) -> Iterator[Change]:
    pairs = list(pairs)
    kept = {name for old, new in pairs if old and new for name in ancestors(new.module)}
    kept_old = {name for old, new in pairs if old and new for name in ancestors(old.module)}
    by_module: dict[tuple[str, bool], list[_Pair]] = {}
    for old, new in pairs:
        if new is not None:
            name = new.module if old is not None else _whole(new.module, kept)
        elif old is not None:
            name = _whole(old.module, kept_old)
        # What is gone has a name of the first side, which may mean something else on the second.
        by_module.setdefault((name, new is None), []).append((old, new))
    for (name, _), members in by_module.items():
        olds, news = [o for o, _ in members if o], [n for _, n in members if n]
        yield Change(
            name,
            sum(e.num_elements for e in olds) if olds else None,
            sum(e.num_elements for e in news) if news else None,
            "; ".join(_shape_changes(members)),
        )


# The outermost module of which everything is new or gone.
def _whole(module: str, kept: set[str]) -> str:
    return next((name for name in ancestors(module) if name not in kept), module)


def _shape_changes(members: Iterable[_Pair]) -> Iterator[str]:
    for old, new in members:
        if old and new and old.shape != new.shape:
            yield f"{new.name.rpartition('.')[2]} {shape_of(old)} -> {shape_of(new)}"


def _dtype_notes(pairs: Iterable[_Pair]) -> list[str]:
    changed: dict[tuple[str, str], int] = {}
    for old, new in pairs:
        if old and new and old.dtype != new.dtype:
            key = (old.dtype, new.dtype)
            changed[key] = changed.get(key, 0) + new.num_elements
    return [f"{n:,} parameters are {y} that were {x}" for (x, y), n in changed.items()]


def _lazy_notes(*tables: ParameterTable) -> list[str]:
    return [
        f"{table.num_lazy} parameters of {table.model} have no shape yet and are left out"
        for table in tables
        if table.num_lazy
    ]
