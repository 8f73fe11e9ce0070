"""Say what offloading leaves on the device: `python -m benchmarks.offloading`.

Steps of three models are predicted for CUDA, and the smallest of them is trained on this machine's
CPU. A RoBERTa of 7 million parameters trains there with and without offloading, in turns, in one
process: the same losses, and what it costs. No memory is copied over a bus there: of the time on a
GPU it says nothing but what the host does.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks._common import RESULTS, markdown_table, run_in_process, write_results
from benchmarks._models import SMALL, TINY, MaskedLM, masked_batch
from benchmarks.ladder._run import TRAINERS
from benchmarks.offloading._timeline import overlap, record
from benchmarks.presets import _run as presets
from benchmarks.presets._run import MODELS, Model
from lightning_memsave import ActivationCheckpointing, Offloading, predict_memory
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.planning.step_time import Rates, step_seconds
from lightning_memsave.prediction.cuda.gpus import GPUS
from lightning_memsave.units import MIB

# Micro-batches as small as the kernels of a GPU still like them: 512 or 1,024 tokens.
_SAMPLES = {"RoBERTa 84M, 64 x 128": 4, "RoBERTa 1.1B, 64 x 128": 8, "GPT-2 XL, 8 x 1024": 1}
KINDS = ("optimizer", "parameters")
GPU_NAMES = ("T4", "RTX-3060-12GB", "RTX-4090", "A100-40GB")
_BATCH_SIZES = (16, 64, 256, 1024)
_UNLIMITED = {"host_budget": "1024GiB"}
SETTINGS: dict[str, dict[str, Any]] = {
    **{f'"{kind}"': {"preset": "single_gpu", "offload": kind} | _UNLIMITED for kind in KINDS},
    'preset="offload"': {"preset": "offload"} | _UNLIMITED,
}
"""What `MemSaveCallback` is told, by name."""
_IN_BACKWARD: dict[str, Any] = {"optimizer_in_backward": True}
_IN_8BIT = _IN_BACKWARD | {"optimizer": "8bit"}
ON_HOST: dict[str, dict[str, Any]] = {
    "float32 on the device": {"low_precision_weights": None},
    '"master"': {},
    '"master", in backward': _IN_BACKWARD,
    '"master", in backward, 8-bit': _IN_8BIT,
    '"split", in backward, 8-bit': _IN_8BIT | {"low_precision_weights": "split"},
}
"""What is set beside `offload="parameters"`, for the memory of the host."""


def predict(model: Model, settings: dict[str, Any]) -> dict[str, Any]:
    """Predict a step on CUDA.

    Args:
        model: The model and its batch.
        settings: What `MemSaveCallback` is told.

    Returns:
        Bytes on the device and on the host, and estimated seconds by GPU.
    """
    found = predict_memory(model.build, model.batch(), settings=settings)
    seconds = {
        name: sum(step_seconds(found.work, Rates.of_gpu(throughput)).values())
        for name in GPU_NAMES
        if (throughput := GPUS[name].throughput) is not None
    }
    return {
        "device_bytes": found.peak_bytes,
        "host_bytes": found.peak.host_bytes,
        "seconds": seconds,
    }


def ratios_by_tokens(model: Model, batch_sizes: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Estimate what offloading costs in steps of more and more tokens.

    Args:
        model: The model.
        batch_sizes: Sequences in a step.

    Returns:
        By tokens in a step, by what is offloaded and by GPU: the time of a step over that without.
    """
    found: dict[str, dict[str, Any]] = {}
    for batch_size in batch_sizes:
        step = replace(model, batch_size=batch_size)
        without = predict(step, {"preset": "single_gpu"})["seconds"]
        found[str(batch_size * model.num_tokens)] = {
            kind: {
                name: seconds / without[name]
                for name, seconds in predict(step, SETTINGS[f'"{kind}"'])["seconds"].items()
            }
            for kind in KINDS
        }
    return found


def train(size: MaskedLM, batch: Any, kind: str | None, num_steps: int) -> dict[str, Any]:
    """Train on the CPU with checkpointing, AdamW and clipping, in a plain loop.

    Args:
        size: Of the model.
        batch: For every step.
        kind: What is offloaded.
        num_steps: Steps that are timed, after one that is not.

    Returns:
        Losses, seconds of all timed steps with their updates, and the counted peak.
    """
    model: nn.Module = size.build()
    ActivationCheckpointing().apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    handle = None
    if kind is not None:
        technique = Offloading(kind)
        handle = technique.apply(model)
        technique.update_in_background(optimizer)

    def step() -> float:
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    losses = [step()]
    start_s = time.monotonic()
    losses += [step() for _ in range(num_steps)]
    if handle is not None:
        handle.wait()
    seconds = time.monotonic() - start_s
    with LiveTensors(model, [optimizer]) as counter:
        losses.append(step())
    if handle is not None:
        handle.undo()
    return {"losses": losses, "seconds": seconds, "peak_bytes": counter.peak.total_bytes}


def compare(size: MaskedLM, batch: Any, num_pairs: int, num_steps: int) -> dict[str, Any]:
    """Train with and without each kind, in turns.

    Args:
        size: Of the model.
        batch: For every step.
        num_pairs: Repetitions.
        num_steps: Steps of each.

    Returns:
        By kind: whether all losses were the same, the ratio of seconds, and the peaks.
    """
    found = {}
    for kind in KINDS:
        pairs = [
            (train(size, batch, None, num_steps), train(size, batch, kind, num_steps))
            for _ in range(num_pairs)
        ]
        ratios = [saving["seconds"] / plain["seconds"] for plain, saving in pairs]
        found[kind] = {
            "same_losses": all(plain["losses"] == saving["losses"] for plain, saving in pairs),
            "time_ratio": statistics.median(ratios),
            "time_ratios": ratios,
            "plain_bytes": pairs[-1][0]["peak_bytes"],
            "peak_bytes": pairs[-1][1]["peak_bytes"],
        }
    return found


def count_parameters(model: str) -> int:
    """Return the number of parameters of a model."""
    with torch.device("meta"):
        return sum(param.numel() for param in MODELS[model].build().parameters())


def compare_with_hugging_face(workload: str) -> dict[str, int]:
    """Train the small model once more, beside Hugging Face's Trainer with all of its flags.

    Args:
        workload: Of `benchmarks.ladder`.

    Returns:
        Counted peaks in bytes by trainer.
    """
    return {
        trainer: run_in_process(
            "benchmarks.ladder._run", trainer, "offload", workload, limit_s=900
        )["peak_live_bytes"]
        for trainer in TRAINERS
    }


def make_text(results: dict[str, Any]) -> str:
    """Lay out what was found as Markdown."""
    predicted, on_host, trained = (results[name] for name in ("predicted", "on_host", "trained"))
    real, peaks, spans = (results[name] for name in ("real", "peaks", "timeline"))
    trained_model, found = real["model"], real["found"]
    sizes = [f"{found[name] / MIB:,.2f}" for name in ("predicted_bytes", "counted_bytes")]
    losses = " -> ".join(f"{loss:.4f}" for loss in found["losses"])
    columns = [*next(iter(predicted.values()))]
    rows = [
        [model, *(f"{found[c]['device_bytes'] / MIB:,.0f}" for c in columns)]
        for model, found in predicted.items()
    ]
    hosts = [
        [model, *(f"{found[c]['host_bytes'] / MIB:,.0f}" for c in columns)]
        for model, found in predicted.items()
    ]
    by_setting = [
        [
            model,
            *(
                f"{found[c]['host_bytes'] / MIB:,.0f} "
                f"({found[c]['host_bytes'] / found['num_parameters']:.1f})"
                for c in ON_HOST
            ),
        ]
        for model, found in on_host.items()
    ]
    estimated = [
        [
            model,
            gpu,
            *(
                f"{found[c]['seconds'][gpu] / found['without']['seconds'][gpu]:.2f}"
                for c in columns[1:]
            ),
        ]
        for model, found in predicted.items()
        for gpu in GPU_NAMES
    ]
    by_tokens = [
        [f"{int(tokens):,}", f'"{kind}"', *(f"{found[kind][gpu]:.2f}" for gpu in GPU_NAMES)]
        for tokens, found in results["by_tokens"].items()
        for kind in KINDS
    ]
    times = [
        [
            f'`offload="{kind}"`',
            f"{found['plain_bytes'] / MIB:,.1f}",
            f"{found['peak_bytes'] / MIB:,.1f}",
            f"{found['time_ratio']:.3f}",
            "yes" if found["same_losses"] else "no",
        ]
        for kind, found in trained.items()
    ]
    return "\n\n".join(
        [
            'Predicted peak of a step on CUDA in MiB with `preset="single_gpu"` or `"offload"`, '
            "cuBLAS's workspace included, the allocator's slack and CUDA's context not; 84M and "
            "1.1B are RoBERTa with 64 x 128 tokens, XL is GPT-2 with 8 x 1024, and few samples at "
            "a time are 4, 8 and 1:",
            markdown_table(["model", *columns], rows),
            "Predicted host memory of the same steps in MiB:",
            markdown_table(["model", *columns], hosts),
            'Predicted host memory of steps of whole batches with `offload="parameters"`, in MiB '
            "and in bytes per parameter, by `low_precision_weights`, `optimizer_in_backward` and "
            "`optimizer`:",
            markdown_table(["model", *ON_HOST], by_setting),
            "Estimated time of the same steps over that of the step without, from kernels, FLOP "
            "and bytes, with a host that reads and writes 50 GB/s; nothing of it was measured:",
            markdown_table(["model", "GPU", *columns[1:]], estimated),
            f"The same for {trained_model.split(',')[0]} by tokens in a step, whole batches:",
            markdown_table(["tokens", "offloaded", *GPU_NAMES], by_tokens),
            f'Two steps of {trained_model} on this CPU with `preset="offload"` and few samples at '
            "a time, in MiB of device memory:",
            markdown_table(["predicted", "counted", "losses"], [[*sizes, losses]]),
            "A RoBERTa of 7 million parameters with AdamW and clipping on this CPU, 16 x 128 "
            "tokens, all blocks checkpointed; MiB counted, seconds as a ratio to the run without:",
            markdown_table(["", "without", "with", "time", "same losses"], times),
            f"Of the time of its updates on the host, {100 * overlap(spans):.0f} % lie beside "
            "passes of the main thread, with 2 x 32 tokens in a step.",
            "The same model with everything that saves device memory, one sample at a time, in "
            "MiB counted:",
            markdown_table(
                ["Hugging Face's Trainer, all flags", '`preset="offload"`', "ratio"],
                [
                    [
                        f"{peaks['hugging_face'] / MIB:,.1f}",
                        f"{peaks['lightning'] / MIB:,.1f}",
                        f"{peaks['lightning'] / peaks['hugging_face']:.3f}",
                    ]
                ],
            ),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="small models, few steps")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    names = ["GPT-2 XL in small"] if options.dry_run else [*_SAMPLES]
    predicted: dict[str, Any] = {}
    on_host: dict[str, Any] = {}
    for name in names:
        few = {"micro_batch_size": _SAMPLES.get(name, 1)}
        wanted: dict[str, dict[str, Any]] = {"without": {"preset": "single_gpu"}}
        for label, settings in SETTINGS.items():
            wanted[label] = settings
            wanted[f"{label}, few samples"] = settings | few
        model = MODELS[name]
        predicted[name] = {label: predict(model, how) for label, how in wanted.items()}
        on_host[name] = {
            label: predict(model, SETTINGS['"parameters"'] | settings)
            for label, settings in ON_HOST.items()
        }
        on_host[name]["num_parameters"] = count_parameters(name)
    size, batch = (
        (TINY, masked_batch(500, 4, 16))
        if options.dry_run
        else (SMALL, masked_batch(8_000, 16, 128))
    )
    pairs = (2, 2) if options.dry_run else (7, 6)
    real = names[0]
    samples = _SAMPLES.get(real, 1)
    found = presets.train(real, "offload", micro_batch_size=samples)
    trained = compare(size, batch, *pairs)
    peaks = compare_with_hugging_face("dry" if options.dry_run else "7m")
    spans = record(
        size, masked_batch(500, 2, 16) if options.dry_run else masked_batch(8_000, 2, 32)
    )
    whole = {"model": real, "found": found}
    sizes = (2, 4) if options.dry_run else _BATCH_SIZES
    results = {
        "predicted": predicted,
        "by_tokens": ratios_by_tokens(MODELS[names[0]], sizes),
        "on_host": on_host,
        "real": whole,
        "trained": trained,
        "peaks": peaks,
        "timeline": spans,
        "samples": _SAMPLES,
    }
    text = make_text(results)
    print(text)
    write_results("offloading_cpu", results, text, folder=options.results)


if __name__ == "__main__":
    main()
