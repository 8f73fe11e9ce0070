"""The callback and the monitor under DDP, on two processes: `ranks` runs every scenario on both."""

import contextlib
import csv
import functools
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_memsave import GPUMemoryMonitor, MemSaveCallback
from lightning_memsave.callbacks.settings import micro_batch_size
from lightning_memsave.errors import MemoryExhaustedError
from lightning_memsave.techniques.micro_batching.training_state import TrainingState
from tests.callbacks.lit import callback_with, loader_of, only, peak_of, rows_of
from tests.callbacks.ranks import Notes, rank_of_this_process
from tests.callbacks.test_strategies import (
    SGD,
    SIZES,
    assert_near,
    batches,
    make,
    raised_by,
    row,
    train,
)
from tests.cases import WIDTH, BatchNormModel, Model
from tests.out_of_memory import MESSAGE

# --- what runs on each rank ---


class TwoHeads(Model):
    """One head is never used: its parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)


CHECKPOINTED: dict[str, tuple[type[nn.Module], Any, str]] = {
    "all": (BatchNormModel, DDPStrategy, "all"),
    "selective": (BatchNormModel, DDPStrategy, "selective"),
    "every:2": (BatchNormModel, DDPStrategy, "every:2"),
    "unused": (TwoHeads, functools.partial(DDPStrategy, find_unused_parameters=True), "all"),
    "static": (Model, functools.partial(DDPStrategy, static_graph=True), "all"),
}


def run_bitwise() -> Notes:
    notes: Notes = {}
    for name, (model, make_strategy, which) in CHECKPOINTED.items():
        callback = MemSaveCallback(which, exactness="bitwise", report=False)
        notes[f"plain {name}"] = train(make(model), strategy=make_strategy())
        notes[f"ours {name}"] = train(make(model), callback, strategy=make_strategy())
        notes[f"row {name}"] = row(callback, "activation_checkpointing")
    return notes


def run_everything() -> Notes:
    """The bare callback, with precision and accumulation."""
    callback, written = MemSaveCallback(precision="bf16-mixed", accumulate_grad_batches=2), []
    is_on, out = True, io.StringIO()

    def hear(event: str, args: Any) -> None:
        if is_on and event == "os.rename" and str(args[1]).endswith("memsave_report.json"):
            written.append(str(args[1]))

    sys.addaudithook(hear)  # every file that this process puts in its place
    with contextlib.redirect_stdout(out):
        notes = train(make(), callback, max_epochs=3)
    is_on = False
    rows = {name: found.status for name, found in rows_of(callback).items()}
    said = {"printed": out.getvalue(), "written": written}
    return notes | said | {"rows": rows, "peak_bytes": peak_of(callback)}


def run_monitor() -> Notes:
    """Rank 1 alone holds a large tensor during each step."""
    monitor = GPUMemoryMonitor(every_n_steps=1, print_summary=False)

    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        ballast = torch.zeros(1 + rank_of_this_process() * 1_000_000)
        return self.model(batch) + ballast.sum()

    logger = pl.loggers.CSVLogger(Path.cwd() / "csv")
    train(make(training_step=training_step), monitor, logger=logger)
    summary = monitor.summary
    assert summary is not None
    return {
        "peak_bytes": summary.peak_bytes,
        "own_peak_bytes": sum(summary.by_category.values()),
        "num_samples": summary.num_samples,
        "num_steps": summary.num_steps,
        "logged_bytes": logged_peaks(Path(logger.log_dir)) if rank_of_this_process() == 0 else [],
    }


def logged_peaks(folder: Path) -> list[int]:
    with (folder / "metrics.csv").open() as file:
        values = [row["memory/peak_live_gib"] for row in csv.DictReader(file)]
    return [round(float(value) * 2**30) for value in values if value]  # one row is of validation


def masked_batches() -> list[Tensor]:
    """In the first batch, rank 0 leaves out no label and rank 1 has one sample."""
    rank = rank_of_this_process()
    generator = torch.Generator().manual_seed(rank)
    labels = torch.randint(5, (3, 8, 6), generator=generator)
    marks = torch.rand(labels.shape, generator=generator) < torch.linspace(0.1, 0.9, 8)[:, None]
    marks[0] &= rank == 1
    batches = [*labels.masked_fill(marks, -100)]
    return batches if rank == 0 else [batches[0][:1], *batches[1:]]


def run_micro_batches() -> Notes:
    """What the loss is the mean over is proven by both ranks, or by none."""

    def masked(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch.clamp(min=0)).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch.flatten())

    def over_the_batch(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch.clamp(min=0)).mean((0, 1)).square().sum()

    notes: Notes = {}
    for name, size, step in (
        ("plain", None, masked),
        ("fixed", 3, masked),
        ("auto", "auto", masked),
        ("over the batch", "auto", over_the_batch),
    ):
        callback = only(size)
        lit = make(
            lambda: nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5)).double(),
            training_step=step,
            train_dataloader=lambda self: loader_of(masked_batches()),
            **SGD,
        )
        notes[name] = train(lit, callback)
        notes[f"{name} row"] = row(callback) if size else None
    return notes


def run_after_the_probe() -> Notes:
    """Count per batch what is saved, what we communicate, and passes through DDP itself.

    Memory runs out in the fourth.
    """
    batches: list[dict[str, int]] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            if batches and (name != "ddp" or args[0].require_backward_grad_sync):
                batches[-1][name] += 1
            return function(*args, **kwargs)

        return count

    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            raise torch.OutOfMemoryError(MESSAGE)
        return self.model(batch)

    per_batch = callback_with(
        on_train_batch_start=lambda *_: batches.append({"saved": 0, "averaged": 0, "ddp": 0})
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, owner, attribute in (
            ("saved", TrainingState, "__init__"),
            ("averaged", micro_batch_size, "average_gradients"),
            ("ddp", DistributedDataParallel, "forward"),
        ):
            patch.setattr(owner, attribute, counted(name, getattr(owner, attribute)))
        lit = make(training_step=training_step)
        raised = raised_by(lambda: train(lit, only("auto"), per_batch))
    return {"batches": batches, "raised": raised}


UNEVEN: dict[str, Any] = {
    "whole": {},
    "cut": {"limit_train_batches": 2},
    "short": {"max_steps": 2},
}


def run_uneven() -> Notes:
    """One process has three batches, and the other two."""
    notes: Notes = {}
    for name, settings in UNEVEN.items():
        own = batches((4, 4, 4))[rank_of_this_process() :]
        lit = make(train_dataloader=lambda self, own=own: loader_of(own))
        raised = raised_by(functools.partial(train, lit, MemSaveCallback(), **settings))
        notes[name] = [raised, lit.trainer.global_step]
    return notes


SCENARIOS: dict[str, Callable[[], Notes]] = {
    "bitwise": run_bitwise,
    "everything": run_everything,
    "monitor": run_monitor,
    "micro_batches": run_micro_batches,
    "after_the_probe": run_after_the_probe,
    "uneven": run_uneven,
}


# --- what pytest compares ---


pytestmark = [pytest.mark.usefixtures("no_prediction", "any_saving_counts"), pytest.mark.slow]


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpointing_is_bitwise(report, name):
    """With dropout, of which a mix-up between ranks would be seen: each draws its own."""
    first, second = report("bitwise")
    assert first[f"plain {name}"]["losses"] != second[f"plain {name}"]["losses"]
    for notes in (first, second):
        assert notes[f"row {name}"][0] == "on"
        assert notes[f"ours {name}"] == notes[f"plain {name}"]


def test_processes_that_would_wait_for_each_other_are_refused_before_training(report):
    for notes in report("uneven"):
        (name, message), num_steps = notes["whole"]
        assert name == "IncompatibleError"
        assert "2 batches in one process, and 3 in another" in message
        assert "`Trainer(limit_train_batches=2)`" in message
        assert not num_steps
        assert notes["cut"] == notes["short"] == [[], 2]


def test_after_the_probe_ddp_is_as_without_us_and_nothing_is_saved(report):
    """DDP sums gradients while backward computes; until two steps have passed we do, after it."""
    for rank, notes in enumerate(report("after_the_probe")):
        probed, later = notes["batches"][:2], notes["batches"][2:]
        assert probed == [{"saved": 1, "averaged": 1, "ddp": 0}] * 2
        assert later == [{"saved": 0, "averaged": 0, "ddp": 1}] * 2
        kind, message = notes["raised"]
        assert kind == MemoryExhaustedError.__name__
        assert f"4 samples at once on rank {rank}, after 3 optimizer steps" in message
        assert "`micro_batch_size=2`" in message


def test_everything_trains_equal_parameters_and_rank_zero_prints_and_writes(report):
    first, second = report("everything")
    # The line of what only a preset would switch on apart, and what several processes ask for.
    off = {name for name, status in first["rows"].items() if status != "on"}
    assert off == {"preset", "evaluation"}
    assert first["parameters"] == second["parameters"]
    assert first["losses"] != second["losses"]
    assert sum(first["losses"][-3:]) < sum(first["losses"][:3])
    assert first["peak_bytes"] == second["peak_bytes"] > 0
    assert "MemSaveCallback:" in first["printed"]
    assert "peak memory" in first["printed"]
    assert len(first["written"]) == 1
    assert (second["printed"], second["written"]) == ("", [])


def test_peaks_are_maxima_and_samples_are_sums_over_ranks(report):
    first, second = report("monitor")
    assert second["own_peak_bytes"] > first["own_peak_bytes"] + 3_000_000
    assert first["peak_bytes"] == second["peak_bytes"] == second["own_peak_bytes"]
    assert max(first["logged_bytes"]) == first["peak_bytes"]
    assert min(first["logged_bytes"]) > first["own_peak_bytes"]
    for notes in (first, second):
        assert notes["num_samples"] == sum(map(sum, SIZES))
        assert notes["num_steps"] == len(SIZES[0])


@pytest.mark.parametrize("name", ["fixed", "auto"])
def test_micro_batches_are_weighted_as_both_ranks_have_proven(report, name):
    for notes in report("micro_batches"):
        assert "that are not -100, proven" in notes[f"{name} row"][1]
        for key, truth in notes["plain"]["parameters"].items():
            assert_near(notes[name]["parameters"][key], truth)


def test_micro_batches_are_off_where_the_loss_cannot_be_split(report):
    for notes in report("micro_batches"):
        assert notes["over the batch row"][0] == "off"
