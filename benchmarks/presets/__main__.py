"""Say what each preset needs: `python -m benchmarks.presets`.

Steps of six models are predicted for CUDA, each in a fresh process, with `MemSaveCallback(preset=)`
and nothing else. With ``--train`` the 84M RoBERTa and the small models train two steps with
``"single_gpu"`` on this machine's CPU, and what was counted stands beside what was predicted.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, markdown_table, run_in_process, write_results
from benchmarks.presets._run import MODELS, SETTINGS

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


def make_text(predicted: dict[str, dict[str, Any]]) -> str:
    """Lay out what was predicted, by model and settings."""
    rows = [
        [model, *(f"{found[name]['peak_bytes'] / MIB:,.0f}" for name in SETTINGS)]
        for model, found in predicted.items()
    ]
    return (
        "Predicted peak of a step on CUDA in MiB with `MemSaveCallback(preset=...)` and nothing "
        "beside it, cuBLAS's workspace included, the allocator's slack and CUDA's context not:\n\n"
        + markdown_table(["model", *SETTINGS], rows)
    )


def make_trained_text(trained: dict[str, Any]) -> str:
    """Lay out what was counted, by model."""
    rows = [
        [
            model,
            f"{found['predicted_bytes'] / MIB:,.1f}",
            f"{found['counted_bytes'] / MIB:,.1f}",
            f"{100 * (found['predicted_bytes'] / found['counted_bytes'] - 1):+.3f} %",
            " -> ".join(f"{loss:.4f}" for loss in found["losses"]),
        ]
        for model, found in trained.items()
    ]
    return "Two steps on a CPU with `single_gpu`, in MiB:\n\n" + markdown_table(
        ["model", "predicted", "counted", "error", "losses"], rows
    )


def check_claims(predicted: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Say what holds of what is claimed of predictions, by model and settings."""
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
    return claims


def check_trained_claims(trained: dict[str, Any]) -> dict[str, bool]:
    """Say what holds of what is claimed of what was counted, by model."""
    claims = {}
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
    """Predict or train, print and write the results.

    Args:
        arguments: Of the command line.

    Returns:
        1 if what is claimed is not so.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.presets", description=__doc__)
    parser.add_argument("--train", action="store_true", help="count two steps on this CPU instead")
    parser.add_argument("--dry", action="store_true", help="the small models only")
    parser.add_argument("--results", type=Path, help="folder of the result files")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    if options.train:
        for model in SMALL if options.dry else TRAINED:
            found[model] = _run("train", model, "single_gpu")
        name, text, claims = (
            "presets_trained",
            make_trained_text(found),
            check_trained_claims(found),
        )
    else:
        for model in SMALL if options.dry else MODELS:
            found[model] = {setting: _run("predict", model, setting) for setting in SETTINGS}
        name, text, claims = "presets", make_text(found), check_claims(found)
    print(f"\n{text}\n")
    for claim, holds in claims.items():
        print(f"{'holds' if holds else 'FAILS'}: {claim}")
    path = write_results(
        f"{name}_{'dry' if options.dry else 'cpu'}",
        {"trained" if options.train else "predicted": found, "claims": claims},
        text,
        folder=options.results or (Path(tempfile.mkdtemp()) if options.dry else RESULTS),
    )
    print(f"\nWritten to {path}")
    return 0 if all(claims.values()) else 1


def _run(what: str, model: str, setting: str) -> dict[str, Any]:
    found = run_in_process("benchmarks.presets._run", what, model, setting, limit_s=LIMIT_S)
    if "error" in found:
        raise RuntimeError(f"{what} {model} {setting}: {found['error']}")
    shown = found.get("counted_bytes", found.get("peak_bytes", 0))
    print(f"{what} {model}, {setting}: {shown / MIB:,.1f} MiB", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
