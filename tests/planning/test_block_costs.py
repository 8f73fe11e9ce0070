from dataclasses import replace

import pytest

from lightning_memsave.core.blocks import find_blocks
from lightning_memsave.planning.block_costs import KEEP, BlockCosts
from lightning_memsave.planning.recorded_blocks import can_be_cut, choices, cut, runs_of, value_of
from lightning_memsave.planning.step_time import step_seconds
from lightning_memsave.prediction.predict import predict
from tests.planning.plans import RATES, planned, what_if_of

pytestmark = pytest.mark.slow

RECORDED = ("nested", "full", "selective", KEEP)
CHOICES = (
    [KEEP] * 6,
    ["full"] * 6,
    ["nested"] * 6,
    ["selective"] * 6,
    ["full"] * 3 + [KEEP] * 3,
    ["full"] * 2 + ["selective"] * 2 + [KEEP] * 2,
    ["nested"] * 2 + ["full"] * 4,
)


@pytest.mark.parametrize(
    ("settings", "error", "strategy"),
    [
        ({}, 0.01, None),
        pytest.param({"optimizer_in_backward": True}, 0.01, None, marks=pytest.mark.exhaustive),
        pytest.param({"micro_batch_size": 1}, 0.03, None, marks=pytest.mark.exhaustive),
        ({}, 0.01, "ddp"),
        ({}, 0.07, "fsdp2"),  # in which block the next one is gathered
    ],
    ids=str,
)
def test_what_is_composed_of_four_blocks_is_what_is_predicted_of_six(settings, error, strategy):
    model = planned("gpt2").model
    (run,) = runs_of(model, find_blocks(model))
    assert len(run) == 6
    step = what_if_of("gpt2").step.with_settings({"precision": "32-true", **settings})
    step = replace(step, strategy=strategy, world_size=1 if strategy is None else 4)
    few = replace(
        step.with_settings({"activation_checkpointing": value_of(RECORDED)}),
        change=lambda copy: cut(copy, run, len(RECORDED)),
    )
    recorded = [(dict(zip(run, RECORDED, strict=False)), predict(few))]
    costs = BlockCosts([run], recorded, [p.numel() for p in model.parameters()], RATES)
    for kinds in CHOICES:
        # FSDP2 frees a table while nested blocks are recomputed: 21 % too much is estimated here,
        # and a search predicts what it chooses.
        if strategy == "fsdp2" and {*kinds} == {"nested"}:
            continue
        whole = predict(step.with_settings({"activation_checkpointing": value_of(kinds)}))
        peak_bytes, seconds = costs.peak_and_seconds(kinds)
        assert peak_bytes == pytest.approx(whole.peak_bytes, rel=error), kinds
        times = step_seconds(whole.work, RATES)
        assert seconds == pytest.approx(sum(times.values()), rel=0.01), kinds
        by_phase = dict.fromkeys(times, 0.0) | costs.seconds_by_phase(kinds)
        # A pass of few blocks ends with what another one waits for.
        assert by_phase == pytest.approx(times, rel=0.02 if strategy == "fsdp2" else 0.01), kinds
        assert sum(by_phase.values()) == pytest.approx(seconds)


@pytest.mark.parametrize("number", [1, 12, 48, 53])
def test_all_blocks_may_be_recomputed_in_one_way(number):
    ways = [*choices(number, ("nested", "full", "selective"))]
    assert {(kind,) * number for kind in RECORDED} <= {*ways}


def test_runs_are_blocks_of_equal_shapes_that_follow_each_other():
    model = planned("t5").model
    runs = runs_of(model, find_blocks(model))
    # The first block of each preset has the table of relative positions.
    assert [len(run) for run in runs] == [1, 1, 1, 1]
    model = planned("convolutions").model
    assert [len(run) for run in runs_of(model, find_blocks(model))] == [1, 1, 1, 1]


def test_a_cut_keeps_the_names_of_the_first_blocks():
    model = planned("gpt2").model
    run = ("transformer.h.4", "transformer.h.5")
    assert can_be_cut(model, run)
    step = replace(what_if_of("gpt2").step, change=lambda copy: cut(copy, run, 1))
    names = {module.name for module in predict(step).modules}
    assert "transformer.h.4" in names
    assert "transformer.h.5" not in names
    assert hasattr(model.get_submodule("transformer.h"), "5")  # of the user's model


def test_recomputed_blocks_are_written_as_an_argument():
    assert value_of(["full", "full", "keep"]) == 2
    kinds = ["nested", "full", "selective", "keep"]
    assert value_of(kinds) == "nested:1,full:1,selective:1"
