"""Find the fastest plan that fits a budget."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from lightning_memsave.core.technique import Exactness
from lightning_memsave.errors import InfeasiblePlanError
from lightning_memsave.planning.block_costs import KEEP
from lightning_memsave.planning.budget import margin_of, rates_of
from lightning_memsave.planning.candidates import (
    MICRO_BATCH,
    advised_against,
    exactness_of_all,
    not_installed,
    untried,
)
from lightning_memsave.planning.constants import (
    CLOSE,
    EQUALLY_FAST,
    LARGE_RESERVE,
    LEVEL,
    MAX_VERIFIED,
    NEAR,
    RESERVE,
    SLACK,
)
from lightning_memsave.planning.plan import MemoryPlan, Plan, short_settings
from lightning_memsave.planning.recorded_blocks import choices, resident_choices
from lightning_memsave.planning.variant import (
    NOT_ADVISED,
    RECOMPUTED,
    Estimate,
    Variant,
    shown_frontier,
    thinned_frontier,
)
from lightning_memsave.planning.variants import Variants
from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.training_step import as_code
from lightning_memsave.techniques.registry import Entry
from lightning_memsave.units import MIB, format_bytes

_OUT_OF_TIME = (
    "the search for a plan takes longer than allowed: allow it more seconds, with `time_limit_s=` "
    "of `plan_memory` or `predict=` of `MemSaveCallback`"
)

_QUICK = 64  # micro-batches: the simulation of more takes longer


class PlanSearch:
    def __init__(
        self,
        variants: Variants,
        *,
        margin_of: Callable[[int], int] = lambda budget_bytes: 0,
        given: Sequence[Entry] = (),
    ) -> None:
        self._variants, self._what_if = variants, variants.what_if
        self._margin_of, self._given = margin_of, given
        self._verified: dict[Estimate, MemoryPrediction | None] = {}
        # By how much whole predictions were higher than estimates, also with another optimizer.
        self._corrections: dict[object, int] = {}
        self._host_corrections: dict[Variant, int] = {}
        self._too_large: set[Variant] = set()  # they were preferred, and did not fit
        self._by_variant: dict[Variant, list[Estimate]] = {}
        self._chosen: Estimate | None = None
        self._slack_bytes, self._room, self._unchanged_s = 0.0, 0, 1.0

    def find(self, budget_bytes: int) -> MemoryPlan:
        """Find the fastest plan that fits, or raise; when time is over, the best one by then."""
        room = budget_bytes - self._margin_of(budget_bytes)
        self._variants.look_again(room)
        self._by_variant = {v: c for v, c in self._by_variant.items() if not v.shown}
        self._variants.is_last_resort = False
        best = self._fastest_of_all(room)
        if best is None and self._variants.has_last_resort:
            self._variants.is_last_resort = True
            best = self._fastest_of_all(room)
        if best is None:
            self._refuse(budget_bytes, room)
        return self._found(best, budget_bytes, room)

    def _fastest_of_all(self, room: int) -> Estimate | None:
        self._prepare()
        if self._slower_s(room) is not None:
            self._add(*self._variants.in_parts())
        limit_s = self._slower_s(room)
        if limit_s is not None and limit_s < math.inf:
            self._look_on_host(room, limit_s)
        best = self._fastest_that_fits(room)
        if best is None and self.is_out_of_time:
            return self._fastest(self._candidates, room, RESERVE)
        return best

    # Of the fastest that is estimated to fit, if others are faster; infinite if none fits.
    def _slower_s(self, room: int) -> float | None:
        best = self._fastest(self._candidates, room, RESERVE)
        limit_s = self._quickest_s * (1 + EQUALLY_FAST)
        fastest_s = math.inf if best is None else best.seconds
        return fastest_s if fastest_s > limit_s else None

    def _fastest_that_fits(self, room: int) -> Estimate | None:
        """Estimate, verify and correct, until the plan that is wanted is known to fit."""
        self._slack_bytes = 0.0
        self._too_large.clear()
        for _ in range(MAX_VERIFIED):
            # Estimate: the fastest of what is recorded, and more is recorded where nothing fits.
            # Before a refusal, what needs the least is verified: estimates may be too high.
            wanted = self._wanted(room)
            if wanted is None and any(self._look_on_host(room, in_parts=p) for p in (False, True)):
                continue
            if wanted is not None and self._has_smaller_on_host(wanted, room):
                continue
            wanted = wanted or min(self._unsure(room), key=self._bytes)
            if wanted in self._verified:
                break
            # Verify: predict the whole step, unless time is over.
            prediction = self._variants.predict(wanted.variant, *wanted.way)
            if prediction is None and self._variants.left_s <= 0:
                break
            # Correct: the estimates of its variant, and of all where it is slightly too large.
            self._learn(wanted, prediction)
            if not self._is_known_to_fit(wanted, room):
                self._too_large.add(wanted.variant)
            if room < self._bytes(wanted) < room * (1 + NEAR):
                self._slack_bytes += SLACK * room
        self._slack_bytes = 0.0
        known = [c for c in self._candidates if self._is_known_to_fit(c, room)]
        return wanted if wanted in known else self._fastest(known, room)

    def least(self, budget_bytes: int) -> MemoryPlan:
        """Name the plan that needs the least by what is known when time is over."""
        room = budget_bytes - self._margin_of(budget_bytes)
        if self._candidates:
            return self._found(min(self._candidates, key=self._bytes), budget_bytes, room)
        settings = {**self._what_if.step.settings, **self._variants.unpredicted_settings()}
        exactness, make = self._variants.exactness.value, self._what_if.step.make_callback
        how = as_code(make, short_settings(make, settings, exactness))
        plan = Plan(settings, how, exactness, room, room, 1.0)  # of its bytes nothing is known
        return MemoryPlan(budget_bytes, budget_bytes - room, plan, None, (plan,))

    @property
    def is_out_of_time(self) -> bool:
        return self._variants.left_s <= 0 or self._variants.is_cut_short

    def _found(self, best: Estimate, budget_bytes: int, room: int) -> MemoryPlan:
        self._chosen, self._room = best, room
        slower_s = best.seconds * (1 + EQUALLY_FAST)
        others = [
            c
            for c in self._candidates
            if c.variant is not best.variant
            and (c.seconds > slower_s or c.variant.rank != best.variant.rank)
        ]
        second = self._fastest(others, room)
        return MemoryPlan(
            budget_bytes,
            budget_bytes - room,
            self._plan(best),
            None if second is None else self._plan(second),
            tuple(map(self._plan, shown_frontier(self._candidates, self._bytes, best))),
            self._variants.seconds_so_far,
            self._variants.num_predictions,
            (LEVEL[0] * self._unchanged_s, LEVEL[1] * self._unchanged_s),
            tuple(self._notes(best)),
            precision=self._what_if.step.with_settings(self._variants.settings({})).precision,
        )

    def _notes(self, best: Estimate) -> Iterator[str]:
        step = self._what_if.step
        if step.strategy is not None:
            yield f"For each process of `{step.trainer_code}`, with such a batch in each."
        if self.is_out_of_time:
            yield (
                f"The search was cut off after {self._variants.seconds_so_far:.0f} s of processor "
                "time: this is the best plan so far, and a faster one may fit."
            )
        for name, why in best.variant.not_advised.items():
            value = best.variant.changes[name]
            yield f"Nothing else fits: `{name}={value!r}` is advised against, as {why}."
        for name, why in advised_against(step.settings, self._what_if.has_batch_norm).items():
            yield f"`{name}={step.settings[name]!r}` is advised against, as {why}."
        if why := self._variants.why_form(best.variant):
            yield f"On the host with {why}."
        yield from not_installed(self._variants.options())

    def on(self, gpu: Gpu, limit_s: float = math.inf) -> "PlanSearch":
        device = self._what_if.step.device
        variants = self._variants.on(gpu, rates_of(gpu, device), limit_s)
        free = functools.partial(margin_of, device=device)
        return PlanSearch(variants, margin_of=free, given=self._given)

    def ladder(self) -> list[Plan]:
        """List the plans to which a fit can change."""
        # They differ from the plan found last in recomputation and micro-batches only, and are as
        # exact, or more exact with whole batches, for a loss that cannot be split; the largest
        # first, and that plan among them.
        chosen = self._chosen
        if chosen is None:  # a plan without predictions
            return []

        def rest_of(variant: Variant) -> dict[str, Any]:
            return {n: v for n, v in variant.changes.items() if n not in (RECOMPUTED, MICRO_BATCH)}

        self._add(*self._variants.in_other_parts(chosen.variant))
        same = [
            [
                candidate
                for candidate in found
                if self._bytes(candidate) < math.inf
                and candidate.num_resident == chosen.num_resident
                and chosen.exactness.allows(candidate.exactness)
            ]
            for variant, found in self._by_variant.items()
            if variant.rank <= chosen.variant.rank and rest_of(variant) == rest_of(chosen.variant)
        ]
        ladder: set[Estimate] = set()
        for found in filter(None, same):
            best = self._fastest(found, self._room) or min(found, key=self._bytes)
            best = chosen if chosen in found else best
            ladder |= {*thinned_frontier(found, self._bytes, best)}
        return [self._plan(c) for c in sorted(ladder, key=self._bytes, reverse=True)]

    def _prepare(self) -> None:
        unchanged = self._variants.unchanged()
        if unchanged is None:
            if not self.is_out_of_time:
                self._what_if.base()  # raises what the user's code does
            raise TimeoutError(_OUT_OF_TIME)
        self._unchanged_s = unchanged.estimate([KEEP] * self._variants.num_blocks)[1]
        self._add(*self._variants.all())

    @property
    def _quickest_s(self) -> float:
        return min(candidate.seconds for candidate in self._candidates)

    # Only where nothing else fits or is as fast: it takes long to record.
    def _look_on_host(
        self,
        room: int,
        limit_s: float = math.inf,
        *,
        in_parts: bool = False,
        is_small: bool = False,
    ) -> bool:
        is_new, self._variants.slowest_s = False, limit_s
        for variant in self._variants.on_host(in_parts=in_parts, is_small=is_small):
            is_new = is_new or variant not in self._by_variant
            self._add(variant)
            candidates = self._by_variant[variant]
            quickest_s = min(candidate.seconds for candidate in candidates)
            fitting = self._fastest(candidates, room, RESERVE)
            is_as_fast = fitting is not None and fitting.seconds <= quickest_s * (1 + EQUALLY_FAST)
            # Each that follows moves what this one moves, and more.
            is_first = fitting is not None and limit_s == math.inf
            if variant.moves_weights and (is_first or is_as_fast or quickest_s >= limit_s):
                break
        return is_new

    # The host takes long for whole state, while state in 8 bits passes the device.
    def _has_smaller_on_host(self, wanted: Estimate, room: int) -> bool:
        limit_s = self._slower_s(room) if wanted.variant.moves_weights else None
        return limit_s is not None and self._look_on_host(room, limit_s, is_small=True)

    def _add(self, *variants: Variant) -> None:
        number, kinds = self._variants.num_blocks, self._variants.kinds
        for variant in variants:
            ways: Iterable[tuple[tuple[str, ...], int]]
            ways = [((), n) for n in range(variant.most_resident + 1)]
            if variant.costs is not None:
                ways = [(way, 0) for way in dict.fromkeys(choices(number, kinds))]
                ways += resident_choices(number, kinds, variant.most_resident)
            if variant not in self._by_variant:
                self._by_variant[variant] = [
                    Estimate.of(variant, kinds, num_resident)
                    for kinds, num_resident in ways
                    if not variant.shown or variant.shown >= {*kinds}
                ]

    @property
    def _candidates(self) -> list[Estimate]:
        limit = NOT_ADVISED if self._variants.is_last_resort else NOT_ADVISED - 1
        return [c for v, found in self._by_variant.items() if v.rank <= limit for c in found]

    def _wanted(self, room: int) -> Estimate | None:
        fastest = self._fastest(self._candidates, room, RESERVE)
        if fastest is None:  # only room for what is estimated to fit closely
            self._slack_bytes = 0.0
            fastest = self._fastest(self._candidates, room)
        if fastest is None:
            return None
        limit_s = fastest.seconds * (1 + EQUALLY_FAST)
        best = self._known_or(fastest, self._candidates, room)
        return self._preferred(best, room, limit_s)

    def _known_or(self, wanted: Estimate, candidates: Sequence[Estimate], room: int) -> Estimate:
        close_s = wanted.seconds + CLOSE * self._unchanged_s
        known = [
            c
            for c in candidates
            if self._is_known_to_fit(c, room)
            and c.seconds <= close_s
            and c.variant.rank <= wanted.variant.rank
        ]
        return min(known, key=lambda c: c.seconds, default=wanted)

    # Without settings that change results or that cannot be repeated, as long as it is as fast.
    def _preferred(self, best: Estimate, room: int, limit_s: float) -> Estimate:
        quickest_s = self._quickest_s

        # What is slower with more settings on is slower without them; with micro-batches, if it is
        # with whole batches, where nothing is recomputed.
        def may_be_as_fast(changes: Mapping[str, Any]) -> bool:
            size = changes.get(MICRO_BATCH)
            settings = {(n, v) for n, v in changes.items() if n != MICRO_BATCH}
            for variant, candidates in self._by_variant.items():
                of_it = variant.changes.get(MICRO_BATCH)
                if of_it not in (size, None) or not settings <= variant.changes.items():
                    continue
                if of_it == size:
                    found = self._fastest(candidates, room)
                    if found is None or found.seconds > limit_s:
                        return False
                elif min(c.seconds for c in candidates) > quickest_s * (1 + EQUALLY_FAST):
                    return False
            return True

        for variant in self._variants.without_each(best.variant, may_be_as_fast):
            is_less_exact = variant.rank > best.variant.rank
            if is_less_exact or variant in self._too_large:
                continue
            self._add(variant)
            candidates = self._by_variant[variant]
            found = self._fastest(candidates, room, LARGE_RESERVE)
            if found is not None and found.seconds <= limit_s:
                return self._preferred(self._known_or(found, candidates, room), room, limit_s)
        return best

    # Before a budget is refused: estimates of what may be enough may be too high.
    def _unsure(self, room: int) -> list[Estimate]:
        verified = {c.variant for c in self._candidates if c in self._verified}
        open_ones = [
            c
            for c in self._candidates
            if c.variant not in verified and self._bytes(c) <= room * (1 + NEAR)
        ]
        return open_ones or self._candidates

    def _fastest(
        self, candidates: Iterable[Estimate], room: int, reserve: float = 0.0
    ) -> Estimate | None:
        fitting = [c for c in candidates if self._bytes(c, reserve) <= room]
        if not fitting:
            return None
        limit_s = min(c.seconds for c in fitting) * (1 + EQUALLY_FAST)
        return min(
            (c for c in fitting if c.seconds <= limit_s),
            key=lambda c: (
                c.variant.rank,
                c.exactness.rank,
                c.variant.is_offloaded,
                c.seconds,
                -c.num_resident,
                self._bytes(c),
            ),
        )

    def _learn(self, candidate: Estimate, prediction: MemoryPrediction | None) -> None:
        self._verified[candidate] = prediction
        if prediction is not None:
            correction = prediction.device_bytes - candidate.num_bytes
            variant = candidate.variant.but_optimizer
            self._corrections |= {variant: correction, (variant, candidate.way): correction}
            on_host = prediction.peak.host_bytes - candidate.host_bytes
            self._host_corrections[candidate.variant] = on_host
            self._variants.correct(candidate.variant, on_host)

    def _bytes(self, candidate: Estimate, reserve: float = 0.0) -> float:
        prediction = self._verified.get(candidate)
        is_offloaded = candidate.variant.is_offloaded
        if is_offloaded and self._host_bytes(candidate) > self._variants.host_budget_bytes:
            return math.inf
        if prediction is not None:
            return prediction.device_bytes
        if candidate in self._verified:  # it could not be predicted
            return math.inf
        estimate = self._estimate(candidate) + self._slack_bytes
        is_rough = candidate.variant.overhead_bytes > 0
        if is_rough and candidate.variant.but_optimizer not in self._corrections:
            return estimate * (1 + reserve)
        return estimate

    def _host_bytes(self, candidate: Estimate) -> int:
        if prediction := self._verified.get(candidate):
            return prediction.peak.host_bytes
        return candidate.host_bytes + self._host_corrections.get(candidate.variant, 0)

    def _estimate(self, candidate: Estimate) -> int:
        variant, known = candidate.variant.but_optimizer, self._corrections
        latest = known.get(variant, 0)
        return candidate.num_bytes + known.get((variant, candidate.way), latest)

    def _is_known_to_fit(self, candidate: Estimate, room: int) -> bool:
        return self._verified.get(candidate) is not None and self._bytes(candidate) <= room

    def _plan(self, candidate: Estimate) -> Plan:
        changes = self._variants.settings(candidate.variant.changes_with(*candidate.way))
        step, norm = self._what_if.step, self._what_if.has_batch_norm
        settings, make = {**step.settings, **changes}, step.make_callback
        given = exactness_of_all(self._given, step.settings, norm)
        exactness = max(given, candidate.exactness, key=lambda each: each.rank).value
        prediction = self._verified.get(candidate)
        if prediction is None and not candidate.num_resident:
            prediction = candidate.variant.prediction
        num_bytes = self._estimate(candidate)
        return Plan(
            settings,
            as_code(make, short_settings(make, settings, exactness)),
            exactness,
            prediction.peak_bytes if prediction else num_bytes - candidate.variant.overhead_bytes,
            prediction.device_bytes if prediction else num_bytes,
            candidate.seconds / self._unchanged_s,
            prediction is not None,
            self._host_bytes(candidate),
            prediction,
            candidate.variant.not_advised,
        )

    # With which a plan would fit the device; 0 if none does.
    def _least_host_bytes(self, room: int) -> int:
        variants, budget_bytes = self._variants, self._variants.host_budget_bytes
        if not variants.is_host_short:
            return 0
        variants.host_budget_bytes, variants.is_smallest = math.inf, True
        try:
            while True:
                able = [c for c in self._candidates if c.variant.moves_weights]
                able = [c for c in able if not c.num_resident]  # all weights decide on the form
                fitting = [c for c in able if self._bytes(c, RESERVE) <= room]
                if fitting:
                    least = min(fitting, key=self._host_bytes)
                    if least in self._verified:
                        return self._host_bytes(least)
                    prediction = self._variants.predict(least.variant, *least.way)
                    if prediction is None and self._variants.left_s <= 0:
                        return 0
                    self._learn(least, prediction)
                elif not self._look_on_host(room):
                    return 0
        finally:
            variants.host_budget_bytes, variants.is_smallest = budget_bytes, False

    def _ways_out(self, least_bytes: int, room: int) -> str:
        gpu = self._what_if.step.gpu
        ways = [f'`budget="{math.ceil(least_bytes / MIB)}MiB"`']
        if gpu is not None and least_bytes > gpu.total_bytes:
            ways = [f"a GPU with {format_bytes(least_bytes)}"]
        if self._variants.exactness is not Exactness.APPROXIMATE:
            ways.append('`exactness="approximate"`')
        if self._given:
            ways.append(f"no {' or '.join(f'`{entry.argument}=`' for entry in self._given)}")
        if lacking_bytes := self._least_host_bytes(room):
            ways.append(f'`host_budget="{math.ceil(lacking_bytes / MIB)}MiB"` if the host has it')
        ways.append("shorter samples" if self._what_if.num_samples == 1 else "a smaller batch")
        return f"Use {', '.join(ways)}, or a smaller model."

    # No micro-batches are recorded where model states alone are too much.
    def _find_least(self) -> Estimate:
        if not any(MICRO_BATCH in c.variant.beside for c in self._candidates):
            is_last, self._variants.is_last_resort = self._variants.is_last_resort, False
            found = self._variants.in_parts(_QUICK)
            self._variants.is_last_resort = is_last
            self._add(*(found or self._variants.in_parts(_QUICK)))
        least = min(self._candidates, key=self._bytes)
        if least not in self._verified and self._variants.left_s > 0:
            self._learn(least, self._variants.predict(least.variant, *least.way))
        known = [c for c in self._candidates if self._verified.get(c) is not None]
        return min(known or self._candidates, key=self._bytes)

    def _refuse(self, budget_bytes: int, room: int) -> NoReturn:
        if self.is_out_of_time:
            raise TimeoutError(_OUT_OF_TIME)
        smallest = self._plan(self._find_least())
        least_bytes = smallest.device_bytes
        while least_bytes - self._margin_of(least_bytes) < smallest.device_bytes:
            least_bytes = smallest.device_bytes + self._margin_of(least_bytes)
        free = f" and {format_bytes(kept)} that stay free" if (kept := budget_bytes - room) else ""
        raise InfeasiblePlanError(
            f"No settings fit a budget of {format_bytes(budget_bytes)}. The least found is "
            f"{format_bytes(smallest.device_bytes)} on the device{free}, with `{smallest.how}`: "
            f"{smallest.made_of or 'estimated from its blocks'}. "
            f"{self._ways_out(least_bytes, room)}"
            f"{untried(self._variants.options(), self._variants.failures)}",
            smallest,
        )
