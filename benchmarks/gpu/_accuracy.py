"""Predicted memory beside torch's allocator on this GPU: the fits of the virtual ones."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu._lines import write_line
from benchmarks.virtual_gpu._architectures import ARCHITECTURES
from benchmarks.virtual_gpu.accuracy import MARK, SETTINGS

ROOT = Path(__file__).parents[2]


def fit_some(names: Sequence[str], path: Path | None) -> None:
    """Train one after the other in forks of one process, and write a line for each."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.virtual_gpu", "accuracy", "--forked", *names],
        cwd=ROOT,
        # A process that has asked CUDA how many devices there are cannot be forked.
        env=os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = (line for line in process.stdout if line.startswith(MARK))
        for name, line in zip(names, lines, strict=False):
            found = json.loads(line.removeprefix(MARK))
            write_line(path, {"check": "accuracy", "case": name, **found})


def main() -> None:
    """Write a line for each fit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="file to append the lines to")
    options = parser.parse_args()
    names = [f"{name}:{setting}" for setting in SETTINGS for name in ARCHITECTURES]
    if options.device == "cpu":  # nothing to compare with
        return
    # At the same time: their bytes are the same whatever else the GPU does.
    num_processes = max(1, (os.cpu_count() or 2) * 3 // 4)
    with ThreadPoolExecutor(num_processes) as pool:
        for i in range(num_processes):
            pool.submit(fit_some, names[i::num_processes], options.out)


if __name__ == "__main__":
    main()
