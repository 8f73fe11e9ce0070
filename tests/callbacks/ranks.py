"""Two processes that train together on CPU, started once for all tests of a file.

A test file that is also the script of its processes: run under torchrun it calls `write_notes`, run
by pytest it reads them through `make_report`. A hang is a failure: each scenario has a time-out,
after which the process says where it is and ends.
"""

import faulthandler
import functools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from lightning_memsave.callbacks import _arguments, _settings

Notes = dict[str, Any]
Report = Callable[[str], list[Notes]]

RANKS = 2
SCENARIO_SECONDS = 90


def rank_of_this_process() -> int:
    return int(os.environ["RANK"])


def write_notes(scenarios: Mapping[str, Callable[[], Notes]], arguments: list[str]) -> None:
    """Run scenarios on this rank, all or the named ones, and write down what each of them saw."""
    folder, *names = arguments
    # As in `conftest`: predictions take time, and call the hooks that tests listen to.
    vars(_arguments)["TIME_LIMIT_S"] = None
    vars(_settings)["SMALLEST_SAVING_BYTES"] = 0  # of small models, too
    for name in names or scenarios:
        faulthandler.dump_traceback_later(SCENARIO_SECONDS, exit=True)
        print(f"--- {name}", flush=True)  # noqa: T201
        try:
            notes = scenarios[name]()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the other rank may wait for this one: torchrun ends it
        path = Path(folder) / f"{name}-{rank_of_this_process()}.json"
        path.write_text(json.dumps(notes))
    faulthandler.cancel_dump_traceback_later()


def make_report(factory: pytest.TempPathFactory, script: str, seconds: int) -> Report:
    """Start the script on two ranks, unless another worker of pytest has; give what they wrote."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # so that the workers share one launch
    folder = root / Path(script).stem
    with FileLock(root / f"{folder.name}.lock"):
        if not folder.exists():
            folder.mkdir()
            launch(folder, script, seconds)

    @functools.cache
    def notes_of(name: str) -> list[Notes]:
        paths = [folder / f"{name}-{rank}.json" for rank in range(RANKS)]
        missing = [path.name for path in paths if not path.exists()]
        assert not missing, f"{missing} missing:\n{(folder / 'log').read_text()[-6000:]}"
        return [json.loads(path.read_text()) for path in paths]

    return notes_of


def launch(folder: Path, script: str, seconds: int) -> None:
    # torchrun finds a free port itself, and ends the other rank when one fails.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", str(Path(script).resolve()), str(folder)]
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its ranks
            process.wait()
