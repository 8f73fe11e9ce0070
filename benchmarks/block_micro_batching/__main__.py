"""Compare micro-batches in blocks with whole ones: `python -m benchmarks.block_micro_batching`.

Steps of two models with `offload=True` are predicted for CUDA. On this machine's CPU a RoBERTa of 7
million parameters trains with both, in turns, in one process.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._common import RESULTS, markdown_table, write_results
from benchmarks._models import SMALL, TINY, MaskedLM, masked_batch
from benchmarks.presets._run import MODELS
from lightning_memsave import (
    ActivationCheckpointing,
    BlockMicroBatching,
    MicroBatching,
    Offloading,
    predict_memory,
)
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.units import MIB

_NAMES = ("RoBERTa 84M, 64 x 128", "GPT-2 XL, 8 x 1024")
_SIZES = (4, 1)


def ways(sizes: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Return the settings that are compared, by label."""
    found: dict[str, dict[str, Any]] = {"whole batch": {}}
    for size in sizes:
        found[f"`micro_batch_size={size}`"] = {"micro_batch_size": size}
        in_blocks = MicroBatching(size, of="blocks")
        found[f'`MicroBatching({size}, of="blocks")`'] = {"micro_batch_size": in_blocks}
    return found


def predict(model: str, settings: dict[str, Any]) -> int:
    """Predict the peak of a step on CUDA in bytes."""
    chosen = MODELS[model]
    offloaded = {"preset": "single_gpu", "offload": True, "host_budget": "1024GiB"}
    return predict_memory(chosen.build, chosen.batch(), settings=offloaded | settings).peak_bytes


def train(size: MaskedLM, batch: Any, way: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """Train on the CPU with streamed weights, checkpointing and AdamW, in a plain loop.

    Args:
        size: Of the model.
        batch: For every step.
        way: As `ways` gives it.
        num_steps: Steps that are timed, after one that is not.

    Returns:
        Seconds of all timed steps with their updates, and the counted peak.
    """
    model: nn.Module = size.build()
    ActivationCheckpointing().apply(model)
    in_blocks = BlockMicroBatching.from_value(way.get("micro_batch_size"))
    if in_blocks is not None:
        in_blocks.apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    technique = Offloading("parameters+activations")
    handle = technique.apply(model)
    technique.update_in_background(optimizer)

    def whole(batch: Any) -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()
        return loss

    samples = way.get("micro_batch_size") if in_blocks is None else None
    run = MicroBatching(samples or len(batch["labels"]), loss_weight="tokens", module=model).apply(
        lambda part: model(**part).loss
    )
    pass_batch = whole if samples is None else run.target

    def step() -> None:
        pass_batch(batch)
        optimizer.step()
        optimizer.zero_grad()

    step()
    start_s = time.monotonic()
    for _ in range(num_steps):
        step()
    handle.wait()
    seconds = time.monotonic() - start_s
    with LiveTensors(model, [optimizer]) as counter:
        step()
    handle.undo()
    return {"seconds": seconds, "peak_bytes": counter.peak.total_bytes}


def compare(size: MaskedLM, batch: Any, num_turns: int, num_steps: int) -> dict[str, Any]:
    """Train in each way, in turns.

    Args:
        size: Of the model.
        batch: For every step.
        num_turns: Repetitions.
        num_steps: Steps of each.

    Returns:
        By label: the ratio of seconds to whole batches, and the peak.
    """
    turns = [
        {label: train(size, batch, way, num_steps) for label, way in ways(_SIZES).items()}
        for _ in range(num_turns)
    ]
    return {
        label: {
            "time_ratio": statistics.median(
                turn[label]["seconds"] / turn["whole batch"]["seconds"] for turn in turns
            ),
            "peak_bytes": found["peak_bytes"],
        }
        for label, found in turns[-1].items()
    }


def make_text(predicted: dict[str, dict[str, int]], trained: dict[str, Any]) -> str:
    """Lay out what was found as Markdown."""
    labels = [*trained]
    rows = [
        [model, *(f"{found[label] / MIB:,.0f}" for label in labels)]
        for model, found in predicted.items()
    ]
    times = [
        [label, f"{found['peak_bytes'] / MIB:,.1f}", f"{found['time_ratio']:.2f}"]
        for label, found in trained.items()
    ]
    return "\n\n".join(
        [
            'Predicted peak of a step on CUDA in MiB with `preset="single_gpu", offload=True`, '
            "cuBLAS's workspace included, the allocator's slack and CUDA's context not:",
            markdown_table(["model", *labels], rows),
            "A RoBERTa of 7 million parameters with AdamW on this CPU, 16 x 128 tokens, all blocks "
            "checkpointed, weights and activations offloaded; MiB counted, seconds as a ratio to "
            "whole batches:",
            markdown_table(["", "MiB", "time"], times),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="small models, few steps")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    names = ["GPT-2 XL in small"] if options.dry_run else _NAMES
    predicted = {
        name: {label: predict(name, way) for label, way in ways(_SIZES).items()} for name in names
    }
    size, batch = (
        (TINY, masked_batch(500, 4, 16))
        if options.dry_run
        else (SMALL, masked_batch(8_000, 16, 128))
    )
    trained = compare(size, batch, *((1, 1) if options.dry_run else (5, 4)))
    text = make_text(predicted, trained)
    print(text)
    results = {"predicted": predicted, "trained": trained}
    write_results("block_micro_batching_cpu", results, text, folder=options.results)


if __name__ == "__main__":
    main()
