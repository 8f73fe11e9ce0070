"""Published peaks of GPUs are predicted, here with the transformers that is installed."""

import json

import pytest

from benchmarks.published.__main__ import main as predict_published
from benchmarks.published._sources import SOURCES

SMALL = {"DistilBERT": "8 x 256, sdpa", "ALBERT base v2": "4 x 512, eager"}


@pytest.mark.slow
def test_two_small_models(tmp_path):
    which = ["--installed", "--sources", *SMALL, "--runs", *SMALL.values()]
    assert predict_published([*which, "--results", str(tmp_path)]) == 0

    found = json.loads((tmp_path / "published.json").read_text())["sources"]
    for name, run in SMALL.items():
        (error,) = (one["error"] for one in found[name]["runs"].values())
        assert list(found[name]["runs"]) == [run]
        assert abs(error) < 0.02
    text = (tmp_path / "published.md").read_text()
    assert "With the run's own code of the model: 2 figures" in text
    assert "With other code: none." in text


def test_names_are_different():
    assert len({source.name for source in SOURCES}) == len(SOURCES)
    for source in SOURCES:
        assert len({str(run) for run in source.runs}) == len(source.runs)
