"""Count the peak bytes of a training step with and without activation checkpointing.

By `LiveTensors`, which sees each tensor at the level of operators, and by torch.profiler, which
sees each allocation of the CPU allocator, scratch memory of kernels included.
"""

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks._common import RESULTS, markdown_table, write_results
from benchmarks._models import DEEP, SMALL, MaskedLM, masked_batch
from benchmarks._profiler import AllocationPeak
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.techniques.activation_checkpointing.technique import (
    ActivationCheckpointing,
)
from lightning_memsave.units import format_bytes

CASES = {"6 layers, vocabulary 8,000": SMALL, "24 layers, vocabulary 500": DEEP}
BATCH_SIZE, NUM_TOKENS, NUM_STEPS = 16, 128, 2


def peak_by_live_tensors(build: Callable[[], nn.Module], batch: dict[str, Any]) -> int:
    """Count the peak of training steps with `LiveTensors`.

    Args:
        build: Makes the model.
        batch: Its keyword arguments.

    Returns:
        Bytes.
    """
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    with LiveTensors(model, [optimizer]) as live:
        live.track_input(batch)
        _train(model, optimizer, batch)
    return live.peak.total_bytes


def peak_by_profiler(build: Callable[[], nn.Module], batch: dict[str, Any]) -> int:
    """Count the same from the allocator's events; the model is built under the profiler too.

    Args:
        build: Makes the model.
        batch: Its keyword arguments.

    Returns:
        Bytes.
    """
    gc.collect()  # an earlier model that is freed meanwhile would count as negative bytes
    with AllocationPeak() as peak:
        inputs = {name: tensor.clone() for name, tensor in batch.items()}
        model = build()
        _train(model, torch.optim.AdamW(model.parameters()), inputs)
    return peak.peak_bytes


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
    # The first step makes the optimizer's state, so only the second is a step as all others are.
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        # Only the loss is kept: the output would hold the logits until the next forward pass.
        model(**batch).loss.backward()
        optimizer.step()


def measure(sizes: MaskedLM) -> dict[str, Any]:
    """Count one model both ways, with and without checkpointing.

    Args:
        sizes: Of the model.

    Returns:
        Peak bytes and ratios.
    """

    def checkpointed() -> nn.Module:
        return ActivationCheckpointing("all").apply(sizes.build()).target

    batch = masked_batch(sizes.vocab_size, BATCH_SIZE, NUM_TOKENS)
    results: dict[str, Any] = {}
    for counter in (peak_by_live_tensors, peak_by_profiler):
        plain, saving = counter(sizes.build, batch), counter(checkpointed, batch)
        name = counter.__name__.removeprefix("peak_by_")
        results[name] = {"plain_bytes": plain, "all_bytes": saving, "ratio": saving / plain}
    return results


def main() -> None:
    """Measure both models, print and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpointing", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    arguments = parser.parse_args()
    results = {name: measure(sizes) for name, sizes in CASES.items()}
    rows = [
        [
            f"{name}, {counter}",
            format_bytes(peak["plain_bytes"]),
            format_bytes(peak["all_bytes"]),
            f"{peak['ratio']:.3f}",
        ]
        for name, counters in results.items()
        for counter, peak in counters.items()
    ]
    table = markdown_table(["peak of a step", "unmodified", "checkpointed", "ratio"], rows)
    print(table)
    path = write_results("checkpointing_cpu", {"cases": results}, table, folder=arguments.results)
    print(f"\nWritten to {path}")


if __name__ == "__main__":
    main()
