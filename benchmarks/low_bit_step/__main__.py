"""Compare our 8-bit step with bitsandbytes' own: `python -m benchmarks.low_bit_step`."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bitsandbytes.optim.optimizer import Optimizer8bit
from torch import nn

from benchmarks._common import RESULTS, markdown_table, write_results
from benchmarks._models import BASE, DEEP, SMALL, TINY, MaskedLM
from benchmarks._paired import summarise
from lightning_memsave import LowBitOptimizer

NUM_WARMUP = 3
MODELS = {
    "7M, 6 layers": SMALL,
    "19M, 24 layers": DEEP,
    "84M, 6 layers": BASE,
}


def make(sizes: MaskedLM, device: torch.device) -> tuple[nn.Module, Any]:
    """Make a model with gradients and its 8-bit optimizer.

    Args:
        sizes: Of the model.
        device: Where to.

    Returns:
        Both.
    """
    model = sizes.build().to(device)
    for param in model.parameters():
        param.grad = torch.randn_like(param) * 1e-3
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return model, LowBitOptimizer(module=model).apply(adamw).target


def bitsandbytes_step(optimizer: Any) -> None:
    """Make a step that waits after each parameter.

    Args:
        optimizer: One of ours.
    """
    Optimizer8bit.step(optimizer)


def our_step(optimizer: Any) -> None:
    """Make a step that waits once.

    Args:
        optimizer: One of ours.
    """
    type(optimizer).step(optimizer)


def num_waits(step: Callable[[Any], None], optimizer: Any) -> int:
    """Count how often a step waits for the GPU.

    Args:
        step: The step.
        optimizer: Its argument.

    Returns:
        Calls of ``torch.cuda.synchronize``.
    """
    with mock.patch.object(torch.cuda, "synchronize", wraps=torch.cuda.synchronize) as waits:
        step(optimizer)
    return waits.call_count


def seconds(step: Callable[[Any], None], optimizer: Any, device: torch.device) -> float:
    """Time a step from an idle device to an idle device.

    Args:
        step: The step.
        optimizer: Its argument.
        device: Where the parameters are.

    Returns:
        Wall time.
    """
    wait(device)
    start = time.perf_counter()
    step(optimizer)
    wait(device)
    return time.perf_counter() - start


def wait(device: torch.device) -> None:
    """Let a GPU end its work.

    Args:
        device: Any device.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(sizes: MaskedLM, device: torch.device, num_pairs: int) -> dict[str, Any]:
    """Compare both steps on one model, in the order 0 1 1 0 0 1 1 0 ...

    Args:
        sizes: Of the model.
        device: Where to.
        num_pairs: Steps of each.

    Returns:
        Median times, the ratio with its spread, and how often each waits.
    """
    steps = (bitsandbytes_step, our_step)
    made = [make(sizes, device) for _ in steps]
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(NUM_WARMUP + num_pairs):
        for i in (0, 1) if pair % 2 == 0 else (1, 0):
            times[i].append(seconds(steps[i], made[i][1], device))
    theirs, ours = (own[NUM_WARMUP:] for own in times)
    weights = [list(model.parameters()) for model, _ in made]
    return {
        "num_tensors": len(weights[0]),
        "num_pairs": num_pairs,
        "bitsandbytes_step_s": statistics.median(theirs),
        "our_step_s": statistics.median(ours),
        "ratio": summarise([b / a for a, b in zip(theirs, ours, strict=True)]),
        "same_bits": all(torch.equal(a, b) for a, b in zip(*weights, strict=True)),
        "bitsandbytes_waits": num_waits(bitsandbytes_step, made[0][1]),
        "our_waits": num_waits(our_step, made[1][1]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; on a GPU also write the results.

    Args:
        arguments: Of the command line.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.low_bit_step", description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="pairs of steps per model")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model and a few steps")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    models = {"tiny": TINY} if options.dry_run else MODELS
    num_pairs = 4 if options.dry_run else options.steps
    results = {name: measure(sizes, device, num_pairs) for name, sizes in models.items()}
    rows = [
        [
            name,
            str(found["num_tensors"]),
            f"{1000 * found['bitsandbytes_step_s']:.2f} ms",
            f"{1000 * found['our_step_s']:.2f} ms",
            f"{found['ratio']['median']:.3f}",
            f"{found['ratio']['confidence_low']:.3f} to {found['ratio']['confidence_high']:.3f}",
            f"{found['bitsandbytes_waits']} / {found['our_waits']}",
            "yes" if found["same_bits"] else "NO",
        ]
        for name, found in results.items()
    ]
    header = ["8-bit AdamW step", "tensors", "bitsandbytes", "ours", "ratio", "95 % interval"]
    table = markdown_table([*header, "waits", "same bits"], rows)
    print(table)
    if device.type != "cuda":
        print("\nOn a CPU nothing is waited for, so the ratio says nothing; no result is written.")
        return
    path = write_results("low_bit_step_gpu", {"models": results}, table, folder=options.results)
    print(f"\nWritten to {path}")


if __name__ == "__main__":
    main()
