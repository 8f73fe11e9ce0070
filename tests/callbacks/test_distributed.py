"""Two processes that train together on CPU: `ranks` runs every scenario on both."""

import contextlib
import csv
import hashlib
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from lightning_memsave import GPUMemoryMonitor, MemSaveCallback
from lightning_memsave.callbacks.settings import micro_batch_size
from lightning_memsave.techniques.micro_batching.training_state import TrainingState
from tests.callbacks.lit import (
    Trace,
    Vectors,
    callback_with,
    loader_of,
    make_lit,
    make_trainer,
    no_step,
    quiet,
    without_dropout,
)
from tests.callbacks.ranks import RANKS, Notes, Report, make_report, rank_of_this_process
from tests.cases import WIDTH, BatchNormModel, Model

LENGTH, BATCH = 40, 4  # five batches on each rank


# --- what runs on each rank ---


class TwoHeads(Model):
    """One head is never used: its parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)


class Stream(IterableDataset[Tensor]):
    """A rank's share of the vectors; its loader does not know how many they are."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Tensor]:
        return iter(Vectors(LENGTH).data[self.rank :: RANKS])


def digest(module: nn.Module) -> str:
    """Tell two states apart to the last bit."""
    whole = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        whole.update(name.encode() + full.contiguous().numpy().tobytes())
    return whole.hexdigest()


def train(lit: Any, *callbacks: Any, strategy: Any = "ddp", **settings: Any) -> Notes:
    trace = Trace(pl)
    trainer = make_trainer(pl, *callbacks, trace.callback, **two_ranks(strategy), **settings)
    torch.manual_seed(100 + rank_of_this_process())  # other dropout on each rank
    trainer.fit(lit)
    return {"losses": trace.losses, "digest": digest(lit)}


def two_ranks(strategy: Any) -> dict[str, Any]:
    return {"devices": RANKS, "strategy": strategy}


def rows_of(callback: MemSaveCallback) -> dict[str, tuple[str, str]]:
    return {row.name: (row.status, " ".join(row.details)) for row in callback.rows}


def lit_of(model: nn.Module, **methods: Any) -> Any:
    defaults = {"train_dataloader": lambda self: DataLoader(Vectors(LENGTH), batch_size=BATCH)}
    return make_lit(model=model, **(defaults | methods))


def seeded(model_class: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return model_class()


def run_bitwise() -> Notes:
    notes = {"plain": train(lit_of(seeded(BatchNormModel)))}
    for which in ("all", "selective", "every:2"):
        callback = MemSaveCallback(which, exactness="bitwise")
        notes[which] = train(lit_of(seeded(BatchNormModel)), callback)
        notes[which]["rows"] = rows_of(callback)
    return notes


def run_unused_parameters() -> Notes:
    notes = {}
    for name, model, how in (
        ("unused", TwoHeads, {"find_unused_parameters": True}),
        ("static", Model, {"static_graph": True}),
    ):
        for way, callbacks in (("plain", []), ("ours", [MemSaveCallback(exactness="bitwise")])):
            strategy = DDPStrategy(**how)  # type: ignore[arg-type] # any
            notes[f"{name} {way}"] = train(lit_of(seeded(model)), *callbacks, strategy=strategy)
    return notes


def run_bare() -> Notes:
    callback, written, out = MemSaveCallback(), [], io.StringIO()
    is_on = True

    def hear(event: str, args: Any) -> None:
        if is_on and event == "os.rename" and str(args[1]).endswith("memsave_report.json"):
            written.append(str(args[1]))

    sys.addaudithook(hear)  # every file that this process puts in its place
    with contextlib.redirect_stdout(out):
        notes = train(lit_of(seeded(Model)), callback, max_epochs=2)
    is_on = False
    return notes | {"rows": rows_of(callback), "printed": out.getvalue(), "written": written}


def run_monitor() -> Notes:
    """Rank 1 alone holds a large tensor during each step."""
    monitor = GPUMemoryMonitor(every_n_steps=1, print_summary=False)

    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        ballast = torch.zeros(1 + rank_of_this_process() * 1_000_000)
        return self.model(batch) + ballast.sum()

    logger = pl.loggers.CSVLogger(Path.cwd() / "csv")
    train(lit_of(seeded(Model), training_step=training_step), monitor, logger=logger)
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


def accumulated(make_loader: Callable[[], Any], window: int) -> list[list[float]]:
    gradients: list[list[float]] = []

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        gradients.append(self.model.head.weight.grad.flatten().tolist())

    lit = lit_of(
        float64_model(),
        on_before_optimizer_step=on_before_optimizer_step,
        training_step=lambda self, batch, batch_idx: self.model(batch.double()),
        configure_optimizers=lambda self: torch.optim.SGD(self.parameters(), lr=0.0),
        train_dataloader=lambda self: make_loader(),
    )
    # Without the prediction, whose trial would call the hook too.
    callback = quiet(None, optimizer=None, accumulate_grad_batches=window)
    # Each rank has its share already; Lightning's own sampler would shuffle.
    train(lit, callback, limit_val_batches=0, use_distributed_sampler=False)
    return gradients


def float64_model() -> nn.Module:
    model: nn.Module = without_dropout(seeded(Model)).double()
    return model


def run_accumulation() -> Notes:
    stream = Stream(rank_of_this_process())
    loaders: dict[str, Callable[[], Any]] = {
        "known length": lambda: DataLoader(list(stream), batch_size=BATCH),  # type: ignore[arg-type] # a list
        "unknown length": lambda: DataLoader(stream, batch_size=BATCH),
    }
    return {
        f"{kind} {window}": accumulated(make, window)
        for kind, make in loaders.items()
        for window in (2, 3)
    }


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

    def make(step: Any) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5)).double()
        return lit_of(
            model,
            training_step=step,
            validation_step=no_step,
            train_dataloader=lambda self: loader_of(masked_batches()),
            configure_optimizers=lambda self: torch.optim.SGD(self.parameters(), lr=0.1),
        )

    notes: Notes = {}
    for name, size in (("plain", None), ("fixed", 3), ("auto", "auto")):
        callback = MemSaveCallback(optimizer=None, micro_batch_size=size)
        lit = make(masked)
        train(lit, callback, use_distributed_sampler=False)
        notes[name] = [p.tolist() for p in lit.parameters()]
        notes[f"{name} rows"] = rows_of(callback)
    callback = MemSaveCallback(optimizer=None, micro_batch_size="auto")
    train(make(over_the_batch), callback, use_distributed_sampler=False)
    notes["over the batch rows"] = rows_of(callback)
    return notes


def run_after_the_probe() -> Notes:
    """Count per batch what is saved, what we communicate, and passes through DDP itself."""
    batches: list[dict[str, int]] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            if batches and (name != "ddp" or args[0].require_backward_grad_sync):
                batches[-1][name] += 1
            return function(*args, **kwargs)

        return count

    per_batch = callback_with(
        on_train_batch_start=lambda *_: batches.append({"saved": 0, "averaged": 0, "ddp": 0})
    )
    callback = quiet()
    with pytest.MonkeyPatch.context() as patch:
        for name, owner, attribute in (
            ("saved", TrainingState, "__init__"),
            ("averaged", micro_batch_size, "average_gradients"),
            ("ddp", DistributedDataParallel, "forward"),
        ):
            patch.setattr(owner, attribute, counted(name, getattr(owner, attribute)))
        train(lit_of(seeded(Model)), callback, per_batch, limit_val_batches=0)
    return {"batches": batches}


SCENARIOS: dict[str, Callable[[], Notes]] = {
    "bitwise": run_bitwise,
    "unused_parameters": run_unused_parameters,
    "bare": run_bare,
    "monitor": run_monitor,
    "accumulation": run_accumulation,
    "micro_batches": run_micro_batches,
    "after_the_probe": run_after_the_probe,
}


# --- what pytest compares ---


pytestmark = [pytest.mark.usefixtures("no_prediction", "any_saving_counts"), pytest.mark.slow]


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Report:
    return make_report(request)


@pytest.mark.parametrize("which", ["all", "selective", "every:2"])
def test_checkpointing_is_bitwise_with_dropout_and_batch_norm(report, which):
    for notes in report("bitwise"):
        assert notes[which]["rows"]["activation_checkpointing"][0] == "on"
        assert notes[which]["losses"] == notes["plain"]["losses"]
        assert notes[which]["digest"] == notes["plain"]["digest"]


def test_ranks_draw_other_batches_and_other_dropout(report):
    """Else the test above would not see a mix-up between ranks."""
    first, second = report("bitwise")
    assert first["plain"]["losses"] != second["plain"]["losses"]


def test_after_the_probe_ddp_is_as_without_us_and_nothing_is_saved(report):
    """DDP sums gradients while backward computes; until two steps have passed we do, after it."""
    for notes in report("after_the_probe"):
        probed, later = notes["batches"][:2], notes["batches"][2:]
        assert probed == [{"saved": 1, "averaged": 1, "ddp": 0}] * 2
        assert later == [{"saved": 0, "averaged": 0, "ddp": 1}] * 3


@pytest.mark.parametrize("kind", ["unused", "static"])
def test_unused_parameters_and_static_graph_are_as_without_it(report, kind):
    for notes in report("unused_parameters"):
        assert notes[f"{kind} ours"] == notes[f"{kind} plain"]


def test_bare_callback_trains_equal_parameters_on_both_ranks(report):
    first, second = report("bare")
    assert first["digest"] == second["digest"]
    assert first["losses"] != second["losses"]
    assert sum(first["losses"][-3:]) < sum(first["losses"][:3])
    for notes in (first, second):
        assert notes["rows"]["activation_checkpointing"][0] == "on"
        assert notes["rows"]["optimizer"][0] == "on"


def test_only_rank_zero_prints_and_writes(report):
    first, second = report("bare")
    assert "MemSaveCallback:" in first["printed"]
    assert "peak memory" in first["printed"]
    assert len(first["written"]) == 1
    assert (second["printed"], second["written"]) == ("", [])


def test_peaks_are_maxima_over_ranks(report):
    first, second = report("monitor")
    assert second["own_peak_bytes"] > first["own_peak_bytes"] + 3_000_000
    assert first["peak_bytes"] == second["peak_bytes"] == second["own_peak_bytes"]
    assert max(first["logged_bytes"]) == first["peak_bytes"]
    assert min(first["logged_bytes"]) > first["own_peak_bytes"]


def test_samples_are_the_sum_over_ranks(report):
    for notes in report("monitor"):
        assert notes["num_samples"] == LENGTH
        assert notes["num_steps"] == LENGTH // BATCH // RANKS


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("kind", ["known length", "unknown length"])
def test_gradient_is_the_mean_over_window_and_ranks(report, kind, window):
    model = float64_model()
    shares = [Vectors(LENGTH).data[rank::RANKS].double().split(BATCH) for rank in range(RANKS)]
    for notes in report("accumulation"):
        gradients = notes[f"{kind} {window}"]
        starts = range(0, len(shares[0]), window)
        assert len(gradients) == len(starts)
        for gradient, start in zip(gradients, starts, strict=True):
            batches = [batch for share in shares for batch in share[start : start + window]]
            model.zero_grad()
            torch.stack([model(batch) for batch in batches]).mean().backward()
            truth: Any = model.get_parameter("head.weight").grad
            torch.testing.assert_close(
                torch.tensor(gradient, dtype=torch.float64), truth.flatten(), rtol=1e-11, atol=0.0
            )


@pytest.mark.parametrize("name", ["fixed", "auto"])
def test_micro_batches_are_weighted_as_both_ranks_have_proven(report, name):
    for notes in report("micro_batches"):
        assert "that are not -100, proven" in notes[f"{name} rows"]["micro_batch_size"][1]
        for ours, truth in zip(notes[name], notes["plain"], strict=True):
            tensors = (torch.tensor(each, dtype=torch.float64) for each in (ours, truth))
            torch.testing.assert_close(*tensors, rtol=1e-11, atol=1e-14)


def test_micro_batches_are_off_where_the_loss_cannot_be_split(report):
    for notes in report("micro_batches"):
        assert notes["over the batch rows"]["micro_batch_size"][0] == "off"
