"""Run a benchmark on the virtual GPU: `python -m benchmarks.virtual_gpu NAME`."""

import importlib
import sys

if __name__ == "__main__":
    module = importlib.import_module(f"benchmarks.virtual_gpu.{sys.argv[1]}")
    sys.exit(module.main(sys.argv[2:]))
