"""Say what each stack needs: `python -m benchmarks.stacks`.

Steps of six models are predicted for CUDA, each in a fresh process, with `MemSaveCallback(stack=)`
and nothing else. On this machine's CPU the 84M RoBERTa and the small models train two steps with
``"single_gpu"``, and what was counted stands beside what was predicted.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, markdown_table, run_in_process, write_results
from benchmarks.stacks._run import MODELS, SETTINGS

MIB = 2**20
# Of tensors, in MiB: the lowest that can be had without moving anything to the host.
LIMITS = {
    "RoBERTa 84M, 64 x 128": 740,
    "RoBERTa 1.1B, 64 x 128": 5_990,
    "GPT-2 XL, 8 x 1024": 8_280,
}
SMALL = [name for name in MODELS if name not in LIMITS]
TRAINED = [next(iter(LIMITS)), *SMALL]
LIMIT_S = 1800


def make_text(predicted: dict[str, dict[str, Any]], trained: dict[str, Any]) -> str:
    """Lay out what was found.

    Args:
        predicted: By model and settings.
        trained: By model.

    Returns:
        Markdown.
    """
    rows = [
        [model, *(f"{found[name]['peak_bytes'] / MIB:,.0f}" for name in SETTINGS)]
        for model, found in predicted.items()
    ]
    counted = [
        [
            model,
            f"{found['predicted_bytes'] / MIB:,.1f}",
            f"{found['counted_bytes'] / MIB:,.1f}",
            f"{100 * (found['predicted_bytes'] / found['counted_bytes'] - 1):+.3f} %",
            " -> ".join(f"{loss:.4f}" for loss in found["losses"]),
        ]
        for model, found in trained.items()
    ]
    return "\n\n".join(
        [
            "Predicted peak of a step on CUDA in MiB with `MemSaveCallback(stack=...)` and nothing "
            "beside it, cuBLAS's workspace included, the allocator's slack and CUDA's context not:",
            markdown_table(["model", *SETTINGS], rows),
            "Two steps on a CPU with `single_gpu` and `chunked_sdpa`, in MiB:",
            markdown_table(["model", "predicted", "counted", "error", "losses"], counted),
        ]
    )


def check_claims(predicted: dict[str, dict[str, Any]], trained: dict[str, Any]) -> dict[str, bool]:
    """Say what holds of what is claimed.

    Args:
        predicted: By model and settings.
        trained: By model.

    Returns:
        True or false for each claim.
    """
    claims = {
        f"{model}: single_gpu is predicted to need at most {LIMITS[model]:,} MiB": (
            found["single_gpu"]["peak_bytes"] <= LIMITS[model] * MIB
        )
        for model, found in predicted.items()
        if model in LIMITS
    }
    for model, found in predicted.items():
        peaks = {name: one["peak_bytes"] for name, one in found.items()}
        claims[f"{model}: offload <= single_gpu <= bitwise and classic <= nothing"] = (
            peaks["offload"] <= peaks["single_gpu"]
            and peaks["single_gpu"] <= min(peaks["bitwise"], peaks["classic"])
            and max(peaks["bitwise"], peaks["classic"]) <= peaks["nothing"]
        )
    for model, found in trained.items():
        claims[f"{model}: predicted within 1 % of what was counted"] = (
            abs(found["predicted_bytes"] / found["counted_bytes"] - 1) <= 0.01
        )
        if model in LIMITS:
            claims[f"{model}: counted at most {LIMITS[model]:,} MiB"] = (
                found["counted_bytes"] <= LIMITS[model] * MIB
            )
    return claims


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, train, print and write the results.

    Args:
        arguments: Of the command line.

    Returns:
        1 if what is claimed is not so.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stacks", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="the small models only")
    parser.add_argument("--results", type=Path, help="folder of the result files")
    options = parser.parse_args(arguments)
    predicted: dict[str, dict[str, Any]] = {}
    for model in SMALL if options.dry else MODELS:
        predicted[model] = {name: _run("predict", model, name) for name in SETTINGS}
    trained = {
        model: _run("train", model, "single_gpu") for model in (SMALL if options.dry else TRAINED)
    }
    text = make_text(predicted, trained)
    print(f"\n{text}\n")
    claims = check_claims(predicted, trained)
    for claim, holds in claims.items():
        print(f"{'holds' if holds else 'FAILS'}: {claim}")
    path = write_results(
        "stacks_dry" if options.dry else "stacks_cpu",
        {"predicted": predicted, "trained": trained, "claims": claims},
        text,
        folder=options.results or (Path(tempfile.mkdtemp()) if options.dry else RESULTS),
    )
    print(f"\nWritten to {path}")
    return 0 if all(claims.values()) else 1


def _run(what: str, model: str, setting: str) -> dict[str, Any]:
    found = run_in_process("benchmarks.stacks._run", what, model, setting, limit_s=LIMIT_S)
    if "error" in found:
        raise RuntimeError(f"{what} {model} {setting}: {found['error']}")
    shown = found.get("counted_bytes", found.get("peak_bytes", 0))
    print(f"{what} {model}, {setting}: {shown / MIB:,.1f} MiB", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
