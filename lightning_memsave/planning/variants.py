"""Variants of a step for the planner: what is on beside recomputation, each recorded once."""

import copy
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_memsave.core.blocks import Block, BlockSelector, find_blocks
from lightning_memsave.core.technique import Exactness
from lightning_memsave.explain.dominant_parts import dominant_embedding
from lightning_memsave.explain.what_if import ImpossibleVariantError, WhatIf
from lightning_memsave.planning.block_costs import KEEP, BlockCosts, Run, can_be_cut, runs_of
from lightning_memsave.planning.candidates import Candidate, CurrentSettings, single_candidates
from lightning_memsave.planning.step_time import Rates, step_time
from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.techniques.activation_checkpointing.technique import (
    inplace_problems,
    parts_of,
)
from lightning_memsave.techniques.registry import entries

RECOMPUTED = "activation_checkpointing"
MICRO_BATCH = "micro_batch_size"
_ALL_8BIT = "8-bit optimizer, also for embeddings"
_FINAL = ("optimizer_in_backward",)  # it updates parameters before the batch has passed
_LEFT_ALONE = (RECOMPUTED, MICRO_BATCH, "eval_micro_batch_size")
# Of a run of equal blocks so many are recorded, in this order.
_RECORDED = ("nested", "full", "selective", KEEP)
# Of the time that is allowed: it is left for predictions of whole plans.
_FOR_PLANS = 0.3
_FASTER, _SMALLER, _MUCH_FASTER = 0.99, 0.999, 0.8


def value_of(kinds: Sequence[str]) -> Any:
    """Write how blocks are recomputed as the argument `activation_checkpointing`.

    Args:
        kinds: Of each block, `KEEP` for the last ones only.

    Returns:
        The value.

    Example:
        >>> value_of(["full", "full", "keep"]), value_of(["nested", "full", "selective", "keep"])
        (2, 'nested:1,full:1,selective:1')
    """
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds) if kind != KEEP}
    if not counts:
        return None
    (kind, number), *others = counts.items()
    if not others and number == len(kinds):
        return "all" if kind == "full" else kind
    if not others and kind == "full":
        return number
    return ",".join(f"{kind}:{number}" for kind, number in counts.items())


@dataclass(eq=False)  # the search compares candidates by their variant
class Variant:
    """A step with some settings on, for any choice of recomputed blocks.

    Args:
        changes: Arguments of `MemSaveCallback`.
        exactness: Of the least exact of them.
        costs: Of its blocks; ``None`` if nothing is chosen about them.
        prediction: Of the step as it is, where there is no choice.
        seconds: Estimated, of that prediction.
    """

    changes: Mapping[str, Any]
    exactness: Exactness
    costs: BlockCosts | None = None
    prediction: MemoryPrediction | None = None
    seconds: float = 0.0

    def estimate(self, kinds: Sequence[str]) -> tuple[int, float]:
        """Estimate bytes on the device and seconds."""
        if self.costs is None:
            assert self.prediction is not None, "one of the two is there"
            return self.prediction.device_bytes, self.seconds
        peak_bytes, seconds = self.costs.peak_and_seconds(kinds)
        return peak_bytes + self.costs.overhead_bytes, seconds


class Variants:
    """Records variants of a step.

    Args:
        what_if: Predicts them whole.
        open_arguments: Arguments of `MemSaveCallback` that may be chosen.
        exactness: How far results may move.
        rates: What the device reaches.
        limit_s: Seconds after which nothing more is recorded.
    """

    def __init__(
        self,
        what_if: WhatIf,
        open_arguments: Collection[str],
        exactness: Exactness,
        rates: Rates,
        limit_s: float = math.inf,
    ) -> None:
        self.what_if = what_if
        self.rates = rates
        self.exactness = exactness
        """The most that results may move."""
        self._start_s = time.monotonic()
        self._limit_s = limit_s
        self._open = set(open_arguments)
        self._off: dict[str, Any] = {
            e.argument: None for e in entries() if e.argument in self._open
        } | {name: "auto" for name in (MICRO_BATCH, "eval_micro_batch_size") if name in self._open}
        if "early_release" in self._open:  # costs nothing
            self._off["early_release"] = True
        self._num_before = 0
        self.is_cut_short = False
        """Whether time was too short for some variants."""
        self._known: dict[str, Variant | None] = {}
        self.runs: list[Run] = []
        self.kinds: tuple[str, ...] = ()
        """How blocks may be recomputed, the one with the least memory first."""
        self._names: list[str] = []  # of the blocks that are recorded
        self._sizes: list[int] = []
        self._copies = what_if
        if RECOMPUTED in self._open:
            self._find_blocks()

    @property
    def num_blocks(self) -> int:
        """Blocks of the model about which there is a choice."""
        return sum(len(run.names) for run in self.runs)

    @property
    def _num_samples(self) -> int:
        return self.what_if.num_samples or 0

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self._limit_s - self.seconds_so_far

    @property
    def _left_to_record_s(self) -> float:
        return (1 - _FOR_PLANS) * self._limit_s - self.seconds_so_far

    @property
    def seconds_so_far(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._start_s

    @property
    def num_predictions(self) -> int:
        """How many steps were predicted, copies with fewer blocks among them."""
        copies = 0 if self._copies is self.what_if else self._copies.num_predictions
        return self.what_if.num_predictions + copies - self._num_before

    def on(self, gpu: Gpu, rates: Rates, limit_s: float = math.inf) -> "Variants":
        """Share what was predicted with the same variants on another GPU with equal kernels.

        Args:
            gpu: That GPU.
            rates: What it reaches.
            limit_s: Seconds after which nothing more is recorded for it.

        Returns:
            Its variants.
        """

        def moved(what_if: WhatIf) -> WhatIf:
            return replace(what_if, step=replace(what_if.step, gpu=gpu))

        other = copy.copy(self)
        other.what_if = moved(self.what_if)
        is_cut = self._copies is not self.what_if
        other._copies = moved(self._copies) if is_cut else other.what_if
        other.rates, other._known, other.is_cut_short = rates, {}, False
        other._start_s, other._limit_s = time.monotonic(), limit_s
        other._num_before += self.num_predictions
        return other

    def settings(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Complete changes to arguments of `MemSaveCallback` that leave nothing to a stack."""
        settings = {**self._off, **changes}
        for entry in entries():  # their details are refused beside what is off
            if entry.argument in self._open and settings[entry.argument] is None:
                settings |= {n: v for n, v in entry.details.items() if n not in changes}
        return settings

    def unchanged(self) -> Variant | None:
        """Record the step with nothing on."""
        return self._record([], None)

    def all(self) -> list[Variant]:
        """Record the variants that are worth a choice.

        Returns:
            Everything on that helps; this with smaller and smaller micro-batches; this without each
            of its settings; what is more exact; and nothing on.
        """
        chosen = self._helpful()
        found = [self.unchanged(), self._record(chosen, None)]
        found += [self._record(_without(chosen, one), None) for one in chosen]
        times = [v.estimate([KEEP] * self.num_blocks)[1] for v in found[:2] if v is not None]
        if times[-1] > _MUCH_FASTER * times[0]:  # else what is more exact is slower
            for limit in (Exactness.BITWISE, Exactness.ROUNDING):
                rest = [one for one in chosen if limit.allows(Exactness(one.exactness))]
                found.append(self._record(rest, None))
        for size in self._micro_batches():
            found.append(self._record(chosen, size))
        by_changes = {repr(v.changes): v for v in found if v is not None}
        return list(by_changes.values())

    def without_each(
        self, variant: Variant, is_worth_it: Callable[[Mapping[str, Any]], bool]
    ) -> Iterator[Variant]:
        """Record a variant without each setting that a plan is better without.

        Args:
            variant: What there is so far.
            is_worth_it: Says of the changes that are left whether to record them.

        Yields:
            What is left without one that changes results, the least exact first, and then without
            one after which a batch that ran out of memory cannot be repeated.
        """
        size = variant.changes.get(MICRO_BATCH)
        on = [c for c in self._options() if c.changes.items() <= variant.changes.items()]
        unwanted = [c for c in on if _of(c).rank or not c.changes.keys().isdisjoint(_FINAL)]
        for one in sorted(unwanted, key=lambda c: _of(c).rank, reverse=True):
            for rest in self._less(on, one):
                if not is_worth_it(_changes(rest, size)):
                    continue
                found = self._record(rest, size)
                if found is not None and len(found.changes) < len(variant.changes):
                    yield found

    def in_other_parts(self, variant: Variant) -> list[Variant]:
        """Record a variant with whole batches, and if it is as inexact with any micro-batches."""
        on = [c for c in self._options() if c.changes.items() <= variant.changes.items()]
        sizes = self._micro_batches() if variant.exactness.allows(Exactness.ROUNDING) else []
        found = [self._record(on, size) for size in (None, *sizes)]
        return [variant for variant in found if variant is not None]

    def predict(self, variant: Variant, kinds: Sequence[str]) -> MemoryPrediction | None:
        """Predict a plan whole; ``None`` if the model cannot do it, or there is no time left."""
        changes = dict(variant.changes)
        if variant.costs is not None:
            changes[RECOMPUTED] = value_of(kinds)
        try:
            return self.what_if.predict(self.settings(changes), limit_s=self.left_s)
        except ImpossibleVariantError:
            return None

    def seconds(self, prediction: MemoryPrediction) -> float:
        """Estimate how long a predicted step takes."""
        return step_time(prediction.work, self.rates).seconds

    def _find_blocks(self) -> None:
        step = self.what_if.step
        selectors = step.settings.get("blocks")
        if isinstance(step.model, nn.Module):
            self._use_blocks(step.model, selectors)
            return
        with fake_tensors():
            assert step.model is not None, "checked before"
            module = step.model()
            if callable(configure := getattr(module, "configure_model", None)):
                configure()
        self._use_blocks(module, selectors)

    def _use_blocks(
        self, model: nn.Module, selectors: BlockSelector | Sequence[BlockSelector] | None
    ) -> None:
        blocks = find_blocks(model, selectors)
        if not blocks:
            return
        self.runs = runs_of(model, blocks)
        self._names = [block.name for block in blocks]
        self._sizes = [parameter.numel() for parameter in model.parameters()]
        self.kinds = tuple(kind for kind in ("nested", "full", "selective") if _can(kind, blocks))
        most = len(_RECORDED)
        long = [r for r in self.runs if len(r.names) > most and can_be_cut(model, r)]
        if not long:
            return

        def cut(copy: nn.Module) -> None:
            for run in long:
                run.cut(copy, most)

        step = replace(self.what_if.step, change=cut)
        if self.what_if.step.model is not model and not hasattr(model, "configure_model"):
            cut(model)  # built here on fake tensors: building all blocks each time takes long
            step = replace(self.what_if.step, model=model)
        self._copies = replace(self.what_if, step=step, _known={})
        self._names = [
            name for run in self.runs for name in (run.names[:most] if run in long else run.names)
        ]
        if self.unchanged() is None:  # it counts its blocks
            self._copies, self._names = self.what_if, [block.name for block in blocks]
            self._known.clear()

    def _helpful(self) -> list[Candidate]:
        found = self._options()
        # Of several values of an argument the last one saves the most.
        chosen = list({_argument(c): c for c in found}.values())
        for one in list(chosen):
            with_it, without = self._record(chosen, None), self._record(_without(chosen, one), None)
            if with_it is None:
                chosen = chosen if without is None else _without(chosen, one)
            # Estimated from few blocks, which updates in backward may treat as one group.
            elif without and _of(one).rank and not self._helps(with_it, without):
                chosen = _without(chosen, one)
        if self._record(chosen, None) is None:  # more than one of them is impossible
            chosen = [one for one in chosen if self._record([one], None) is not None]
        return chosen

    # Without a setting, or with a value of it that changes less, such as 8-bit state without that
    # of embeddings.
    def _less(self, chosen: Sequence[Candidate], one: Candidate) -> Iterator[list[Candidate]]:
        rest = _without(chosen, one)
        yield rest
        for other in self._options():
            if other.changes.items() < one.changes.items():
                yield [*rest, other]

    def _helps(self, with_it: Variant, without: Variant) -> bool:
        for kinds in self._extremes():
            (new, new_s), (old, old_s) = with_it.estimate(kinds), without.estimate(kinds)
            if new < _SMALLER * old or new_s < _FASTER * old_s:
                return True
        return False

    def _extremes(self) -> list[list[str]]:
        return [[kind] * self.num_blocks for kind in (KEEP, *self.kinds)]

    def _options(self) -> list[Candidate]:
        what_if = self.what_if
        step = what_if.step.with_settings(self.settings({}))
        now = CurrentSettings(
            step.effective_settings,
            step.precision,
            what_if.gpu is None or what_if.gpu.has_bf16,
            self._num_samples,
            dominant_embedding(what_if.table),
            what_if.overflows,
        )
        found = single_candidates(now)
        found += [
            replace(one, name=_ALL_8BIT, changes={**one.changes, "force_8bit": ("*",)})
            for one in found
            if one.changes == {"optimizer": "8bit"}
        ]
        found = [c for c in found if c.changes.get("force_8bit", ("*",)) == ("*",)]
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
        return [
            one
            for one in found
            if self.exactness.allows(Exactness(one.exactness))
            and _argument(one) not in _LEFT_ALONE
            and all(self._may_set(name, value) for name, value in one.changes.items())
        ]

    # On a CPU precision stays as it is.
    def _may_set(self, name: str, value: Any) -> bool:
        if name == "precision" and self.what_if.device == "cpu":
            return False
        given = self.what_if.step.settings.get(name)
        if name == "force_8bit":
            return "optimizer" in self._open and not given
        return name in self._open or given == value

    def _micro_batches(self) -> list[int]:
        number = self._num_samples
        if MICRO_BATCH not in self._open or not self.exactness.allows(Exactness.ROUNDING):
            return []
        return list(dict.fromkeys(max(1, number >> n) for n in range(1, number.bit_length())))

    def _record(self, on: Sequence[Candidate], size: int | None) -> Variant | None:
        changes = _changes(on, size)
        found = [Exactness.BITWISE, *map(_of, on)]
        if size is not None:
            found.append(Exactness.ROUNDING)
        exactness = max(found, key=lambda exactness: exactness.rank)
        key = repr(sorted(changes.items()))
        if key not in self._known:
            try:
                self._known[key] = self._make(changes, exactness)
            except ImpossibleVariantError:
                self._known[key] = None
                self.is_cut_short = self.is_cut_short or self._left_to_record_s <= 0
        return self._known[key]

    def _make(self, changes: Mapping[str, Any], exactness: Exactness) -> Variant:
        def predict(settings: Mapping[str, Any]) -> MemoryPrediction:
            return self._copies.predict(settings, limit_s=self._left_to_record_s)

        if not self.kinds:
            prediction = predict(self.settings(changes))
            seconds = self.seconds(prediction)
            return Variant(changes, exactness, prediction=prediction, seconds=seconds)
        recorded, names = [], self._names
        for kinds in self._assignments(len(names)):
            settings = self.settings({**changes, RECOMPUTED: value_of(kinds)})
            prediction = predict(settings)
            recorded.append((dict(zip(names, kinds, strict=True)), prediction))
        costs = BlockCosts(self.runs, recorded, self._sizes, self.rates)
        return Variant(changes, exactness, costs)

    # Of equal blocks one step shows as many kinds as there are blocks.
    def _assignments(self, number: int) -> list[list[str]]:
        kinds = [kind for kind in _RECORDED if kind in (*self.kinds, KEEP)]
        if len(self.runs) > 1:
            return [[kind] * number for kind in kinds]
        shown = [kinds[start : start + number] for start in range(0, len(kinds), number)]
        return [some + [KEEP] * (number - len(some)) for some in shown]


def _can(kind: str, blocks: Sequence[Block]) -> bool:
    if kind == "nested":
        return bool(parts_of(blocks))
    return kind == "full" or not inplace_problems(blocks)


def _of(one: Candidate) -> Exactness:
    return Exactness(one.exactness)


def _argument(one: Candidate) -> str:
    return next(iter(one.changes))


def _without(chosen: Sequence[Candidate], one: Candidate) -> list[Candidate]:
    return [c for c in chosen if _argument(c) != _argument(one)]


def _changes(on: Sequence[Candidate], size: int | None) -> dict[str, Any]:
    changes = {name: value for one in on for name, value in one.changes.items()}
    return changes if size is None else {**changes, MICRO_BATCH: size}
