"""Train the TabFormer of the docs with its tables on the host: `python -m benchmarks.embedding`.

867,813 categories: a table of 867,813 x 832 that is tied to the output layer, one of 867,813 x 64,
and a BERT. Weights, gradients and AdamW's state are on the host. The device has two tiles
of the tied table, the rows of the batch, and two blocks of the BERT. On a CPU, where this runs, the
memory of the device is told from that of the host by what the techniques mark.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks._common import RESULTS, markdown_table, run_in_process, write_results
from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.techniques.activation_checkpointing.technique import (
    ActivationCheckpointing,
)
from lightning_memsave.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.units import format_bytes
from tests.tabular_bert import LARGE_CARDINALITIES, SPECIAL, Rows, TabularBert, Vocabulary

BATCH, TIME = 8, 10
LIMIT_BYTES = 200 * 2**20
SMALL_CARDINALITIES = {**LARGE_CARDINALITIES, "account": 2000}


def make_batch(vocabulary: Vocabulary, step: int) -> Rows:
    """Make rows of categories, uniformly at random.

    Args:
        vocabulary: Which ids belong to which column.
        step: Seed.

    Returns:
        Sequences of rows, each of which is its own label.
    """
    made = torch.Generator().manual_seed(step)
    columns = tuple(vocabulary.cardinalities)
    ids = [
        torch.randint(of.start, of.stop, (BATCH, TIME), generator=made)
        for of in map(vocabulary.ids_of, columns)
    ]
    cells = torch.stack(ids, dim=2)
    return Rows(columns, cells, cells)


def make_model(cardinalities: dict[str, int], num_layers: int) -> TabularBert:
    """Make the model.

    Args:
        cardinalities: Number of categories of each column.
        num_layers: Of the BERT.

    Returns:
        The model, on the CPU.
    """
    torch.manual_seed(0)
    num = SPECIAL + sum(cardinalities.values())
    return TabularBert(num, num_layers=num_layers, vocabulary=Vocabulary(cardinalities))


def make_step(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[Rows], float]:
    """Move everything to the host.

    Args:
        model: The model.
        optimizer: Its optimizer.

    Returns:
        A training step that gives its loss.
    """
    ChunkedCrossEntropy(heads="cls.decoder").apply(model)
    ActivationCheckpointing().apply(model)  # otherwise the graph holds the weights of all blocks
    technique = Offloading("parameters+embeddings", min_table_bytes=2**22, host_budget="20GiB")
    technique.apply(model)
    technique.update_in_background(optimizer)

    def step(batch: Rows) -> float:
        loss = model(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def measure(cardinalities: dict[str, int], num_layers: int, num_steps: int) -> dict[str, Any]:
    """Train, and count the bytes of the device.

    Args:
        cardinalities: Number of categories of each column.
        num_layers: Of the BERT.
        num_steps: Optimizer steps.

    Returns:
        Bytes at the peak, losses and times.
    """
    model = make_model(cardinalities, num_layers)
    num_parameters = sum(p.numel() for p in model.parameters())
    num_cells = BATCH * TIME * len(cardinalities)
    num_words = SPECIAL + sum(cardinalities.values())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step, losses, times = make_step(model, optimizer), [], []
    with LiveTensors(model, [optimizer]) as live:
        for index in range(num_steps):
            assert model.vocabulary is not None
            batch = make_batch(model.vocabulary, index)
            live.track_input(batch)
            start = time.perf_counter()
            losses.append(step(batch))
            times.append(time.perf_counter() - start)
    return {
        "vocabulary": num_words,
        "num_layers": num_layers,
        "num_parameters": num_parameters,
        "cells": num_cells,
        "peak": live.peak.to_dict(),
        "limit_bytes": LIMIT_BYTES,
        # Weights, gradients and two moments in float32.
        "state_bytes": 16 * num_parameters,
        "logits_bytes": 4 * num_cells * num_words,
        "losses": losses,
        "step_s": times,
        "max_resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def make_text(runs: Sequence[dict[str, Any]]) -> str:
    """Lay out what was measured.

    Args:
        runs: Results of `measure`.

    Returns:
        A table in Markdown.
    """
    peaks = [MemoryBreakdown.from_dict(run["peak"]) for run in runs]
    lines: dict[str, list[int]] = {
        "weights, gradients and AdamW's moments": [run["state_bytes"] for run in runs],
        "logits of all cells": [run["logits_bytes"] for run in runs],
        "**device, at the peak of a step**": [peak.total_bytes for peak in peaks],
    }
    for name in peaks[0].by_category():
        of_each = [peak.by_category()[name] for peak in peaks]
        if any(of_each):
            lines[f"- {name.replace('_', ' ')}"] = of_each
    lines["host, at its peak"] = [peak.host_bytes for peak in peaks]
    lines["memory of the process"] = [run["max_resident_bytes"] for run in runs]
    rows = [(name, *map(format_bytes, of_each)) for name, of_each in lines.items()]
    rows += [
        ("seconds of each step", *(_joined(run["step_s"], 1) for run in runs)),
        ("losses", *(_joined(run["losses"], 3) for run in runs)),
    ]
    header = [
        f"{runs[0]['vocabulary']:,} categories, {runs[0]['cells']} cells in a batch",
        *(f"{run['num_layers']} layers, {run['num_parameters']:,} parameters" for run in runs),
    ]
    return markdown_table(header, rows)


def _joined(numbers: Sequence[float], num_digits: int) -> str:
    return ", ".join(f"{number:.{num_digits}f}" for number in numbers)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print and write the result.

    Args:
        arguments: Of the command line.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embedding", description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[12], help="of the BERT")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--dry-run", action="store_true", help="few categories, one layer")
    parser.add_argument("--one", action="store_true", help="print as JSON; 14 GiB for 12 layers")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    options = parser.parse_args(arguments)
    cardinalities = SMALL_CARDINALITIES if options.dry_run else LARGE_CARDINALITIES
    num_layers = [1] if options.dry_run else options.layers
    if options.one:
        print(json.dumps(measure(cardinalities, num_layers[0], options.steps)))
        return
    runs = [_run(options, each) for each in num_layers]
    text = make_text(runs)
    print(text)
    path = write_results("embedding_cpu", {"runs": runs}, text, folder=options.results)
    print(f"\nWritten to {path}")


# In a process of its own, whose memory is that of this run.
def _run(options: argparse.Namespace, num_layers: int) -> dict[str, Any]:
    arguments = ["--one", "--layers", str(num_layers), "--steps", str(options.steps)]
    arguments += ["--dry-run"] if options.dry_run else []
    found = run_in_process("benchmarks.embedding", *arguments, limit_s=1800)
    if "error" in found:
        raise SystemExit(found["error"])
    return found


if __name__ == "__main__":
    main()
