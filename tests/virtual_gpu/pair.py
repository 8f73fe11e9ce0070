"""Two virtual GPUs, on each of which a test file trains as a script."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def train_on_two(module: str) -> dict[str, Any]:
    """Run a module on two processes under torchrun; return what its first one prints as JSON."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node=2", "-m", module],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"VGPU_DEVICES": "2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    result: dict[str, Any] = json.loads(lines[-1])
    return result
