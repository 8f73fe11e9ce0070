"""Fits with a budget: memory that runs out in spite of the plan, and processes that are killed."""

import collections
import contextlib
import random
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from benchmarks._common import markdown_table
from benchmarks.faults._attack import in_process
from benchmarks.faults._fits import Faults, digest
from benchmarks.plan._budgets import MODELS, train
from lightning_memsave import MemSaveCallback
from lightning_memsave.callbacks import run_plan
from lightning_memsave.callbacks.settings.budget import read_plan
from lightning_memsave.techniques.micro_batching.loss_proof import prove

LIMIT_S = 300
NAMES = ("GPT-2", "residual MLP")
BUDGET, SMALLER_BUDGET = 0.8, 0.65
"""Shares of the counted peak of plain training."""
NUM_BATCHES = 5
MOST_FAILURES = 3
_KEPT = 8  # last frames of a traceback
OUTCOMES = ("right", "wrong", "hung", "lost with advice", "lost without advice")
# What a training step that a smaller plan computes in other parts may differ, as a share of how far
# the weights have moved.
MAX_DISTANCE = 0.05

_REMEDY = re.compile(r"`[\w.]+=[^`]+`|MemSaveCallback\(|memsave explain")


@dataclass(frozen=True)
class Planned:
    """One kind of fit with a budget.

    Args:
        model: One of `NAMES`.
        exactness: ``"bitwise"`` with dropout; ``"approximate"`` without, as micro-batches draw
            other masks.
    """

    model: str
    exactness: str

    def __str__(self) -> str:
        return f"{self.model}, {self.exactness}"


@dataclass
class PlannedFit:
    """Runs a case; memory runs out, or the process dies."""

    case: Planned
    settings: Mapping[str, Any]
    """Of `MemSaveCallback`."""
    faults: tuple[int, ...] = ()
    further: tuple[int, ...] = ()
    """Operators after the start of the next tries of that batch where memory runs out again."""
    kill: int | None = None
    steps_down_at: Mapping[int, int] = field(default_factory=dict)
    """Batches before which the fit changes to a smaller plan, and how many times."""
    num_epochs: int = 1
    folder: Path | None = None
    known: dict[str, Any] | None = None
    """A plan, so that it is not searched for again."""
    starts: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    """Operators until the end of the forward pass of each batch, or of its last part."""
    num_ops: int = 0
    failed: list[int] = field(default_factory=list)
    """The batch of each failure; -1 before the first."""
    num_in_proof: int = 0
    """Failures of the proof of the loss, which are repeated by themselves."""
    error: Exception | None = None
    disturb: Callable[[], None] | None = None
    disturbed_at: int | None = None
    places: set[int] = field(default_factory=set)

    def note_failure(self) -> None:
        """Remember the batch for which memory ran out."""
        if any(frame.name == prove.__name__ for frame in traceback.extract_stack()):
            self.num_in_proof += 1
        else:
            self.failed.append(len(self.starts) - 1)

    def run(self) -> dict[str, Any]:
        """Train; give the digest, the weights' distance from the start, and the plan at the end."""
        torch.manual_seed(0)
        model = MODELS[self.case.model]
        module = model.build()
        if self.case.exactness != "bitwise":
            for part in module.modules():
                if isinstance(part, nn.Dropout):
                    part.p = 0.0
        callback = MemSaveCallback(**self.settings, predict=False, report=False)
        watch, checkpoint, last = _Watch(self, callback), [], None
        if self.folder is not None:
            checkpoint = [ModelCheckpoint(self.folder, save_last=True)]
            last = self.folder / "last.ckpt"
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=self.num_epochs,
            callbacks=[callback, watch, *checkpoint],
            logger=False,
            enable_checkpointing=bool(checkpoint),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader: Any = DataLoader([model.batch(n) for n in range(NUM_BATCHES)], batch_size=None)  # type: ignore[arg-type] # a list is a dataset
        _fail_again(module, self)
        with warnings.catch_warnings(), _known_plan(self.known):
            warnings.simplefilter("ignore")
            try:
                with Faults(self) as mode:
                    self.places = mode.places
                    path = last if last is not None and last.exists() else None
                    trainer.fit(module, loader, ckpt_path=path)
            except Exception as error:
                self.error = error
        return {
            "digest": digest(module),
            "weights": _flat(module) if self.case.exactness != "bitwise" else [],
            "plan": watch.state,
            "is_found": callback.plan is not None and bool(callback.plan.frontier),
            "num_ops": self.num_ops,
            "starts": self.starts,
            "failed": self.failed,
            "num_in_proof": self.num_in_proof,
            "error": _said(self.error),
            "passed": self.passed,
            "traceback": [] if self.error is None else _frames(self.error),
        }


def _frames(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)[-_KEPT:]
    # Without the folders of a machine.
    return [f"{Path(f.filename).name}, line {f.lineno}, in {f.name}: {f.line}" for f in frames]


def _flat(module: nn.Module) -> list[float]:
    values = torch.cat([p.detach().flatten() for p in module.parameters()])
    found: list[float] = values[:: max(1, len(values) // 20_000)].tolist()
    return found


def _said(error: BaseException | None) -> str:
    said = []
    while error is not None:
        lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
        said.append("\n".join(lines))
        error = error.__cause__ or error.__context__
    return "\n".join(said)


# Each further failure is that of the next try of the batch, which begins with its forward pass.
def _fail_again(module: Any, fit: PlannedFit) -> None:
    left = list(fit.further)

    def before(*_: Any) -> None:
        if (fit.failed or fit.num_in_proof) and left:
            fit.places.add(fit.num_ops + left.pop(0))

    module.model.register_forward_pre_hook(before)


@contextmanager
def _known_plan(state: dict[str, Any] | None) -> Iterator[None]:
    made = None if state is None else read_plan(state)
    known: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if made is not None:
        known = mock.patch.object(run_plan, "plan_fit", return_value=made)
    with known:
        yield


class _Watch(pl.Callback):
    def __init__(self, fit: PlannedFit, callback: MemSaveCallback) -> None:
        self.fit, self.callback = fit, callback
        self.state: dict[str, Any] = {}

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning saves no random states: dropout after a resume would be another one.
        if batch_idx == 0:
            torch.manual_seed(trainer.current_epoch)
        self.fit.starts.append(self.fit.num_ops)
        for _ in range(self.fit.steps_down_at.get(batch_idx, 0)):
            # There is no public way, since no user wants it: plans change when memory runs out.
            self.callback._budget.step_down(trainer, "it was told to")

    def on_before_backward(self, *_: Any) -> None:
        del self.fit.passed[len(self.fit.starts) - 1 :]
        self.fit.passed.append(self.fit.num_ops)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.callback.plan is not None:
            self.state = self.callback._budget.state()


class Plans:
    """Attacks fits of one case with a budget.

    Args:
        case: The case.
        seed: Of the places.
    """

    def __init__(self, case: Planned, seed: int) -> None:
        self.case, self.random = case, random.Random(f"{case} {seed}")
        self.plain_bytes = _in_process(lambda: count(case))["counted_bytes"]
        self.settings = {"budget": self._budget(BUDGET), "exactness": case.exactness}
        found = self._run()
        if found["error"]:
            raise RuntimeError(f"{case}: {found['error']}")
        self.state = found["plan"]
        self.whole = self._run(known=self.state)  # without the operators of the search
        assert self.whole["digest"] == found["digest"], "a plan that is known is no other plan"
        self.plain = self._run(settings={"preset": "off"}) if self._is_bitwise else None
        self._smaller: dict[str, Any] = {}
        self._number = 0

    @property
    def _is_bitwise(self) -> bool:
        return self.case.exactness == "bitwise"

    def _budget(self, share: float) -> int:
        return int(share * self.plain_bytes)

    def _run(self, **options: Any) -> Any:
        settings = options.pop("settings", self.settings)
        return _in_process(lambda: PlannedFit(self.case, settings, **options).run())

    def inject(self) -> dict[str, Any]:
        """Let memory run out once to three times in a row.

        Every other time at a random operator of a forward pass, where a batch can always be
        repeated; else at any one.
        """
        num_failures = self.random.randint(1, MOST_FAILURES)
        self._number += 1
        is_forward = bool(self._number % 2)
        starts, passed = self.whole["starts"], self.whole["passed"]
        place = self.random.randrange(self.whole["num_ops"])
        if is_forward:
            batch = self.random.randrange(NUM_BATCHES)
            place = self.random.randrange(starts[batch], passed[batch])
        within = passed[-1] - starts[-1]
        further = tuple(self.random.randrange(within) for _ in range(num_failures - 1))
        known = {"case": str(self.case), "place": place, "failures": num_failures}
        known["where"] = "in forward" if is_forward else "anywhere"
        found = self._run(faults=(place,), further=further, known=self.state)
        if not isinstance(found, dict):
            lost = "hung" if found == "hung" else "lost without advice"
            return {**known, "kind": "injection", "outcome": lost}
        assert found["failed"] or found["num_in_proof"], "memory ran out"
        known |= {"kind": "injection", "batches": found["failed"], "error": found["error"]}
        known["in_proof"] = found["num_in_proof"]
        if found["error"]:
            has_advice = bool(_REMEDY.search(found["error"]))
            lost = "lost with advice" if has_advice else "lost without advice"
            return {**known, "outcome": lost, "traceback": found["traceback"]}
        why = self._differs(found)
        return {**known, "outcome": "wrong" if why else "right", "why": why}

    # The first try again of a batch is with the cache freed; each further one with the next plan.
    def _differs(self, found: dict[str, Any]) -> str:
        failures = collections.Counter(found["failed"])
        changes = {batch: number - 1 for batch, number in failures.items() if number > 1}
        key = repr(sorted(changes.items()))
        if key not in self._smaller:
            self._smaller[key] = self._run(steps_down_at=changes, known=self.state)
        told = self._smaller[key]
        if found["digest"] != told["digest"]:
            return f"not as a fit that was told to change plans: {changes}"
        if found["plan"]["plan"] != told["plan"]["plan"]:
            return "another plan than that fit"
        if self.plain is not None and found["digest"] != self.plain["digest"]:
            return "not as plain training"
        if not self._is_bitwise:
            distance = _distance(found["weights"], self.whole["weights"])
            if distance > MAX_DISTANCE:
                return f"{distance:.1%} away from the same plan that was not interrupted"
        return ""

    def kill(self, *, is_smaller: bool) -> dict[str, Any]:
        """Kill a fit at a random operator, and resume it with the same or a smaller budget."""
        share = SMALLER_BUDGET if is_smaller else BUDGET
        lengths: dict[str, Any] = {"num_epochs": 3}
        resumed_with = {**self.settings, "budget": self._budget(share)}
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            plain = self._run(folder=Path(one), known=self.state, **lengths)
            place = self.random.randrange(plain["num_ops"])
            died = self._run(folder=Path(other), kill=place, known=self.state, **lengths)
            has_checkpoint = (Path(other) / "last.ckpt").exists()
            resumed = self._run(folder=Path(other), settings=resumed_with, **lengths)
        known = {
            "kind": "kill, smaller budget" if is_smaller else "kill, same budget",
            "case": str(self.case),
            "place": place,
            "resumed": has_checkpoint,
        }
        if died is not None:
            return {**known, "outcome": "hung" if died == "hung" else "not killed"}
        if not isinstance(resumed, dict):
            return {**known, "outcome": "hung" if resumed == "hung" else "lost without advice"}
        if resumed["error"]:
            return {**known, "outcome": "lost without advice", "error": resumed["error"]}
        why = ""
        if resumed["digest"] != plain["digest"]:
            why = "other weights than the fit that was not killed"
        elif has_checkpoint and resumed["is_found"] is not is_smaller:
            why = f"the plan {'comes' if is_smaller else 'does not come'} from the checkpoint"
        elif resumed["plan"]["plan"]["device_bytes"] > resumed_with["budget"]:
            why = "the plan does not fit the budget"
        return {**known, "outcome": "wrong" if why else "right", "why": why}


def count(case: Planned) -> dict[str, Any]:
    """Count the peak of plain training."""
    return train(MODELS[case.model], preset="off", predict=False)


def _in_process(job: Callable[[], Any]) -> Any:
    return in_process(job, LIMIT_S)


def _distance(a: list[float], b: list[float]) -> float:
    first, second = torch.tensor(a), torch.tensor(b)
    return float((first - second).norm() / second.norm())


CASES = [Planned(name, exactness) for name in NAMES for exactness in ("approximate", "bitwise")]


def attack(num_injections: int, num_kills: int, seed: int) -> list[dict[str, Any]]:
    """Attack all cases; bitwise ones are also killed."""
    found: list[dict[str, Any]] = []
    for index, case in enumerate(CASES):
        share = _share(num_injections, len(CASES), index)
        deaths = 0
        if case.exactness == "bitwise":
            deaths = _share(num_kills, len(NAMES), NAMES.index(case.model))
        if not share + deaths:
            continue
        plans = Plans(case, seed)
        print(f"{case}: {len(plans.state['ladder'])} plans in the ladder", flush=True)
        found += [plans.inject() for _ in range(share)]
        found += [plans.kill(is_smaller=bool(n % 2)) for n in range(deaths)]
        outcomes = [one["outcome"] for one in found if one["case"] == str(case)]
        print(f"{case}: { ({o: outcomes.count(o) for o in outcomes}) }", flush=True)
    return found


def _share(total: int, number: int, index: int) -> int:
    return total * (index + 1) // number - total * index // number


def make_table(found: list[dict[str, Any]]) -> str:
    """Lay out what became of the fits."""
    rows = []
    for kind in dict.fromkeys(_kind(one) for one in found):
        for case in [*dict.fromkeys(one["case"] for one in found), "all"]:
            these = [o for o in found if _kind(o) == kind and case in (o["case"], "all")]
            if these:
                counts = [str(sum(o["outcome"] == name for o in these)) for name in OUTCOMES]
                rows.append([f"{kind}; {case}", str(len(these)), *counts])
    return markdown_table(["attack", "number", *OUTCOMES], rows)


def _kind(one: dict[str, Any]) -> str:
    return f"{one['kind']} {one['where']}" if "where" in one else str(one["kind"])


_WHERE = {
    "has updated parameters": "in a backward pass that had updated parameters, as "
    "`optimizer_in_backward` does",
    "in the step of": "in the step of the optimizer",
    "cannot be reduced": "with the last plan and one sample",
    "in the middle of an accumulation": "in an accumulation window",
}


def make_reasons(found: list[dict[str, Any]]) -> str:
    """Say where fits were lost."""
    lost = [one for one in found if one["outcome"].startswith("lost")]
    counts = collections.Counter(
        next((text for part, text in _WHERE.items() if part in one["error"]), "elsewhere")
        for one in lost
    )
    again = [one for one in found if len(one.get("batches", ())) > 1]
    changed = [one for one in again if one["outcome"] == "right"]
    text = f"{len(lost)} fits were lost: " + "; ".join(f"{n} {t}" for t, n in counts.items())
    return (
        f"{text}. Memory ran out again in {len(again)} fits before they ended; {len(changed)} of "
        "these changed to a smaller plan and ended right."
    )


def check_claims(found: list[dict[str, Any]]) -> dict[str, bool]:
    """Say which claims hold."""
    bad = [o for o in found if o["outcome"] not in ("right", "lost with advice")]
    kills = [o for o in found if o["kind"] != "injection"]
    return {
        f"{len(found)} attacks: results are right, or the fit ends with advice ({len(bad)} not)": (
            not bad
        ),
        f"{len(kills)} killed fits end like those that were not": all(
            o["outcome"] == "right" for o in kills
        ),
    }
