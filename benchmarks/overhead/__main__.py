"""Compare the time of steps with the callback and without it: `python -m benchmarks.overhead`."""

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks._common import RESULTS, markdown_table, write_results
from benchmarks._models import SMALL, TINY, MaskedLM, masked_batch
from benchmarks._paired import TimedBatches, summarise, time_pairs
from benchmarks._settings import CHECKPOINTING, NOTHING
from benchmarks._training import LanguageModel, fit
from lightning_memsave import MemSaveCallback

NUM_WARMUP = 5

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
    "monitor alone / no callback": (plain, partial(plain, **{**NOTHING, "monitor": True})),
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
    path = write_results("overhead_cpu", {"comparisons": results}, table, folder=options.results)
    print(f"\nWritten to {path}")


if __name__ == "__main__":
    main()
