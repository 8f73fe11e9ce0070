"""What is different between two models or two predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from lightning_memsave.core.names import block_template
from lightning_memsave.core.plain_text import as_plain_text, figure_table
from lightning_memsave.units import format_bytes

# Together these must make most of the difference to be named in a sentence.
_MOST = 0.95
# Above it a share would be a riddle.
_WHOLE = 1.0005
_MAX_NAMED = 3
_MAX_ROWS = 20
_MAX_NAME_WIDTH = 40


@dataclass(frozen=True, slots=True)
class Change:
    name: str
    before: int | None
    after: int | None
    detail: str = ""

    @property
    def difference(self) -> int:
        return (self.after or 0) - (self.before or 0)

    @property
    def status(self) -> str:
        """``"new"``, ``"gone"``, ``"grew"``, ``"shrank"`` or ``"same"``."""
        if self.before is None or self.after is None:
            return "new" if self.before is None else "gone"
        return "grew" if self.difference > 0 else "shrank" if self.difference else "same"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "before": self.before,
            "after": self.after,
            "difference": self.difference,
            "status": self.status,
            "detail": self.detail,
        }


@dataclass(frozen=True, slots=True)
class MemoryComparison:
    """Which figures differ between two sides, the largest differences first.

    Args:
        kind: ``"parameters"`` or ``"predictions"``.
        a: What the first side is.
        b: What the second side is.
        total: Parameters, or bytes at the peak.
        modules: Those that differ. Of parameters: each module with what it owns itself, or a whole
            part of the model that is new or gone.
        categories: Bytes at the peak by category, those that are not 0 on both sides.
        phases: Peak of each phase in bytes.
        parameter_bytes: What the parameters take; ``None`` if nothing is known of them.
        measured: Peaks measured in the runs that were predicted; ``None`` without any.
        settings: What was set differently: name, first value, second value.
        notes: What was taken for granted, one line each.
    """

    kind: str
    a: str
    b: str
    total: Change
    modules: tuple[Change, ...] = ()
    categories: tuple[Change, ...] = ()
    phases: tuple[Change, ...] = ()
    parameter_bytes: Change | None = None
    measured: Change | None = None
    settings: tuple[tuple[str, str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """``"parameters"`` or ``"bytes"``: what ``total`` and ``modules`` are counted in."""
        return "parameters" if self.kind == "parameters" else "bytes"

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain values, for JSON.

        Returns:
            The fields under their names.
        """
        return {
            "kind": self.kind,
            "a": self.a,
            "b": self.b,
            "unit": self.unit,
            "total": self.total.to_dict(),
            "parameter_bytes": self.parameter_bytes and self.parameter_bytes.to_dict(),
            "measured": self.measured and self.measured.to_dict(),
            "modules": [change.to_dict() for change in self.modules],
            "categories": [change.to_dict() for change in self.categories],
            "phases": [change.to_dict() for change in self.phases],
            "settings": [
                {"name": name, "before": before, "after": after}
                for name, before, after in self.settings
            ],
            "notes": list(self.notes),
        }

    def sentences(self) -> list[str]:
        """Say what changed and which modules did it.

        Returns:
            At least one sentence.
        """
        before, after = (self._format(n or 0) for n in (self.total.before, self.total.after))
        what = "parameters" if self.kind == "parameters" else "at the peak"
        if not self.total.difference:
            return [f"Both have {after} {what}{'.' if not self.modules else ', but not the same.'}"]
        times = self._times()
        found = [f"{before} -> {after} {what} ({self._signed(self.total.difference)}{times})."]
        decisive = _decisive(grouped(self.modules), self.total.difference)
        if decisive:
            found.append(self._share(decisive))
        return found

    def _share(self, decisive: Sequence[Change]) -> str:
        together = sum(change.difference for change in decisive)
        names = " and ".join(
            f"`{change.name or '(whole)'}` {self._signed(change.difference)}" for change in decisive
        )
        share = together / self.total.difference
        if share < _WHOLE:
            return f"{names}: {100 * share:.1f} % of the difference."
        rest = self._signed(self.total.difference - together)
        return f"{names}: more than the difference, as all others together change by {rest}."

    def _times(self) -> str:
        if not self.total.before or not self.total.after:
            return ""
        return f", {self.total.after / self.total.before:.2f} times"

    def _format(self, number: int) -> str:
        return f"{number:,}" if self.kind == "parameters" else format_bytes(number)

    def _signed(self, number: int) -> str:
        return f"{'+' if number > 0 else ''}{self._format(number)}"

    def _tables(self, max_rows: int | None = _MAX_ROWS) -> list[Table | Text]:
        head = f"{self.a} -> {self.b}"
        shown: list[Table | Text] = [Text(head), *(Text(f"note: {note}") for note in self.notes)]
        shown += [Text(sentence) for sentence in self.sentences()]
        if self.parameter_bytes is not None and self.parameter_bytes.difference:
            before, after = (
                format_bytes(n or 0)
                for n in (self.parameter_bytes.before, self.parameter_bytes.after)
            )
            shown.append(Text(f"Memory of the parameters: {before} -> {after}."))
        if self.measured is not None:
            before, after = (
                "not measured" if n is None else format_bytes(n)
                for n in (self.measured.before, self.measured.after)
            )
            shown.append(Text(f"Measured peaks: {before} -> {after}."))
        if self.modules:
            rows = grouped(self.modules)
            shown.append(self._table("module", rows[:max_rows], is_detailed=True))
            if max_rows is not None and len(rows) > max_rows:
                shown.append(Text(f"... and {len(rows) - max_rows} smaller differences"))
        for title, changes in (("category", self.categories), ("phase", self.phases)):
            if changes:
                shown.append(self._table(title, changes))
        return [*shown, *(Text(f"{name}: {x} -> {y}") for name, x, y in self.settings)]

    def _table(self, title: str, changes: Sequence[Change], *, is_detailed: bool = False) -> Table:
        numbers = ("before", "after", "difference")
        table = figure_table(title, *numbers, *(("what",) if is_detailed else ()), numbers=numbers)
        longest = max((len(change.name) or 7 for change in changes), default=0)
        # Not `min_width`, with which rich makes lines that are too long and cuts them off.
        table.columns[0].width = max(min(longest, _MAX_NAME_WIDTH), len(title))
        for change in changes:
            before, after = (
                "-" if n is None else self._format(n) for n in (change.before, change.after)
            )
            cells = [change.name.replace("_", " ") if not is_detailed else change.name or "(whole)"]
            cells += [before, after, self._signed(change.difference)]
            if is_detailed:
                status = change.status if change.status in {"new", "gone"} else ""
                cells.append(", ".join(filter(None, (status, change.detail))))
            table.add_row(*(Text(cell) for cell in cells))
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._tables()

    def __str__(self) -> str:
        return as_plain_text(*self._tables())


def grouped(changes: Sequence[Change]) -> list[Change]:
    """Put the same change of several blocks into one."""
    found: dict[tuple[str, object], list[Change]] = {}
    for change in changes:
        template = block_template(change.name)
        key = (template, (change.before, change.after, change.detail))
        found.setdefault(key, []).append(change)
    merged = [
        _merged(template, members) for (template, _), members in _with_fewer_or_more(found).items()
    ]
    return sorted(merged, key=lambda change: -abs(change.difference))


# Blocks that are new or gone belong to those that have changed, if all of these did so alike.
def _with_fewer_or_more(
    found: Mapping[tuple[str, object], list[Change]],
) -> dict[tuple[str, object], list[Change]]:
    result = dict(found)
    for template in {template for template, _ in found}:
        keys = [key for key in found if key[0] == template]
        changed = [key for key in keys if found[key][0].status not in {"new", "gone"}]
        if len(changed) == 1 and "*" in template:
            result[changed[0]] = [change for key in keys for change in found[key]]
            for key in keys:
                if key != changed[0]:
                    del result[key]
    return result


def _merged(template: str, members: Sequence[Change]) -> Change:
    if len(members) == 1:
        return members[0]
    before = [member.before for member in members if member.before is not None]
    after = [member.after for member in members if member.after is not None]
    is_same = len(before) == len(after) or not before or not after
    number = f"{len(members)}" if is_same else f"{len(before)} -> {len(after)}"
    return Change(
        f"{template} ({number} x)",
        sum(before) if before else None,
        sum(after) if after else None,
        next((member.detail for member in members if member.detail), ""),
    )


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    return tuple(
        (name, str(a.get(name, "-")), str(b.get(name, "-")))
        for name in dict.fromkeys((*a, *b))
        if a.get(name, "-") != b.get(name, "-")
    )


# The fewest changes that make most of the difference.
def _decisive(changes: Sequence[Change], difference: int) -> list[Change]:
    found: list[Change] = []
    for change in changes[:_MAX_NAMED]:
        # The whole says something only beside its parts.
        is_all = not change.name and (len(changes) == 1 or change.status in {"new", "gone"})
        if is_all or change.difference * difference <= 0:
            break
        found.append(change)
        if sum(c.difference for c in found) / difference >= _MOST:
            return found
    return []
