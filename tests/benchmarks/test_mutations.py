"""The list of waits that `benchmarks.mutations` removes is that of the source."""

import ast

import pytest

from benchmarks.mutations import _sites
from benchmarks.mutations.__main__ import ROOT, TESTS, make_text, removed
from benchmarks.mutations._equivalent import EQUIVALENT
from benchmarks.mutations._sites import find_sites

SOURCE = b"""
def send(stream, copies):
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        target.copy_(source)
    event = stream.record_event()
    copies.to_device([target], [source])()
    module.register_hook(wait_for)
    return event.synchronize


def wait_for(*updates):
    for update in updates:
        update.result()
    queue(copies.finish)
    results.append(landing)
"""


@pytest.fixture
def sites(tmp_path, monkeypatch):
    monkeypatch.setattr(_sites, "TECHNIQUES", ".")
    monkeypatch.setattr(_sites, "FILES", ("a.py",))
    monkeypatch.setattr(_sites, "HOLDS", (("a", "target], [source", "other], [source"),))
    (tmp_path / "a.py").write_bytes(SOURCE)
    return find_sites(tmp_path)


def test_each_wait_is_found_and_goes_alone(sites, tmp_path):
    assert [site.name for site in sites] == [
        "a: send: `stream.wait_stream(torch.cuda.current_stream())`",
        "a: send: `torch.cuda.stream(stream)`",
        "a: send: `stream.record_event()`",
        "a: send: `copies.to_device([target], [source])()`",
        "a: send: `wait_for`",
        "a: send: `event.synchronize`",
        "a: wait_for: `update.result()`",
        "a: wait_for: `queue(copies.finish)`",
        "a: hold: `target], [source`",
    ]
    before = SOURCE.splitlines()
    for site in sites:
        with removed(tmp_path, site):
            source = (tmp_path / "a.py").read_bytes()
        ast.parse(source)
        after = source.splitlines()
        assert [number for number, line in enumerate(before, 1) if line != after[number - 1]] == [
            site.line
        ]
    assert (tmp_path / "a.py").read_bytes() == SOURCE


def test_what_holds_memory_is_there_once(tmp_path, monkeypatch):
    monkeypatch.setattr(_sites, "HOLDS", (("offloading/copies", "not there", ""),))
    with pytest.raises(ValueError, match="'not there' is there 0 times"):
        find_sites(ROOT)


def test_reasons_are_for_what_is_there():
    names = [site.name for site in find_sites(ROOT)]
    assert len(names) == len({*names})
    assert {*EQUIVALENT} <= {*names}
    assert all((ROOT / test).is_file() for test in TESTS)


def test_the_text_counts(sites):
    names = [site.name for site in sites[:3]]
    found = [
        {"name": names[0], "killed_by": "tests/techniques/test_a.py::test_b", "equivalent": ""},
        {"name": names[1], "killed_by": "", "equivalent": "nobody reads it"},
        {"name": names[2], "killed_by": "", "equivalent": ""},
    ]
    text = make_text(found)
    assert "Of 3 waits, each removed alone, 1 make a test fail, 1 change nothing" in text
    assert "and 1 survive." in text
    assert "`test_a.py::test_b`" in text
    assert "equivalent: nobody reads it" in text
