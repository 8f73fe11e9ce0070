"""A process that is killed between ``optimizer.step()`` and its updates loses no checkpoint."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import assert_same
from tests.techniques.killed_run import MOMENTS, NUM_STEPS, Loop

ROOT = Path(__file__).parents[2]
LAST_STEP = 4


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-m", "tests.techniques.killed_run", str(folder), str(LAST_STEP)]
    subprocess.run(command, cwd=ROOT, timeout=120, check=True)
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_last_checkpoint_goes_on_as_if_nothing_had_happened(moment, killed):
    folder = killed / moment
    assert int((folder / "status").read_text()) == -signal.SIGKILL
    num_parts = 5  # four blocks and the rest
    assert int((folder / "left").read_text()) == num_parts - MOMENTS[moment] + 1
    unbroken = Loop(None)
    unbroken.run(0)
    for what in (None, "optimizer", "parameters"):
        resumed = Loop(what)
        resumed.load(folder / f"{LAST_STEP - 1}.ckpt")
        resumed.run(LAST_STEP)
        assert resumed.losses == unbroken.losses[LAST_STEP:]
        assert len(resumed.losses) == NUM_STEPS - LAST_STEP
        assert_same(resumed.model.state_dict(), unbroken.model.state_dict())
        assert_same(resumed.optimizer.state_dict(), unbroken.optimizer.state_dict())
        resumed.close()
