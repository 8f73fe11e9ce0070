"""Compare the time of steps with the callback and without it: `python -m benchmarks.overhead`."""

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks._common import RESULTS, markdown_table, write_results
from benchmarks._models import SMALL, TINY, MaskedLM, masked_batch
from benchmarks._paired import TimedBatches, summarise, time_pairs
from benchmarks._settings import CHECKPOINTING, NOTHING
from benchmarks._training import LanguageModel, fit
from lightning_memsave import MemSaveCallback

NUM_WARMUP = 5
NUM_TINY_MODULES = 10_000
STEP_S = 0.020
"""A fast step, of which the callback's own work may take 1 %."""

Make = Callable[[MaskedLM], tuple[nn.Module, list[MemSaveCallback]]]


def plain(sizes: MaskedLM, **settings: Any) -> tuple[nn.Module, list[MemSaveCallback]]:
    """Make a model, and a callback if there are settings for one.

    Args:
        sizes: Of the model.
        settings: Arguments of the callback.

    Returns:
        The model and the callbacks.
    """
    return sizes.build(), [MemSaveCallback(**settings, report=False)] if settings else []


def checkpointed_by_hand(sizes: MaskedLM) -> tuple[nn.Module, list[MemSaveCallback]]:
    """Make a model whose blocks call `torch.utils.checkpoint`, as one writes it by hand.

    Args:
        sizes: Of the model.

    Returns:
        The model and no callback.
    """
    model: Any = sizes.build()
    for block in model.roberta.encoder.layer:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model, []


COMPARISONS: dict[str, tuple[Make, Make]] = {
    "everything None / no callback": (plain, partial(plain, **NOTHING)),
    "checkpointing / by hand": (
        checkpointed_by_hand,
        partial(plain, **{**NOTHING, **CHECKPOINTING}),
    ),
    "monitor alone / no callback": (plain, partial(plain, preset="off")),
    "no callback / no callback": (plain, plain),  # what the method itself gets wrong
}


def measure(
    pair: tuple[Make, Make], sizes: MaskedLM, num_rounds: int, num_steps: int
) -> dict[str, Any]:
    """Time one comparison.

    Args:
        pair: What makes the reference and what makes the run to compare with it.
        sizes: Of the model.
        num_rounds: Fits of each, which change places from one to the next.
        num_steps: Steps that count in each round.

    Returns:
        Median ratios and their spread, by processor time, which other processes disturb little, and
        by wall time.
    """
    num_tokens = 16 if sizes is TINY else 128
    batches = [
        masked_batch(sizes.vocab_size, 2, num_tokens, seed=seed)
        for seed in range(NUM_WARMUP + num_steps)
    ]

    def run(make: Make, timed: TimedBatches[Any]) -> None:
        torch.set_num_threads(1)  # the threads of one fit would spin while the other works
        model, callbacks = make(sizes)
        fit(LanguageModel(model), timed, callbacks)

    reference, other = (partial(run, make) for make in pair)
    cpu, wall, step_times_s = [], [], []
    for i in range(num_rounds):
        if i % 2 == 0:
            a, b = time_pairs(reference, other, batches, num_warmup=NUM_WARMUP)
        else:
            b, a = time_pairs(other, reference, batches, num_warmup=NUM_WARMUP)
        cpu += [y / x for x, y in zip(a.cpu_times_s, b.cpu_times_s, strict=True)]
        wall += [y / x for x, y in zip(a.wall_times_s, b.wall_times_s, strict=True)]
        step_times_s += a.cpu_times_s
    return {
        "num_pairs": len(cpu),
        "step_time_s": statistics.median(step_times_s),
        "cpu": summarise(cpu),
        "wall": summarise(wall),
    }


class ManyModules(LightningModule):
    """A linear layer, beside modules that no sample reaches: nothing but visits to them costs time.

    Args:
        num_modules: Of those, in pairs of a block and a linear layer with two numbers.
    """

    def __init__(self, num_modules: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(1, 1)) for _ in range(num_modules // 2)
        )
        self.head = nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """Compute a loss."""
        loss: torch.Tensor = self.head(batch).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Train everything."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def measure_own_work(num_modules: int, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Time what a bare callback adds to a step after the first ones, which are not logged.

    Args:
        num_modules: As for `ManyModules`.
        num_rounds: Fits with and without it.
        num_steps: Steps that count in each round.

    Returns:
        Median and quartiles of the difference of processor time, in seconds.
    """
    batches = [torch.zeros(2, 1) for _ in range(NUM_WARMUP + num_steps)]

    def run(callbacks: list[MemSaveCallback], timed: TimedBatches[Any]) -> None:
        torch.set_num_threads(1)
        fit(ManyModules(num_modules), timed, callbacks)

    added = []
    for i in range(num_rounds):
        pair = [partial(run, []), partial(run, [MemSaveCallback(report=False, predict=False)])]
        one, other = pair if i % 2 == 0 else pair[::-1]
        first, second = time_pairs(one, other, batches, num_warmup=NUM_WARMUP)
        without, with_it = (first, second) if i % 2 == 0 else (second, first)
        times = zip(without.cpu_times_s, with_it.cpu_times_s, strict=True)
        added += [b - a for a, b in times]
    low, median, high = statistics.quantiles(added, n=4)
    return {
        "num_modules": num_modules,
        "num_pairs": len(added),
        "added_s": median,
        "quartiles_s": [low, high],
        "share_of_step": median / STEP_S,
    }


def own_work_table(rows: Sequence[dict[str, Any]]) -> str:
    """Write the rows of `measure_own_work` as a table.

    Args:
        rows: At least one.

    Returns:
        Markdown.
    """
    head = ["modules", "time added to a step", "quartiles", f"of {STEP_S * 1000:.0f} ms", "pairs"]
    return markdown_table(
        head,
        [
            [
                f"{row['num_modules']:,}",
                f"{row['added_s'] * 1e6:.0f} us",
                " to ".join(f"{1e6 * s:.0f}" for s in row["quartiles_s"]),
                f"{row['share_of_step']:.2%}",
                str(row["num_pairs"]),
            ]
            for row in rows
        ],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the results.

    Args:
        arguments: Of the command line.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="fits per comparison")
    parser.add_argument("--steps", type=int, default=50, help="pairs of steps per round")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model and a few steps")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    options = parser.parse_args(arguments)
    sizes, rounds, steps = (
        (TINY, 2, 3) if options.dry_run else (SMALL, options.rounds, options.steps)
    )
    torch.set_num_threads(1)
    results = {}
    for name, pair in COMPARISONS.items():
        results[name] = measure(pair, sizes, rounds, steps)
        print(f"{name}: {results[name]['cpu']['median']:.4f}", flush=True)
    rows = [
        [
            name,
            f"{found['cpu']['median']:.4f}",
            f"{found['cpu']['confidence_low']:.4f} to {found['cpu']['confidence_high']:.4f}",
            f"{found['cpu']['quartile_low']:.3f} to {found['cpu']['quartile_high']:.3f}",
            f"{found['wall']['median']:.3f}",
            f"{1000 * found['step_time_s']:.0f} ms",
            str(found["num_pairs"]),
        ]
        for name, found in results.items()
    ]
    table = markdown_table(
        ["time of a step", "median", "95 % interval", "quartiles", "wall", "step", "pairs"], rows
    )
    print(f"\n{table}")
    sizes_of = (20,) if options.dry_run else (20, NUM_TINY_MODULES)
    own = [measure_own_work(n, rounds, steps) for n in sizes_of]
    own_table = own_work_table(own)
    print(f"\nA bare callback:\n\n{own_table}")
    table = f"{table}\n\nWhat a bare callback adds to a step:\n\n{own_table}"
    found = {"comparisons": results, "own_work": own}
    path = write_results("overhead_cpu", found, table, folder=options.results)
    print(f"\nWritten to {path}")


if __name__ == "__main__":
    main()
