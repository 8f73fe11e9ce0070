"""Predict and count: `python -m benchmarks.predict`.

Each architecture trains two steps for real under each setting, and the peak of live tensors is
compared with its prediction. Then deep models are predicted in fresh processes, for the time and
the memory that it takes.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, markdown_table, run_in_process, write_results
from benchmarks._models import MaskedLM, masked_batch
from lightning_memsave import predict_memory

DEEP = MaskedLM(52_000, 1500, 48, 25, 4096)
"""1.1 billion parameters in 48 blocks."""
DEEP_SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "checkpointing": {"activation_checkpointing": "all"},
}
LIMIT_S = 300


def measure(name: str) -> dict[str, dict[str, Any]]:
    """Predict and count one architecture under all settings.

    Args:
        name: Of the architecture.

    Returns:
        For each setting ``predicted_bytes``, ``counted_bytes`` and ``seconds`` of the prediction.
    """
    # The architectures stand with the tests that demand equality.
    from tests.prediction.architectures import ARCHITECTURES, SETTINGS  # noqa: PLC0415
    from tests.prediction.counting import count, predict, settings_for  # noqa: PLC0415

    architecture, found = ARCHITECTURES[name], {}
    for setting in SETTINGS:
        settings = settings_for(architecture, setting)
        if settings is not None:
            prediction = predict(architecture, settings)
            found[setting] = {
                "predicted_bytes": prediction.peak_bytes,
                "counted_bytes": count(architecture, settings),
                "seconds": prediction.seconds,
            }
    return found


def predict_deep(setting: str) -> dict[str, Any]:
    """Predict the deep model.

    Args:
        setting: Its name.

    Returns:
        Seconds by the clock and of the processor, and the most memory of this process.
    """
    batch = masked_batch(DEEP.vocab_size, 64, 128)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    prediction = predict_memory(DEEP.build, batch, settings=DEEP_SETTINGS[setting])
    return {
        "predicted_bytes": prediction.peak_bytes,
        "seconds": time.perf_counter() - start_s,
        "processor_seconds": time.process_time() - start_cpu_s,
        "process_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def make_text(exactness: dict[str, dict[str, Any]], deep: dict[str, dict[str, Any]]) -> str:
    """Lay out what was found.

    Args:
        exactness: What `measure` gave for each architecture.
        deep: What `predict_deep` gave for each setting.

    Returns:
        Markdown.
    """
    settings = list(dict.fromkeys(name for found in exactness.values() for name in found))
    rows = [
        [name, *(_error(found.get(setting)) for setting in settings), _seconds(found)]
        for name, found in exactness.items()
    ]
    deep_rows = [
        [
            name,
            f"{found['predicted_bytes'] / 2**30:.2f}",
            f"{found['seconds']:.1f}",
            f"{found['processor_seconds']:.1f}",
            f"{found['process_bytes'] / 2**20:,.0f}",
        ]
        for name, found in deep.items()
    ]
    return "\n\n".join(
        [
            "Predicted peak against counted peak of two real steps on a CPU, in parts per million; "
            "0 is equal to the byte. Seconds: the longest prediction of the row.",
            markdown_table(["architecture", *settings, "seconds"], rows),
            "RoBERTa with 1.1 billion parameters in 48 blocks, batch 64 x 128, predicted for CUDA "
            "in a fresh process: peak in GiB, seconds by the clock and of the processor, memory of "
            "the process in MiB.",
            markdown_table(["setting", "peak", "seconds", "processor", "process"], deep_rows),
        ]
    )


def _error(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    difference = found["predicted_bytes"] - found["counted_bytes"]
    return f"{1e6 * difference / found['counted_bytes']:+.0f}" if difference else "0"


def _seconds(found: dict[str, Any]) -> str:
    return f"{max(one['seconds'] for one in found.values()):.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the results.

    Args:
        arguments: Of the command line.

    Returns:
        1 if a prediction is off by more than 1 %, or something failed.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predict", description=__doc__)
    parser.add_argument("--architectures", nargs="+", metavar="NAME")
    parser.add_argument("--no-deep", action="store_true", help="without the deep models")
    parser.add_argument("--results", type=Path, help="folder of the result files")
    parser.add_argument("--only-deep", choices=DEEP_SETTINGS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.only_deep:
        print(json.dumps(predict_deep(options.only_deep)))
        return 0
    from tests.prediction.architectures import ARCHITECTURES  # noqa: PLC0415

    exactness = {}
    for name in options.architectures or ARCHITECTURES:
        exactness[name] = measure(name)
        print(f"{name}: {len(exactness[name])} settings", flush=True)
    deep = {
        name: run_in_process("benchmarks.predict", "--only-deep", name, limit_s=LIMIT_S)
        for name in ([] if options.no_deep else DEEP_SETTINGS)
    }
    for found in deep.values():
        if "error" in found:
            print(found["error"])
            return 1
    text = make_text(exactness, deep)
    print(f"\n{text}")
    is_whole = not options.architectures and not options.no_deep
    # A part of the table should not stand among the results.
    folder = options.results or (RESULTS if is_whole else Path(tempfile.mkdtemp()))
    path = write_results("predict_cpu", {"exactness": exactness, "deep": deep}, text, folder=folder)
    print(f"\nWritten to {path}")
    cells = [found for row in exactness.values() for found in row.values()]
    worst = max(abs(one["predicted_bytes"] / one["counted_bytes"] - 1) for one in cells)
    return 0 if worst <= 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
