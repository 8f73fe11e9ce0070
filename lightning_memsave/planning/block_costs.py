"""Memory and time of a step with any choice of recomputed blocks, from few recorded steps."""

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from lightning_memsave.core.blocks import ancestors
from lightning_memsave.planning.step_time import PASSES, Lane, Rates, lane_of
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.work import launches_of

KEEP = "keep"
"""Of a block that is not recomputed."""


Run = tuple[str, ...]
"""Names of equal blocks, one after another."""


@dataclass
class _Cost:
    resident_bytes: int = 0
    seconds: dict[Lane, float] = field(default_factory=lambda: defaultdict(float))
    visits: list["_Visit"] = field(default_factory=list)
    own: Counter[int] = field(default_factory=Counter)


class _Visit(NamedTuple):
    """Bytes that a part of a step adds, and the most that it has meanwhile."""

    change: int
    excess: int


class _Part(NamedTuple):
    number: int
    phase: str
    is_pass: bool
    visit: _Visit


_STAYS = "stays"
_Place = str | None  # "first", "between" or "last" of a run, or of those that stay on the device


class BlockCosts:
    """Costs of each block by how it is recomputed; composes the peak and the time of a step.

    Blocks are visited in order in forward and in reverse in backward. A visit adds bytes and has a
    highest point, both read from the recorded step; levels are sums of visits. Blocks that were not
    in the recorded model cost what an equal one costs. Where its last block stays on the device and
    something of the others waits on the host, both are known. ``size_on_host`` are then the
    elements of a block whose weights wait; 0 if only activations do.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        recorded: Sequence[tuple[Mapping[str, str], MemoryPrediction]],
        sizes: Sequence[int],
        rates: Rates,
        *,
        by_place: bool = False,
        has_resident: bool = False,
        size_on_host: int = 0,
    ) -> None:
        self._runs, self._by_place, self._rates = runs, by_place, rates
        self._costs: dict[tuple[int, _Place, str], _Cost] = {}
        run_of = {name: number for number, run in enumerate(runs) for name in run}
        for kinds, prediction in recorded:
            numbers = [run_of[name] for name in kinds]
            counts = [numbers.count(number) for number in range(len(runs))]
            places = dict(zip(kinds, self._places(counts, int(has_resident)), strict=True))
            step = _Step(prediction, kinds, places, sizes, rates)
            if size_on_host:
                num_updated = prediction.num_parameters - size_on_host
                num_outside = sum(sizes) - size_on_host * len(runs[-1])
                step.share_updates(size_on_host / num_updated, num_outside / num_updated)
            for name, place in places.items():
                self._costs.setdefault((*place, kinds[name]), step.costs[name])
        # Where all blocks of a step are of one kind, the rest of the host's memory is the same. In
        # other steps nothing of blocks is on the host, but gradients may wait for their norm there.
        on_host = [(next(iter(kinds.values())), p.peak.host_bytes) for kinds, p in recorded]
        on_host = on_host if by_place else []
        least_bytes = min((num_bytes for _, num_bytes in on_host), default=0)
        # What the last one saves stays on the device, as backward needs it at once.
        num_leave = max(1, len(step.costs) - has_resident - 1)
        self._host_bytes = {k: (n - least_bytes) // num_leave for k, n in on_host}
        last = recorded[-1][1]
        self._parts, self._outside_s = step.parts, step.outside_s
        everywhere = [self._outside_s, *(cost.seconds for cost in self._costs.values())]
        self._has_copies = any(lane != "device" for found in everywhere for _, lane in found)
        self._resident_bytes = step.outside_bytes
        self.overhead_bytes = last.device_bytes - last.peak_bytes
        """Of the device's allocator and context."""

    def peak_and_seconds(self, kinds: Sequence[str], num_resident: int = 0) -> tuple[int, float]:
        keys = self._keys(kinds, num_resident)
        rows = [(self._costs[key], len([*row])) for key, row in itertools.groupby(keys)]
        level = self._resident_bytes + sum(cost.resident_bytes * count for cost, count in rows)
        peak = level
        for part in self._parts:
            if not part.is_pass:
                peak = max(peak, level + part.visit.excess)
                level += part.visit.change
                level += sum(cost.own[part.number] * count for cost, count in rows)
                continue
            is_forward = part.phase == "forward"
            visits = [*self._visits(rows, self._shifts(keys, part.number), part.number)]
            for (change, excess), count, shift in visits if is_forward else reversed(visits):
                # Of equal blocks in a row the first or the last one is at the highest point.
                highest = level + excess + (0 if is_forward else shift)
                peak = max(peak, highest, highest + (count - 1) * change)
                level += count * change + shift
        return peak, sum(self.seconds_by_phase(kinds, num_resident).values())

    # Of each row of equal blocks, and how many there are; one with a shift stands alone.
    def _visits(
        self, rows: Sequence[tuple[_Cost, int]], shifts: Mapping[int, int], number: int
    ) -> Iterator[tuple[_Visit, int, int]]:
        index = 0
        for cost, count in rows:
            if number < len(cost.visits):
                visit, shift, left = cost.visits[number], shifts.get(index, 0), count
                if shift:
                    yield visit, 1, shift
                    left -= 1
                if left:
                    yield visit, left, 0
            index += count

    # While a block computes, what the one before it saved leaves, and comes back in backward: as
    # much as its own in the recorded steps. The first block has none before it; of two blocks, none
    # is between others.
    def _shifts(self, keys: Sequence[tuple[int, _Place, str]], number: int) -> dict[int, int]:
        def saved(run: int, kind: str) -> int:
            following = "between" if (run, "between", kind) in self._costs else "last"
            ends = (self._costs[run, place, kind].visits for place in ("first", following))
            first, other = (v[number].change if number < len(v) else 0 for v in ends)
            return first - other

        return {
            index: saved(run, kind) - saved(run, before)
            for index, ((_, _, before), (run, place, kind)) in enumerate(pairwise(keys), 1)
            if kind != before and place in ("between", "last")
        }

    def held_bytes(self, kinds: Sequence[str]) -> int:
        """Estimate the bytes of live tensors at the start of a step."""
        return self._resident_bytes + sum(
            self._costs[key].resident_bytes for key in self._keys(kinds)
        )

    def host_bytes(self, kinds: Sequence[str], num_resident: int = 0) -> int:
        """Estimate what activations of blocks need on the host, beyond the least that they do."""
        if not any(self._host_bytes.values()):
            return 0
        return sum(self._host_bytes[kind] for kind in kinds[: len(kinds) - num_resident - 1])

    def seconds_by_phase(self, kinds: Sequence[str], num_resident: int = 0) -> dict[str, float]:
        keys = self._keys(kinds, num_resident)
        if not self._has_copies:  # the order does not matter
            total = defaultdict(float, self._outside_s)
            for key, count in Counter(keys).items():
                for lane, seconds in self._costs[key].seconds.items():
                    total[lane] += count * seconds
            return self._rates.by_phase({name: [total] for name in PASSES})
        blocks = [self._costs[key].seconds for key in keys]
        # The head is before the blocks in backward, where most of the rest is.
        forward, backward = [self._outside_s, *blocks], [self._outside_s, *reversed(blocks)]
        return self._rates.by_phase(
            {"forward": forward, "backward": backward, "optimizer": forward}
        )

    def _keys(self, kinds: Sequence[str], num_resident: int = 0) -> list[tuple[int, _Place, str]]:
        places = self._places([*map(len, self._runs)], num_resident)
        return [(*place, kind) for place, kind in zip(places, kinds, strict=True)]

    # By run: of the last one some stay on the device.
    def _places(self, counts: Sequence[int], num_resident: int) -> list[tuple[int, _Place]]:
        found: list[tuple[int, _Place]] = []
        for number, count in enumerate(counts):
            left = count - (num_resident if number == len(counts) - 1 else 0)
            places: Sequence[_Place] = [None] * left
            if self._by_place:
                places = ["first", *["between"] * (left - 2), "last"][:left]
            found += [(number, place) for place in (*places, *[_STAYS] * (count - left))]
        return found


class _Step:
    def __init__(
        self,
        prediction: MemoryPrediction,
        kinds: Mapping[str, str],
        places: Mapping[str, tuple[int, _Place]],
        sizes: Sequence[int],
        rates: Rates,
    ) -> None:
        self.costs = {name: _Cost() for name in kinds}
        self._places = places
        self._block_of = functools.cache(
            lambda module: next((n for n in (module, *ancestors(module)) if n in kinds), None)
        )
        self.outside_bytes = 0
        self.parts: list[_Part] = []
        self._read_memory(prediction)
        self._share_gradients()
        self.outside_s: dict[Lane, float] = defaultdict(float)
        self._read_time(prediction, sizes, rates)

    def _read_memory(self, prediction: MemoryPrediction) -> None:
        trace = prediction.trace
        owners = [self._block_of(origin.module) for _, origin in trace.storages]
        changes = list(zip(trace.changes, trace.places, strict=True))
        for (index, change), (phase, _) in changes:
            if not phase:
                owner = owners[index]
                if owner is None:
                    self.outside_bytes += change
                else:
                    self.costs[owner].resident_bytes += change
        steps = [(index, change, *place) for (index, change), place in changes if place[0]]
        places = list(_smoothed([(phase, self._block_of(m)) for _, _, phase, m in steps]))
        self._gradients: Counter[tuple[str, int]] = Counter()
        block, level, highest, number = None, 0, 0, -1
        before: tuple[str, bool] | None = None
        for (index, change, _, _), (phase, name) in zip(steps, places, strict=True):
            if before != (phase, name is not None) or name != block:
                self._close(block, level, highest)
                level = highest = 0
                if before != (phase, name is not None):
                    number += 1
                    self.parts.append(_Part(number, phase, name is not None, _Visit(0, 0)))
                before, block = (phase, name is not None), name
            level += change
            highest = max(highest, level)
            owner = owners[index]
            if name is None and owner is not None:
                self.costs[owner].own[number] += change
                self.parts[-1] = self.parts[-1]._replace(
                    visit=_Visit(self.parts[-1].visit.change - change, 0)
                )
            if name is not None and trace.storages[index][0] == "gradient":
                self._gradients[name, number] += change
        self._close(block, level, highest)

    def _close(self, block: str | None, level: int, highest: int) -> None:
        if not self.parts:
            return
        part = self.parts[-1]
        if block is None:
            visit = _Visit(part.visit.change + level, highest)
            self.parts[-1] = part._replace(visit=visit)
            return
        visits = self.costs[block].visits
        visits += [_Visit(0, 0)] * (part.number + 1 - len(visits))
        change, excess = visits[part.number]  # of a block that is called again
        visits[part.number] = _Visit(change + level, max(excess, change + highest))

    # Updates in backward free the gradients of several blocks at once: each has its share.
    def _share_gradients(self) -> None:
        members: dict[tuple[int, bool, int], list[str]] = {}
        for part in self.parts:
            for name, cost in self.costs.items():
                if part.is_pass and part.number < len(cost.visits):
                    run, place = self._places[name]
                    members.setdefault((run, place == _STAYS, part.number), []).append(name)
        for (*_, number), names in members.items():
            mean = sum(self._gradients[name, number] for name in names) // len(names)
            for name in names:
                change, excess = self.costs[name].visits[number]
                change += mean - self._gradients[name, number]
                self.costs[name].visits[number] = _Visit(change, max(excess, change))

    # Updates take all parameters together: small ones take as long as their kernels to launch.
    def _read_time(self, prediction: MemoryPrediction, sizes: Sequence[int], rates: Rates) -> None:
        num_tensors = sum(category == "parameter" for category, _ in prediction.trace.storages)
        by_elements = sum(sizes) / max(1, prediction.num_parameters)
        by_tensors = len(sizes) / max(1, num_tensors)
        for kernel, count in prediction.work:
            seconds = count * rates.seconds(kernel)
            block = self._block_of(kernel.module)
            if block is None and kernel.phase == "optimizer":
                is_short = seconds <= count * kernel.num_launches * rates.launch_s
                if is_short and kernel.num_tensors > 1:  # one call, of more tensors
                    more = launches_of(by_tensors * kernel.num_tensors)
                    seconds *= more / kernel.num_launches
                else:
                    seconds *= by_tensors if is_short else by_elements
            of = self.outside_s if block is None else self.costs[block].seconds
            of[lane_of(kernel)] += seconds
        self._by_elements = by_elements

    def share_updates(self, block: float, outside: float) -> None:
        """Let blocks of the last run have the time of their updates, each where it is.

        ``block`` and ``outside`` are parameters of one, and those outside of all in the whole
        model, over those that the host updates in the recorded one.
        """
        last = max(run for run, _ in self._places.values())
        of_all = {n: self.outside_s.pop(("optimizer", n), 0.0) for n in ("device", "host")}
        here_s, host_s = (seconds / self._by_elements for seconds in of_all.values())
        self.outside_s["optimizer", "host"] = outside * host_s
        for name, (run, place) in self._places.items():
            if place == _STAYS:
                self.costs[name].seconds["optimizer", "device"] += here_s
            elif run == last:
                self.costs[name].seconds["optimizer", "host"] += block * host_s


# Between two blocks of one pass, what is outside belongs to the first.
def _smoothed(places: Sequence[tuple[str, str | None]]) -> Iterator[tuple[str, str | None]]:
    following: list[tuple[str, str] | None] = []
    later = None
    for phase, name in reversed(places):
        later = later if name is None else (phase, name)
        following.append(later)
    before: tuple[str, str] | None = None
    for (phase, name), after in zip(places, reversed(following), strict=True):
        if name is not None:
            before = phase, name
        is_between = before is not None and after is not None and before[0] == after[0] == phase
        if name is None and is_between:
            yield before  # type: ignore[misc] # it is known
        else:
            yield phase, name
