"""Two processes, each with a virtual GPU, on each of which a test file trains as a script.

A machine with one real GPU runs both on it, over gloo: NCCL refuses that.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.virtual_gpu import counters


def train_on_two(module: str, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    """Run a module on two processes under torchrun; return what each tells, by rank."""
    return train_on(2, module, *arguments, **environment)


def train_on(number: int, module: str, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    """As `train_on_two`, on so many processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    own = {"VGPU_DEVICES": "2"} | os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, f"--nproc-per-node={number}", "-m", module, *arguments],
            cwd=folder,
            env=own | environment,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(number)]


def tell(found: dict[str, Any]) -> None:
    """Say what this process has found, for `train_on`."""
    Path(f"{rank()}.json").write_text(json.dumps(found))


def rank() -> int:
    return int(os.environ["RANK"])


def backend() -> str | None:
    """What the processes talk through; None for what the strategy takes by itself, NCCL."""
    number = int(os.environ["WORLD_SIZE"])
    return "gloo" if counters.is_on or number > torch.cuda.device_count() else None


def on_gpus(strategy: Any) -> dict[str, Any]:
    """Settings of the Trainer."""
    number = int(os.environ["WORLD_SIZE"])
    if number > torch.cuda.device_count():
        strategy.parallel_devices = number * [torch.device("cuda", 0)]
        # torch 2.11 cannot split a group of gloo that is bound to a device.
        make = torch.distributed.init_process_group

        def unbound(*args: Any, device_id: Any = None, **settings: Any) -> None:
            make(*args, **settings)

        torch.distributed.init_process_group = unbound
        return {"accelerator": "gpu", "strategy": strategy}
    return {"accelerator": "gpu", "strategy": strategy, "devices": number}
