"""Peak memory and time per step of 1, 2 and 4 processes under FSDP2: `python -m benchmarks.scale`.

Beside each peak stands the prediction, for which no other process is there.

RoBERTa 7M with one short sequence per process, so that weights, gradients and optimizer state are
what needs memory. Processes on a CPU, over gloo: bytes are exact, and times are only ratios to the
same number of processes sharded by hand, as two cores serve all of them. By hand: Lightning's
`ModelParallelStrategy`, with `fully_shard` of each block and of the model, as its documentation
writes it, and 32-bit AdamW.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from benchmarks._common import RESULTS, markdown_table, write_results
from benchmarks._models import SMALL
from lightning_memsave import LowBitOptimizer, MemSaveCallback, predict_memory
from lightning_memsave.units import format_bytes

PROCESSES = (1, 2, 4)
ALL_8BIT = LowBitOptimizer("8bit", force_8bit=("*",))
BY_HAND = "`fully_shard` by hand"
WAYS: dict[str, dict[str, Any]] = {
    BY_HAND: {},
    '`strategy="memsave_fsdp2"`': {},
    '`optimizer="8bit"`': {"optimizer": "8bit"},
    "`optimizer=LowBitOptimizer(force_8bit=('*',))`": {"optimizer": ALL_8BIT},
    "`optimizer_in_backward=True`": {"optimizer_in_backward": True},
    "both": {"optimizer": ALL_8BIT, "optimizer_in_backward": True},
    '`activation_checkpointing="all"`': {"activation_checkpointing": "all"},
}
STEPS = 8


class Lit(pl.LightningModule):
    """A masked language model; notes when steps begin."""

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


def run(settings: dict[str, Any], *, by_hand: bool = False) -> dict[str, Any]:
    """Train on this process.

    Args:
        settings: Of `MemSaveCallback`.
        by_hand: Let the module shard itself.

    Returns:
        Peak bytes by category, the median step in seconds, and losses.
    """
    callback = MemSaveCallback(preset="off", predict=False, **settings)
    number = int(os.environ["WORLD_SIZE"])
    strategy: Any = "memsave_fsdp2"
    if by_hand:
        strategy = ModelParallelStrategy(data_parallel_size=number, tensor_parallel_size=1)
    module = ByHand() if by_hand else Lit()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=number,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    gc.collect()  # what earlier fits have left
    trainer.fit(module, DataLoader(data_of(trainer.world_size), batch_size=1))
    assert callback.monitor is not None, "it measures"
    assert callback.monitor.summary is not None, "a fit has ended"
    measured = callback.monitor.summary.to_dict()
    steps = [b - a for a, b in zip(module.times[2:], module.times[3:], strict=False)]
    return {
        "peak_bytes": measured["peak_bytes"],
        "by_category": measured["by_category"],
        "step_s": statistics.median(steps),
        "losses": module.losses,
    }


def launch(number: int) -> dict[str, Any]:
    """Run all ways on so many processes.

    Args:
        number: Of processes.

    Returns:
        What rank zero has measured, by way.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={number}", "-m", "benchmarks.scale", "--rank-of", str(path)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def predicted(settings: dict[str, Any], world_size: int) -> int:
    """Predict the peak of one process.

    Args:
        settings: Of `MemSaveCallback`.
        world_size: Number of processes.

    Returns:
        Bytes.
    """
    given: dict[str, Any] = {"preset": "off", **settings}
    batch = data_of(1)[:1].clone()
    found = predict_memory(
        Lit(), batch, settings=given, device="cpu", strategy="fsdp2", world_size=world_size
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
    for way in WAYS:
        row = [way]
        for number in map(str, PROCESSES):
            found, plain = results[number][way], results[number][BY_HAND]
            bytes_ratio = found["peak_bytes"] / plain["peak_bytes"]
            time_ratio = found["step_s"] / plain["step_s"]
            peak = format_bytes(found["peak_bytes"])
            said = f"{time_ratio:.2f} x the time"
            if way != BY_HAND:
                error = 100 * (found["predicted_bytes"] / found["peak_bytes"] - 1)
                said = f"predicted {error:+.1f} %, {said}"
            row.append(f"{peak} ({bytes_ratio:.2f}), {said}")
        rows.append(row)
    return markdown_table(["setting", *(f"{n} processes" for n in PROCESSES)], rows)


def main() -> None:
    """Measure, and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    typed = parser.parse_args()
    if typed.rank_of is not None:
        found = {way: run(settings, by_hand=way == BY_HAND) for way, settings in WAYS.items()}
        if os.environ["RANK"] == "0":
            typed.rank_of.write_text(json.dumps(found))
        return
    results = {str(number): launch(number) for number in PROCESSES}
    for number, found in results.items():
        for way in WAYS.keys() - {BY_HAND}:
            found[way]["predicted_bytes"] = predicted(WAYS[way], int(number))
    write_results("scale_cpu", results, table_of(results), folder=typed.results)


if __name__ == "__main__":
    main()
