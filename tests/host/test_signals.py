"""Ctrl-C ends a fit without a trace too, and never the process."""

import os
import signal
import sys
import threading
import time
from types import FunctionType

import pytest
import torch
from torch import nn

from lightning_memsave.analysis.predict import predict_memory
from lightning_memsave.host.signals import signals_kept
from tests.callbacks.lit import PACKAGES

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_an_interruption_comes_through_wherever_it_hits(package) -> None:
    class Lit(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(8, 8)

        def training_step(self, batch, batch_idx):
            hidden = self.model(batch)
            while True:
                hidden = hidden * 0.5

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters())

    handler = signal.getsignal(signal.SIGINT)
    # Sooner or later it hits a line that torch has called.
    for delay_s in (0.1, 0.13, 0.17, 0.2):
        killer = threading.Timer(0.4 + delay_s, os.kill, (os.getpid(), signal.SIGINT))
        killer.start()
        with pytest.raises(KeyboardInterrupt):
            predict_memory(Lit(), torch.ones(4, 8), time_limit_s=30)
        killer.join()
    assert signal.getsignal(signal.SIGINT) is handler


def test_what_runs_inside_does_not_handle_sigterm() -> None:
    seen = []

    class Model(nn.Linear):
        def forward(self, x):
            seen.append(signal.getsignal(signal.SIGTERM))
            return super().forward(x)

    predict_memory(Model(2, 2), torch.ones(1, 2))
    assert set(seen) == {signal.getsignal(signal.SIGTERM)}


def test_waits_while_torch_calls() -> None:
    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append("torch's own line")

    def run() -> None:
        with signals_kept():
            called_by_torch()
            reached.append("this line")
            time.sleep(5)

    reached: list[str] = []
    names = {"__name__": "torch._ops", "signal": signal}
    called_by_torch = FunctionType(interrupted.__code__, names, closure=interrupted.__closure__)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert reached[0] == "torch's own line"


def test_handlers_of_the_user_are_theirs(monkeypatch) -> None:
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with signals_kept():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def test_other_threads_leave_them_alone() -> None:
    seen = []

    def look() -> None:
        with signals_kept():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
