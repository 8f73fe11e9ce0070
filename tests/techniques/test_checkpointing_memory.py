"""How much a training step of RoBERTa needs with and without checkpointing, counted twice."""

import pytest

from benchmarks._models import DEEP, SMALL, MaskedLM
from benchmarks.checkpointing import __main__ as counting

# As SMALL, half as wide: the same part of the peak are logits, for a fifth of the work.
NARROW = MaskedLM(4_000, 128, 6, 4, 512, dropout=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "num_tokens", "largest_ratio"),
    # 6 layers and a vocabulary that is large for them: the logits stay.
    [
        pytest.param(NARROW, 64, 0.62, id="6 narrow layers"),
        pytest.param(SMALL, 128, 0.62, id="6 layers", marks=pytest.mark.exhaustive),
        pytest.param(DEEP, 128, 0.335, id="24 layers", marks=pytest.mark.exhaustive),
    ],
)
def test_peak_of_a_step_falls_as_far_as_it_should(sizes, num_tokens, largest_ratio, monkeypatch):
    monkeypatch.setattr(counting, "NUM_TOKENS", num_tokens)
    counted = counting.measure(sizes)
    ours, torchs = counted["live_tensors"], counted["profiler"]
    assert ours["ratio"] <= largest_ratio
    assert torchs["ratio"] <= largest_ratio
    for key in ("plain_bytes", "all_bytes"):
        assert ours[key] == pytest.approx(torchs[key], rel=2e-3)
