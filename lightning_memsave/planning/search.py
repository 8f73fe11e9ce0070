"""Find the fastest plan that fits a budget."""

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from lightning_memsave.core.technique import Exactness
from lightning_memsave.errors import InfeasiblePlanError
from lightning_memsave.explain.what_if import WhatIf
from lightning_memsave.planning.block_costs import KEEP
from lightning_memsave.planning.budget import margin_of, rates_of
from lightning_memsave.planning.plan import MemoryPlan, Plan
from lightning_memsave.planning.step_time import Rates
from lightning_memsave.planning.variants import (
    MICRO_BATCH,
    RECOMPUTED,
    Variant,
    Variants,
    value_of,
)
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.training_step import as_code
from lightning_memsave.techniques.registry import Entry, entries
from lightning_memsave.units import MIB, format_bytes

EQUALLY_FAST = 0.01
"""Plans whose time differs by less, as a share, are judged by exactness."""
_MAX_VERIFIED = 8
_STEP = 0.04
_MOST_NESTED = 12
_OUT_OF_TIME = "the search for a plan takes longer than allowed: allow it more seconds"
_MENTIONED = 0.02  # of the peak
_SLACK, _NEAR = 0.004, 0.1


@dataclass(frozen=True, slots=True)
class _Candidate:
    variant: Variant
    kinds: tuple[str, ...]
    estimated_bytes: int
    seconds: float


class PlanSearch:
    """Finds plans for one step, with any budget.

    Args:
        what_if: Predicts variants of the step.
        open_arguments: Arguments of `MemSaveCallback` that may be chosen; others are as in the
            step's settings.
        exactness: How far results may move.
        rates: What the device reaches.
        limit_s: Seconds after which nothing more is predicted.
        margin_of: Gives the bytes of a budget that stay free.
        given: What the user has chosen and is on.
    """

    def __init__(
        self,
        what_if: WhatIf,
        open_arguments: Collection[str],
        exactness: Exactness,
        rates: Rates,
        *,
        limit_s: float = math.inf,
        margin_of: Callable[[int], int] = lambda budget_bytes: 0,
        given: Sequence[Entry] = (),
    ) -> None:
        self._start_s = time.monotonic()
        self._what_if = what_if
        self._margin_of, self._exactness, self._given = margin_of, exactness, given
        self._variants = Variants(what_if, open_arguments, exactness, rates, limit_s)
        self._verified: dict[int, MemoryPrediction | None] = {}
        # By how much whole predictions were higher than estimates, by variant; the last for others.
        self._corrections: dict[int, int] = {}
        self._correction = 0
        self._slack_bytes = 0.0
        self._candidates: list[_Candidate] = []
        self._chosen: _Candidate | None = None
        self._room = 0
        self._unchanged_s = 1.0

    def find(self, budget_bytes: int) -> MemoryPlan:
        """Find the fastest plan that fits.

        Args:
            budget_bytes: Bytes that the device may use.

        Returns:
            The plan and the frontier.

        Raises:
            InfeasiblePlanError: If none fits.
            TimeoutError: If that is not known in time.

        Note:
            What the model raises on fake tensors comes through.
        """
        self._prepare()
        room = budget_bytes - self._margin_of(budget_bytes)
        best = self._best(room)
        if best is None:
            self._refuse(budget_bytes, room)
        fastest_s = min(c.seconds for c in self._candidates if self._is_known_to_fit(c, room))
        limit_s = fastest_s * (1 + EQUALLY_FAST)
        self._room = room
        self._chosen = best = self._more_exact(best, room, limit_s)
        slower_s = best.seconds * (1 + EQUALLY_FAST)
        others = [
            c
            for c in self._candidates
            if c.variant is not best.variant
            and (c.seconds > slower_s or c.variant.exactness is not best.variant.exactness)
        ]
        second = self._fastest(others, room)
        return MemoryPlan(
            budget_bytes,
            budget_bytes - room,
            self._plan(best),
            None if second is None else self._plan(second),
            tuple(self._plan(candidate) for candidate in self._thinned(self._candidates, best)),
            time.monotonic() - self._start_s,
            self._variants.num_predictions,
        )

    def ladder(self) -> list[Plan]:
        """List the plans to which a fit can change.

        Returns:
            Those that differ from the plan found last in recomputation and micro-batches only, and
            are as exact; the fastest first, each of which needs less than the one before, and that
            plan among them. After these those with whole batches, for a loss that cannot be split,
            likewise.
        """
        chosen = self._chosen
        assert chosen is not None, "a plan was found"

        def rest_of(variant: Variant) -> dict[str, Any]:
            return {n: v for n, v in variant.changes.items() if n not in (RECOMPUTED, MICRO_BATCH)}

        same = [
            c
            for c in self._candidates
            if c.variant.exactness is chosen.variant.exactness
            and rest_of(c.variant) == rest_of(chosen.variant)
        ]
        found = list(self._thinned(same, chosen))
        whole = self._whole(chosen)
        if whole:
            fitting = self._fastest(whole, math.floor(self._room * (1 - _SLACK)))
            best = chosen if chosen in whole else fitting or min(whole, key=self._bytes)
            found += [c for c in self._thinned(whole, best) if c not in found]
        return [self._plan(candidate) for candidate in found]

    def _whole(self, chosen: _Candidate) -> list[_Candidate]:
        variant = None
        with contextlib.suppress(TimeoutError):
            variant = self._variants.without_micro_batches(chosen.variant)
        found = [c for c in self._candidates if c.variant is variant]
        if variant is not None and not found:
            found = self._candidates_of(variant)
            self._candidates += found
        return found

    def _prepare(self) -> None:
        if self._candidates:
            return
        unchanged = self._variants.unchanged()
        if unchanged is None:
            self._what_if.base()  # raises what the user's code does
            raise TimeoutError(_OUT_OF_TIME)
        num_blocks = self._variants.num_blocks
        self._unchanged_s = unchanged.estimate([KEEP] * num_blocks)[1]
        for variant in self._variants.all():
            self._candidates += self._candidates_of(variant)

    def _candidates_of(self, variant: Variant) -> list[_Candidate]:
        if variant.costs is None:
            return [_Candidate(variant, (), *variant.estimate(()))]
        choices = dict.fromkeys(_choices(self._variants.num_blocks, self._variants.kinds))
        return [_Candidate(variant, kinds, *variant.estimate(kinds)) for kinds in choices]

    # The fastest that the whole prediction confirms. What it finds corrects the estimates of the
    # same variant, so that a faster one may come into reach.
    def _best(self, room: int) -> _Candidate | None:
        self._slack_bytes = 0.0
        for _ in range(_MAX_VERIFIED):
            best = self._fastest(self._candidates, room)
            if best is None:  # only room for what is estimated to fit closely
                self._slack_bytes = 0.0
                best = self._fastest(self._candidates, room)
            if best is None:
                best = min(self._unsure(), key=self._bytes)
            if id(best) in self._verified:
                break
            self._verify(best)
            if room < self._bytes(best) < room * (1 + _NEAR):
                self._slack_bytes += _SLACK * room
        fitting = [c for c in self._candidates if self._is_known_to_fit(c, room)]
        return self._fastest(fitting, room)

    # Before a budget is refused, each variant's least is verified: estimates may be too high.
    def _unsure(self) -> list[_Candidate]:
        verified = {c.variant for c in self._candidates if id(c) in self._verified}
        open_ones = [c for c in self._candidates if c.variant not in verified]
        return open_ones or self._candidates

    def _fastest(self, candidates: Iterable[_Candidate], room: int) -> _Candidate | None:
        fitting = [c for c in candidates if self._bytes(c) <= room]
        if not fitting:
            return None
        limit_s = min(c.seconds for c in fitting) * (1 + EQUALLY_FAST)
        ranks = list(Exactness)
        return min(
            (c for c in fitting if c.seconds <= limit_s),
            key=lambda c: (ranks.index(c.variant.exactness), c.seconds, self._bytes(c)),
        )

    def _more_exact(self, best: _Candidate, room: int, limit_s: float) -> _Candidate:
        ranks = list(Exactness)
        for variant in self._variants.without_each(best.variant):
            if ranks.index(variant.exactness) > ranks.index(best.variant.exactness):
                continue
            candidates = [c for c in self._candidates if c.variant is variant]
            if not candidates:
                candidates = self._candidates_of(variant)
                self._candidates += candidates
            found = self._fastest(candidates, math.floor(room * (1 - _SLACK)))
            if found is None or found.seconds > limit_s:
                continue
            if id(found) not in self._verified:
                self._verify(found)
            if not self._is_known_to_fit(found, room):
                break
            return self._more_exact(found, room, limit_s)
        return best

    def _verify(self, candidate: _Candidate) -> None:
        prediction = self._variants.predict(candidate.variant, candidate.kinds)
        self._verified[id(candidate)] = prediction
        if prediction is not None:
            self._correction = prediction.device_bytes - candidate.estimated_bytes
            self._corrections[id(candidate.variant)] = self._correction

    def _bytes(self, candidate: _Candidate) -> float:
        prediction = self._verified.get(id(candidate))
        if prediction is not None:
            return prediction.device_bytes
        if id(candidate) in self._verified:  # it could not be predicted
            return math.inf
        return self._estimate(candidate) + self._slack_bytes

    def _estimate(self, candidate: _Candidate) -> int:
        if candidate.variant.costs is None:
            return candidate.estimated_bytes
        correction = self._corrections.get(id(candidate.variant), self._correction)
        return candidate.estimated_bytes + correction

    def _is_known_to_fit(self, candidate: _Candidate, room: int) -> bool:
        return self._verified.get(id(candidate)) is not None and self._bytes(candidate) <= room

    def _thinned(
        self, candidates: Sequence[_Candidate], chosen: _Candidate
    ) -> Iterator[_Candidate]:
        self._slack_bytes = 0.0
        frontier = self._frontier(candidates)
        at = [c for c in frontier if self._bytes(c) > self._bytes(chosen) and c is not chosen]
        below = [c for c in frontier if self._bytes(c) < self._bytes(chosen)]
        before = math.inf
        for candidate in (*at, chosen, *below):
            num_bytes = self._bytes(candidate)
            is_end = candidate is chosen or candidate is frontier[-1]
            if is_end or num_bytes < before * (1 - _STEP):
                before = num_bytes
                yield candidate

    def _frontier(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        ranks = list(Exactness)
        found: list[_Candidate] = []
        least = math.inf

        def order(one: _Candidate) -> tuple[float, float, int]:
            return one.seconds, self._bytes(one), ranks.index(one.variant.exactness)

        for one in sorted(candidates, key=order):
            if self._bytes(one) < least:
                least = self._bytes(one)
                found.append(one)
        return found

    def _exactness_of(self, candidate: _Candidate) -> Exactness:
        # "32-true" is what Lightning does by itself.
        is_exact = str(self._what_if.step.settings.get("precision")) in ("32", "32-true")
        found = [candidate.variant.exactness] + [
            entry.exactness
            for entry in self._given
            if not (entry.argument == "precision" and is_exact)
        ]
        return max(found, key=list(Exactness).index)

    def _settings_of(self, candidate: _Candidate) -> dict[str, Any]:
        changes = dict(candidate.variant.changes)
        if candidate.variant.costs is not None:
            changes[RECOMPUTED] = value_of(candidate.kinds)
        return {**self._what_if.step.settings, **self._variants.settings(changes)}

    def _plan(self, candidate: _Candidate) -> Plan:
        settings = self._settings_of(candidate)
        prediction = self._verified.get(id(candidate)) or candidate.variant.prediction
        costs, num_bytes = candidate.variant.costs, self._estimate(candidate)
        overhead_bytes = 0 if costs is None else costs.overhead_bytes
        return Plan(
            settings,
            as_code(self._what_if.step.make_callback, settings),
            self._exactness_of(candidate).value,
            prediction.peak_bytes if prediction else num_bytes - overhead_bytes,
            prediction.device_bytes if prediction else num_bytes,
            candidate.seconds / self._unchanged_s,
            prediction is not None,
            prediction,
        )

    def _ways_out(self, least_bytes: int) -> str:
        gpu = self._what_if.gpu
        ways = [f'`budget="{math.ceil(least_bytes / MIB)}MiB"`']
        if gpu is not None and least_bytes > gpu.total_bytes:
            ways = [f"a GPU with {format_bytes(least_bytes)}"]
        if self._exactness is not Exactness.APPROXIMATE:
            ways.append('`exactness="approximate"`')
        if self._given:
            ways.append(f"no {' or '.join(f'`{entry.argument}=`' for entry in self._given)}")
        is_one = self._what_if.num_samples == 1
        ways.append("shorter samples" if is_one else "a smaller batch")
        return f"Use {', '.join(ways)}, or a smaller model."

    def _refuse(self, budget_bytes: int, room: int) -> NoReturn:
        if self._variants.left_s <= 0:
            raise TimeoutError(_OUT_OF_TIME)
        known = [c for c in self._candidates if self._verified.get(id(c)) is not None]
        smallest = self._plan(min(known or self._candidates, key=self._bytes))
        least_bytes = smallest.device_bytes + budget_bytes - room
        sizes = {} if smallest.prediction is None else smallest.prediction.peak.by_category()
        made_of = ", ".join(
            f"{format_bytes(size)} of {name.replace('_', ' ')}"
            for name, size in sorted(sizes.items(), key=lambda item: -item[1])
            if size > _MENTIONED * smallest.peak_bytes
        )
        free = (
            f" and {format_bytes(budget_bytes - room)} that stay free"
            if budget_bytes > room
            else ""
        )
        raise InfeasiblePlanError(
            f"No settings fit a budget of {format_bytes(budget_bytes)}. The least found is "
            f"{format_bytes(smallest.device_bytes)} on the device{free}, with `{smallest.how}`: "
            f"{made_of or 'estimated from its blocks'}. {self._ways_out(least_bytes)}",
            smallest,
        )


# Not of what is trained, or not in a plan.
_NEITHER = ("stack", "budget", "monitor", "report", "predict")


def search_for(
    what_if: WhatIf, exactness: Exactness, limit_s: float = math.inf, closed: Collection[str] = ()
) -> PlanSearch:
    """Prepare a search with all arguments open that the step's settings leave to it.

    Args:
        what_if: Predicts variants of the step.
        exactness: How far results may move.
        limit_s: Seconds after which nothing more is predicted.
        closed: Arguments of `MemSaveCallback` that stay off.

    Returns:
        The search. What is off in the step's settings because nobody named it is open.
    """
    step = what_if.step
    defaults = step.make_callback().arguments
    fixed = {
        name: value
        for name, value in step.settings.items()
        if name not in _NEITHER and value not in ("auto", defaults[name])
    }
    given = [entry for entry in entries() if fixed.get(entry.argument) not in (None, False)]
    fixed |= {name: None for name in closed if name not in fixed}
    return PlanSearch(
        replace(what_if, step=replace(step, settings=fixed), _known={}),
        [entry.argument for entry in entries() if entry.argument not in fixed],
        exactness,
        rates_of(what_if.gpu, what_if.device),
        limit_s=limit_s,
        margin_of=functools.partial(margin_of, gpu=what_if.gpu, device=what_if.device),
        given=given,
    )


# The first blocks need recomputation most: their activations live longest. One kind follows another
# in the order of what they save.
def _choices(number: int, kinds: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for first, second in itertools.pairwise((*kinds, KEEP)):
        step = max(1, number // _MOST_NESTED) if first == "nested" else 1
        for num_first in range(0, number + 1, step):
            for num_second in range(1 if second == KEEP else number - num_first + 1):
                rest = number - num_first - num_second
                yield (first,) * num_first + (second,) * num_second + (KEEP,) * rest
