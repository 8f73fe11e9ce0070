"""The picture of a training step shows its peak, and the step is that of the presets' figures."""

import json
from itertools import accumulate

import pytest

from benchmarks._common import RESULTS
from benchmarks.step_picture import NAME, SETTINGS, points
from lightning_memsave.prediction.result import Timeline


def test_the_highest_of_each_few_samples_is_drawn():
    phases = ("forward",) * 9 + ("backward",) * 3
    sizes = [mib * 2**20 for mib in accumulate(range(9))] + [50 * 2**20, 7 * 2**20, 2**20]
    drawn = points(Timeline(phases, {"activation": tuple(sizes), "parameter": (2**20,) * 12}))
    assert drawn == {
        "phases": {"forward": 2, "backward": 1},
        "mib": {"activation": [28, 36, 50], "parameter": [1, 1, 1]},
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_the_step_is_that_of_the_presets(name):
    step = json.loads((RESULTS / f"{NAME}.json").read_text())["steps"][name]
    presets = json.loads((RESULTS / "presets_cpu.json").read_text())["predicted"]
    same = presets["GPT-2 XL, 8 x 1024"][name]["peak_bytes"]
    assert step["peak_bytes"] == pytest.approx(same, rel=1e-4)
    highest = max(map(sum, zip(*step["mib"].values(), strict=True)))
    assert highest == pytest.approx(step["peak_bytes"] / 2**20, rel=0.01)
