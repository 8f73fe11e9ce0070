"""The benchmarks run, in their dry form, and what they compute from measurements is right."""

import json
import re
import shutil
import threading
from functools import partial

import pytest

from benchmarks import evidence
from benchmarks._common import RESULTS, markdown_table, write_results
from benchmarks._paired import Turns, summarise, time_pairs
from benchmarks.embedding.__main__ import main as train_tables
from benchmarks.faults.__main__ import main as attack
from benchmarks.faults._attack import IN_CHECKPOINT, PHASES, Injections, kill_and_resume
from benchmarks.faults._environment import FAULTS
from benchmarks.faults._fits import Case
from benchmarks.offloading.early_updates import main as update_early
from benchmarks.overhead.__main__ import main as time_overhead
from benchmarks.plan.__main__ import DRY, rank_correlation
from benchmarks.plan.__main__ import main as compare_times
from benchmarks.predict.__main__ import main as compare_predictions
from benchmarks.predict.__main__ import make_text as lay_out
from benchmarks.scale.__main__ import times_table


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning, about this machine
def test_overhead_runs_dry(tmp_path):
    time_overhead(["--dry-run", "--results", str(tmp_path)])

    written = json.loads((tmp_path / "overhead_cpu.json").read_text())
    found = written["comparisons"]
    assert all(comparison["num_pairs"] == 6 for comparison in found.values())
    assert "everything None / no callback" in found
    (own,) = written["own_work"]
    assert (own["num_modules"], own["num_pairs"]) == (20, 6)
    assert own["quartiles_s"][0] <= own["added_s"] <= own["quartiles_s"][1]
    assert "What a bare callback adds to a step" in (tmp_path / "overhead_cpu.md").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning, about this machine
def test_early_updates_run_dry(tmp_path):
    update_early(["--dry-run", "--results", str(tmp_path)])
    found = json.loads((tmp_path / "early_updates_cpu.json").read_text())
    assert (found["bits"]["clipped"], found["bits"]["different"]) == (2, 0)
    assert found["kills"] == {"right": 1}


@pytest.mark.slow
def test_tables_on_the_host_train_dry(tmp_path):
    train_tables(["--dry-run", "--results", str(tmp_path)])
    (run,) = json.loads((tmp_path / "embedding_cpu.json").read_text())["runs"]
    table_bytes = 4 * run["vocabulary"] * 832
    assert run["peak"]["host_bytes"] > 4 * table_bytes  # weight, gradient and two moments
    assert run["losses"][1] < run["losses"][0]
    assert "device, at the peak of a step" in (tmp_path / "embedding_cpu.md").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning, about this machine
def test_estimated_times_run_dry(tmp_path):
    compare_times(["--dry-run", "--results", str(tmp_path)])
    found = json.loads((tmp_path / "step_time_cpu.json").read_text())["models"]
    for plans in found.values():
        assert list(plans) == list(DRY)
        assert plans["plain"]["measured_ratio"] == plans["plain"]["estimated_ratio"] == 1.0
        times = plans["recompute all blocks"]
        assert times["estimated_ratio"] > 1.0
        ratio = times["measured_s"] / plans["plain"]["measured_s"]
        assert times["error"] == pytest.approx(times["estimated_ratio"] / ratio - 1)


@pytest.mark.slow
def test_large_models_are_planned_dry(tmp_path):
    compare_times(["--frontier", "--dry-run", "--results", str(tmp_path)])
    written = json.loads((tmp_path / "plan_frontier.json").read_text())
    (found,) = written["cases"].values()
    assert found["plan"]["time_ratio"] == 1.0  # it fits as it is
    assert found["plan"]["device_bytes"] + found["margin_bytes"] <= found["budget_bytes"] == 2**30
    assert all(written["claims"].values())
    assert (
        "RoBERTa tiny, 8 x 16, RTX-3060-12GB, 1GiB" in (tmp_path / "plan_frontier.md").read_text()
    )


@pytest.mark.slow
def test_hosts_with_little_memory_are_planned_dry(tmp_path):
    compare_times(["--host", "--dry-run", "--results", str(tmp_path)])
    written = json.loads((tmp_path / "plan_host.json").read_text())
    (found,) = written["cases"].values()
    assert found["plan"]["time_ratio"] == 1.0  # it fits as it is
    assert all(written["claims"].values())
    row = "| RoBERTa tiny, 8 x 16, 1GiB of RTX-3060-12GB | 1GiB |"
    assert row in (tmp_path / "plan_host.md").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning, about this machine
def test_small_models_train_under_budgets_dry(tmp_path):
    compare_times(["--budgets", "--dry-run", "--results", str(tmp_path)])
    written = json.loads((tmp_path / "plan_budgets_cpu.json").read_text())
    (found,) = written["models"].values()
    (one,) = found["fits"]
    assert found["num_bitwise"] == 20
    assert one["counted_bytes"] == one["plan"]["peak_bytes"] <= one["budget_bytes"]
    assert one["counted_bytes"] < found["plain"]["counted_bytes"]
    assert one["losses"] == found["plain"]["losses"]
    assert one["plan"]["settings"]["activation_checkpointing"] is not None
    assert all(written["claims"].values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning, about this machine
def test_fits_with_a_budget_survive(tmp_path):
    attack(["--plans", "--injections", "1", "--kills", "1", "--results", str(tmp_path)])
    injection, kill = json.loads((tmp_path / "faults_plans_cpu.json").read_text())["attacks"]
    assert len(injection["batches"]) >= 1
    assert (injection["kind"], kill["kind"]) == ("injection", "kill, same budget")
    assert injection["outcome"] in ("right", "lost with advice")
    assert kill["outcome"] == "right"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning, about this machine
def test_memory_runs_out_in_each_phase():
    places = Injections(Case("words", "in backward", accumulate=1, clip=0.5), seed=0)
    found = [places.attack() for _ in PHASES]
    assert [one["phase"] for one in found] == [*PHASES]
    assert {one["outcome"] for one in found} == {"right", "lost with advice"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning, about this machine
def test_fits_are_killed_while_a_checkpoint_is_written():
    found = kill_and_resume(Case("convolutions", "micro-batches", 2, None), 2, IN_CHECKPOINT)
    assert (found["outcome"], found["resumed"]) == ("right", True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning, about this machine
def test_resumed_attacks_repeat_only_what_was_not_right(tmp_path):
    typed = ["--injections", "2", "--kills", "0", "--environment", "0", "--results", str(tmp_path)]
    attack(typed)
    path = tmp_path / "faults_cpu.json"
    first = json.loads(path.read_text())
    one, other = first["attacks"]
    expected = other["outcome"]
    one["batch"], other["outcome"] = "kept", "hung"
    path.write_text(json.dumps(first))

    attack([*typed, "--resume"])

    kept, repeated = json.loads(path.read_text())["attacks"]
    assert (kept["batch"], repeated["outcome"]) == ("kept", expected)


def test_what_is_not_right_is_counted_in_the_evidence(tmp_path):
    for path in RESULTS.glob("faults_*.json"):
        shutil.copy(path, tmp_path)
    path = tmp_path / "faults_cpu.json"
    found = json.loads(path.read_text())
    kills = [one for one in found["attacks"] if one["kind"] == "kill"]
    kills[0]["outcome"] = "hung"
    path.write_text(json.dumps(found))
    (row,) = re.findall("^. killed, resumed .*$", evidence.make_text(tmp_path), re.MULTILINE)
    numbers = [len(kills), len(kills) - 1, 0, 0, 0, 1]
    assert [int(cell) for cell in row.split("|")[2:-1]] == numbers


def test_rank_correlation():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 400]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(0.8)


def test_ratios_of_times_have_median_and_range():
    table = times_table({"1": {"DDP": [1.0, 9.0, 1.2]}, "2": {"DDP": [0.5, 0.75, 1.0]}})
    assert re.search(
        r"^\| DDP +\| +1.20 \(1.00 to 9.00\) \| +0.75 \(0.50 to 1.00\) \|", table, re.M
    )


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
@pytest.mark.filterwarnings("ignore")  # of Lightning, about this machine
def test_each_fault_of_the_environment_is_survived(tmp_path):
    numbers = ["--injections", "0", "--kills", "0", "--environment", "5"]
    attack([*numbers, "--results", str(tmp_path)])

    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())["attacks"]
    assert path.name == "faults_environment_cpu.json"
    assert {one["fault"] for one in found} == set(FAULTS)
    assert {one["outcome"] for one in found} == {"went on", "clear error"}
    assert "| NVML lost            |      1 |       1 |" in path.with_suffix(".md").read_text()


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
