"""Find the peaks of a recording by category, phase and module, and its timeline."""

import itertools
from collections.abc import Iterator, Sequence

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.prediction.recording import Recording
from lightning_memsave.prediction.result import PHASES, TensorMemory, Timeline
from lightning_memsave.prediction.snapshot import Origin, StepTrace

MAX_POINTS = 1000
NUM_LARGEST = 50


class Peaks:
    def __init__(
        self,
        recording: Recording,
        extra: Sequence[tuple[str, int, str]] = (),
        workspaces: Sequence[int] = (),
        *,
        has_run: bool = False,
    ) -> None:
        self.events = recording.events
        # Category, bytes and module.
        self.blocks = [*extra, *(("other", num_bytes, "") for num_bytes in workspaces)]
        # What is there before the first batch has no operator.
        start = [at for at, event in enumerate(self.events) if has_run and event.op][:1]
        phases = [p for p in ("forward", "backward", "updates") if p in recording.first_products]
        firsts = [recording.first_products[phase] for phase in phases]
        firsts[:1] = [*start, *firsts[:1]][:1]
        self._workspace_places = firsts[: len(workspaces)]
        self.extra = sum(
            (MemoryBreakdown.from_categories({name: size}) for name, size, _ in self.blocks),
            MemoryBreakdown(),
        )
        self.at_peak, by_phase = self._find()
        self.event, self.peak = self.events[self.at_peak], self._breakdown(self.at_peak)
        self.by_phase = {phase: self._breakdown(at) for phase, at in by_phase.items()}
        last = recording.batch_ends[-2] if len(recording.batch_ends) > 1 else 0
        # The last batch is like all later ones; an earlier one is shown only if its peak is higher.
        starts = [0, *recording.batch_ends[:-1]]
        self.start = last if self.at_peak >= last else max(s for s in starts if s <= self.at_peak)
        ends = [end for end in recording.batch_ends if end > self.at_peak]
        self.end = ends[0] if ends else len(self.events)

    def _find(self) -> tuple[int, dict[str, int]]:
        live = highest = peak = 0
        by_phase = dict.fromkeys(PHASES, (-1, 0))
        for index, event in enumerate(self.events):
            live += event.change
            # The later one of equal peaks: the first step differs from the others.
            if live >= highest:
                highest, peak = live, index
            if live >= by_phase[event.phase][0]:
                by_phase[event.phase] = live, index
        return peak, {phase: index for phase, (live, index) in by_phase.items() if live >= 0}

    def by_module(self) -> dict[str, MemoryBreakdown]:
        alive = [(t.category, t.num_bytes, t.module) for t in self._alive(self.at_peak)]
        found: dict[str, dict[str, int]] = {}
        for category, num_bytes, module in (*alive, *self.blocks):
            of_module = found.setdefault(module, {})
            of_module[category] = of_module.get(category, 0) + num_bytes
        return {name: MemoryBreakdown.from_categories(c) for name, c in found.items()}

    def largest(self) -> tuple[TensorMemory, ...]:
        found = sorted(self._alive(self.at_peak), key=lambda tensor: -tensor.num_bytes)
        return tuple(found[:NUM_LARGEST])

    def timeline(self) -> Timeline:
        """Return live bytes through the step with the peak, in at most `MAX_POINTS` points."""
        now = self.extra.by_category()
        for event in self.events[: self.start]:
            now[event.storage.category] += event.change
        events, at_peak = self.events[self.start : self.end], self.at_peak - self.start
        size = -(-len(events) // MAX_POINTS) or 1
        levels = list(itertools.accumulate(event.change for event in events))
        chosen = []  # of each part the highest place, or the peak
        for first in range(0, len(events), size):
            part = range(first, min(first + size, len(events)))
            highest = max(part, key=lambda place: (levels[place], place))
            chosen.append(at_peak if at_peak in part else highest)
        phases: list[str] = []
        points: list[dict[str, int]] = []
        shown = frozenset(chosen)
        for place, event in enumerate(events):
            now[event.storage.category] += event.change
            if place in shown:
                phases.append(event.phase)
                points.append(dict(now))
        return Timeline(
            tuple(phases),
            {
                name: tuple(point[name] for point in points)
                for name in now
                if any(point[name] for point in points)
            },
            chosen.index(at_peak) if events else 0,
        )

    def trace(self) -> StepTrace:
        numbers: dict[int, int] = {}
        at_start = [num_bytes for _, num_bytes, _ in self.blocks]
        storages = [(category, Origin(module)) for category, _, module in self.blocks]
        changes: list[tuple[int, int]] = []
        for position, event in enumerate(self.events[: self.end]):
            storage = event.storage
            number = numbers.setdefault(id(storage), len(storages))
            if number == len(storages):
                storages.append((storage.category, storage.origin))
                at_start.append(0)
            if position < self.start:
                at_start[number] += event.change
            else:
                changes.append((number, event.change))
        there = [(number, num_bytes) for number, num_bytes in enumerate(at_start) if num_bytes]
        places = [(e.phase, e.module) for e in self.events[self.start : self.end]]
        before = [("", "")] * len(there)
        return StepTrace(tuple(storages), (*there, *changes), (*before, *places))

    def changes(self) -> Iterator[tuple[int, int]]:
        places: dict[int, list[tuple[int, int]]] = {}
        num_others = len(self.blocks) - len(self._workspace_places)
        firsts = [*[0] * num_others, *self._workspace_places]
        for number, (at, (_, num_bytes, _)) in enumerate(zip(firsts, self.blocks, strict=True)):
            if num_bytes:
                places.setdefault(at, []).append((-1 - number, num_bytes))
        for position, event in enumerate(self.events):
            yield from places.get(position, ())
            yield id(event.storage), event.change
        yield from places.get(len(self.events), ())

    def _breakdown(self, at: int) -> MemoryBreakdown:
        found = self.extra.by_category()
        for event in self.events[: at + 1]:
            found[event.storage.category] += event.change
        return MemoryBreakdown.from_categories(found)

    def _alive(self, at: int) -> list[TensorMemory]:
        sizes: dict[int, int] = {}
        storages = {}
        for event in self.events[: at + 1]:
            key = id(event.storage)
            sizes[key] = sizes.get(key, 0) + event.change
            storages[key] = event.storage
        return [
            TensorMemory(
                storages[key].category, num_bytes, o.module, o.op, o.phase, o.shape, o.dtype
            )
            for key, num_bytes in sizes.items()
            if num_bytes
            for o in [storages[key].origin]
        ]


def peak_bytes(recording: Recording) -> int:
    return max(itertools.accumulate(event.change for event in recording.events), default=0)


def room_for_gradients(recording: Recording, taken: Sequence[tuple[int, int]]) -> int:
    """Return how many bytes of gradients could stay on the device without a higher peak."""
    levels = list(itertools.accumulate(event.change for event in recording.events))
    peak = max(levels, default=0)
    highest = kept = 0
    ends = [at for at, _ in taken[1:]]
    for (start, num_bytes), end in zip(reversed(taken), [None, *reversed(ends)], strict=True):
        until = taken[-1][0] if end is None else end
        highest = max([highest, *levels[start:until]]) + num_bytes
        if highest > peak:
            break
        kept += num_bytes
    return kept
