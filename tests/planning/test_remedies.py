from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memsave import MemSaveCallback, explain_memory, plan_memory, predict_memory
from lightning_memsave.errors import InfeasiblePlanError
from lightning_memsave.planning.remedies import EARLY_RELEASE, best_that_fits
from lightning_memsave.prediction.cuda.gpus import GPUS
from lightning_memsave.units import MIB
from tests.explain.test_factors import bert, ids, large_vocabulary

pytestmark = pytest.mark.slow

BLOCKS = {"num_hidden_layers": 1}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        return x + self.layers(x)


def deep():
    return nn.Sequential(*(Block() for _ in range(4)))


BATCH = torch.ones(6400, 32, 64)


def find_remedies(*args, **options):
    return list(explain_memory(*args, factors=[], **options).remedies or ())


@pytest.fixture(scope="module")
def remedies():
    return find_remedies(deep, BATCH, device="cpu", gpu="1GiB")


def test_what_is_to_be_typed_gives_the_predicted_peak(remedies):
    before = predict_memory(deep, BATCH, device="cpu").peak_bytes
    assert len(remedies) > 4
    for remedy in remedies[:1] + remedies[1::2]:
        callback = eval(remedy.how, {"MemSaveCallback": MemSaveCallback})
        found = predict_memory(deep, BATCH, settings=callback, device="cpu")
        assert found.peak_bytes == remedy.peak_bytes == before - remedy.saved_bytes < before
        assert found.device_bytes == remedy.device_bytes
        if remedy.name == EARLY_RELEASE:  # which each of the others has, too
            before = found.peak_bytes


def test_what_any_setting_saves_is_the_first_row_and_no_other_row():
    """Lightning keeps gradients of the previous step through the forward pass."""
    found = find_remedies(large_vocabulary, ids(2, 16), device="cpu")
    assert [remedy.name for remedy in found].index(EARLY_RELEASE) == 0
    assert found[0].exactness == "bitwise"
    assert found[0].saved_bytes > 0
    assert all(remedy.peak_bytes < found[0].peak_bytes for remedy in found[1:])
    callback = eval(found[0].how, {"MemSaveCallback": MemSaveCallback})
    again = find_remedies(large_vocabulary, ids(2, 16), settings=callback, device="cpu")
    assert EARLY_RELEASE not in {remedy.name for remedy in again}


def test_what_fits_is_what_predict_says():
    """Also within the share of a GPU that a plan leaves free."""
    base = predict_memory(deep, BATCH, gpu="T4")
    gpu = replace(GPUS["T4"], total_bytes=base.device_bytes + MIB)
    explained = explain_memory(deep, BATCH, gpu=gpu, factors=[])
    assert base.fits(gpu).note.startswith("barely")
    assert "It fits T4 without changes." in str(explained)
    assert all(remedy.fits for remedy in explained.remedies)
    assert not any("plan" in remedy.name for remedy in explained.remedies)


def test_time_is_estimated_where_the_gpu_is_known(remedies):
    assert {remedy.time_ratio for remedy in remedies} == {None}  # of "1GiB" nothing else is known
    wide = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 8))
    found = find_remedies(wide, torch.ones(64, 512, 64), gpu="T4")
    ratios = {remedy.name: remedy.time_ratio for remedy in found}
    half, whole = ratios["recompute half of the blocks"], ratios["recompute all blocks"]
    assert half is not None
    assert whole is not None
    assert 1.05 < half < whole < 1.5
    assert str(found[0]).count(" times the time of the step as given (") == 1


def test_the_cheapest_come_first(remedies):
    names = [remedy.name for remedy in remedies]
    order = ["optimizer in backward", "recompute half of the blocks"]
    order += ["recompute all blocks", "micro-batches of 3200", "micro-batches of 1"]
    order += ["precision bf16-mixed", "8-bit optimizer", "weights in bf16"]
    found = [name for name in order if name in names]
    assert [name for name in names if name in order] == found
    assert "recompute all blocks" in names


def test_exactness_is_that_of_the_techniques(remedies):
    exactness = {remedy.name: remedy.exactness for remedy in remedies}
    assert exactness["recompute all blocks"] == "bitwise"
    assert exactness["micro-batches of 1"] == "rounding"


@pytest.mark.parametrize(("times", "fits"), [(1, True), (6, False)])
def test_for_a_gpu_that_is_too_small_the_last_line_is_the_plan(times, fits):
    batch = BATCH.repeat(times, 1, 1)
    step: dict[str, Any] = {"device": "cpu", "gpu": "256MiB"}
    last = find_remedies(deep, batch, **step)[-1]
    try:
        plan = plan_memory(deep, batch, **step).plan
    except InfeasiblePlanError as error:
        plan = error.smallest
    assert last.name == ("the fastest plan that fits" if fits else "the smallest plan")
    assert (last.how, last.device_bytes) == (plan.how, plan.device_bytes)
    assert last.fits is fits
    callback = eval(last.how, {"MemSaveCallback": MemSaveCallback})
    found = predict_memory(deep, batch, settings=callback, device="cpu")
    assert found.peak_bytes == last.peak_bytes


def test_each_says_whether_it_fits_and_the_plan_is_chosen(remedies):
    for remedy in remedies:
        assert remedy.fits == (remedy.device_bytes <= 2**30)
    assert {remedy.fits for remedy in remedies[:-1]} == {True, False}
    assert best_that_fits(remedies) is remedies[-1]
    single = remedies[:-1]
    best = best_that_fits(single)
    assert all(not remedy.fits for remedy in single[: single.index(best)])


def test_attention_is_among_them_and_named():
    def model():
        return bert(**BLOCKS)

    found = next(r for r in find_remedies(model, ids(1, 256)) if "attention" in r.name)
    assert 'attention="sdpa"' in found.how
    assert found.exactness == "rounding"
    with_sdpa = predict_memory(lambda: bert("sdpa", **BLOCKS), ids(1, 256))
    assert found.peak_bytes == with_sdpa.peak_bytes


def test_what_is_on_already_is_kept_and_not_offered():
    settings = {"activation_checkpointing": "all", "optimizer": "8bit", "precision": "bf16-mixed"}
    found = find_remedies(deep, BATCH, settings=settings, device="cpu")
    assert {remedy.name for remedy in found}.isdisjoint({"recompute all blocks", "8-bit optimizer"})
    for remedy in found:
        assert 'activation_checkpointing="all", optimizer="8bit"' in remedy.how


def test_cards_without_bf16_get_another_precision():
    found = find_remedies(deep, BATCH, gpu="T4")
    names = {remedy.name for remedy in found}
    assert "precision 16-mixed" in names
    assert not any("bf16" in name for name in names)


def test_the_same_as_plain_values_and_in_a_line(remedies):
    assert remedies[0].to_dict()["how"] == remedies[0].how
    assert remedies[0].how in str(remedies[0])
