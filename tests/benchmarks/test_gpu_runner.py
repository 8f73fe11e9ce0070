"""The runner of the first ten minutes on a GPU, in small and on the CPU."""

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks._common import RESULTS
from benchmarks.gpu import _device_checks, _fit, _technique_checks
from benchmarks.gpu.__main__ import Line, describe, main, read_lines, run_step
from benchmarks.gpu._steps import STEPS, Step
from benchmarks.gpu._tables import write_tables

KNOWN: dict[str, Any] = {
    "benchmarks.gpu._device_checks": _device_checks.CHECKS,
    "benchmarks.gpu._technique_checks": _technique_checks.CHECKS,
    "benchmarks.gpu._fit": _fit.FITS,
}


def test_each_check_and_fit_is_a_step():
    named = {module: [s.name for s in STEPS if s.command[0] == module] for module in KNOWN}
    assert {m: sorted(names) for m, names in named.items()} == {
        module: sorted(known) for module, known in KNOWN.items()
    }
    assert all(step.command[1] == step.name for step in STEPS if step.command[0] in KNOWN)
    assert len({step.file_name for step in STEPS}) == len(STEPS)


@pytest.mark.parametrize("check", [*_device_checks.CHECKS, *_technique_checks.CHECKS])
@pytest.mark.slow
@pytest.mark.usefixtures("inductor_in_this_thread")  # "fused_updates" compiles
def test_each_check_runs_in_small(check, monkeypatch):
    monkeypatch.setattr(_technique_checks, "WIDTH", 64)
    checks = {**_device_checks.CHECKS, **_technique_checks.CHECKS}
    for found in checks[check]("cpu"):
        assert "case" in found
        assert not isinstance(found.get("error"), str), found
        assert found.get("is_bitwise", True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the models' libraries
@pytest.mark.parametrize(
    "name",
    ["roberta single_gpu, clipping"]
    + [pytest.param(n, marks=pytest.mark.exhaustive) for n in _fit.FITS],
)
def test_each_fit_runs_in_small(name):
    found = _fit.run(name, "cpu")
    assert found["predicted_mib"] > 0
    assert len(found["losses"]) >= 4


def test_time_in_which_a_gpu_does_two_things_counts_once():
    def event(start: int, end: int, name: str, device: str = "CUDA") -> Any:
        time_range = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(
            time_range=time_range, name=name, device_type=SimpleNamespace(name=device)
        )

    events = [event(500, 2000, "Memcpy HtoD"), event(0, 1000, "gemm"), event(0, 9000, "x", "CPU")]
    found = _fit.occupancy_of([*events, event(5000, 6000, "gemm")])
    assert found == {"gpu_busy_ms": 3.0, "kernels_ms": 2.0, "copies_ms": 1.5}


@pytest.mark.parametrize("name", _fit.MODELS)
@pytest.mark.slow
def test_each_model_gives_a_loss_of_its_batch(name):
    model = _fit.MODELS[name]
    batch = {key: tensor.to("meta") for key, tensor in model.make_batch().items()}
    with torch.device("meta"):
        assert model.build()(**batch).loss.shape == ()


@pytest.mark.slow
def test_a_step_writes_a_file(tmp_path, capsys):
    name = "roberta plain"
    assert main(["--dry", "--results", str(tmp_path), "--only", name]) == 0, capsys.readouterr().out
    (step,) = (step for step in STEPS if step.name == name)
    fit = read_lines(tmp_path / step.file_name)
    assert fit[0]["case"] == name
    assert fit[-1]["returncode"] == 0
    assert "| roberta plain |" in (tmp_path / "fits.md").read_text()
    (run,) = json.loads((tmp_path / "provenance.json").read_text())
    assert run["versions"]["torch"]


@pytest.mark.slow
def test_the_next_steps_wait_for_their_turn(tmp_path, capsys):
    """They import while another one measures, and are gone when the time is over."""
    chosen = ["wide_products", "stochastic_rounding", "saved_by_attention"]
    arguments = ["--dry", "--ahead", "2", "--results", str(tmp_path), "--only", *chosen]
    assert main(arguments) == 0, capsys.readouterr().out
    for step in STEPS:
        if step.name in chosen:
            *cases, end = read_lines(tmp_path / step.file_name)
            assert cases
            assert end["returncode"] == 0
    steps = [Step(name, ("benchmarks.gpu._device_checks", name), 60) for name in chosen]
    with Line(steps, tmp_path, 2, is_dry=True) as line:
        line.run(steps[0], 60)  # nobody is ahead of the first
        line.run(steps[1], 60)
        (waiting,) = line._waiting.values()
        assert waiting.poll() is None
    assert waiting.returncode == -9


@pytest.mark.parametrize("folder", [*RESULTS.glob("gpu_*")], ids=lambda folder: folder.name)
def test_tables_are_those_of_the_results(tmp_path, folder):
    for path in folder.iterdir():
        if path.suffix != ".md":
            (tmp_path / path.name).write_text(path.read_text())
    write_tables(tmp_path)
    tables = [*folder.glob("*.md")]
    assert len(tables) >= 2
    for table in tables:
        assert (tmp_path / table.name).read_text() == table.read_text()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_steps_write_a_file_each(tmp_path, capsys):
    chosen = ["fixed_costs", "roberta plain", "gpu tests"]
    arguments = ["--dry", "--results", str(tmp_path), "--only", *chosen]
    assert main(arguments) == 0, capsys.readouterr().out
    steps = [step for step in STEPS if step.name in chosen]
    costs, fit, tests = (read_lines(tmp_path / step.file_name) for step in steps)
    assert [line["case"] for line in costs[:-1]][:2] == ["zeros", "matmul"]
    assert "tests/measure/test_peak.py" in (tmp_path / "gpu_tests.log").read_text()
    assert all(lines[-1]["returncode"] == 0 for lines in (costs, fit, tests))


def test_a_step_that_is_stopped_keeps_its_lines(tmp_path, monkeypatch):
    (tmp_path / "slow_step.py").write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "Path(sys.argv[sys.argv.index('--out') + 1]).write_text('{\"case\": \"first\"}\\n')\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start_s = time.monotonic()
    path = tmp_path / "lines.jsonl"
    run_step(Step("slow", ("slow_step",), 3), path, 3, is_dry=True)
    assert time.monotonic() - start_s < 60
    first, end = read_lines(path)
    assert first == {"case": "first"}
    assert end["error"] == "stopped after 3 s"


def test_a_step_that_fails_says_why_and_the_next_one_runs(tmp_path, monkeypatch, capsys):
    steps = tuple(Step(name, ("no_such_module",), 60) for name in ("failing", "as well"))
    monkeypatch.setattr("benchmarks.gpu.__main__.STEPS", steps)
    assert main(["--dry", "--results", str(tmp_path)]) == 1
    assert "Not done: failing, as well" in capsys.readouterr().out
    for step in steps:
        (end,) = read_lines(tmp_path / step.file_name)
        assert "No module named no_such_module" in end["error"][-1]


def test_steps_without_their_packages_are_left_out(tmp_path, monkeypatch, capsys):
    step = Step("quantised", ("benchmarks.gpu._fit", "?"), 60, ("no_such_package",))
    monkeypatch.setattr("benchmarks.gpu.__main__.STEPS", (step,))
    assert "LEFT OUT: no_such_package is not installed" in describe(step)
    assert main(["--dry", "--results", str(tmp_path)]) == 0
    assert "LEFT OUT" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.jsonl"))


def test_list_runs_nothing(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(STEPS)
    assert lines[0].split()[:2] == ["1", "fixed_costs"]
