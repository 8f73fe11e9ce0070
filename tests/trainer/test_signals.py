"""Ctrl-C ends a fit without a trace too, and never the process."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_memsave.api import predict_memory
from lightning_memsave.trainer.nested_fit import quiet, raise_if_interrupted

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


@pytest.fixture(autouse=True)
def interruptible():
    """The background jobs of a shell are started with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# In a process of its own: an interruption that is late would end another test.
INTERRUPTED = """
import os, signal, sys, threading
import {package}
import torch
from lightning_memsave import predict_memory

class Lit({package}.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        hidden = self.model(batch)
        while True:
            hidden = hidden * 0.5

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())

handler = signal.default_int_handler
signal.signal(signal.SIGINT, handler)  # a shell's background jobs ignore it
# Sooner or later it hits a line that torch has called.
for delay_s in (0.5, 0.53, 0.57, 0.6):
    killer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
    killer.start()
    try:
        predict_memory(Lit(), torch.ones(4, 8))
    except KeyboardInterrupt:
        print("interrupted")
    killer.join()
assert signal.getsignal(signal.SIGINT) is handler
"""


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_an_interruption_comes_through_wherever_it_hits(package: str) -> None:
    script = INTERRUPTED.replace("{package}", package)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["interrupted"] * 4


def test_waits_for_a_line_where_it_is_safe() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), quiet():  # noqa: PT012 - where it comes out
        raise_if_interrupted()
        signal.raise_signal(signal.SIGINT)
        reached.append("the next line")
        raise_if_interrupted()
        reached.append("too far")
    assert reached == ["the next line"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("error", [None, ValueError("of the fit inside")])
def test_comes_at_the_end_at_the_latest(error) -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), quiet():  # noqa: PT012 - where it comes out
        signal.raise_signal(signal.SIGINT)
        reached.append("the end")
        if error is not None:
            raise error
    assert reached == ["the end"]


def test_a_second_one_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), quiet():  # noqa: PT012 - where it comes out
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        time.sleep(60)


def test_what_runs_inside_does_not_handle_sigterm() -> None:
    seen = []

    class Model(nn.Linear):
        def forward(self, x):
            seen.append(signal.getsignal(signal.SIGTERM))
            return super().forward(x)

    predict_memory(Model(2, 2), torch.ones(1, 2))
    assert set(seen) == {signal.getsignal(signal.SIGTERM)}


def test_handlers_of_the_user_are_theirs(monkeypatch) -> None:
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with quiet():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def test_other_threads_leave_them_alone() -> None:
    seen = []

    def look() -> None:
        with quiet():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
