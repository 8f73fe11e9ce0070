"""Projects whose modules are awkward train bit for bit as without the callback, or are refused."""

import functools
import re
from typing import Any

import pytest

from benchmarks.faults._modules import SETTINGS, run

OFFLOADED = (
    *("BoundedTable", "BoundedBlocks", "CodebooksInBlocks", "HiddenWrites"),
    *("AdaptiveWeight", "GradientInBlock", "GradientThenAnew", "PerSampleOfAll"),
    *("Recurrent", "RecurrentBlocks", "PackedRecurrent"),
)


@functools.cache
def plain(project: str) -> Any:
    return run(project, None, "plain", drops=True)["digest"]


@pytest.mark.parametrize("project", OFFLOADED)
@pytest.mark.parametrize("name", ["offload optimizer", "offload parameters"])
def test_offloaded(project, name):
    found = run(project, SETTINGS[name][0], "plain", drops=True)
    assert found["error"] is None
    assert found["digest"] == plain(project)


@pytest.mark.parametrize(
    ("project", "name", "why"),
    [
        ("StatefulRecurrent", "micro-batches", "previous micro-batch changed.*: `state.0`"),
        ("SpectralNorm", "micro-batches", "previous micro-batch changed.*_u`"),
        ("CodebooksInBlocks", "block micro-batches", "it changes `codes`"),
        ("HiddenWrites", "block micro-batches", "it changes `down.weight`"),
    ],
)
def test_refused_before_the_first_step(project, name, why):
    found = run(project, SETTINGS[name][0], "plain", drops=False)
    assert found["steps"] == 0
    assert found["has_advice"]
    assert re.search(why, found["error"])
