"""What keeps more from step to step is named once, with what to type; nothing else is."""

import json
import logging
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memsave import GPUMemoryMonitor, MemSaveCallback
from lightning_memsave.callbacks import memory_growth
from lightning_memsave.callbacks.memory_growth import Floor
from lightning_memsave.measure.allocator import allocated_bytes
from tests import helpers
from tests.callbacks.lit import (
    LIGHTNING,
    PACKAGES,
    callback_with,
    loader_of,
    make_lit,
    make_trainer,
)
from tests.helpers import return_free_memory

WIDTH = 256
IN_A_LIST: list[Tensor] = []
ON_BOTH = pytest.mark.parametrize(
    "accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
)


@pytest.fixture(autouse=True)
def without_free_memory() -> Iterator[None]:
    return_free_memory()
    yield
    IN_A_LIST.clear()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The warnings of growth."""
    for name in PACKAGES.values():
        monkeypatch.setattr(logging.getLogger(name.__name__), "propagate", True)

    def messages() -> list[str]:
        return [r.getMessage() for r in caplog.records if "grows" in r.getMessage()]

    return messages


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each walk through the objects."""
    found: list[int] = []
    walk = memory_growth._find_kept

    def counted(trainer: Any, module: Any, batch: Any) -> Any:
        found.append(trainer.global_step)
        return walk(trainer, module, batch)

    monkeypatch.setattr(memory_growth, "_find_kept", counted)
    return found


class Lengths(DataLoader[Tensor]):
    """Batches of 64 to 256 rows, or all of 256."""

    def __init__(self, num_steps: int = 100, is_varied: bool = True) -> None:
        numbers = random.Random(3)
        sizes = [numbers.randrange(64, 257) if is_varied else 256 for _ in range(num_steps)]
        super().__init__([torch.randn(n, WIDTH) for n in sizes], batch_size=None)  # type: ignore[arg-type]


def make(keep: Any = None, package: Any = LIGHTNING, depth: int = 0, **attributes: Any) -> Any:
    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.model.net(batch).relu()
        loss: Tensor = self.model.head(hidden).square().mean()
        for _ in range(depth):
            loss = loss + 0
        self.log("loss", loss)
        if keep is not None:
            keep(self, hidden, loss)
        return loss

    layers = {"net": nn.Linear(WIDTH, WIDTH), "head": nn.Linear(WIDTH, 1)}
    lit = make_lit(
        package,
        nn.ModuleDict(layers),
        __module__=__name__,  # whose lists are looked at
        training_step=training_step,
        validation_step=lambda self, batch, batch_idx: self.log(
            "val_loss", self.model.head(self.model.net(batch)).mean()
        ),
        val_dataloader=lambda self: loader_of([*torch.randn(2, 32, WIDTH)]),
    )
    lit.losses = []
    for name, value in attributes.items():
        setattr(lit, name, value)
    return lit


def fit(lit: Any, *callbacks: Any, package: Any = LIGHTNING, **settings: Any) -> Any:
    """Fit with batches of `Lengths`; returns the notes of the summary."""
    # On a GPU 96 steps are enough; memory of a process is rounded, which may need twice as many.
    few = 100 if settings.get("accelerator") == "gpu" else 200
    batches = Lengths(settings.pop("num_batches", few), settings.pop("is_varied", True))
    monitor = GPUMemoryMonitor(print_summary=False)
    make_trainer(package, monitor, *callbacks, **settings).fit(lit, batches)
    summary: Any = monitor.summary
    return summary.notes


def outputs(lit: Any, hidden: Tensor, loss: Tensor) -> None:
    lit.losses.append({"hidden": hidden.detach().repeat(4, 1)})


def metric(lit: Any, hidden: Tensor, loss: Tensor) -> None:
    lit.scores.update(hidden.detach().repeat(4, 1))


def in_a_list(lit: Any, hidden: Tensor, loss: Tensor) -> None:
    IN_A_LIST.append(hidden.detach().repeat(4, 1))


def auxiliary_loss(lit: Any, hidden: Tensor, loss: Tensor) -> None:
    """Its graph is never freed, as it goes into no backward pass."""
    lit.losses.append((lit.model.net(hidden.detach().repeat(4, 1)).exp() * 2).mean())


def loss_with_graph(lit: Any, hidden: Tensor, loss: Tensor) -> None:
    lit.losses.append(loss)


def loss_alone(lit: Any, hidden: Tensor, loss: Tensor) -> None:
    lit.losses.append(loss.detach())


EMPTY, DETACH = (
    "Empty `{}` as soon as it is read",
    "Keep numbers in `{}`, not graphs: `loss.detach()`",
)
LEAKS = {
    "outputs": (outputs, "self.losses", EMPTY),
    "metric": (metric, "self.scores.value", "`CatMetric` keeps all values until `.reset()`, as it"),
    "list of the file": (in_a_list, f"{__name__}.IN_A_LIST", EMPTY),
    "auxiliary loss": (auxiliary_loss, "self.losses", DETACH),
}


@ON_BOTH
@pytest.mark.parametrize("name", LEAKS)
def test_names_what_keeps_more(name: str, accelerator: str, said: Any, walks: Any) -> None:
    keep, owner, advice = LEAKS[name]
    (note,) = fit(make(keep, scores=torchmetrics.CatMetric()), accelerator=accelerator)
    assert said() == [note]
    assert re.match(
        rf"Memory grows from step to step: `{re.escape(owner)}` keeps [\d.]+ MiB more than \d+ "
        r"steps ago \(\d+ tensors( with graphs)?, [\d.]+ [MG]iB in 1,000 steps\)\. ",
        note,
    )
    assert advice.format(owner) in note
    # Eight blocks of eight, and sixteen more.
    assert walks == [64, 80, 96] or (accelerator == "cpu" and len(walks) in (3, 5, 6))


@ON_BOTH
def test_names_losses_with_their_graphs_however_small(accelerator: str, said: Any) -> None:
    # On the host each node of a graph counts, on the GPU the loss alone.
    lit = make(loss_with_graph, depth=1000 if accelerator == "cpu" else 0)
    (note,) = fit(lit, accelerator=accelerator, is_varied=False)
    assert re.search(r"`self\.losses` keeps (\d+) tensors with graphs more than \1 steps ago", note)
    assert note.endswith("A tensor with a graph keeps all activations of its step.")
    assert said() == [note]


@ON_BOTH
def test_says_where_to_look_if_no_attribute_leads_to_it(
    accelerator: str, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "elsewhere", [], raising=False)

    def keep(lit: Any, hidden: Tensor, loss: Tensor) -> None:
        helpers.elsewhere.append(hidden.detach().repeat(4, 1))  # type: ignore[attr-defined]

    (note,) = fit(make(keep), accelerator=accelerator)
    assert "tensors that no attribute leads to take " in note
    assert note.endswith("Look for a list in a closure, or in a file that your project imports.")
    assert said() == [note]


@ON_BOTH
def test_names_a_callback_and_a_logger(accelerator: str, package: Any, said: Any) -> None:
    def collect(self, *args):
        self.seen["train"].append(args[3].repeat(4, 1))  # the batch

    collector = callback_with(package, "Collector", on_train_batch_end=collect)
    collector.seen = {"train": []}

    class Keeping(package.loggers.CSVLogger):  # type: ignore[misc]
        def log_metrics(self, metrics, step=None):
            self.kept = [*getattr(self, "kept", []), torch.ones(100_000, device=lit.device)]

    lit = make(package=package)
    (note,) = fit(lit, collector, package=package, accelerator=accelerator)
    assert "`Collector.seen` keeps " in note
    lit = make(package=package)
    logged = {"logger": Keeping("."), "log_every_n_steps": 1}
    (note,) = fit(lit, package=package, accelerator=accelerator, **logged)
    assert "`Keeping.kept` keeps " in note
    assert len(said()) == 2


def buffer(lit: Any, hidden: Tensor, loss: Tensor) -> None:
    """Full after fifty steps."""
    lit.losses = [*lit.losses, hidden.detach()][-50:]


def last(lit: Any, hidden: Tensor, loss: Tensor) -> None:
    lit.losses = [hidden, loss]


def until_the_epoch_ends(lit: Any, hidden: Tensor, loss: Tensor) -> None:
    """Of 40 steps."""
    lit.losses = [*lit.losses, hidden.detach()] if lit.trainer.global_step % 40 else []


def test_what_short_epochs_empty_is_not_growth_beside_something_else(said: Any) -> None:
    """Once the memory of a process rose in its first steps, and such a list was named."""

    def keep(lit: Any, hidden: Tensor, loss: Tensor) -> None:
        until_the_epoch_ends(lit, hidden, loss)
        outside.append(bytes(2**20))

    outside: list[bytes] = []
    assert fit(make(keep)) == ()
    assert said() == []


SILENT: dict[str, tuple[Any, dict[str, Any]]] = {
    "nothing": (None, {}),
    "evaluation": (None, {"val_check_interval": 20}),
    "accumulated batches": (None, {"accumulate_grad_batches": 2, "num_batches": 400}),
    "full buffer": (buffer, {}),
    "what the last step left": (last, {}),
    "numbers": (loss_alone, {}),
    "outputs of short epochs": (until_the_epoch_ends, {}),
}


@ON_BOTH
@pytest.mark.parametrize("name", SILENT)
def test_says_nothing_of(name: str, accelerator: str, said: Any) -> None:
    keep, settings = SILENT[name]
    assert fit(make(keep), accelerator=accelerator, **{"num_batches": 200, **settings}) == ()
    assert said() == []


@pytest.mark.gpu
def test_never_looks_where_nothing_grows(walks: Any) -> None:
    fit(make(), accelerator="gpu", num_batches=200)
    assert walks == []


def test_training_is_the_same_bit_for_bit() -> None:
    weights = []
    for monitors in ([], [GPUMemoryMonitor(print_summary=False)]):
        torch.manual_seed(0)
        lit = make(auxiliary_loss)
        trainer = make_trainer(LIGHTNING, *monitors)
        trainer.fit(lit, Lengths())
        weights.append(list(lit.parameters()))
        assert len(lit.losses) == 100
    assert all(map(torch.equal, *weights))


def test_memsave_callback_finds_it_too(said: Any) -> None:
    lit, callback = make(outputs), MemSaveCallback(preset="off", predict=False)
    make_trainer(LIGHTNING, callback).fit(lit, Lengths(180))
    (note,) = json.loads(Path("memsave_report.json").read_text())["measured"]["notes"]
    assert said() == [note]


def test_a_failure_ends_the_search_and_not_the_fit(
    caplog: pytest.LogCaptureFixture, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("no /proc")

    monkeypatch.setattr(memory_growth, "allocated_bytes", fail)
    assert fit(make(), num_batches=10) == ()
    failures = [r for r in caplog.records if "no /proc" in r.getMessage()]
    assert [r.getMessage() for r in failures] == [
        "What grows in memory cannot be found: OSError: no /proc"
    ]


class TestFloor:
    """Readings of many kinds."""

    @staticmethod
    def rises_at(readings: Iterator[int] | list[int]) -> list[int]:
        floor = Floor()
        return [number for number, each in enumerate(readings, 1) if floor.rises(each)]

    def test_rises_with_each_window_of_what_grows_under_varying_batches(self) -> None:
        numbers = random.Random(0)
        grown = [100 * step + numbers.randrange(1000) for step in range(600)]
        assert self.rises_at(grown) == [64, 128, 256, 512]

    def test_does_not_rise_with_noise(self) -> None:
        numbers = random.Random(0)
        for _ in range(200):
            assert self.rises_at([numbers.randrange(10**9) for _ in range(520)]) == []

    def test_rises_where_growth_begins_late(self) -> None:
        assert self.rises_at([max(step, 500) * 1000 for step in range(5000)]) == [4096]


@ON_BOTH
def test_reading_takes_microseconds(accelerator: str) -> None:
    device = torch.device("cuda" if accelerator == "gpu" else "cpu")
    allocated_bytes(device)
    start_s = time.perf_counter()
    for _ in range(100):
        allocated_bytes(device)
    assert (time.perf_counter() - start_s) / 100 < 1e-3
