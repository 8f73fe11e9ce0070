"""Run the GPU tests, then train the ladder: `python -m benchmarks.gpu`, under nine minutes.

Each rung trains the 84M RoBERTa in a process of its own; one that fails is recorded and the next
one goes on. With `--dry-run` a tiny model on the CPU, to see that the command works.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import (
    RESULTS,
    device_name,
    markdown_table,
    run_in_process,
    write_results,
)
from benchmarks.gpu._rungs import BITWISE, MODELS, RUNGS

ROOT = Path(__file__).parents[2]
TIME_LIMIT_S = 9 * 60
TESTS_LIMIT_S = 4 * 60
RUNG_LIMIT_S = 90


def run_tests(*, is_dry: bool) -> dict[str, Any]:
    """Run the tests that need a GPU.

    Args:
        is_dry: Only collect them.

    Returns:
        Exit status and the closing line of pytest.
    """
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--color=no", "tests"]
    command += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    if is_dry:
        command.append("--collect-only")
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"returncode": None, "summary": f"stopped after {TESTS_LIMIT_S} s"}
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"returncode": done.returncode, "summary": lines[-1].strip("= "), "failed": failed}


def run_rung(name: str, steps: int, limit_s: float, *, is_dry: bool) -> dict[str, Any]:
    """Train one rung in a fresh process.

    Args:
        name: Of the rung.
        steps: Steps that count.
        limit_s: Time after which it is stopped.
        is_dry: Tiny and on the CPU.

    Returns:
        What it measured, or ``error``.
    """
    if limit_s < 20:
        return {"error": "no time was left"}
    arguments = [name, "--steps", str(steps), *(["--dry-run"] if is_dry else [])]
    return run_in_process("benchmarks.gpu._train", *arguments, limit_s=limit_s)


def compare_losses(rungs: dict[str, dict[str, Any]]) -> None:
    """Say of each rung how far its losses are from those of training without the callback.

    Args:
        rungs: Results by name; those of the same model get ``max_loss_difference``.
    """
    reference = rungs.get("nothing", {}).get("losses")
    for name, found in rungs.items():
        if reference is not None and "losses" in found and name not in MODELS:
            pairs = zip(found["losses"], reference, strict=True)
            found["max_loss_difference"] = max(abs(a - b) for a, b in pairs)


def make_table(rungs: dict[str, dict[str, Any]]) -> str:
    """Lay out the ladder.

    Args:
        rungs: Results by name.

    Returns:
        The table in Markdown, and the errors below it.
    """
    reference = rungs.get("nothing", {})
    rows = []
    for name, found in rungs.items():
        if "error" in found:
            rows.append([name, "failed", *[""] * 10])
            continue
        ratio = _ratio(found, reference, "peak_allocated_bytes")
        used = found.get("nvml_process_bytes") or found.get("nvml_used_bytes")
        used = used or found.get("driver_used_bytes")
        rows.append(
            [
                name,
                _mib(found["peak_allocated_bytes"]),
                ratio,
                _predicted(found, "peak_allocated_bytes", found["peak_allocated_bytes"]),
                _mib(found["peak_reserved_bytes"]),
                _predicted(found, "peak_reserved_bytes", found["peak_reserved_bytes"]),
                _mib(used),
                _predicted(found, "device_bytes", used),
                f"{1000 * found['median_step_s']:.1f}",
                _ratio(found, reference, "median_step_s"),
                f"{found['losses'][-1]:.4f}",
                f"{found.get('max_loss_difference', float('nan')):.1e}",
            ]
        )
    header = ["rung", "allocated", "ratio", "predicted", "reserved", "predicted"]
    header += ["NVML", "predicted", "step (ms)", "ratio", "last loss", "off nothing"]
    table = markdown_table(header, rows)
    errors = [f"`{name}`: {found['error']}" for name, found in rungs.items() if "error" in found]
    return "\n\n".join([table, *errors])


def _mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:,.0f}"


def _predicted(found: dict[str, Any], name: str, measured_bytes: int | None) -> str:
    predicted_bytes = (found.get("predicted") or {}).get(name)
    if not predicted_bytes or not measured_bytes:
        return "-"
    return f"{100 * (predicted_bytes / measured_bytes - 1):+.1f} %"


def _ratio(found: dict[str, Any], reference: dict[str, Any], key: str) -> str:
    return f"{found[key] / reference[key]:.3f}" if key in reference else "-"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything, print and write the results.

    Args:
        arguments: Of the command line.

    Returns:
        1 if a test or a rung failed, or a bitwise rung has other losses; the results are written
        all the same.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--steps", type=int, default=20, help="steps that count in each rung")
    parser.add_argument("--rungs", nargs="+", choices=RUNGS, default=list(RUNGS), metavar="RUNG")
    parser.add_argument("--no-tests", action="store_true", help="only the ladder")
    parser.add_argument("--results", type=Path, help="folder of the result files")
    options = parser.parse_args(arguments)
    end_s = time.monotonic() + TIME_LIMIT_S
    is_dry = options.dry_run
    tests = None if options.no_tests else run_tests(is_dry=is_dry)
    if tests is not None:
        print(f"GPU tests: {tests['summary']}", flush=True)
    rungs: dict[str, dict[str, Any]] = {}
    for name in options.rungs:
        limit_s = min(RUNG_LIMIT_S, end_s - time.monotonic())
        rungs[name] = run_rung(name, 2 if is_dry else options.steps, limit_s, is_dry=is_dry)
        print(f"{name}: {rungs[name].get('error') or 'done'}", flush=True)
    compare_losses(rungs)
    table = make_table(rungs)
    print(f"\n{table}")
    # A dry run proves nothing that should stand among the results.
    folder = options.results or (Path(tempfile.mkdtemp()) if is_dry else RESULTS)
    slug = re.sub(r"[^a-z0-9]+", "_", device_name().lower()).strip("_")
    note = (
        "Sizes in MiB, peaks over the steps that count; NVML after the last step; beside each what "
        "was predicted, against it."
    )
    path = write_results(
        "gpu_dry_run" if is_dry else f"gpu_{slug}",
        {"tests": tests, "rungs": rungs},
        f"{note}\n\n{table}\n\nGPU tests: {tests['summary'] if tests else 'not run'}",
        folder=folder,
    )
    print(f"\nWritten to {path}")
    is_repeatable = rungs.get("nothing, again", {}).get("max_loss_difference", 0.0) == 0.0
    not_bitwise = [n for n in BITWISE if rungs.get(n, {}).get("max_loss_difference", 0.0) > 0.0]
    if not is_repeatable:
        print("Training without the callback does not repeat itself bit for bit on this device.")
        not_bitwise = []
    if not_bitwise:
        print(f"Not bitwise, though they should be: {', '.join(not_bitwise)}")
    failed = any("error" in found for found in rungs.values())
    # 5 is pytest's status for "no test was collected".
    tests_failed = tests is not None and tests["returncode"] not in (0, 5)
    return 1 if failed or tests_failed or not_bitwise else 0


if __name__ == "__main__":
    sys.exit(main())
