"""A training loop with offloaded weights that writes checkpoints, and may be killed.

As a script: ``python -m tests.techniques.killed_run FOLDER STEP`` starts processes that kill
themselves in a step, after ``optimizer.step()`` has returned, ``before`` an update has begun or
``while`` they run.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave.core.technique import Handle
from lightning_memsave.techniques.offloading.residence import Residence
from lightning_memsave.techniques.offloading.technique import Offloading

NUM_STEPS = 7
MOMENTS = {"before": 1, "while": 3}  # the update that does not end


class Block(nn.Module):
    """Plain torch alone, as a process that imports little starts soon."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.dropout(self.up(x).tanh()))
        return y


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(4)], nn.Linear(8, 1))


class Loop:
    """Losses of a loop; each second step writes a checkpoint."""

    def __init__(self, what: str | None) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.losses: list[float] = []
        self.handles: list[Handle[Any]] = []
        self.residence: Residence | None = None
        if what is not None:
            technique = Offloading(what)
            handle = technique.apply(self.model)
            self.residence = handle.residence
            self.handles = [handle, technique.update_in_background(self.optimizer)]

    def run(self, first: int, after_step: Callable[[int], None] = lambda _: None) -> None:
        for number in range(first, NUM_STEPS):
            torch.manual_seed(number)
            loss = self.model(torch.randn(4, 8)).square().mean()
            loss.backward()
            self.losses.append(loss.item())
            self.optimizer.step()
            after_step(number)
            self.optimizer.zero_grad()

    def close(self) -> None:
        for handle in reversed(self.handles):
            handle.undo()

    def save(self, path: Path) -> None:
        whole = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(whole, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    def load(self, path: Path) -> None:
        found = torch.load(path, weights_only=True)
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])


def main(folder: Path, last_step: int, moment: str) -> None:
    loop = Loop("parameters")
    residence = loop.residence
    assert residence is not None
    worker: Any = residence.worker
    submit, works, is_reached = worker.submit, [], threading.Event()

    def wait_to_be_killed() -> None:
        is_reached.set()
        threading.Event().wait()

    def count(work: Callable[[], None]) -> "Future[None]":
        works.append(work)
        return submit(wait_to_be_killed if len(works) == MOMENTS[moment] else work)

    def after_step(number: int) -> None:
        if number % 2:
            loop.save(folder / f"{number}.ckpt")
        if number == last_step - 1:
            worker.submit = count
        if number == last_step:
            is_reached.wait()
            num_left = sum(part.is_updating for part in residence.parts)
            (folder / "left").write_text(str(num_left))
            os.kill(os.getpid(), signal.SIGKILL)

    loop.run(0, after_step)


if __name__ == "__main__":
    for moment in MOMENTS:
        own = Path(sys.argv[1]) / moment
        own.mkdir()
        if not (child := os.fork()):
            main(own, int(sys.argv[2]), moment)
        (own / "status").write_text(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
