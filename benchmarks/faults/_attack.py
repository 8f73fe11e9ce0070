"""One attack at a time, in a process of its own, and what became of the fit."""

import dataclasses
import itertools
import json
import logging
import multiprocessing
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faults._fits import BACKWARD, ELSEWHERE, FORWARD, OPTIMIZER, Case, Fit

PHASES = (FORWARD, BACKWARD, OPTIMIZER, ELSEWHERE)
LIMIT_S = 120
"""A fit takes about a second: after this time it hangs."""

# What can be typed, as every error of ours names it.
_REMEDY = re.compile(r"`[\w.]+=[^`]+`|MemSaveCallback\(|memsave explain")


def in_process(job: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Run a job in a fork; give what it returns, ``"hung"``, or ``None`` if the process died."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        process = multiprocessing.get_context("fork").Process(target=_write, args=(job, path))
        process.start()
        process.join(limit_s)
        if process.is_alive():
            process.kill()
            process.join()
            return "hung"
        return json.loads(path.read_text()) if path.exists() else None


def _write(job: Callable[[], Any], path: Path) -> None:
    # A thousand fits would say it all.
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    path.write_text(json.dumps(job()))


def measure(case: Case) -> dict[str, Any]:
    """Run a case unharmed: where its phases begin and end, and what it gives."""
    phases: list[str] = []
    fit = Fit(case, phases=phases)
    result = fit.run()
    if fit.error is not None:
        raise fit.error
    ranges: dict[str, list[tuple[int, int]]] = {phase: [] for phase in PHASES}
    begin = 0
    for phase, same in itertools.groupby(phases):
        end = begin + len([*same])
        ranges[phase].append((begin, end))
        begin = end
    return {"ranges": ranges, "digest": result}


def inject(case: Case, place: int) -> dict[str, Any]:
    """Let memory run out at one operator."""
    fit = Fit(case, faults=(place,))
    result = fit.run()
    error = shown = fit.error
    said = ""
    # Python prints all of them, as where Lightning's teardown raises an error of its own later.
    while shown is not None:
        said += "\n".join([str(shown), *getattr(shown, "__notes__", ())])
        shown = shown.__cause__ or shown.__context__  # type: ignore[assignment] # also an exit
    return {
        "digest": result,
        "batch": fit.batch,
        "phase": fit.phase,
        "has_fired": fit.num_ops > place,
        "error": None if error is None else f"{type(error).__name__}: {str(error)[:200]}",
        "has_advice": bool(_REMEDY.search(said)),
    }


def smaller(case: Case, batch: int) -> str:
    """Give the digest of a fit with the smaller size from a batch on."""
    fit = Fit(case, smaller_from=batch)
    result = fit.run()
    if fit.error is not None:
        raise fit.error
    return result


class Injections:
    """Injects into a case, in each phase in turn, and compares with fits that meant the same."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.random = case, random.Random(f"{case} {seed}")
        self.plain = in_process(lambda: measure(case))
        self.ranges = itertools.cycle(filter(None, self.plain["ranges"].values()))
        self._smaller: dict[int, str] = {}

    def attack(self) -> dict[str, Any]:
        """Attack once; ``outcome`` is right, wrong, hung, lost with advice or lost without."""
        # Not of all operators alike: in the first batch there are many, for the proof of the loss.
        place = self.random.randrange(*self.random.choice(next(self.ranges)))
        found = in_process(lambda: inject(self.case, place))
        known = {**_describe(self.case), "place": place}
        if not isinstance(found, dict):
            outcome = "hung" if found == "hung" else "lost without advice"
            return {**known, "outcome": outcome}
        if found["error"] is not None:
            outcome = "lost with advice" if found["has_advice"] else "lost without advice"
        else:
            outcome = "right" if found["has_fired"] and self._is_right(found) else "wrong"
        kept = {name: found[name] for name in ("phase", "batch", "error")}
        return {**known, "outcome": outcome, **kept}

    def _is_right(self, found: dict[str, Any]) -> bool:
        if found["digest"] == self.plain["digest"]:
            return True
        batch = max(found["batch"], 0)
        if batch not in self._smaller:
            self._smaller[batch] = in_process(lambda: smaller(self.case, batch))
        return bool(found["digest"] == self._smaller[batch])


def _describe(case: Case) -> dict[str, Any]:
    return {"case": str(case), **dataclasses.asdict(case)}


EPOCHS, BATCHES = 3, 4
AT_OPERATOR, IN_CHECKPOINT = "at an operator", "while a checkpoint is written"


def kill_and_resume(case: Case, seed: int, moment: str = AT_OPERATOR) -> dict[str, Any]:
    """Kill a fit at a random place, resume it from its last checkpoint, compare the weights.

    Args:
        case: The fit.
        seed: Of the place: an operator, or a byte of all checkpoints.
        moment: `AT_OPERATOR` or `IN_CHECKPOINT`.

    Returns:
        ``outcome``: right, wrong, hung, not killed or lost without advice.
    """
    lengths = {"num_epochs": EPOCHS, "num_batches": BATCHES}

    def train(folder: Path, **killed: int) -> Any:
        tempfile.tempdir = str(folder)  # where a checkpoint lies until it is whole
        fit = Fit(case, folder=folder, **killed, **lengths)  # type: ignore[arg-type] # integers
        result = fit.run()
        known = {"digest": result, "error": str(fit.error or "")}
        return {**known, "num_ops": fit.num_ops, "num_bytes": fit.num_bytes}

    option, total = {
        AT_OPERATOR: ("kill", "num_ops"),
        IN_CHECKPOINT: ("kill_at_byte", "num_bytes"),
    }[moment]
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as cut:
        plain = in_process(lambda: train(Path(whole)))
        place = random.Random(f"{case} {seed}").randrange(plain[total])
        died = in_process(lambda: train(Path(cut), **{option: place}))
        has_checkpoint = (Path(cut) / "last.ckpt").exists()
        resumed = in_process(lambda: train(Path(cut)))
    known = {**_describe(case), "moment": moment, "place": place, "resumed": has_checkpoint}
    if died is not None:
        return {**known, "outcome": "hung" if died == "hung" else "not killed"}
    if not isinstance(resumed, dict):
        return {**known, "outcome": "hung" if resumed == "hung" else "lost without advice"}
    if resumed["error"]:
        return {**known, "outcome": "lost without advice", "error": resumed["error"][:200]}
    is_right = resumed["digest"] == plain["digest"]
    return {**known, "outcome": "right" if is_right else "wrong"}
