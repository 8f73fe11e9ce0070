"""Resume a killed run and get the same result as without the interruption.

Three runs, each in its own process: one is not interrupted, one kills itself with SIGKILL in the
middle of an epoch, and one resumes in the folder of the killed one. The third ends with the same
weights and 8-bit optimizer state as the first, bit for bit.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import bitsandbytes  # noqa: F401 - once here rather than in each of the three processes
import torch
from _sorting import Sorter, make_loader
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_memsave import MemSaveCallback


class SeedEachStep(Callback):
    """Seeds each step, so that dropout does not depend on how the run got there.

    Lightning does not save the state of the random number generators. Without this a resumed run
    has different dropout masks.
    """

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Seed by the number of the step."""
        torch.manual_seed(trainer.global_step)


class KillAt(Callback):
    """Kills the process at a step with SIGKILL, which no `except` can catch."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Kill this process if it is time."""
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, num_batches: int, accident: KillAt | None = None) -> None:
    """Train three epochs in a folder, from its last checkpoint if there is one."""
    torch.manual_seed(0)
    callbacks: list[Callback] = [
        MemSaveCallback(optimizer="8bit"),  # by name, since it saves little in a model this small
        ModelCheckpoint(folder, save_last=True),  # at the end of each epoch
        SeedEachStep(),
    ]
    callbacks += [] if accident is None else [accident]
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        callbacks=callbacks,
        logger=False,
        default_root_dir=folder,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    # The same call starts and resumes: without a checkpoint it starts from the beginning.
    trainer.fit(Sorter(), make_loader(num_batches), ckpt_path="last")


def run(*arguments: Any) -> int:
    """Train in another process and return its exit status; -9 is SIGKILL."""
    process = multiprocessing.get_context("fork").Process(target=train, args=arguments)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def is_same(one: Any, other: Any) -> bool:
    """Compare the contents of checkpoints, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def main() -> int:
    """Run all three and compare; returns 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few steps only")
    num_batches = 4 if parser.parse_args().small else 100

    with tempfile.TemporaryDirectory() as name:
        alone, killed = Path(name, "alone"), Path(name, "killed")
        print(f"not interrupted: exit status {run(alone, num_batches)}", flush=True)
        step = num_batches + num_batches // 2  # in the middle of the second epoch
        status = run(killed, num_batches, KillAt(step))
        print(f"killed at step {step}: exit status {status}", flush=True)
        saved = torch.load(killed / "last.ckpt", weights_only=True)
        print(f"last checkpoint: step {saved['global_step']}", flush=True)
        print(f"resumed: exit status {run(killed, num_batches)}", flush=True)
        ends = [torch.load(p / "last.ckpt", weights_only=True) for p in (alone, killed)]
    all_same = True
    for key in ("global_step", "state_dict", "optimizer_states"):
        same = is_same(ends[0][key], ends[1][key])
        print(f"{key}: {'the same' if same else 'NOT the same'}")
        all_same = all_same and same
    return 0 if all_same and status == -signal.SIGKILL else 1


if __name__ == "__main__":
    sys.exit(main())
