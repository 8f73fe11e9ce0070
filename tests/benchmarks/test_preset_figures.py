"""What the preset with the least memory is to need, on the models that the figures are of."""

import pytest

from benchmarks.presets.__main__ import LIMITS, MIB, SMALL
from benchmarks.presets._run import predict, train

FIRST, *OTHERS = LIMITS


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [FIRST, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)]
)
def test_single_gpu_is_predicted_below_the_limit(model):
    assert predict(model, "single_gpu")["peak_bytes"] <= LIMITS[model] * MIB


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning, about this machine
@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.exhaustive) for name in SMALL]
)
def test_small_versions_need_what_is_predicted(model):
    found = train(model, "single_gpu")
    assert found["predicted_bytes"] == pytest.approx(found["counted_bytes"], rel=0.01)
    first, second = found["losses"]
    assert second < first
