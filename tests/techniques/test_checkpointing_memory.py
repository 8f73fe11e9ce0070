"""How much a training step of RoBERTa needs with and without checkpointing, counted twice."""

import pytest

from benchmarks._models import DEEP, SMALL
from benchmarks.checkpointing.__main__ import measure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "largest_ratio"),
    # 6 layers and vocabulary 8,000: the logits are a good part of the peak and stay.
    [
        pytest.param(SMALL, 0.62, id="6 layers"),
        pytest.param(DEEP, 0.335, id="24 layers", marks=pytest.mark.exhaustive),
    ],
)
def test_peak_of_a_step_falls_as_far_as_it_should(sizes, largest_ratio):
    counted = measure(sizes)
    ours, torchs = counted["live_tensors"], counted["profiler"]
    assert ours["ratio"] <= largest_ratio
    assert torchs["ratio"] <= largest_ratio
    for key in ("plain_bytes", "all_bytes"):
        assert ours[key] == pytest.approx(torchs[key], rel=2e-3)
