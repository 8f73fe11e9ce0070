"""Two processes: one has no batch left, gets SIGTERM, or is killed while the other one saves.

As a script this file is one of them.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_memsave import MemSaveCallback
from lightning_memsave.trainer import lost_ranks

LIMIT_S = 200
ENDLESS = 10**6
BATCHES = {
    "shorter": (6, 5),
    "equal": (5, 5),
    "terminated": (ENDLESS, ENDLESS),
    "killed": (ENDLESS, ENDLESS),
}
"""For each scenario the batches of both ranks."""


class Data(IterableDataset[Tensor]):
    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.number):
            yield torch.randn(4, 8)


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.blocks(batch).square().mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", self.blocks(batch).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Signal(Callback):
    """Sends this process a signal in the middle of a step, or when the other one saves."""

    def __init__(self, scenario: str) -> None:
        self.scenario = scenario

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.scenario == "terminated" and trainer.global_step == 20:
            threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGTERM)).start()

    def on_save_checkpoint(self, *_: Any) -> None:
        if self.scenario == "killed":
            os.kill(os.getpid(), signal.SIGKILL)


class Slow(TorchCheckpointIO):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(6)
        super().save_checkpoint(*args, **kwargs)


def train(scenario: str, folder: Path) -> None:
    """Be one of the two processes."""
    rank = int(os.environ["NODE_RANK"])
    lost_ranks.GRACE_S = 1
    saves = ModelCheckpoint(folder, filename="saved", every_n_train_steps=3)
    callbacks: list[Callback] = [MemSaveCallback(predict=False, report=False), saves]
    # With 6 and 5 batches, of which the second fit needs 5.
    limits: tuple[Any, ...] = (
        ({},) if scenario != "equal" else ({}, {"max_steps": 5, "limit_val_batches": 0})
    )
    for limit in limits:
        trainer = pl.Trainer(
            accelerator="cpu",
            num_nodes=2,
            devices=1,
            strategy="ddp",
            max_epochs=2,
            callbacks=[*callbacks, *([Signal(scenario)] if rank == 1 else [])],
            plugins=[Slow()] if scenario == "killed" else None,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            **limit,
        )
        data = Data((BATCHES["shorter"] if limit else BATCHES[scenario])[rank])
        validation: Any = torch.randn(2, 4, 8)
        loaders = DataLoader(data, batch_size=None), DataLoader(validation, batch_size=None)
        trainer.fit(Lit(), *loaders)
        print("finished", trainer.global_step)  # noqa: T201 - read by the test


def run(scenario: str, folder: Path) -> tuple[list[int], list[str]]:
    """Start both, and give how they ended and what they said."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
    root = Path(__file__).parents[2]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", __spec__.name, scenario, str(folder)],
            cwd=root,
            env=environment | {"NODE_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=LIMIT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], said


@pytest.mark.slow
def test_iterable_data_of_unequal_length_ends_in_words(tmp_path):
    codes, said = run("shorter", tmp_path)
    assert codes == [1, 1]
    for text in said:
        assert "the epoch of rank 1 has ended after 5 batches, that of rank 0 goes on" in text
        assert "`Trainer(limit_train_batches=5)`" in text


@pytest.mark.slow
def test_epochs_of_equal_length_go_on(tmp_path):
    codes, said = run("equal", tmp_path)
    assert codes == [0, 0], said
    for text in said:
        assert text.index("finished 10") < text.index("finished 5")


@pytest.mark.slow
def test_sigterm_to_one_process_ends_both(tmp_path):
    codes, said = run("terminated", tmp_path)
    assert codes == [1, 0], said  # Lightning raises a `SystemExit` in the latter
    assert "Rank 1 has ended: SIGTERMException." in said[0]
    assert not any("finished" in text for text in said)


@pytest.mark.slow
def test_a_checkpoint_that_is_being_written_is_not_lost(tmp_path):
    codes, said = run("killed", tmp_path)
    assert codes == [1, -signal.SIGKILL], said
    assert "Rank 1 has ended: killed" in said[0]
    assert torch.load(tmp_path / "saved.ckpt", weights_only=False)["global_step"] == 3


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]))
