"""Memory arrives in the loggers that people use, under one name and in one unit."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.callbacks.loggers import LOGGERS
from tests.helpers import IN_CI

ROOT = Path(__file__).parents[2]
NAMES = {"memory/live_gib", "memory/peak_live_gib", "memory/host_rss_gib"}  # on a CPU


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of one fit in a process of its own: the packages start threads and processes."""
    folder = tmp_path_factory.mktemp("loggers")
    command = [sys.executable, "-m", "tests.callbacks.loggers", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("logger", LOGGERS)
def test_each_logger_has_the_same_names_steps_and_values(found, logger):
    if importlib.util.find_spec(logger) is None and not IN_CI:  # `make venv` installs them
        pytest.skip(f"{logger} is not installed")
    points = sorted(point for point in found[logger] if point[0].startswith("memory/"))
    expected = sorted(point for point in found["csv"] if point[0].startswith("memory/"))
    assert {(name, step) for name, step, _ in expected} == {
        (n, s) for n in NAMES for s in (1, 3, 5)
    }
    assert [point[:2] for point in points] == [point[:2] for point in expected]
    for (*_, value), (*_, of_csv) in zip(points, expected, strict=True):
        assert value == pytest.approx(of_csv, rel=1e-6)  # TensorBoard keeps float32
