"""Peak memory of 1, 2 and 4 processes: `python -m benchmarks.scale`.

Beside each peak stands the prediction, for which no other process is there. Several processes train
five times, of which the least peak is compared and the highest given too: at times a thread of gloo
still holds what it has sent of a block when the next one is there, which depends on load.

RoBERTa 7M with one short sequence per process, so that weights, gradients and optimizer state are
what needs memory. Processes on a CPU, over gloo: bytes are exact. By hand: Lightning's
`ModelParallelStrategy`, with `fully_shard` of each block and of the model, as its documentation
writes it, and 32-bit AdamW. With `--times`: steps of 1 and 2 processes on two cores against the
same strategy without the callback, fits of both in turns; 4 processes would wait for cores. With
`--plans`: what `memsave plan` says of two GPUs.
"""

import argparse
import contextlib
import gc
import importlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from benchmarks._common import RESULTS, markdown_table, write_results
from benchmarks._models import SMALL
from lightning_memsave import LowBitOptimizer, MemSaveCallback, predict_memory
from lightning_memsave.cli.main import main as memsave
from lightning_memsave.units import format_bytes

PROCESSES = (1, 2, 4)
TIMED_PROCESSES, PAIRS = (1, 2), 5
ALL_8BIT = LowBitOptimizer("8bit", force_8bit=("*",))
DDP, BY_HAND = "DDP", "`fully_shard` by hand"
FSDP2 = '`strategy="memsave_fsdp2"`'


class Way(NamedTuple):
    """A way to train.

    Args:
        strategy: As `predict_memory` calls it; empty for sharding by hand.
        settings: Of `MemSaveCallback`.
        is_of_torchao: With the 8-bit AdamW of torchao.
    """

    strategy: str
    settings: dict[str, Any]
    is_of_torchao: bool = False

    @property
    def base(self) -> str:
        """The way to compare with."""
        return DDP if self.strategy == "ddp" else BY_HAND


ON_BOTH: dict[str, dict[str, Any]] = {
    '`optimizer="8bit"`': {"optimizer": "8bit"},
    '`activation_checkpointing="all"`': {"activation_checkpointing": "all"},
    "`chunked_cross_entropy=True`": {"chunked_cross_entropy": True},
    '`preset="bitwise"`': {"preset": "bitwise"},
    '`preset="single_gpu"`': {"preset": "single_gpu"},
}
ON_FSDP2: dict[str, dict[str, Any]] = {
    "`optimizer=LowBitOptimizer(force_8bit=('*',))`": {"optimizer": ALL_8BIT},
    "`optimizer_in_backward=True`": {"optimizer_in_backward": True},
    "both": {"optimizer": ALL_8BIT, "optimizer_in_backward": True},
}
WAYS: dict[str, Way] = {
    DDP: Way("ddp", {}),
    **{f"{DDP}, {name}": Way("ddp", settings) for name, settings in ON_BOTH.items()},
    BY_HAND: Way("", {}),
    FSDP2: Way("fsdp2", {}),
    **{f"FSDP2, {n}": Way("fsdp2", settings) for n, settings in (ON_FSDP2 | ON_BOTH).items()},
}
WITH_TORCHAO: dict[str, Way] = {
    BY_HAND: Way("", {}),
    '`optimizer="8bit"`': Way("fsdp2", {"optimizer": "8bit"}),
    "`optimizer=LowBitOptimizer(force_8bit=('*',))`": Way("fsdp2", {"optimizer": ALL_8BIT}),
    "`torchao.optim.AdamW8bit`": Way("fsdp2", {}, is_of_torchao=True),
}
STEPS = 8
RUNS = 5
XL = {"n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50_257, "n_positions": 1024}
PLAN = ("plan", "config.json", "--batch", "4x1024", "--gpu", "RTX-4090", "--world-size", "2")


class Lit(pl.LightningModule):
    """A masked language model; notes when steps begin."""

    is_of_torchao = False

    def __init__(self) -> None:
        super().__init__()
        self.model = SMALL.build()
        self.times: list[float] = []
        self.losses: list[float] = []

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> Any:
        """Compute the loss.

        Args:
            tokens: Ids, of shape (samples, tokens).
            batch_idx: Number of the batch.

        Returns:
            The loss.
        """
        self.times.append(time.perf_counter())
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        if self.is_of_torchao:
            optimizer = importlib.import_module("torchao.optim").AdamW8bit
            made: torch.optim.Optimizer = optimizer(self.parameters(), lr=1e-4, weight_decay=0.01)
            return made
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class ByHand(Lit):
    """Shards itself."""

    def configure_model(self) -> None:
        """Shard each block, and the rest."""
        model: Any = self.model
        assert self.device_mesh is not None, "the strategy has set it"
        mesh = self.device_mesh["data_parallel"]
        for block in model.roberta.encoder.layer:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)


def data_of(world_size: int) -> Any:
    """Give one short sequence per step and process.

    Args:
        world_size: Number of processes.

    Returns:
        Ids, of shape (samples, tokens).
    """
    made = torch.Generator().manual_seed(1)
    return torch.randint(5, 1000, (STEPS * world_size, 8), generator=made)


def fit(way: Way, callback: MemSaveCallback | None) -> Lit:
    """Train on this process.

    Args:
        way: How.
        callback: With its settings; none to train without us.

    Returns:
        The module, with what it noted.
    """
    number = int(os.environ["WORLD_SIZE"])
    strategy: Any = {"fsdp2": "memsave_fsdp2"}.get(way.strategy, way.strategy)
    if not strategy:
        strategy = ModelParallelStrategy(data_parallel_size=number, tensor_parallel_size=1)
    module = Lit() if way.strategy else ByHand()
    module.is_of_torchao = way.is_of_torchao
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=number,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[*filter(None, [callback])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    gc.collect()  # what earlier fits have left
    trainer.fit(module, DataLoader(data_of(trainer.world_size), batch_size=1))
    return module


def run(way: Way) -> dict[str, Any]:
    """Train on this process, and measure.

    Args:
        way: How.

    Returns:
        Peak bytes by category, the median step in seconds, and losses.
    """
    callback = _make_callback(way)
    module = fit(way, callback)
    assert callback.monitor is not None, "it measures"
    assert callback.monitor.summary is not None, "a fit has ended"
    measured = callback.monitor.summary.to_dict()
    return {
        "peak_bytes": measured["peak_bytes"],
        "by_category": measured["by_category"],
        "step_s": _step_s(module),
        "losses": module.losses,
    }


def _make_callback(way: Way) -> MemSaveCallback:
    return MemSaveCallback(**{"preset": "off", "predict": False, **way.settings})


def _step_s(module: Lit) -> float:
    steps = [b - a for a, b in zip(module.times[2:], module.times[3:], strict=False)]
    return statistics.median(steps)


def time_ratios(way: Way) -> list[float]:
    """Time a way and the same strategy without us, in turns.

    Args:
        way: How to train.

    Returns:
        The ratio of the median steps of each pair.
    """
    ratios = []
    for number in range(PAIRS):
        seconds = {}
        for with_us in (True, False) if number % 2 else (False, True):
            module = fit(way, _make_callback(way)) if with_us else fit(WAYS[way.base], None)
            seconds[with_us] = _step_s(module)
        ratios.append(seconds[True] / seconds[False])
    return ratios


def least_of(way: Way) -> dict[str, Any]:
    """Train on this process until gloo's threads were in time.

    Args:
        way: How.

    Returns:
        As `run`, of the run with the least peak, and the highest.
    """
    runs = [run(way) for _ in range(RUNS if int(os.environ["WORLD_SIZE"]) > 1 else 1)]
    highest_bytes = max(one["peak_bytes"] for one in runs)
    return min(runs, key=lambda one: one["peak_bytes"]) | {"highest_bytes": highest_bytes}


def launch(number: int, *more: str) -> dict[str, Any]:
    """Run all ways on so many processes.

    Args:
        number: Of processes.
        *more: Arguments of the command line.

    Returns:
        What rank zero has measured, by way.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={number}", "-m", "benchmarks.scale", "--rank-of", str(path)]
        command += more
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def predicted(way: Way, world_size: int) -> int:
    """Predict the peak of one process.

    Args:
        way: How it trains.
        world_size: Number of processes.

    Returns:
        Bytes.
    """
    strategy: Any = way.strategy
    found = predict_memory(
        Lit(),
        data_of(1)[:1].clone(),
        settings={"preset": "off", **way.settings},
        device="cpu",
        strategy=strategy,
        world_size=world_size,
    )
    return found.peak_bytes


def table_of(results: dict[str, Any]) -> str:
    """Write the table.

    Args:
        results: By number of processes, and way.

    Returns:
        Markdown.
    """
    rows = []
    for name, way in WAYS.items():
        row = [name]
        for number in map(str, PROCESSES):
            found, plain = results[number][name], results[number][way.base]
            bytes_ratio = found["peak_bytes"] / plain["peak_bytes"]
            said = f"{format_bytes(found['peak_bytes'])} ({bytes_ratio:.2f})"
            if found["highest_bytes"] > found["peak_bytes"]:
                said += f", at times {format_bytes(found['highest_bytes'])}"
            if way.strategy:
                error = 100 * (found["predicted_bytes"] / found["peak_bytes"] - 1)
                said += f", predicted {error:+.1f} %"
            row.append(said)
        rows.append(row)
    return markdown_table(["setting", *(f"{n} processes" for n in PROCESSES)], rows)


def times_table(results: dict[str, dict[str, list[float]]]) -> str:
    """Write the table of ratios of times.

    Args:
        results: Of each pair, by number of processes, and way.

    Returns:
        Markdown.
    """
    rows = []
    for name in results[str(TIMED_PROCESSES[0])]:
        ratios = [results[str(number)][name] for number in TIMED_PROCESSES]
        rows.append(
            [name, *(f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in ratios)]
        )
    columns = (f"{number} processes on two cores" for number in TIMED_PROCESSES)
    table = markdown_table(["step time, of the strategy without us", *columns], rows)
    said = "Median (least to most) of pairs of fits in turns; 8 tokens per step and process, so"
    return f"{table}\n\n{said} that time goes to weights and their updates.\n"


def plans() -> str:
    """Plan GPT-2 XL for one GPU and for two.

    Returns:
        The command, and the table of its ways, in Markdown.
    """
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **XL}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("config.json").write_text(json.dumps(config))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            memsave([*PLAN])
    table, _, _ = printed.getvalue().partition("\n\n")
    return f"```\n$ memsave {' '.join(PLAN)}\n{table}\n```\n"


def torchao_table(found: dict[str, Any]) -> str:
    """Write the table of 8-bit state by bitsandbytes and by torchao.

    Args:
        found: By way.

    Returns:
        Markdown.
    """
    base, rows = found[BY_HAND], []
    for name, one in found.items():
        state = format_bytes(one["by_category"]["optimizer_state"])
        peak, ratio = format_bytes(one["peak_bytes"]), one["step_s"] / base["step_s"]
        rows.append([name, peak, state, f"{ratio:.2f}", f"{one['losses'][-1]:.5f}"])
    return markdown_table(["2 processes", "peak", "state in it", "time", "last loss"], rows)


def main() -> None:
    """Measure, and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--torchao", action="store_true", help="compare with torchao, if there")
    parser.add_argument("--times", action="store_true", help="compare times instead")
    parser.add_argument("--plans", action="store_true", help="plan for two GPUs instead")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    typed = parser.parse_args()
    ways = WITH_TORCHAO if typed.torchao else WAYS
    if typed.rank_of is not None:
        measure: Callable[[Way], Any] = time_ratios if typed.times else least_of
        # Without settings it is what the others are compared with, but by the callback.
        found = {
            name: measure(way) for name, way in ways.items() if way.strategy or not typed.times
        }
        if os.environ["RANK"] == "0":
            typed.rank_of.write_text(json.dumps(found))
        return
    if typed.plans:
        write_results("scale_plans", {}, plans(), folder=typed.results)
        return
    if typed.times:
        ratios = {str(number): launch(number, "--times") for number in TIMED_PROCESSES}
        write_results("scale_times", ratios, times_table(ratios), folder=typed.results)
        return
    if typed.torchao:
        found = launch(2, "--torchao")
        write_results("scale_torchao", found, torchao_table(found), folder=typed.results)
        return
    results = {str(number): launch(number) for number in PROCESSES}
    for number, found in results.items():
        for name, way in WAYS.items():
            if way.strategy:
                found[name]["predicted_bytes"] = predicted(way, int(number))
    write_results("scale_cpu", results, table_of(results), folder=typed.results)


if __name__ == "__main__":
    main()
