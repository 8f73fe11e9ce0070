"""Plans that put something into the memory of the host, where nothing else fits or is as fast."""

import copy
import functools
import itertools
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from lightning_memsave import Exactness, InfeasiblePlanError, predict_memory
from lightning_memsave.api import make_what_if
from lightning_memsave.errors import IncompatibleError
from lightning_memsave.planning.constants import EQUALLY_FAST
from lightning_memsave.planning.plan import Plan
from lightning_memsave.planning.search import PlanSearch
from lightning_memsave.planning.variant import Estimate
from lightning_memsave.planning.variants import Variants
from lightning_memsave.techniques.registry import ALL_8BIT
from lightning_memsave.units import MIB
from tests.planning.plans import RATES

# Predictions of many plans take long.
pytestmark = pytest.mark.slow

OPEN = ("activation_checkpointing", "offload")
NUM_BLOCKS = 7


@functools.cache
def model() -> Any:
    return gpt2(NUM_BLOCKS)


def gpt2(num_blocks: int) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=256, n_layer=num_blocks, n_head=4, n_positions=64, vocab_size=300, bos_token_id=0,
        eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def tokens(num_samples: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(num_samples, 64, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def variants_of(
    open_arguments=OPEN,
    exactness=Exactness.ROUNDING,
    num_samples=16,
    device="cuda",
    rates=RATES,
    **settings,
):
    off = dict.fromkeys({*OPEN, "micro_batch_size"} - {*open_arguments})
    what_if = make_what_if(model(), tokens(num_samples), settings=off | settings, device=device)
    return Variants(what_if, open_arguments, exactness, rates)


@functools.cache
def recorded() -> Variants:
    variants = variants_of()
    assert variants.unchanged() is not None
    assert len([*variants.on_host(in_parts=False)]) == 2  # no embedding is large
    return variants


def with_host(num_bytes):
    variants = copy.copy(recorded())
    variants._excess = {}  # what another search has learned
    variants.host_budget_bytes = num_bytes
    return PlanSearch(variants)


def block_on_host():
    return 16 * sum(p.numel() for p in model().transformer.h[0].parameters())


def budget_of(share):
    """Leave a share of what a step needs without any settings, beside the CUDA context."""
    unchanged = recorded().what_if.base()
    context_bytes = unchanged.context_bytes
    return context_bytes + int(share * (unchanged.device_bytes - context_bytes))


@pytest.mark.parametrize("recomputed", ["selective", "keep", "full"])
@pytest.mark.parametrize("num_resident", [0, 3])
def test_what_is_composed_of_few_blocks_is_what_is_predicted_of_all(recomputed, num_resident):
    kinds = sorted([recomputed] * 4 + ["full"] * 3, key=("full", "selective", "keep").index)
    for variant in recorded().on_host(in_parts=False):
        whole = recorded().predict(variant, kinds, num_resident)
        assert whole is not None
        peak_bytes, seconds = variant.costs.peak_and_seconds(kinds, num_resident)
        assert peak_bytes == pytest.approx(whole.peak_bytes, rel=0.02)
        assert seconds == pytest.approx(recorded().seconds(whole), rel=0.13)
        on_host = variant.host_bytes(kinds, num_resident)
        assert on_host == pytest.approx(whole.peak.host_bytes, abs=8 * MIB)


@pytest.mark.parametrize("kinds", [("full", "keep"), ("selective", "keep")])
def test_two_blocks_may_differ(kinds):
    variants = Variants(
        make_what_if(gpt2(2), tokens(16), settings={"micro_batch_size": None}, device="cuda"),
        *(OPEN, Exactness.BITWISE, RATES),
    )
    assert variants.unchanged() is not None
    for variant in variants.on_host(in_parts=False):
        whole = variants.predict(variant, kinds)
        peak_bytes, _ = variant.costs.peak_and_seconds(kinds)
        assert peak_bytes == pytest.approx(whole.peak_bytes, rel=0.02)


def test_a_block_on_the_device_needs_its_bytes_there_and_saves_time():
    *_, variant = recorded().on_host(in_parts=False)
    estimates = [Estimate.of(variant, ("full",) * NUM_BLOCKS, n) for n in range(NUM_BLOCKS - 1)]
    block = block_on_host()
    for one, more in itertools.pairwise(estimates):
        assert one.host_bytes - more.host_bytes == pytest.approx(block, rel=0.01)
        assert more.num_bytes - one.num_bytes > block // 2  # of gradients there are two anyway
    work = [recorded().predict(variant, ["full"] * NUM_BLOCKS, n).work for n in (0, 5)]
    moved = [sum(k.num_bytes * n for k, n in w if k.kind == "from_host") for w in work]
    assert moved[1] < 0.5 * moved[0]


# With rates of a GPU whose host is slow: copies and updates take most of a step.
def test_a_plan_fills_the_device_with_blocks():
    slow = replace(RATES, host_bytes=RATES.host_bytes / 20, host_memory_bytes=1e9)
    variants = copy.copy(recorded())
    variants.rates, variants._known = slow, {}
    budget = budget_of(0.4)
    found = PlanSearch(variants).find(budget).plan
    number = found.settings["offload"].resident
    assert number > 0
    assert found.is_verified
    assert found.device_bytes <= budget
    changes = {**found.settings}
    more = changes | {"offload": replace(changes["offload"], resident=number + 1)}
    assert variants.what_if.predict(more).device_bytes > budget
    none = changes | {"offload": replace(changes["offload"], resident=0)}
    least = variants.what_if.predict(none)
    assert least.device_bytes < found.device_bytes
    assert found.prediction is not None
    assert variants.seconds(found.prediction) < variants.seconds(least)


def test_is_faster_than_plans_without_or_fits_where_none_does():
    search, plain = PlanSearch(recorded()), PlanSearch(variants_of(OPEN[:1]))
    wanted = 0
    for percent in (30, 40, 50, 60, 80, 100):
        budget = budget_of(percent / 100)
        try:
            found = search.find(budget).plan
        except InfeasiblePlanError:
            assert not wanted, "a smaller budget was enough"
            continue
        assert found.is_verified
        assert found.device_bytes <= budget
        assert (found.host_bytes > 0) == (found.settings["offload"] is not None)
        wanted += found.settings["offload"] is not None
        try:
            without = plain.find(budget).plan
        except InfeasiblePlanError:
            continue
        assert found.time_ratio <= without.time_ratio * (1 + EQUALLY_FAST)
    assert wanted > 1


def test_state_in_8_bits_is_on_a_host_that_takes_long_for_whole_state():
    rates = replace(RATES, host_memory_bytes=RATES.host_memory_bytes / 100)

    def find(*names: str) -> Plan:
        found = variants_of((*OPEN, *names), Exactness.APPROXIMATE, 1, rates=rates)
        return PlanSearch(found).find(572 * MIB).plan

    whole, small = find(), find("optimizer")
    assert {whole.settings["offload"], small.settings["offload"]} == {"parameters+activations"}
    assert small.settings["optimizer"] == "8bit"
    assert small.time_ratio < 0.5 * whole.time_ratio


def test_is_not_looked_at_where_the_rest_is_as_fast():
    found = PlanSearch(variants_of()).find(2**40)
    assert found.plan.settings["offload"] is None
    assert found.num_predictions == PlanSearch(variants_of(OPEN[:1])).find(2**40).num_predictions


def test_what_the_host_has_is_a_budget_too():
    num_bytes = 16 * sum(parameter.numel() for parameter in model().parameters())
    found = with_host(4 * num_bytes).find(budget_of(0.4))
    assert 0.9 * num_bytes < found.plan.host_bytes <= 4 * num_bytes
    assert "on the host, " in " ".join(str(found).split())
    with pytest.raises(InfeasiblePlanError, match=r'`host_budget="\d+MiB"` if the host has it'):
        with_host(num_bytes // 2).find(budget_of(0.4))


@pytest.mark.parametrize("share", [0.3, 2])
def test_activations_count_towards_the_budget_of_the_host(share):
    first = next(recorded().on_host(in_parts=False))
    assert first.changes == {"offload": "activations"}
    limit = share * first.host_bytes(["keep"] * NUM_BLOCKS)
    found = with_host(limit).find(budget_of(0.7)).plan
    assert found.host_bytes <= limit
    assert found.host_bytes > 0 or share < 1


def test_a_host_rounds_updates_as_a_gpu_does_not():
    offered = variants_of(exactness=Exactness.BITWISE).on_host(in_parts=False)
    assert [variant.changes["offload"] for variant in offered] == ["activations"]
    kinds = {v.changes["offload"]: v.exactness for v in recorded().on_host(in_parts=False)}
    assert kinds.pop("activations") is Exactness.BITWISE
    assert set(kinds.values()) == {Exactness.ROUNDING}


def test_nothing_waits_on_a_host_that_trains_itself():
    assert not [*variants_of(device="cpu").on_host(in_parts=False)]


@pytest.mark.exhaustive
def test_parts_are_for_when_whole_batches_do_not_fit():
    search = PlanSearch(variants_of((*OPEN, "micro_batch_size"), num_samples=2))
    with pytest.raises(InfeasiblePlanError) as failure:
        search.find(MIB)
    tried = {
        (v.changes.get("offload"), v.changes.get("micro_batch_size")) for v in search._by_variant
    }
    assert {size for offload, size in tried if offload == "parameters+activations"} == {None, 1}
    assert failure.value.smallest.settings["offload"].startswith("parameters")


def test_a_master_copy_takes_the_place_of_rounded_weights():
    variants = variants_of(
        (*OPEN[1:2], "low_precision_weights", "optimizer"),
        Exactness.APPROXIMATE,
        precision="bf16-mixed",
    )
    first, second = itertools.islice(variants.on_host(in_parts=False), 2)
    kept, moved = first.changes, second.changes
    assert (kept["offload"], moved["offload"]) == ("activations", "parameters+activations")
    assert (kept["low_precision_weights"], kept["optimizer"]) == ("stochastic", "8bit")
    assert (moved["low_precision_weights"], moved["optimizer"]) == ("master", None)


_MASTER = {"low_precision_weights": "master"}
_SPLIT = {"low_precision_weights": "split"}
_IN_BACKWARD = {"optimizer_in_backward": True}
_8BIT = {"optimizer": "8bit"}


@pytest.mark.parametrize(
    ("is_open", "num_bytes", "changes"),
    [
        (False, 18, _MASTER),
        (False, 16, _SPLIT),
        (False, 10, _SPLIT | _8BIT),
        (False, 9, None),
        (True, 14, _MASTER | _IN_BACKWARD),
        (True, 12, _SPLIT | _IN_BACKWARD),
        (True, 6, _SPLIT | _IN_BACKWARD | _8BIT),
        (True, 5, None),
    ],
)
def test_the_fastest_form_is_tried_for_which_the_host_has_memory(is_open, num_bytes, changes):
    names = ("low_precision_weights", "optimizer", "optimizer_in_backward")
    open_arguments = (*OPEN[1:2], *names[: 2 + is_open])
    variants = variants_of(open_arguments, Exactness.APPROXIMATE, precision="bf16-mixed")
    variants.host_budget_bytes = num_bytes * sum(p.numel() for p in model().parameters())
    moved = [v for v in variants.on_host(in_parts=False) if v.changes["offload"] != "activations"]
    found = [{n: v.changes[n] for n in names if v.changes.get(n)} for v in moved]
    assert found == ([] if changes is None else [changes])
    is_fastest = changes is not None and changes.items() >= _MASTER.items()
    assert all(("need" in variants.why_form(v)) != is_fastest for v in moved)


def test_what_is_named_is_enough():
    num_bytes = 16 * sum(parameter.numel() for parameter in model().parameters())
    with pytest.raises(InfeasiblePlanError) as failure:
        with_host(num_bytes // 2).find(budget_of(0.4))
    text = re.search(r'`host_budget="(\d+)MiB"` if the host has it', str(failure.value))
    assert text is not None
    found = with_host(int(text[1]) * MIB).find(budget_of(0.4)).plan
    assert found.host_bytes <= int(text[1]) * MIB


def test_when_time_is_over_the_best_so_far_is_the_plan():
    variants = copy.copy(recorded())
    variants._limit_s = 0.0
    found = PlanSearch(variants).find(2**40)
    assert found.fits(found.plan)
    assert "this is the best plan so far" in " ".join(str(found).split())
    assert not PlanSearch(recorded()).find(2**40).notes


def test_estimates_say_what_the_host_needs_too():
    variants = copy.copy(recorded())
    found = PlanSearch(variants).find(budget_of(0.4))
    moved = [p for p in found.frontier if "parameters" in str(p.settings["offload"])]
    assert {plan.is_verified for plan in moved} == {False, True}
    for plan in (moved[0], moved[-1]):
        whole = variants.what_if.predict(plan.settings)
        assert plan.host_bytes == pytest.approx(whole.peak.host_bytes, abs=8 * MIB)


def test_no_more_is_recorded_than_tells_enough():
    variants = variants_of()
    least, room = variants.kinds[0], budget_of(2)

    def shown(room, slowest_s=math.inf):
        variants.look_again(room)
        variants.slowest_s = slowest_s
        return next(variants.on_host(in_parts=False)).shown

    assert shown(MIB) == {least}
    assert shown(room, slowest_s=0.0) == {"keep"}
    assert not shown(room)  # copies are not hidden, and to copy less may be faster
    assert not variants.is_cut_short
    assert not shown(budget_of(0.7))


def test_what_was_recorded_of_a_variant_counts_when_time_is_over():
    variants = variants_of()
    variants.look_again(MIB)
    first = next(variants.on_host(in_parts=False))
    variants.look_again(2**40)
    variants._limit_s = 0.0
    again = next(variants.on_host(in_parts=False))
    assert variants.is_cut_short
    assert (again.changes, again.shown) == (first.changes, first.shown)


@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "backward"])
@pytest.mark.parametrize(
    "optimizer",
    [None, "8bit", ALL_8BIT, "torch.optim:NAdam"],
    ids=["32", "8bit", "all", "nadam"],
)
@pytest.mark.parametrize(
    ("offload", "low"),
    [
        ("embeddings", None),  # other weights must wait on the host, too, to be sent in 16 bits
        *itertools.product(["parameters", "parameters+embeddings"], [None, "master", "split"]),
    ],
)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_a_host_budget_is_checked_by_what_is_predicted(
    is_tied, offload, low, optimizer, in_backward
):
    """Of a model so large that 64 MiB, through which gradients come, are little."""
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        num_hidden_layers=3,
        tie_word_embeddings=is_tied,
    )
    settings = {"preset": "off", "chunked_cross_entropy": True, "micro_batch_size": "auto"}
    settings |= {"offload": offload, "optimizer": optimizer, "optimizer_in_backward": in_backward}
    settings |= {"low_precision_weights": low, "precision": low and "bf16-mixed"}

    def predict(host_budget: int) -> int:
        found = predict_memory(
            lambda: transformers.LlamaForCausalLM(config),
            {"input_ids": (tokens := torch.zeros(1, 8, dtype=torch.long)), "labels": tokens},
            settings=settings | {"host_budget": host_budget},
            gpu="RTX-4090",
        )
        return found.peak.host_bytes

    predicted = predict(2**40)
    with pytest.raises(IncompatibleError, match="of host memory") as refused:
        predict(int(0.98 * predicted))
    needed = int(re.findall(r"`host_budget=(\d+)`", str(refused.value))[0])
    # 8-bit state moves in the first step, when a resumed fit has that of all weights already.
    assert needed <= (1.15 if optimizer else 1.05) * predicted
