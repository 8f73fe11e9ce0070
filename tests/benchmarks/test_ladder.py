"""The ladder and the learning curves run in small, and what they make of measurements is right."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks._common import run_in_process
from benchmarks.convergence.__main__ import judge as judge_presets
from benchmarks.convergence.__main__ import make_text as make_preset_text
from benchmarks.ladder import __main__ as ladder
from benchmarks.ladder._data import Collate, Samples
from benchmarks.ladder._observers import Meter
from benchmarks.ladder._plot import plot
from benchmarks.ladder._rows import ROWS, WORKLOADS
from benchmarks.ladder._run import TRAINERS, train_with
from benchmarks.ladder._table import CATEGORIES, check_claims, make_text
from benchmarks.ladder._timing import time_row
from benchmarks.learning_curves.__main__ import judge, make_table
from benchmarks.learning_curves.__main__ import plot as plot_curves

DRY = WORKLOADS["dry"]
MIB = 2**20


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """Undo what Hugging Face's Trainer leaves behind."""
    import accelerate.state  # type: ignore[import-untyped]
    from bitsandbytes.optim.optimizer import GlobalOptimManager

    rng_state = torch.random.get_rng_state()
    num_threads = torch.get_num_threads()
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    GlobalOptimManager._instance = None
    torch.set_num_threads(num_threads)
    torch.random.set_rng_state(rng_state)


def _train(trainer: str, row: str) -> dict[str, Any]:
    meter = Meter(DRY)
    train_with(trainer)(ROWS[row], DRY, meter)
    return meter.results()


@pytest.mark.parametrize("row", ["nothing", "checkpointing"])
def test_both_trainers_train_the_same(row):
    ours, theirs = (_train(trainer, row) for trainer in TRAINERS)

    assert len(ours["losses"]) == DRY.num_steps
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert ours["losses"][0] != pytest.approx(ours["losses"][-1], rel=1e-3)


def test_micro_batches_of_both_trainers_learn_what_the_whole_batch_teaches():
    whole = _train("lightning", "nothing")["losses"]

    assert _train("lightning", "micro-batches")["losses"] == pytest.approx(whole, rel=1e-5)
    # A mean over samples of means over tokens, not over all tokens: near, but not the same.
    theirs = _train("hugging_face", "micro-batches")["losses"]
    assert theirs == pytest.approx(whole, rel=0.05)


@pytest.mark.slow
def test_everything_on_needs_less_than_nothing_and_than_the_other_trainer():
    nothing = {trainer: _train(trainer, "nothing") for trainer in TRAINERS}
    everything = {trainer: _train(trainer, "all") for trainer in TRAINERS}

    for trainer in TRAINERS:
        assert everything[trainer]["peak_live_bytes"] < nothing[trainer]["peak_live_bytes"]
        for found in (everything[trainer], nothing[trainer]):
            assert sum(found["by_category"].values()) == found["peak_live_bytes"]
    parameters = everything["lightning"]["by_category"]["parameter"]
    assert parameters == everything["hugging_face"]["by_category"]["parameter"]
    ours, theirs = (everything[trainer]["peak_live_bytes"] for trainer in TRAINERS)
    assert ours <= theirs


def test_what_is_kept_between_steps_is_counted():
    class Keeps(Meter):
        kept: tuple[torch.Tensor, ...] = ()

        def track_input(self, batch: object) -> None:
            if self._live is not None:  # counting: make something that stays until the next step
                self.kept = (*self.kept, torch.ones(MIB // 4))
            super().track_input(batch)

    plain, keeping = Meter(DRY), Keeps(DRY)
    for meter in (plain, keeping):
        train_with("lightning")(ROWS["nothing"], DRY, meter)

    num_kept = len(keeping.kept)
    grown = keeping.results()["peak_live_bytes"] - plain.results()["peak_live_bytes"]
    assert num_kept >= 2
    assert (num_kept - 1) * MIB <= grown <= num_kept * MIB


def test_a_row_is_timed_beside_nothing_and_beside_the_other_trainer():
    found = time_row("checkpointing", DRY, 3)

    assert set(found["median_step_s"]) == {"lightning", "hugging_face", "nothing"}
    for ratios in (found["cpu"], found["wall"]):
        assert set(ratios) == {
            "lightning / nothing",
            "hugging_face / nothing",
            "lightning / hugging_face",
        }
    assert found["num_rounds"] == 3


def test_both_trainers_are_told_the_same():
    assert ROWS["nothing"].callback_arguments(DRY) is None
    ours = ROWS["all"].callback_arguments(DRY)
    assert ours is not None
    theirs = ROWS["all"].hugging_face_arguments(DRY)
    assert ours["micro_batch_size"] == theirs["per_device_train_batch_size"] == 1
    assert theirs["gradient_accumulation_steps"] == DRY.batch_size
    assert (ours["precision"], theirs["bf16"]) == ("bf16-mixed", True)
    assert (ours["optimizer"], theirs["optim"]) == ("8bit", "adamw_bnb_8bit")
    assert ROWS["nothing"].hugging_face_arguments(DRY)["gradient_accumulation_steps"] == 1


def test_samples_come_again_and_are_collated_to_tensors():
    tracked: list[object] = []
    workload = replace(DRY, num_warmup=5)
    samples = Samples(workload)

    batch = Collate(tracked.append)([samples[0], samples[16]])

    assert len(samples) == workload.num_steps * 4
    assert torch.equal(batch["input_ids"][0], batch["input_ids"][1])  # 4 batches of 4, again
    assert tracked == [batch]
    with pytest.raises(IndexError):
        samples[len(samples)]


def _found(peak_bytes: int) -> dict[str, Any]:
    return {
        "peak_live_bytes": peak_bytes,
        "by_category": dict.fromkeys(CATEGORIES, peak_bytes // len(CATEGORIES)),
        "median_step_s": 0.1,
        "losses": [2.0, 1.5],
    }


def _row(ours: int, theirs: int, time_ratio: float = 0.9) -> dict[str, Any]:
    interval = {"confidence_low": time_ratio - 0.05, "confidence_high": time_ratio + 0.05}
    ratio = {"median": time_ratio, **interval}
    keys = ("lightning / nothing", "hugging_face / nothing", "lightning / hugging_face")
    return {
        "lightning": _found(ours),
        "hugging_face": _found(theirs),
        "time": {"cpu": dict.fromkeys(keys, ratio)},
    }


def test_table_has_ratios_to_nothing_and_to_the_other_trainer():
    calls = {"nothing": "", "all": "MemSaveCallback()"}
    text = make_text({"nothing": _row(8 * MIB, 8 * MIB), "all": _row(2 * MIB, 4 * MIB)}, calls)

    line = next(line for line in text.splitlines() if line.startswith("| all "))
    cells = [cell.strip() for cell in line.split("|")][1:-1]
    assert cells[1:5] == ["2.0", "0.250", "4.0", "0.500"]
    assert cells[7] == "0.900 (0.850 to 0.950)"
    assert "| all, HF" in text
    typed = [line for line in text.splitlines() if "`MemSaveCallback()`" in line]
    assert [line.split()[1] for line in typed] == ["all"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (_row(2, 2), [True, True]),
        (_row(3, 2), [False, True]),
        (_row(2, 2, time_ratio=1.2), [True, False]),
    ],
)
def test_claims_fail_when_more_is_needed(row, expected):
    assert list(check_claims({"all": row}, is_timed=True).values()) == expected
    assert list(check_claims({"all": row}, is_timed=False).values()) == expected[:1]


def test_nothing_is_claimed_of_a_row_that_failed():
    row = {**_row(1, 1), "lightning": {"error": "out of memory"}}

    assert check_claims({"all": row}, is_timed=True) == {}
    assert "`all`, lightning: out of memory" in make_text({"all": row}, {"all": ""})


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [((4, 3, 2, 2), {True}), ((3, 4, 2, 1), {True}), ((4, 3, 2, 3), {True, False})],
)
def test_presets_are_in_order(peaks, expected):
    names = ("classic", "bitwise", "single_gpu", "offload")
    rows = {n: _row(peak, 8) for n, peak in zip(names, peaks, strict=True)}
    found = check_claims(rows, is_timed=False)
    ordered = {claim: holds for claim, holds in found.items() if "needs no more than" in claim}
    assert len(ordered) == 5
    assert {*ordered.values()} == expected
    assert "bitwise needs no more than classic" not in ordered


def test_the_call_beside_a_row_is_what_its_trainer_gets():
    for name, row in ROWS.items():
        code = row.call(DRY)
        given = row.callback_arguments(DRY)
        assert (code == "") == (given is None) == (name == "nothing")
        if given is not None:
            typed = eval(code, {"MemSaveCallback": dict})
            assert typed == {n: v for n, v in given.items() if n != "predict"}


def test_main_writes_tables_claims_and_plot(tmp_path, monkeypatch, capsys):
    measured = {"nothing": _row(8 * MIB, 8 * MIB), "all": _row(2 * MIB, 4 * MIB)}
    monkeypatch.setattr(ladder, "measure", lambda rows, workload, num_rounds: measured)

    assert ladder.main(["--dry", "--results", str(tmp_path)]) == 0

    found = json.loads((tmp_path / "ladder_dry.json").read_text())
    assert found["rows"]["all"]["lightning"]["peak_live_bytes"] == 2 * MIB
    assert all(found["claims"].values())
    assert "| all " in (tmp_path / "ladder_dry.md").read_text()
    assert "lightning-memsave" in (tmp_path / "ladder_dry.svg").read_text()

    measured["all"] = _row(5 * MIB, 4 * MIB)
    assert ladder.main(["--dry", "--results", str(tmp_path)]) == 1
    assert "FAILS: all: the peak" in capsys.readouterr().out


def test_plot_of_the_same_figures_is_the_same_file(tmp_path):
    rows = {"nothing": _row(8 * MIB, 8 * MIB)}

    for name in ("a.svg", "b.svg"):
        plot(rows, tmp_path / name)

    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()


@pytest.mark.slow
def test_a_row_runs_in_a_fresh_process():
    found = _in_process("lightning", "checkpointing")

    assert found["peak_live_bytes"] == _train("lightning", "checkpointing")["peak_live_bytes"]


def test_a_process_that_fails_is_recorded():
    found = run_in_process("benchmarks.no_such_module", limit_s=300)
    assert "No module named benchmarks.no_such_module" in found["error"]


def test_a_process_that_takes_too_long_is_recorded():
    assert _in_process("lightning", "nothing", limit_s=0.5) == {"error": "stopped after 0 s"}


def _in_process(trainer: str, row: str, limit_s: float = 300) -> dict[str, Any]:
    return run_in_process("benchmarks.ladder._run", trainer, row, "dry", limit_s=limit_s)


def _curve(*losses: float) -> dict[str, Any]:
    steps = range(50, 50 * len(losses) + 1, 50)
    return {"validation_losses": dict(zip(steps, losses, strict=True))}


def test_learning_is_judged_by_the_spread_of_seeds(tmp_path):
    curves = {
        "nothing": {0: _curve(3.0, 2.0), 1: _curve(3.0, 2.2)},
        "all": {0: _curve(3.0, 2.1), 1: _curve(3.0, 2.2)},
    }

    verdict = judge(curves)
    assert verdict["is_within"]
    assert verdict["mean_with_all"] == pytest.approx(2.15)
    assert verdict["largest_difference"] == pytest.approx(0.1)
    assert "| all, seed 0     |" in make_table(curves)
    assert "+0.1000" in make_table(curves)
    plot_curves(curves, tmp_path / "curves.svg")
    assert "validation loss" in (tmp_path / "curves.svg").read_text()

    curves["all"][1] = _curve(3.0, 2.4)
    assert not judge(curves)["is_within"]


def test_text_is_real_and_masked():
    from benchmarks.learning_curves._text import load_text

    train, validation = load_text(64, 16, 64, 500)

    assert train["input_ids"].shape == (64, 64)
    assert validation["labels"].shape == (16, 64)
    is_masked = train["input_ids"] == 4
    assert 0.12 < is_masked.double().mean().item() < 0.18
    assert torch.equal(is_masked, train["labels"] != -100)
    assert train["labels"][is_masked].min() >= 5  # what is asked for are ordinary tokens
    assert train["input_ids"].max() < 500
    again, _ = load_text(64, 16, 64, 500)
    assert torch.equal(again["input_ids"], train["input_ids"])


@pytest.mark.slow
def test_every_row_of_the_ladder_trains_on_text():
    from benchmarks.learning_curves._run import train

    found = train("all", 0, is_dry=True)

    assert len(found["train_losses"]) == 4
    assert list(found["validation_losses"]) == [2, 4]
    assert found["validation_losses"][4] < found["validation_losses"][2]


def test_a_preset_passes_if_its_mean_is_as_near_as_seeds_are_to_each_other():
    def ends_with(*finals: float) -> dict[int, dict[int, float]]:
        return {seed: {2: 9.0, 4: final} for seed, final in enumerate(finals)}

    losses = {
        "float32": ends_with(3.0, 3.1, 3.2),
        "single_gpu": ends_with(3.2, 3.3, 3.2),
        "classic": ends_with(3.3, 3.4, 3.5),
        "single_gpu, Kahan": ends_with(3.05),
    }
    verdicts = judge_presets(losses)
    assert {row: verdict["passes"] for row, verdict in verdicts.items()} == {
        "float32": True,
        "single_gpu": True,
        "classic": False,
        "single_gpu, Kahan": True,
    }
    assert verdicts["single_gpu, Kahan"]["difference"] == pytest.approx(0.05)
    assert "| single_gpu, Kahan" in make_preset_text(losses)


@pytest.mark.slow
def test_a_preset_trains_on_text():
    from benchmarks.convergence._run import train

    found = train("single_gpu", 0, is_dry=True)

    assert list(found) == [2, 4]
    assert found[4] < found[2]
