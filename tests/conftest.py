"""Seeds, which cases run, and a check after each test that nothing global was left behind."""

import functools
import gc
import importlib
import importlib.metadata
import os
import shutil
import signal
import subprocess
import threading
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_memsave.prediction.fake.tensors import cached_functions
from tests.helpers import seed_torch, set_other_defaults
from tests.virtual_gpu import counters

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Fake tensors come and go by the thousand in a prediction: the collector runs twice as long with
# Python's own threshold of 700.
gc.set_threshold(50_000, 20, 50)
# Each Trainer reads the metadata of all packages, which takes longer than all the rest of it.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)  # type: ignore[assignment]
# Where torch is built with CUDA and there is no GPU, the first backward pass after a prediction for
# one starts a thread for it, and then no fork can run backward. The very first starts none.
if not torch.cuda.is_available():
    torch.ones((), requires_grad=True).backward()

CASES_OF = "MEMSAVE_CASES_OF"
MOST_CASES = 2
"""Of each test that `make test` runs."""
SLOW_TURNS = 3
"""It runs slow tests of a file for each third commit."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        choices=("some", "half", "all"),
        default="all",
        help=f"of each test: some cases, half of the others too, or all (the default). Which ones, "
        f"depends on what is committed, or on the number {CASES_OF} in the environment",
    )


def pytest_report_header(config: pytest.Config) -> str:
    cases, number = config.getoption("--cases"), chosen_number()
    if cases == "all":
        return "cases: all"
    return f"cases: {cases}, those of {number:x} (`{CASES_OF}={number:x}` runs the same)"


@pytest.hookimpl(tryfirst=True)  # before other files choose
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = "needs a CUDA device, and torch sees none"
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=reason))
    cases = config.getoption("--cases")
    if cases != "all":
        number = chosen_number()
        left = {*left_to_test_all(items, number)}
        if cases == "half":
            left -= half_of(left, items, number)
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
    # Two processes run the scenarios of these meanwhile.
    items.sort(key=_has_scenarios)


def _has_scenarios(item: pytest.Item) -> bool:
    return hasattr(getattr(item, "module", None), "SCENARIOS")


def pytest_unconfigure() -> None:
    gc.unfreeze()  # triton calls what is still frozen when the process ends a leak


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly or not any(map(_has_scenarios, session.items)):
        return
    from tests.callbacks import ranks

    ranks.start(session)


@functools.cache
def chosen_number() -> int:
    """Read the number that chooses cases: the one given, or the hash of what is committed."""
    given = os.environ.get(CASES_OF)
    return int(given, 16) if given else number_of_commit(Path(__file__).parent)


def number_of_commit(folder: Path) -> int:
    """Read the start of the hash of what is committed there; 0 outside of a repository."""
    git = shutil.which("git")
    if git is None:
        return 0
    command = [git, "-C", str(folder), "rev-parse", "--verify", "--quiet", "HEAD^{tree}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(found.stdout[:12], 16) if found.returncode == 0 else 0


def left_to_test_all(items: Sequence[pytest.Item], number: int) -> list[pytest.Item]:
    """Give what `make test` leaves out: all but a few cases of each test, and what is exhaustive.

    Of slow tests it runs a share of the files. Which cases and files, depends on ``number``.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("exhaustive") is None and _has_turn(item, number):
            tests.setdefault(_name_of(item), []).append(item)
    chosen: set[pytest.Item] = set()
    for cases in tests.values():
        cases.sort(key=lambda item: zlib.crc32(f"{number}{item.nodeid}".encode()))
        chosen |= {*cases[:MOST_CASES]}
    return [item for item in items if item not in chosen]


def _has_turn(item: pytest.Item, number: int) -> bool:
    file = item.nodeid.partition("::")[0]
    is_slow = item.get_closest_marker("slow") is not None
    return not is_slow or (zlib.crc32(file.encode()) + number) % SLOW_TURNS == 0


def half_of(left: set[pytest.Item], items: Sequence[pytest.Item], number: int) -> set[pytest.Item]:
    """Give half of what was left out, and of each test at least one case."""
    half = {item for item in left if is_in_half(item.nodeid, number)}
    names = {_name_of(item) for item in items if item not in left or item in half}
    for item in items:
        if _name_of(item) not in names:
            names.add(_name_of(item))
            half.add(item)
    return half


def is_in_half(case: str, number: int) -> bool:
    """Whether a case is in the half of this number; those of the next number are the others."""
    return (zlib.crc32(case.encode()) + number) % 2 == 0


def _name_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


@pytest.fixture(params=("lightning", "pytorch_lightning"))
def package(request: pytest.FixtureRequest) -> Any:
    """Each of the two packages that Lightning comes in."""
    from tests.callbacks.lit import PACKAGES as MODULES

    return MODULES[request.param]


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Any:
    """Give what the scenarios of a test file have written on two ranks."""
    from tests.callbacks import ranks

    return ranks.make_report(request)


@pytest.fixture(scope="module")
def report_of_four(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Any:
    """Give what the scenarios of a test file have written on four ranks."""
    from tests.callbacks import ranks

    root = tmp_path_factory.mktemp("four")
    ranks.launch(root, [str(request.path)], number=4)
    ranks.wait(root)
    return lambda name: ranks.read_notes(root / request.path.stem, name, 4)


@pytest.fixture(params=[2, 4])
def seen(request: pytest.FixtureRequest) -> Any:
    """Run a test with what two ranks have written, and with that of four."""
    return request.getfixturevalue("report" if request.param == 2 else "report_of_four")


# What is asked for by a number, as in `predict=20.0`, is predicted all the same.
@pytest.fixture
def no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the prediction of each fit, which takes up to a second and calls hooks."""
    set_other_defaults("no_prediction", monkeypatch)


@pytest.fixture
def any_saving_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a preset save as little as it can in the models of tests."""
    set_other_defaults("any_saving_counts", monkeypatch)


@pytest.fixture
def inductor_in_this_thread() -> Iterator[None]:
    """Compile for real, without the pool of threads that would outlive the test."""
    config: Any = importlib.import_module("torch._inductor.config")
    with config.patch(compile_threads=1), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated")  # torch's use
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_collection() -> None:
    """Leave what is there already out of garbage collections, a full one takes long with it."""
    cached_functions()
    gc.collect()
    gc.freeze()


@pytest.fixture
def only_own_tensors() -> None:
    """Hide what other tests have left in this process, where all that is alive is looked for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def share_of_a_real_gpu(request: pytest.FixtureRequest) -> None:
    """Let none of the workers take what the others need: some tests fill all that there is."""
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    is_real = torch.cuda.is_available() and not counters.is_on
    if is_real and num_workers > 1 and request.node.get_closest_marker("gpu"):
        torch.cuda.set_per_process_memory_fraction(0.8 / num_workers)


def _sync_debug_mode() -> int:
    is_in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # tests replace one
    return torch.cuda.get_sync_debug_mode() if is_in_use else 0


def _handler_of_sigterm() -> Any:
    return signal.getsignal(signal.SIGTERM)


# A Trainer that is not torn down stays alive by it.
def _handle_sigterm(handler: Any) -> None:
    signal.signal(signal.SIGTERM, handler)


class ProcessState:
    """The settings of this process that all tests share."""

    _SETTINGS: tuple[tuple[Any, Any], ...] = (
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        (_sync_debug_mode, torch.cuda.set_sync_debug_mode),
        (_handler_of_sigterm, _handle_sigterm),
    )

    def __init__(self) -> None:
        self._before: list[Any] = [read() for read, _ in self._SETTINGS]

    def restore(self) -> list[str]:
        """Set everything as it was at first; name what was different."""
        changed = []
        for mode in reversed(_get_current_dispatch_mode_stack()):
            changed.append(type(mode).__name__)
            mode.__exit__(None, None, None)
        if _has_any_global_hook():
            changed.append("global hooks of modules")
            for name, hooks in vars(torch.nn.modules.module).items():
                if name.startswith("_global_") and isinstance(hooks, dict):
                    hooks.clear()
        for (read, write), before in zip(self._SETTINGS, self._before, strict=True):
            if read() != before:
                changed.append(write.__name__)
                write(before)
        return changed


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder from a fixed seed; fail a test that changes the process for others."""
    monkeypatch.chdir(tmp_path)
    seed_torch(0)
    before = ProcessState()
    environment, threads = dict(os.environ), set(threading.enumerate())
    yield
    # Lightning leaves `LOCAL_RANK` there, with which the next script waits for others to start it.
    for name in os.environ.keys() - environment:
        del os.environ[name]
    os.environ.update(environment)
    assert before.restore() == []
    started = [t for t in set(threading.enumerate()) - threads if not t.daemon]
    if started:  # that of a model which is garbage ends with it
        gc.collect()
    for thread in started:  # those of a pool that was told to stop may still be on their way out
        thread.join(timeout=5)
    assert [thread for thread in started if thread.is_alive()] == []
