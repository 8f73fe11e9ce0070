"""What a fit writes to, reads from and asks fails: disk, folder, output, checkpoint, driver."""

import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml  # type: ignore[import-untyped]
import torch

from benchmarks.faults._attack import BATCHES, EPOCHS, in_process
from benchmarks.faults._fits import LOGS, Case, Fit
from benchmarks.faults.driver import FakeDriver
from lightning_memsave.callbacks.start_advice import is_whole

_ADVISED = re.compile(r"`ckpt_path='(.+?)'`")


def _fill_disk(folder: Path, driver: FakeDriver) -> None:
    # Works without a file system to fill: no file may grow any more.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def _replace_logs_by_a_file(folder: Path, driver: FakeDriver) -> None:
    shutil.rmtree(folder / LOGS, ignore_errors=True)
    (folder / LOGS).write_text("")


def _close_output(folder: Path, driver: FakeDriver) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    os.dup2(writes, sys.stdout.fileno())


def _lose_gpu(folder: Path, driver: FakeDriver) -> None:
    driver.fail(pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST))


DISTURBANCES: dict[str, Callable[[Path, FakeDriver], None]] = {
    "disk full": _fill_disk,
    "log folder gone": _replace_logs_by_a_file,
    "output closed": _close_output,
    "NVML lost": _lose_gpu,
}
# Lightning's own checkpoints and loggers write there: what is ours alone ends no fit.
_MAY_END_A_FIT = ("disk full", "log folder gone")
TRUNCATED = "checkpoint truncated"
FAULTS = (*DISTURBANCES, TRUNCATED)


def disturb(case: Case, fault: str, seed: int) -> dict[str, Any]:
    """Let one of `FAULTS` happen to a fit at a random place; compare with an undisturbed one.

    Args:
        case: The fit.
        fault: What happens.
        seed: Of the place: an operator, or the length of a truncated checkpoint.

    Returns:
        ``outcome``: "went on" with the result of an undisturbed fit, or ended with a "clear error"
        and gave that result when it was resumed from what there was; else wrong, hung or lost.
    """
    numbers = random.Random(f"{case} {fault} {seed}")
    known = {"case": str(case), "fault": fault}
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as cut:
        plain = in_process(lambda: _train(case, Path(whole)))
        attack = _truncate if fault == TRUNCATED else _interrupt
        return known | attack(case, fault, Path(cut), plain, numbers)


def _interrupt(
    case: Case, fault: str, folder: Path, plain: dict[str, Any], numbers: random.Random
) -> dict[str, Any]:
    place = numbers.randrange(plain["num_ops"])
    found = in_process(lambda: _train(case, folder, fault=fault, place=place))
    known = {"place": place}
    if not isinstance(found, dict):
        return {**known, "outcome": found or "lost"}
    known["error"] = found["error"]
    if not found["error"]:
        is_equal = found["digest"] == plain["digest"]
        return {**known, "outcome": "went on" if is_equal else "wrong"}
    is_kept = _newest_step(folder) >= found["step_before"]
    if fault not in _MAY_END_A_FIT or not found["is_clear"] or not is_kept:
        return {**known, "outcome": "lost"}
    if (folder / LOGS).is_file():
        (folder / LOGS).unlink()
    newest = max(_checkpoints(folder), key=_step, default=None)
    return {**known, "outcome": _resume(case, folder, newest, plain)}


def _truncate(
    case: Case, fault: str, folder: Path, plain: dict[str, Any], numbers: random.Random
) -> dict[str, Any]:
    in_process(lambda: _train(case, folder, num_epochs=EPOCHS - 1))
    last = folder / "last.ckpt"
    place = numbers.randrange(last.stat().st_size)
    os.truncate(last, place)
    before = {path: path.read_bytes() for path in folder.glob("*.ckpt")}
    found = in_process(lambda: _train(case, folder))
    known = {"place": place}
    if not isinstance(found, dict):
        return {**known, "outcome": found or "lost"}
    known["error"] = found["error"]
    advised = _ADVISED.search(found["notes"])
    after = {path: path.read_bytes() for path in folder.glob("*.ckpt")}
    if not found["error"] or not advised or str(last) not in found["notes"] or before != after:
        return {**known, "outcome": "lost"}
    return {**known, "outcome": _resume(case, folder, Path(advised[1]), plain)}


def _resume(case: Case, folder: Path, path: Path | None, plain: dict[str, Any]) -> str:
    if path is None:  # it ended before there was one: from the start
        (folder / "last.ckpt").unlink(missing_ok=True)
    found = in_process(lambda: _train(case, folder, resume_from=path))
    if not isinstance(found, dict):
        return found or "lost"
    return "clear error" if found["digest"] == plain["digest"] else "wrong"


def _train(
    case: Case, folder: Path, *, fault: str = "", place: int | None = None, **settings: Any
) -> dict[str, Any]:
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - tables of a hundred fits
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    driver = FakeDriver(setattr)
    settings = {"num_epochs": EPOCHS, "num_batches": BATCHES, **settings}
    fit = Fit(case, folder=folder, watches=True, disturbed_at=place, **settings)
    step_before = 0

    def happen() -> None:
        nonlocal step_before
        step_before = _newest_step(folder)
        DISTURBANCES[fault](folder, driver)

    fit.disturb = happen if fault else None
    digest = fit.run()
    # What follows writes its result.
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    error = fit.error
    said = str(error).replace(f"{folder}/", "")
    return {
        "digest": digest,
        "num_ops": fit.num_ops,
        "step_before": step_before,
        "error": "" if error is None else f"{type(error).__name__}: {said[:200]}",
        "is_clear": isinstance(error, OSError) and bool(error.strerror),
        "notes": "\n".join(getattr(error, "__notes__", ())),
    }


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.ckpt") if is_whole(path)]


def _step(path: Path) -> int:
    return int(torch.load(path, weights_only=False)["global_step"])


def _newest_step(folder: Path) -> int:
    return max(map(_step, _checkpoints(folder)), default=0)
