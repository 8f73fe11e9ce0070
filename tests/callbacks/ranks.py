"""Two processes that train together on CPU, started once for all test files that have `SCENARIOS`.

Run as a script, under torchrun, this file runs them on its rank and writes notes of what they saw;
the test files read the notes of both ranks through `make_report`. A hang is a failure: each
scenario has a time-out, after which the process says where it is and ends.
"""

import faulthandler
import functools
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from torch import distributed

from lightning_memsave.callbacks import arguments as _arguments
from lightning_memsave.callbacks import settings as _settings

Notes = dict[str, Any]
Report = Callable[[str], list[Notes]]

RANKS = 2
SCENARIO_SECONDS = 90
SCRIPT_SECONDS = 400
WITH_MORE = "MEMSAVE_TEST_MORE_SCENARIOS"  # set where `make test-all` has more of them


def rank_of_this_process() -> int:
    return int(os.environ["RANK"])


def write_notes(folder: Path, scenarios: Mapping[str, Callable[[], Notes]]) -> None:
    """Run scenarios on this rank and write down what each of them saw."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    for name, run in scenarios.items():
        faulthandler.dump_traceback_later(SCENARIO_SECONDS, exit=True)
        start_s = time.perf_counter()
        try:
            notes = run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the other rank may wait for this one: torchrun ends it
        print(f"{folder.name}, {name}: {time.perf_counter() - start_s:.1f} s", flush=True)  # noqa: T201
        (folder / f"{name}-{rank_of_this_process()}.json").write_text(json.dumps(notes))
    faulthandler.cancel_dump_traceback_later()


def make_report(request: pytest.FixtureRequest) -> Report:
    """Give what the scenarios of a test file have written, on two ranks that all files share.

    Who needs it first starts them, for all tests of this run of pytest and all its workers.
    """
    root = request.getfixturevalue("tmp_path_factory").getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    modules = [item.module for item in request.session.items if isinstance(item, pytest.Function)]
    every = {module.__file__ for module in modules if hasattr(module, "SCENARIOS")}
    if any(item.get_closest_marker("exhaustive") for item in request.session.items):
        os.environ[WITH_MORE] = "1"
    path = Path(request.path)
    folder = root / path.stem
    with FileLock(root / "ranks.lock"):
        if not (root / "ranks.log").exists():
            launch(root, sorted(map(str, every)))
        if not folder.exists():  # a scenario of another file has failed
            launch(root, [str(path)])

    @functools.cache
    def notes_of(name: str) -> list[Notes]:
        paths = [folder / f"{name}-{rank}.json" for rank in range(RANKS)]
        missing = [path.name for path in paths if not path.exists()]
        assert not missing, f"{missing} missing:\n{(root / 'ranks.log').read_text()[-6000:]}"
        return [json.loads(path.read_text()) for path in paths]

    return notes_of


def launch(root: Path, scripts: list[str]) -> None:
    # torchrun finds a free port itself, and ends the other rank when one fails.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", __file__, str(root), *scripts]
    repository = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": repository, "OMP_NUM_THREADS": "1"}
    with (root / "ranks.log").open("a") as log:
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            process.wait(SCRIPT_SECONDS * len(scripts))
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its ranks
            process.wait()


def main(root: str, *scripts: str) -> None:
    # As in `conftest`: predictions take time, and call the hooks that tests listen to.
    vars(_arguments)["TIME_LIMIT_S"] = None
    vars(_settings)["SMALLEST_SAVING_BYTES"] = 0  # of small models, too
    for script in scripts:
        parts = Path(script).relative_to(Path(__file__).parents[2]).with_suffix("").parts
        module = importlib.import_module(".".join(parts))
        more = getattr(module, "MORE_SCENARIOS", {}) if WITH_MORE in os.environ else {}
        write_notes(Path(root) / parts[-1], module.SCENARIOS | more)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
