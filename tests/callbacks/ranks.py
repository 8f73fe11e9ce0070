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
import shlex
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

from tests.helpers import OTHER_DEFAULTS, set_other_defaults

Notes = dict[str, Any]
Report = Callable[[str], list[Notes]]

RANKS = 2
SCENARIO_SECONDS = 90
WAIT_SECONDS = 1600
_STARTED: list[subprocess.Popen[bytes]] = []  # one that nobody refers to is warned of


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
    """Give what the scenarios of a test file have written, on two ranks that all files share."""
    path, root = Path(request.path), _root_of(request.session)
    folder = root / path.stem
    start(request.session)  # where this file was collected by itself
    wait(root)
    with FileLock(root / "ranks.lock"):
        if not folder.exists():  # a scenario of another file has failed
            launch(root, [str(path)])
            wait(root)

    @functools.cache
    def notes_of(name: str) -> list[Notes]:
        return read_notes(folder, name)

    return notes_of


def read_notes(folder: Path, name: str, number: int = RANKS) -> list[Notes]:
    paths = [folder / f"{name}-{rank}.json" for rank in range(number)]
    missing = [path.name for path in paths if not path.exists()]
    log = folder.with_name("ranks.log")
    assert not missing, f"{missing} missing:\n{log.read_text()[-6000:]}"
    return [json.loads(path.read_text()) for path in paths]


def start(session: pytest.Session) -> None:
    """Start the ranks for all tests that were chosen, once for all workers, and do not wait."""
    root = _root_of(session)
    modules = [item.module for item in session.items if isinstance(item, pytest.Function)]
    files = {str(module.__file__) for module in modules if hasattr(module, "SCENARIOS")}
    if not files:
        return
    with FileLock(root / "ranks.lock"):
        if not (root / "ranks.log").exists():
            launch(root, sorted(files))


def _root_of(session: pytest.Session) -> Path:
    root: Path = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


def wait(root: Path) -> None:
    """Wait until ranks have ended."""
    deadline_s = time.monotonic() + WAIT_SECONDS
    while not (root / "ranks.done").exists() and time.monotonic() < deadline_s:
        time.sleep(0.2)


def launch(root: Path, scripts: list[str], number: int = RANKS) -> None:
    """Start ranks that run scenarios; ``ranks.done`` is there when they have ended."""
    # torchrun finds a free port itself, and ends the other rank when one fails.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={number}", __file__, str(root), *scripts]
    repository = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": repository, "OMP_NUM_THREADS": "1"}
    (root / "ranks.done").unlink(missing_ok=True)
    # A shell of its own: who starts them goes on to other tests, and may be ended first.
    line = f"timeout {WAIT_SECONDS} {shlex.join(command)}; touch ranks.done"
    with (root / "ranks.log").open("a") as log:
        command = ["sh", "-c", line]
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    _STARTED.append(process)


def main(root: str, *scripts: str) -> None:
    for script in scripts:
        parts = Path(script).relative_to(Path(__file__).parents[2]).with_suffix("").parts
        module = importlib.import_module(".".join(parts))
        with pytest.MonkeyPatch.context() as monkeypatch:
            for fixture in OTHER_DEFAULTS.keys() & _fixtures_of(module):
                set_other_defaults(fixture, monkeypatch)
            write_notes(Path(root) / parts[-1], module.SCENARIOS)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _fixtures_of(module: Any) -> set[str]:
    """Give the fixtures that all tests of a file ask for."""
    found = getattr(module, "pytestmark", [])
    marks = found if isinstance(found, list) else [found]
    return {name for mark in marks if mark.name == "usefixtures" for name in mark.args}


if __name__ == "__main__":
    main(*sys.argv[1:])
