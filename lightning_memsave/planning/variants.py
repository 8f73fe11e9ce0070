"""Variants of a step for the planner: what is on beside recomputation, each recorded once."""

import copy
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_memsave.core.clock import processor_time_s
from lightning_memsave.core.technique import Exactness
from lightning_memsave.explain.dominant_parts import embedding_tables
from lightning_memsave.planning.block_costs import KEEP
from lightning_memsave.planning.candidates import (
    MICRO_BATCH,
    OFFLOAD,
    Candidate,
    advised_against,
    candidates_of,
)
from lightning_memsave.planning.constants import (
    FASTER,
    FOR_LAST_PLANS,
    FOR_PLANS,
    MUCH_FASTER,
    NEAR,
    SMALLER,
)
from lightning_memsave.planning.recorded_blocks import RecordedBlocks, value_of
from lightning_memsave.planning.step_time import Rates, step_seconds
from lightning_memsave.planning.variant import (
    ACTIVATIONS,
    NO_LIMIT,
    ON_HOST,
    RECOMPUTED,
    Resident,
    Variant,
    all_exactness,
    changes_of,
    form_of,
    leaving_out,
    weights_on_host,
    what_of,
)
from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.what_if import ImpossibleVariantError, WhatIf
from lightning_memsave.techniques.offloading.host_budget import host_budget_bytes
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.registry import (
    ALL_8BIT,
    BESIDE_OFFLOAD,
    FINAL,
    entries,
    forms_on_host,
    unused_details,
)
from lightning_memsave.units import format_bytes

_ALL_8BIT = "8-bit optimizer, also for embeddings"
_LEFT_ALONE = (RECOMPUTED, MICRO_BATCH, OFFLOAD)


class Variants:
    def __init__(
        self,
        what_if: WhatIf,
        open_arguments: Collection[str],
        exactness: Exactness,
        rates: Rates,
        limit_s: float = math.inf,
        *,
        details: Mapping[str, Any] | None = None,
        offload: Offloading | None = None,
    ) -> None:
        self.what_if, self.rates = what_if, rates
        self.exactness = exactness  # the most that results may move
        self._start_s, self._limit_s = processor_time_s(), limit_s
        self._open = set(open_arguments)
        self._details = dict(details or {})
        self._off: dict[str, Any] = {
            e.argument: None for e in entries() if e.argument in self._open
        } | ({MICRO_BATCH: "auto"} if MICRO_BATCH in self._open else {})
        self._num_before = 0
        self.is_cut_short = False  # whether time was too short for some variants
        given = {**what_if.step.settings, **self._details}
        limit = getattr(offload, "host_budget", None) or given.get("host_budget")
        self.host_budget_bytes = host_budget_bytes(limit, is_here=what_if.step.fit is not None)
        """Host memory that a plan may use."""
        self.is_host_short = False
        """Whether the host has too little memory for weights in some form."""
        self.is_last_resort = False
        """Whether nothing else fits than what is advised against."""
        self.is_smallest = False
        """Whether to try the smallest form whatever the host has."""
        self.room: float = math.inf
        """Bytes on the device: of a variant that needs more in any case not all is recorded."""
        self.slowest_s = math.inf
        """Seconds of a step: of a variant that takes longer in any case not all is recorded."""
        self.failures: dict[str, str] = {}
        """What the model's own code raised, by the settings that were tried."""
        # By form: what predictions of whole steps needed beyond estimates.
        self._excess: dict[str, int] = {}
        self._known: dict[str, Variant | None] = {}
        self._offload, self._has_batch_norm = offload, what_if.has_batch_norm
        self._blocks = RecordedBlocks(what_if)
        selectors = getattr(offload, "blocks", None) or given.get("blocks")
        blocks_of = functools.partial(RecordedBlocks.of, what_if, selectors, exactness)
        if RECOMPUTED in self._open:
            self._blocks = blocks_of()
        elif offload is not None:
            self._blocks = replace(blocks_of(may_be_cut=False), kinds=())
        if self._blocks.is_cut and self.unchanged() is None:  # it counts its blocks
            self._blocks = blocks_of(may_be_cut=False)
            self._known.clear()

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self._blocks.runs))

    @property
    def kinds(self) -> tuple[str, ...]:
        """How blocks may be recomputed, the one with the least memory first."""
        return self._blocks.kinds

    @property
    def has_last_resort(self) -> bool:
        return any(
            one.is_advised_against and self.exactness.allows(one.exactness) and self._is_open(one)
            for one in self._all_options()
        )

    @property
    def left_s(self) -> float:
        return self._limit_s - self.seconds_so_far

    @property
    def _left_to_record_s(self) -> float:
        share = FOR_LAST_PLANS if self.is_last_resort else FOR_PLANS
        return (1 - share) * self._limit_s - self.seconds_so_far

    @property
    def seconds_so_far(self) -> float:
        return processor_time_s() - self._start_s

    @property
    def num_predictions(self) -> int:
        """How many steps were predicted, copies with fewer blocks among them."""
        copies = self._blocks.what_if.num_predictions if self._blocks.is_cut else 0
        return self.what_if.num_predictions + copies - self._num_before

    def on(self, gpu: Gpu, rates: Rates, limit_s: float = math.inf) -> "Variants":
        """Share what was predicted with the same variants on another GPU with equal kernels."""

        def moved(what_if: WhatIf) -> WhatIf:
            return replace(what_if, step=replace(what_if.step, gpu=gpu))

        other = copy.copy(self)
        other.what_if, other._blocks = moved(self.what_if), self._blocks.moved(moved)
        other.rates, other._known, other.is_cut_short = rates, {}, False
        other._excess = {}
        other._start_s, other._limit_s = processor_time_s(), limit_s
        other._num_before += self.num_predictions
        return other

    def settings(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Complete changes to arguments of `MemSaveCallback` that leave nothing to a preset."""
        no_limit = {"host_budget": NO_LIMIT} if self.is_smallest else {}
        settings = {**self._off, **self._details, **changes, **no_limit}
        return settings | unused_details({**self.what_if.step.settings, **settings}, self._open)

    def unpredicted_settings(self) -> dict[str, Any]:
        """Give settings that save memory and need no prediction to be known as possible."""
        kinds = self.kinds[:1] * self.num_blocks
        return self.settings({RECOMPUTED: value_of(kinds)} if kinds else {})

    def look_again(self, room: float) -> None:
        """Record anew what was left because there was less room on the device."""
        self._known = {n: v for n, v in self._known.items() if v is None or not v.shown}
        self.room, self.slowest_s = room, math.inf

    def unchanged(self) -> Variant | None:
        return self._record([])

    def all(self) -> list[Variant]:
        chosen = self._helpful()
        found = [self.unchanged(), self._record(chosen)]
        if self._is_full(found[-1]):
            return [variant for variant in found if variant is not None]
        found += [self._record(leaving_out(chosen, one)) for one in chosen]
        times = [v.estimate([KEEP] * self.num_blocks)[1] for v in found[:2] if v is not None]
        if times[-1] > MUCH_FASTER * times[0]:  # else what is more exact is slower
            for limit in (Exactness.BITWISE, Exactness.ROUNDING):
                rest = [one for one in chosen if limit.allows(one.exactness)]
                found.append(self._record(rest))
        return list({repr(v.changes): v for v in found if v is not None}.values())

    def in_parts(self, most: int = 0) -> list[Variant]:
        """Record all that helps with micro-batches: with `most` where too much is held anyhow."""
        chosen, parts = self._helpful(), self._micro_batches()
        if self._is_full(self._record(chosen)):
            number = self.what_if.num_samples or 0
            parts = [few for few in parts if number <= most * few[MICRO_BATCH]][-1:]
        return [*filter(None, (self._record(chosen, few) for few in parts))]

    def on_host(self, *, in_parts: bool, is_small: bool = False) -> Iterator[Variant]:
        """Record variants with something in host memory, beside everything that helps."""
        if OFFLOAD not in self._open or (self.what_if.step.device == "cpu" and not self._offload):
            return
        chosen = self._helpful()
        tried: set[str] = set()  # forms may become smaller meanwhile
        kinds = [self._offload] if self._offload else self._kinds_on_host(chosen)
        while True:
            forms = [self._form(kind, chosen, is_small=is_small) for kind in kinds]
            ways = [way for way in forms if way is not None]
            if in_parts:
                ways = [way | parts for way in ways[-2:] for parts in self._micro_batches()]
            new = [way for way in ways if repr(way) not in tried]
            if not new:
                return
            tried.add(repr(new[0]))
            found = self._record([c for c in chosen if c.argument not in new[0]], new[0])
            if found is not None:
                yield found

    def _kinds_on_host(self, chosen: Sequence[Candidate]) -> Sequence[str]:
        kinds = ON_HOST[1:] if self._is_full(self._record(chosen)) else ON_HOST
        sizes = [table.num_bytes for table in embedding_tables(self.what_if.table)]
        is_large = max(sizes, default=0) >= Offloading.min_table_bytes
        return kinds if is_large else kinds[:-1]  # the one before is the same

    # Whether what is there before a step is too much, whatever blocks save.
    def _is_full(self, variant: Variant | None) -> bool:
        if variant is None or variant.costs is None:
            return False
        held_bytes = variant.costs.held_bytes(self.kinds[:1] * self.num_blocks)
        return held_bytes > self.room * (1 + NEAR)

    def correct(self, variant: Variant, excess_bytes: int) -> None:
        """Learn by how much a whole step needs more on the host than was estimated."""
        if variant.moves_weights:
            form = form_of(variant.changes)
            self._excess[form] = max(excess_bytes, self._excess.get(form, 0))

    def without_each(
        self, variant: Variant, is_worth_it: Callable[[Mapping[str, Any]], bool]
    ) -> Iterator[Variant]:
        """Record a variant without each setting that a plan is better without."""
        beside = variant.beside
        on = self._on_in(variant)
        unwanted = [c for c in on if c.exactness.rank or not c.changes.keys().isdisjoint(FINAL)]
        unwanted.sort(key=lambda c: (c.is_advised_against, c.exactness.rank), reverse=True)
        for one in unwanted:
            for rest in self._less(on, one):
                changes = changes_of(rest, beside)
                is_small = self._weights_on_host(changes) <= self.host_budget_bytes
                if not is_small or not is_worth_it(changes):
                    continue
                found = self._record(rest, beside)
                if found is not None and found.changes != variant.changes:
                    yield found

    def in_other_parts(self, variant: Variant) -> list[Variant]:
        on = self._on_in(variant)
        whole = {n: v for n, v in variant.beside.items() if n != MICRO_BATCH}
        parts = ({}, *self._micro_batches(variant.exactness))
        return [*filter(None, (self._record(on, whole | few) for few in parts))]

    def _on_in(self, variant: Variant) -> list[Candidate]:
        changes = variant.changes.items() - variant.beside.items()
        return [c for c in self.options() if c.changes.items() <= changes]

    def predict(
        self, variant: Variant, kinds: Sequence[str], num_resident: int = 0
    ) -> MemoryPrediction | None:
        changes = variant.changes_with(kinds, num_resident)
        try:
            return self.what_if.predict(self.settings(changes), limit_s=self.left_s)
        except ImpossibleVariantError as error:
            self._note(error, changes)
            return None

    def _note(self, error: ImpossibleVariantError, changes: Mapping[str, Any]) -> None:
        if not error.is_expected:
            self.failures[", ".join(f"{n}={value!r}" for n, value in changes.items())] = str(error)

    def seconds(self, prediction: MemoryPrediction) -> float:
        return sum(step_seconds(prediction.work, self.rates).values())

    def _helpful(self) -> list[Candidate]:
        # Of several values of an argument the last one saves the most.
        chosen = list({c.argument: c for c in self.options()}.values())
        for one in list(chosen):
            with_it = self._record(chosen)
            if self._is_full(with_it):  # all of it is needed
                break
            without = self._record(leaving_out(chosen, one))
            if with_it is None:
                chosen = chosen if without is None else leaving_out(chosen, one)
            # Estimated from few blocks, which updates in backward may treat as one group.
            elif without and one.exactness.rank and not self._helps(with_it, without):
                chosen = leaving_out(chosen, one)
        if self._record(chosen) is None:  # more than one of them is impossible
            chosen = [one for one in chosen if self._record([one]) is not None]
        return chosen

    # Without a setting, or with a value of it that changes less, such as 8-bit state without that
    # of embeddings.
    def _less(self, chosen: Sequence[Candidate], one: Candidate) -> Iterator[list[Candidate]]:
        rest = leaving_out(chosen, one)
        yield rest
        same = [c for c in self.options() if c.argument == one.argument]
        for other in same[: same.index(one)] if one in same else []:
            yield [*rest, other]

    def _helps(self, with_it: Variant, without: Variant) -> bool:
        for kind in (KEEP, *self.kinds):
            kinds = [kind] * self.num_blocks
            (new, new_s), (old, old_s) = with_it.estimate(kinds), without.estimate(kinds)
            if new < SMALLER * old or new_s < FASTER * old_s:
                return True
        return False

    def options(self) -> list[Candidate]:
        """List single settings that may help, and that nobody has named."""
        return [
            one
            for one in self._all_options()
            if self.exactness.allows(one.exactness)
            and (self.is_last_resort or not one.is_advised_against)
            and one.argument not in _LEFT_ALONE
            and self._is_open(one)
        ]

    def _is_open(self, one: Candidate) -> bool:
        return all(self._may_set(name, value) for name, value in one.changes.items())

    def _all_options(self) -> list[Candidate]:
        what_if = self.what_if
        found = candidates_of(what_if, self.settings({}))
        found += [
            replace(one, name=_ALL_8BIT, changes={"optimizer": ALL_8BIT}, is_advised_against=True)
            for one in found
            if one.changes == {"optimizer": "8bit"}
        ]
        found = [c for c in found if c.changes.get("optimizer", "8bit") in ("8bit", ALL_8BIT)]
        if what_if.attention in (None, "sdpa"):
            found = [one for one in found if "attention" not in one.changes]
        # Weights in bfloat16 name the precision that they need; here it is a choice of its own.
        alone = [one for one in found if list(one.changes) == ["precision"]]
        if alone and self._may_set("precision", alone[0].changes["precision"]):
            found = [
                replace(c, changes={n: v for n, v in c.changes.items() if n != "precision"})
                if len(c.changes) > 1
                else c
                for c in found
            ]
        return found

    def _allows(self, changes: Mapping[str, Any], limit: Exactness | None = None) -> bool:
        limit, norm = limit or self.exactness, self._has_batch_norm
        is_wise = self.is_last_resort or not advised_against(changes, norm)
        return is_wise and all(map(limit.allows, all_exactness(changes, norm)))

    # On a CPU precision stays as it is.
    def _may_set(self, name: str, value: Any) -> bool:
        if name == "precision" and self.what_if.step.device == "cpu":
            return False
        given = self.what_if.step.settings.get(name)
        return name in self._open or given == value

    def _micro_batches(self, limit: Exactness | None = None) -> list[dict[str, Any]]:
        number = self.what_if.num_samples or 0
        if MICRO_BATCH not in self._open:
            return []
        sizes = dict.fromkeys(max(1, number >> n) for n in range(1, number.bit_length()))
        return [{MICRO_BATCH: n} for n in sizes if self._allows({MICRO_BATCH: n}, limit)]

    # The first for which the host has enough memory, or the last one.
    def _form(
        self, kind: Any, chosen: Sequence[Candidate], *, is_small: bool = False
    ) -> dict[str, Any] | None:
        forms = list(self._forms(kind, chosen))
        if self.is_smallest:
            return forms[-1]
        for form in forms[-1:] if is_small else forms:
            if self._needed_by(form, chosen) <= self.host_budget_bytes:
                return form
            self.is_host_short = True
        return None

    def _needed_by(self, form: Mapping[str, Any], chosen: Sequence[Candidate]) -> int:
        changes = changes_of(chosen, form)
        return self._weights_on_host(changes) + self._excess.get(form_of(changes), 0)

    def _forms(self, kind: Any, chosen: Sequence[Candidate]) -> Iterator[dict[str, Any]]:
        if what_of({OFFLOAD: kind}) == ACTIVATIONS:
            yield {OFFLOAD: kind}
            return
        names = {one.argument for one in chosen}
        form = {n: v if n in names else None for n, v in BESIDE_OFFLOAD.items()}
        form = {n: v for n, v in form.items() if n in self._open} | {OFFLOAD: kind}

        def may_set(name: str, value: Any) -> bool:
            is_new = name != OFFLOAD and (name not in FINAL or name not in names)
            return is_new and self._allows({name: value}) and self._may_set(name, value)

        yield from forms_on_host(form, may_set)

    def why_form(self, variant: Variant) -> str:
        """Say for which other form of things on the host there is not enough memory."""
        chosen, kind, short = self._helpful(), variant.beside.get(OFFLOAD), ""
        for form in [] if kind is None else self._forms(kind, chosen):
            if form.items() <= variant.beside.items():
                return short
            needed = self._needed_by(form, chosen)
            own = {n: v for n, v in variant.beside.items() if n not in (MICRO_BATCH, OFFLOAD)}
            names = ", ".join(f"{n}={v!r}" for n, v in own.items() if v != form.get(n))
            if needed > self.host_budget_bytes:
                short = (
                    f"{names}: without, weights and what belongs to them need "
                    f"{format_bytes(needed)} on the host, and `host_budget` is "
                    f"{format_bytes(int(self.host_budget_bytes))}"
                )
        return ""

    def _weights_on_host(self, changes: Mapping[str, Any]) -> int:
        return weights_on_host({**self.what_if.step.settings, **changes}, self.what_if.table)

    def _record(
        self, on: Sequence[Candidate], beside: Mapping[str, Any] | None = None
    ) -> Variant | None:
        beside = beside or {}
        changes = changes_of(on, beside)
        found = [Exactness.BITWISE, *(one.exactness for one in on)]
        found += all_exactness(beside, self._has_batch_norm)
        exactness = max(found, key=lambda exactness: exactness.rank)
        key = repr(sorted(changes.items()))
        if not self.exactness.allows(exactness):
            return None
        if key not in self._known:
            try:
                self._known[key] = self._make(changes, exactness, beside)
            except ImpossibleVariantError as error:
                self._known[key] = None
                self.is_cut_short = self.is_cut_short or self._left_to_record_s <= 0
                self._note(error, changes)
        return self._known[key]

    def _make(
        self, changes: Mapping[str, Any], exactness: Exactness, beside: Mapping[str, Any]
    ) -> Variant:
        def predict(settings: Mapping[str, Any]) -> MemoryPrediction:
            return self._blocks.what_if.predict(settings, limit_s=self._left_to_record_s)

        on_host = self._weights_on_host(changes)
        variant = Variant(changes, exactness, beside, weights_on_host=on_host)
        variant.not_advised = advised_against(changes, self._has_batch_norm)
        if not self.kinds:
            variant.prediction = predict(self.settings(variant.changes_with([])))
            variant.seconds = self.seconds(variant.prediction)
            variant.resident = self._resident_beside(variant)
            return variant
        blocks, is_chosen = self._blocks, OFFLOAD in beside
        more: dict[str, Any] = {"by_place": is_chosen or bool(what_of(self.what_if.step.settings))}
        if is_chosen:  # those that tell most come first
            more["first"] = [self.kinds[0], KEEP][:: 1 if self.slowest_s == math.inf else -1]
        if is_chosen and blocks.most_resident:
            variant.resident = Resident(blocks.most_resident, self._block_on_host(changes))
            more["has_resident"] = True
            more["size_on_host"] = blocks.block_size if variant.moves_weights else 0

        def record(kinds: Sequence[str]) -> MemoryPrediction:
            how = variant.changes_with(kinds, int("has_resident" in more))
            return predict(self.settings({**how, RECOMPUTED: value_of(kinds)}))

        least, number = self.kinds[0], self.num_blocks
        limits = least, number, self.room, self.slowest_s, self.host_budget_bytes
        try:
            for variant.shown, variant.costs in blocks.record(record, self.rates, **more):
                if is_chosen and variant.shown and variant.tells_enough(*limits):
                    break
        except ImpossibleVariantError:
            if variant.costs is None or not is_chosen or self._left_to_record_s > 0:
                raise
            self.is_cut_short = True
        return variant

    # Where each step is predicted whole: as if all that waits on the host were of blocks.
    def _resident_beside(self, variant: Variant) -> Resident | None:
        plain = self.unchanged() if variant.is_offloaded else None
        if plain is None or not (number := self.num_blocks):
            return None
        (needed, seconds), (most, least_s) = variant.estimate([]), plain.estimate([])
        each = max(1, (most - needed) // number), min(0.0, (least_s - seconds) / number)
        return Resident(number, self._block_on_host(variant.changes), each)

    def _block_on_host(self, changes: Mapping[str, Any]) -> int:
        blocks = self._blocks
        return self._weights_on_host(changes) * blocks.block_size // max(1, sum(blocks.sizes))
