"""The benchmarks run, in their dry form, and what they compute from measurements is right."""

import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks._common import markdown_table, write_results
from benchmarks._paired import Turns, summarise, time_pairs
from benchmarks.gpu.__main__ import compare_losses, make_table
from benchmarks.gpu.__main__ import main as run_ladder
from benchmarks.gpu._rungs import BITWISE, RUNGS
from benchmarks.predict.__main__ import main as compare_predictions
from benchmarks.predict.__main__ import make_text as lay_out

ROOT = Path(__file__).parents[1]


def _run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )


@pytest.mark.slow
def test_ladder_runs_dry(tmp_path):
    rungs = ["nothing", "checkpointing all", "all", "micro-batches, out of memory"]

    done = _run(
        *("benchmarks.gpu", "--dry-run", "--no-tests", "--results", str(tmp_path)),
        *("--rungs", *rungs),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu_dry_run.json").read_text())
    assert list(found["rungs"]) == rungs
    assert found["provenance"]["versions"]["torch"]
    nothing, checkpointing, everything, micro_batches = found["rungs"].values()
    assert checkpointing["losses"] == nothing["losses"]
    assert everything["peak_allocated_bytes"] < checkpointing["peak_allocated_bytes"]
    assert checkpointing["peak_allocated_bytes"] < nothing["peak_allocated_bytes"]
    # A dry run has memory enough, so that whole batches pass.
    assert micro_batches["losses"] == nothing["losses"]
    assert ["whole batches; halved when memory runs out"] in [
        row["details"] for row in micro_batches["settings"] if row["name"] == "micro_batch_size"
    ]
    assert "\n| checkpointing all " in (tmp_path / "gpu_dry_run.md").read_text()


def test_a_rung_that_fails_is_recorded_and_the_next_one_runs(tmp_path, monkeypatch, capsys):
    def fail_first(name, steps, limit_s, *, is_dry):
        if name == "nothing":
            return {"error": "CUDA out of memory"}
        return {"peak_allocated_bytes": 1, "peak_reserved_bytes": 2, "losses": [1.0]} | {
            "median_step_s": 0.1
        }

    monkeypatch.setattr("benchmarks.gpu.__main__.run_rung", fail_first)

    arguments = ["--dry-run", "--no-tests", "--results", str(tmp_path), "--rungs", "nothing", "all"]
    assert run_ladder(arguments) == 1

    text = (tmp_path / "gpu_dry_run.md").read_text()
    assert "CUDA out of memory" in text
    assert json.loads((tmp_path / "gpu_dry_run.json").read_text())["rungs"]["all"]["losses"] == [1]


def test_a_rung_that_breaks_bitwise_equality_fails_the_ladder(tmp_path, monkeypatch, capsys):
    losses = {"nothing": [1.0, 2.0], "nothing, again": [1.0, 2.0], "checkpointing all": [1.0, 2.1]}

    def found(name, steps, limit_s, *, is_dry):
        return {"peak_allocated_bytes": 1, "peak_reserved_bytes": 2, "losses": losses[name]} | {
            "median_step_s": 0.1
        }

    monkeypatch.setattr("benchmarks.gpu.__main__.run_rung", found)
    arguments = ["--dry-run", "--no-tests", "--results", str(tmp_path), "--rungs", *losses]

    assert run_ladder(arguments) == 1
    assert "Not bitwise, though they should be: checkpointing all" in capsys.readouterr().out

    losses["nothing, again"] = [1.0, 2.05]
    assert run_ladder(arguments) == 0


def test_each_prediction_stands_beside_what_was_measured():
    found = {
        "peak_allocated_bytes": 100 * 2**20,
        "peak_reserved_bytes": 200 * 2**20,
        "nvml_process_bytes": 800 * 2**20,
        "predicted": {
            "peak_allocated_bytes": 101 * 2**20,
            "peak_reserved_bytes": 190 * 2**20,
            "device_bytes": 880 * 2**20,
        },
        "median_step_s": 0.1,
        "losses": [1.0],
    }
    row = make_table({"nothing": found}).splitlines()[2]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:8] == ["100", "1.000", "+1.0 %", "200", "-5.0 %", "800", "+10.0 %"]


def test_losses_are_compared_with_those_without_the_callback():
    rungs: dict[str, dict[str, Any]] = {
        "nothing": {"losses": [3.0, 2.0]},
        "all": {"losses": [3.0, 2.5]},
        "x": {"error": "?"},
    }

    compare_losses(rungs)

    assert rungs["nothing"]["max_loss_difference"] == 0.0
    assert rungs["all"]["max_loss_difference"] == 0.5
    assert "max_loss_difference" not in rungs["x"]


def test_every_rung_is_accepted_by_the_callback():
    from lightning_memsave import MemSaveCallback

    for settings in RUNGS.values():
        if settings is not None:
            MemSaveCallback(**settings)
    assert set(BITWISE) < set(RUNGS)


def test_table_of_the_ladder_has_ratios_to_nothing():
    def found(peak_bytes, step_s):
        return {"peak_allocated_bytes": peak_bytes, "median_step_s": step_s} | {
            "peak_reserved_bytes": None,
            "losses": [1.5],
        }

    table = make_table({"nothing": found(4 * 2**20, 0.1), "all": found(2**20, 0.15)})

    cells = [cell.strip() for cell in table.splitlines()[3].split("|")]
    assert cells[1:4] == ["all", "1", "0.250"]
    assert cells[9:11] == ["150.0", "1.500"]


@pytest.mark.slow
def test_overhead_runs_dry(tmp_path):
    done = _run("benchmarks.overhead", "--dry-run", "--results", str(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "overhead_cpu.json").read_text())["comparisons"]
    assert all(comparison["num_pairs"] == 6 for comparison in found.values())
    assert "everything None / no callback" in found


def test_turns_change_who_comes_first():
    turns, order = Turns(), []

    def work(me):
        turns.wait(me)
        for _ in range(4):
            turns.end()
            turns.wait(me)
            order.append(me)
        turns.leave(me)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)

    assert order == [0, 1, 1, 0, 0, 1, 1, 0]


def test_pairs_are_timed_one_fit_at_a_time():
    running = threading.Lock()
    steps = []

    def fit(name, timed):
        for batch in timed:
            assert running.acquire(blocking=False)  # the other one would hold it
            steps.append((name, batch))
            running.release()

    first, second = time_pairs(
        partial(fit, "first"), partial(fit, "second"), [0, 1, 2, 3], num_warmup=1
    )

    assert len(first.wall_times_s) == len(second.cpu_times_s) == 3
    assert sorted(steps) == [(name, batch) for name in ("first", "second") for batch in range(4)]


def test_a_fit_that_fails_does_not_block_the_other():
    def fail(timed):
        raise ValueError("no")

    def work(timed):
        done.extend(timed)

    done: list[int] = []
    with pytest.raises(ValueError, match="no"):
        time_pairs(fail, work, [0, 1], num_warmup=0)
    assert done == [0, 1]


def test_summary_of_ratios():
    found = summarise([0.9, 1.0, 1.1, 1.0, 5.0])

    assert found["median"] == 1.0  # an outlier does not move it
    assert found["confidence_low"] <= 1.0 <= found["confidence_high"]


def test_results_say_where_they_come_from(tmp_path):
    path = write_results(
        "x", {"peak": 1}, markdown_table(["a", "b"], [["c", "1"]]), folder=tmp_path
    )

    found = json.loads(path.read_text())
    assert found["peak"] == 1
    assert {"command", "date", "device", "versions"} <= set(found["provenance"])
    text = path.with_suffix(".md").read_text()
    assert found["provenance"]["device"] in text
    assert "| c   |   1 |" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the models' libraries
def test_predictions_are_compared_with_counts(tmp_path, capsys):
    options = ["--architectures", "gan", "--no-deep", "--results", str(tmp_path)]
    assert compare_predictions(options) == 0

    found = json.loads((tmp_path / "predict_cpu.json").read_text())["exactness"]["gan"]
    nothing = found["nothing"]
    assert nothing["predicted_bytes"] == nothing["counted_bytes"] > 0
    assert "| gan " in (tmp_path / "predict_cpu.md").read_text()


def test_errors_of_predictions_are_parts_per_million():
    found = {"predicted_bytes": 1_000_100, "counted_bytes": 1_000_000, "seconds": 2.0}
    equal = {**found, "predicted_bytes": 1_000_000}
    text = lay_out({"a": {"nothing": found, "8bit": equal}, "b": {"8bit": equal}}, {})
    assert "| a            |    +100 |    0 |     2.0 |" in text
    assert "| b            |       - |    0 |     2.0 |" in text
