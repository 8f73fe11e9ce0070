import functools
import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memsave import Exactness, InfeasiblePlanError
from lightning_memsave.api import make_what_if
from lightning_memsave.planning.constants import EQUALLY_FAST
from lightning_memsave.planning.plan_step import search_for
from lightning_memsave.planning.search import PlanSearch
from lightning_memsave.planning.variant import Variant
from lightning_memsave.planning.variants import Variants
from lightning_memsave.prediction.cuda.gpus import GPUS
from lightning_memsave.prediction.what_if import ImpossibleVariantError, WhatIf
from lightning_memsave.techniques.registry import ALL_8BIT
from tests.helpers import set_clock
from tests.planning.plans import (
    ALL,
    OPEN,
    PLANNED,
    RATES,
    all_plans,
    planned,
    search_of,
    what_if_of,
    with_nothing_on,
)

pytestmark = pytest.mark.slow

SHARES = (0.25, 0.4, 0.55, 0.7, 0.9)
_OFTEN = ("encoder", "no blocks")
_MORE = (pytest.mark.exhaustive, pytest.mark.slow)
MODELS = [pytest.param(name, marks=() if name in _OFTEN else _MORE) for name in PLANNED]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=_MORE)])
def test_the_plan_is_as_fast_as_the_best_of_all(name, device):
    everything = list(all_plans(name, device))
    search = search_of(name, device)
    plain = max(num_bytes for num_bytes, _, _ in everything)
    for share in SHARES:
        budget = int(share * plain)
        fitting = [seconds for num_bytes, seconds, _ in everything if num_bytes <= budget]
        if not fitting:
            with pytest.raises(InfeasiblePlanError) as failure:
                search.find(budget)
            assert failure.value.smallest.device_bytes > budget
            continue
        found = search.find(budget)
        assert found.plan.is_verified
        exact = {repr(sorted(c.items())): (b, s) for b, s, c in everything}
        chosen = {n: found.plan.settings[n] for n in everything[0][2]}
        num_bytes, seconds = exact[repr(sorted(chosen.items()))]
        assert num_bytes == found.plan.device_bytes <= budget
        plain_s = min(s for _, s, _ in everything)
        assert seconds - min(fitting) <= 1.01 * EQUALLY_FAST * plain_s, (share, found.plan)


def test_the_frontier_goes_down_and_the_ladder_holds_everything_else():
    search = search_of("encoder")
    plain = search.find(2**40).plan
    assert plain.settings["activation_checkpointing"] is None
    found = search.find(plain.device_bytes // 2)
    sizes = [plan.device_bytes for plan in found.frontier]
    ratios = [plan.time_ratio for plan in found.frontier]
    assert len(sizes) > 2
    assert sizes == sorted(sizes, reverse=True)
    assert ratios == sorted(ratios)
    assert found.plan in found.frontier
    assert found.fits(found.plan)
    assert not found.fits(found.frontier[0])
    ladder = search.ladder()
    assert found.plan in ladder
    assert [p.device_bytes for p in ladder] == sorted(
        (p.device_bytes for p in ladder), reverse=True
    )
    assert {p.settings["optimizer_in_backward"] for p in ladder} == {
        found.plan.settings["optimizer_in_backward"]
    }


def test_few_predictions_are_enough():
    search = search_of("bert", make=with_nothing_on)
    found = search.find(10**9)
    assert planned("bert").num_blocks == 8
    assert found.num_predictions <= 8


def test_state_in_fewer_bits_is_never_shown_as_a_cost():
    open_arguments = ("activation_checkpointing", "optimizer", "chunked_cross_entropy")
    search = search_of("large table", "cuda", open_arguments)
    plain = search.find(2**40).plan
    context_bytes = plain.prediction.context_bytes
    search.find(context_bytes + (plain.device_bytes - context_bytes) // 2)
    with pytest.raises(InfeasiblePlanError):  # 8-bit state of embeddings is the last resort
        search.find(1)

    def num_bits(candidate):
        changes = candidate.variant.changes
        return 32 if "optimizer" not in changes else 8 if changes["optimizer"] == ALL_8BIT else 16

    by_rest: dict[object, list[Any]] = {}
    for candidate in search._candidates:
        key = (candidate.variant.but_optimizer, candidate.kinds)
        by_rest.setdefault(key, []).append(candidate)
    compared = [sorted(alike, key=num_bits) for alike in by_rest.values() if len(alike) > 1]
    assert {num_bits(candidate) for alike in compared for candidate in alike} == {8, 16, 32}
    for alike in compared:
        sizes = [search._bytes(candidate) for candidate in alike]
        assert sizes == sorted(sizes), (alike[0].kinds, alike[0].variant.changes)


@pytest.mark.parametrize("argument", ["optimizer", "precision"])
def test_what_is_advised_against_is_planned_where_nothing_else_fits(argument):
    if argument == "optimizer":
        search = search_of("large table", "cuda", ("activation_checkpointing", "optimizer"))
    else:  # the T4 has no bfloat16
        off = {**dict.fromkeys(ALL - {"precision", "activation_checkpointing"}), "offload": None}
        batch = torch.ones(2048, 64, 32)
        what_if = make_what_if(planned("encoder").model, batch, settings=off, gpu="T4")
        search = search_for(what_if, Exactness.APPROXIMATE)
    with pytest.raises(InfeasiblePlanError) as failure:
        search.find(1)
    least = failure.value.smallest
    assert [*least.not_advised] == [argument]
    margin_bytes = 256 * 2**20 if argument == "precision" else 0  # beside a named GPU
    found = search.find(least.device_bytes + margin_bytes)
    assert found.plan.settings[argument]
    assert found.plan.not_advised == least.not_advised
    assert f"Nothing else fits: `{argument}=" in " ".join(str(found).split())
    unwise = [bool(plan.not_advised) for plan in found.frontier]
    assert unwise == sorted(unwise)
    advised = [plan for plan in found.frontier if not plan.not_advised]
    assert not any(map(found.fits, advised))
    more = search.find(int(1.1 * advised[-1].device_bytes) + 2 * found.margin_bytes)
    assert not any(plan.not_advised for plan in more.frontier)
    assert not more.plan.not_advised


def search_in_parts(num_samples):
    layers = [nn.TransformerEncoderLayer(64, 2, 256, batch_first=True) for _ in range(3)]
    off = {**dict.fromkeys(ALL - {"micro_batch_size", "activation_checkpointing"})}
    settings = {**off, "precision": "32-true", "offload": None}
    what_if = make_what_if(
        nn.Sequential(*layers), torch.ones(num_samples, 64, 64), settings=settings, device="cpu"
    )
    return search_for(what_if, Exactness.ROUNDING)


def test_a_budget_that_is_far_too_small_is_refused_in_few_predictions():
    search = search_in_parts(1024)
    with pytest.raises(InfeasiblePlanError) as failure:
        search.find(2**20)
    assert failure.value.smallest.micro_batch_size == 16
    assert search._variants.num_predictions <= 6  # of ten sizes, one


def test_the_least_that_a_refusal_names_is_the_least_of_any_budget():
    """Also of one that is below what is there before a step."""
    search = search_in_parts(16)
    with pytest.raises(InfeasiblePlanError, match="The least found is ") as failure:
        search.find(2**20)
    least = failure.value.smallest
    assert least.micro_batch_size == 1
    assert search.find(least.device_bytes).plan.device_bytes == least.device_bytes
    with pytest.raises(InfeasiblePlanError) as failure:
        search.find(least.device_bytes - 1)
    assert failure.value.smallest == least


def test_the_budget_that_a_refusal_names_is_enough():
    variants = Variants(what_if_of("no blocks"), OPEN, Exactness.BITWISE, RATES)
    search = PlanSearch(variants, margin_of=lambda size: size - size // 8)
    with pytest.raises(InfeasiblePlanError) as failure:
        search.find(1)
    least_bytes = failure.value.smallest.device_bytes
    found = re.search(r'`budget="(\d+)MiB"`', str(failure.value))
    named = int(found[1]) * 2**20
    assert named - 2**20 < 8 * least_bytes <= named
    assert search.find(named).plan.device_bytes <= named // 8


def test_no_time_is_not_called_infeasible():
    what_if = what_if_of("encoder")
    search = PlanSearch(Variants(what_if, OPEN, Exactness.APPROXIMATE, RATES, limit_s=1e-3))
    with pytest.raises(TimeoutError, match="allow it more seconds"):
        search.find(10**9)


def test_without_time_for_whole_predictions_a_plan_is_estimated(monkeypatch):
    now_s = [0.0]
    set_clock(monkeypatch, lambda: now_s[0])
    variants = Variants(what_if_of("bert"), OPEN, Exactness.BITWISE, RATES, limit_s=100)
    everything = variants.all

    def slow() -> list[Variant]:
        found = everything()
        now_s[0] = 101.0
        return found

    monkeypatch.setattr(variants, "all", slow)
    budget = int(0.9 * what_if_of("bert").base().device_bytes)
    found = PlanSearch(variants).find(budget)
    assert not found.plan.is_verified
    assert found.fits(found.plan)
    search = PlanSearch(variants)
    with pytest.raises(TimeoutError):  # nothing is estimated to fit, and nothing is sure
        search.find(budget // 9)
    least = search.least(budget // 9).plan
    assert least.device_bytes == min(plan.device_bytes for plan in found.frontier)
    assert least in search.ladder()


def test_without_time_for_any_prediction_a_plan_recomputes_all_blocks():
    what_if = what_if_of("bert")
    search = search_for(what_if, Exactness.BITWISE, limit_s=1e-9)
    with pytest.raises(TimeoutError):
        search.find(10**9)
    plan = search.least(10**9).plan
    assert not plan.is_verified
    assert plan.settings["activation_checkpointing"] == "nested"
    assert plan.exactness == "bitwise"


def test_what_the_model_raises_comes_through():
    what_if = what_if_of("encoder")
    what_if.step = replace(what_if.step, batch=torch.ones(8, 32, 31))
    search = PlanSearch(Variants(what_if, OPEN, Exactness.APPROXIMATE, RATES))
    with pytest.raises(Exception, match="31"):
        search.find(10**9)


class WholeBatches(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if len(input) < 64:
            raise ValueError(f"I want 64 samples, and got {len(input)}")
        return super().forward(input)


def test_a_refusal_says_what_could_not_be_tried_as_the_model_failed():
    what_if = make_what_if(WholeBatches(64, 8), torch.ones(64, 64), device="cpu")
    why = r"`.*micro_batch_size=8` \(ValueError: I want 64 samples, and got 8\)"
    with pytest.raises(InfeasiblePlanError, match=f"Not tried, as the model raised .*: {why}"):
        search_for(what_if, Exactness.ROUNDING).find(1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"micro_batch_size": 4}, "rounding"),
        ({"precision": "32-true"}, "bitwise"),
        ({}, "bitwise"),
    ],
    ids=str,
)
def test_the_exactness_of_a_plan_is_that_of_all_that_is_on(settings, expected):
    what_if = what_if_of("encoder", preset=None, **settings)
    found = search_for(what_if, Exactness.BITWISE).find(10**9)
    assert found.plan.exactness == expected


def test_parameters_are_updated_in_backward_only_where_that_is_needed():
    search = search_of("encoder")
    plain = search.find(2**40).plan
    assert plain.settings["optimizer_in_backward"] is None
    with pytest.raises(InfeasiblePlanError) as failure:
        search.find(1)
    needed = search.find(failure.value.smallest.device_bytes).plan
    assert needed.settings["optimizer_in_backward"]


def test_gpus_with_equal_kernels_share_predictions():
    def on(name: str) -> WhatIf:
        what_if = what_if_of("encoder", "cuda")
        return replace(what_if, step=replace(what_if.step, gpu=GPUS[name]))

    first = search_for(on("RTX-3060-12GB"), Exactness.BITWISE)
    first.find(2**30)
    second, alone = first.on(GPUS["RTX-4090"]), search_for(on("RTX-4090"), Exactness.BITWISE)
    assert second._variants.rates == alone._variants.rates != first._variants.rates
    found, expected = second.find(2**30), alone.find(2**30)
    assert found.frontier == expected.frontier
    assert found.num_predictions < expected.num_predictions


def test_a_prediction_that_ran_out_of_time_may_have_more_of_it_later():
    what_if = what_if_of("encoder")
    with pytest.raises(ImpossibleVariantError, match="Timeout"):
        what_if.predict({"activation_checkpointing": "all"}, limit_s=0.0)
    assert what_if.predict({"activation_checkpointing": "all"}).peak_bytes > 0


def test_the_ladder_has_smaller_micro_batches_of_any_plan():
    search = search_of("no blocks", open_arguments=(*OPEN, "micro_batch_size", "optimizer"))
    plain = search.find(2**40).plan
    plan = search.find(plain.device_bytes * 9 // 10).plan
    size = plan.settings["micro_batch_size"]
    assert size > 1
    sizes = {one.settings["micro_batch_size"] for one in search.ladder()}
    assert {"auto", size, 1} <= sizes


def test_a_search_that_runs_out_of_time_takes_the_best_plan_by_then(monkeypatch):
    budget = int(0.9 * what_if_of("bert").base().device_bytes)
    numbers = []
    for now_s in (0, 100):  # by when the first variant is recorded
        so_far_s = itertools.chain([0], itertools.repeat(now_s))
        ask = functools.partial(next, so_far_s)
        monkeypatch.setattr(Variants, "seconds_so_far", property(lambda variants, ask=ask: ask()))  # type: ignore[misc]
        variants = Variants(what_if_of("bert"), OPEN, Exactness.BITWISE, RATES, limit_s=120)
        found = PlanSearch(variants).find(budget)
        assert found.plan.is_verified
        assert found.fits(found.plan)
        numbers.append(found.num_predictions)
    assert numbers[0] > numbers[1]
    with pytest.raises(TimeoutError, match="allow it more seconds"):  # it may be feasible
        PlanSearch(variants).find(budget // 9)
