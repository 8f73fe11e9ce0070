"""Let memory really run out on the virtual GPU: `python -m benchmarks.virtual_gpu out_of_memory`.

torch's own allocator raises each error. Of a GPU of 2 to 24 GiB some MiB are left: at the start,
after three steps, in validation, before the optimizer's first step, before a block as its weights
are fetched, or as a copy on another stream begins. The rest belongs to tensors, to memory that is
not torch's, to a limit, or is not there. A fit that goes on is right if its weights are, bit for
bit, those of a fit with memory enough that was told the same micro-batch sizes. One that ends is
judged by its advice, and by what its report says: the cause, the phase, and which tensors took
most, each against what was seen beside the product.

With VGPU_COMPUTE=1 small models train and values count; with VGPU_COMPUTE=int large models fill
the GPU and only errors and reports do.
"""

import argparse
import contextlib
import functools
import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, markdown_table, write_results
from benchmarks.faults._attack import _REMEDY, in_process
from benchmarks.virtual_gpu._setup import allow_forks, be_quiet, taken_to_work
from benchmarks.virtual_gpu._squeezed_fit import (
    LATE,
    NUM_BATCHES,
    Known,
    Squeeze,
    SqueezedFit,
)
from benchmarks.virtual_gpu._squeezed_models import MODELS, Model
from lightning_memsave import MicroBatching
from lightning_memsave.units import GIB, MIB

OUTCOMES = (
    "right",
    "went on",
    "ended with advice",
    "wrong",
    "hung",
    "ended without advice",
    "crashed",
)
ENOUGH = "never ran out"  # the cache had enough, whatever was taken
SHARE_RIGHT = 0.95
# Of the clock, as what waits for ever needs no processor. A case takes 15 s on a free machine.
LIMIT_S = 900
IS_EXACT = os.environ.get("VGPU_COMPUTE") == "1"
OFF: dict[str, Any] = {"preset": "off"}
BY_NAME: dict[str, Any] = {"optimizer": "8bit"}
PRESETS: dict[str, dict[str, Any] | None] = {
    "without callback": None,
    "micro-batches": {"activation_checkpointing": None, "optimizer": None, "precision": None},
    "classic": {"preset": "classic", **BY_NAME},
    "bitwise": {"preset": "bitwise"},
    "single_gpu": {"preset": "single_gpu", **BY_NAME, "low_precision_weights": "stochastic"},
    "in backward": {**OFF, "optimizer_in_backward": True, "activation_checkpointing": "all"},
    "offload": {"preset": "offload", "offload": True, "low_precision_weights": "master"},
    "offload optimizer": {"offload": "optimizer", "optimizer": None},
    "offload activations": {"offload": "activations", "activation_checkpointing": None},
    "budget": {"budget": "900MiB" if IS_EXACT else "3GiB"},
}
IN_BACKWARD = {"bitwise", "single_gpu", "in backward", "offload"}
WORKSPACES = 2 * 8320 * 2**10  # of cuBLAS, which only C++ holds
OWNERS = ("card", "tensor", "outside", "limit", "pieces")
PLACES = ("start", "late", "validation", "optimizer", "block", "copy")


@dataclass(frozen=True)
class Case:
    """One fit that runs out of memory."""

    number: int
    model: str
    preset: str
    place: str
    owner: str
    capacity_gib: float
    share: float
    """Of what the fit needs at that place, that is left."""
    call: float
    """For ``block`` and ``copy``: where among the calls of blocks, or the copies."""

    def __str__(self) -> str:
        return f"{self.number}: {self.model}, {self.preset}, {self.place}, {self.owner}"


def draw(
    number: int, seed: int, models: Sequence[str], presets: Sequence[str], places: Sequence[str]
) -> Case:
    """Draw a case: every preset and place in turn, the rest at random."""
    chance = random.Random(f"{seed} {number}")
    preset = presets[number % len(presets)]
    place = places[number // len(presets) % len(places)]
    owner = chance.choice(OWNERS)
    if preset == "budget" and owner in {"tensor", "pieces"}:  # its limit is for these too
        owner = "card"
    return Case(
        number,
        models[number % len(models)],
        preset,
        place,
        owner,
        chance.uniform(2, 24),
        chance.uniform(0.0, 0.7),
        chance.random(),
    )


class Attack:
    """Attacks fits, and remembers what fits with memory enough gave."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def run(self, case: Case) -> dict[str, Any]:
        """Let memory run out once; take more of it if it was enough."""
        model = MODELS[case.model]
        whole = self._whole(case, ())
        known: dict[str, Any] = asdict(case)
        for factor in (1.0, 0.0):
            squeeze = _squeeze_for(case, whole, case.share * factor)
            capacity = int(case.capacity_gib * GIB)
            job = functools.partial(_train, model, case, squeeze, capacity, ())
            found = in_process(job, LIMIT_S)
            known["free_bytes"] = squeeze.free_bytes
            if not isinstance(found, dict):
                return {**known, "outcome": found or "crashed"}
            if found["ooms"]:
                return {**known, **self._judge(case, found)}
        return {**known, "outcome": ENOUGH}

    def _whole(self, case: Case, sizes: tuple[int | None, ...]) -> Any:
        key = case.model, case.preset, sizes
        if key not in self._known:
            model = MODELS[case.model]
            job = functools.partial(_train, model, case, None, 64 * GIB, sizes)
            found = in_process(job, LIMIT_S)
            if not isinstance(found, dict) or found["error"]:
                raise RuntimeError(f"{case} with memory enough: {found}")
            self._known[key] = found
        return self._known[key]

    def _judge(self, case: Case, found: dict[str, Any]) -> dict[str, Any]:
        judged = {name: found[name] for name in ("error", "sizes", "losses", "ooms")}
        if found["error"] is None and not IS_EXACT:
            return {**judged, "outcome": "went on"}
        if found["error"] is None:
            sizes = tuple(found["sizes"])
            told = self._whole(case, sizes)
            is_right = found["digest"] == told["digest"] and found["losses"] == told["losses"]
            return {**judged, "outcome": "right" if is_right else "wrong", "told": told["losses"]}
        has_advice = bool(_REMEDY.search(found["said"]))
        judged["outcome"] = "ended with advice" if has_advice else "ended without advice"
        judged |= {"said": found["said"], "traceback": found["traceback"]}
        judged["diagnosis"] = judge_report(found, case)
        return judged


def _squeeze_for(case: Case, whole: dict[str, Any], share: float) -> Squeeze:
    needed = whole["peak_reserved_bytes"]
    if case.place in {"optimizer", "block", "copy"}:
        needed //= 4
    calls = whole["num_calls"].get(case.place, 1)
    call = 1 + int(case.call * (calls - 1))
    return Squeeze(case.place, case.owner, int(share * needed), call)


def _train(
    model: Model, case: Case, squeeze: Squeeze | None, capacity: int, sizes: Any
) -> dict[str, Any]:
    be_quiet()
    # The longest come when memory is short already.
    batches = [model.batch(n, 2 if n == LATE else 1) for n in range(NUM_BATCHES)]
    validation = [model.batch(NUM_BATCHES, 3 if IS_EXACT else 2)]
    settings = PRESETS[case.preset]
    if settings is not None and not IS_EXACT:  # nothing can be proven of what nobody computes
        settings = {**settings, "micro_batch_size": MicroBatching("halve", evaluation=False)}
    fit = SqueezedFit(
        model.build, batches, validation, settings, capacity, squeeze, sizes, IS_EXACT
    )
    with contextlib.nullcontext() if IS_EXACT else taken_to_work(compiles=False):
        found = fit.run()
    return {**found, "num_calls": fit.num_calls}


def judge_report(found: dict[str, Any], case: Case) -> dict[str, Any]:
    """Compare what a report says with what was seen when memory ran out for the last time."""
    known = Known(**[one for one in found["ooms"] if one["phase"] != "over"][-1])
    report = found["report"]
    truth = asdict(known) | {"causes": sorted(causes_of(known, case.owner))}
    said = None
    if report is not None:
        diagnosis = report["diagnosis"]
        said = {
            "cause": diagnosis["cause"],
            "phase": diagnosis["oom"]["phase"],
            "stage": report["where"].get("stage"),
            "alive": report["alive"]["by_category"],
            "largest": [one["name"] for one in report["alive"]["largest"][:4]],
            **{name: diagnosis[name] for name in ("summary", "findings", "advice")},
        }
    wrong = find_wrong(truth, said, found["error"], case.preset)
    return {"truth": truth, "report": said, "wrong": wrong}


def find_wrong(
    truth: dict[str, Any], said: dict[str, Any] | None, error: str, preset: str
) -> list[str]:
    """List what a report says otherwise than it was."""
    if said is None:
        return ["no report"]
    wrong = [] if said["cause"] in truth["causes"] else ["cause"]
    phase = {"start": "setup", "validation": "forward"}.get(truth["phase"], truth["phase"])
    # An update inside of the backward pass is both.
    either = {phase}
    if phase == "backward" and preset in IN_BACKWARD:
        either.add("optimizer")
    if said["phase"] not in either:
        wrong.append("phase")
    if truth["phase"] == "validation" and said["stage"] != "validate":
        wrong.append("stage")
    if not _names_largest(truth["held"], said["alive"], error):
        wrong.append("largest")
    return wrong


def causes_of(known: Known, owner: str) -> set[str]:
    """Name every cause that the figures at that moment allow, the owner of the rest known."""
    reserved_bytes, free_bytes = known.reserved_bytes, known.free_bytes
    unallocated_bytes = reserved_bytes - known.allocated_bytes
    outside_bytes = known.capacity_bytes - free_bytes - reserved_bytes
    # Free memory between tensors would have been enough, and is no small part of what there is.
    if unallocated_bytes >= max(known.requested_bytes, 0.2 * reserved_bytes):
        return {"fragmentation"}
    causes = {"fragmentation"} if unallocated_bytes >= known.requested_bytes - free_bytes else set()
    if known.requested_bytes > known.capacity_bytes:
        return {"too_large"}
    if owner == "limit":
        return causes | {"limit", "too_large"}
    if owner == "outside" and outside_bytes > 3 * GIB:
        return causes | {"outside"}
    if owner == "outside" and outside_bytes > GIB:
        causes.add("outside")
    return causes | {"full"}


def _names_largest(held: dict[str, int], alive: dict[str, int], error: str) -> bool:
    """Whether the largest owner is named, where one is clearly larger than the next."""
    known = ("parameter", "gradient", "optimizer_state")
    owners = {name: held[name] for name in known}
    owners["rest"] = held["taken"] + max(held["others"] - WORKSPACES, 0)
    if error.startswith("MemoryExhaustedError"):  # it frees the activations first, and says so
        owners["rest"] = held["taken"]
    first, second = sorted(owners.values(), reverse=True)[:2]
    if first < 1.2 * second or first < 8 * MIB:
        return True
    named = {name: alive[name] for name in known}
    # Outside of their block, weights that offloading has brought are no parameter's data.
    brought = max(alive["parameter"] - held["parameter"], 0)
    named["parameter"] -= brought
    named["rest"] = sum(alive.values()) - sum(alive[name] for name in known) + brought
    return max(named, key=lambda name: named[name]) == max(owners, key=lambda name: owners[name])


def make_table(found: list[dict[str, Any]]) -> str:
    """Lay out what became of the fits, by place, by preset and by owner of the rest of memory."""
    rows = []
    for kind in ("place", "preset", "owner"):
        rows += [
            _as_row(f"{kind}: {name}", [one for one in found if one[kind] == name])
            for name in dict.fromkeys(one[kind] for one in found)
        ]
    rows.append(_as_row("all", found))
    header = ["memory runs out", "number", *OUTCOMES, "reports", "right", "side stream"]
    return markdown_table(header, rows)


def _as_row(name: str, chosen: list[dict[str, Any]]) -> list[str]:
    judged = [one["diagnosis"]["wrong"] for one in chosen if "diagnosis" in one]
    outcomes = [one["outcome"] for one in chosen]
    side = sum(any(oom["is_side_stream"] for oom in one.get("ooms", ())) for one in chosen)
    return [
        name,
        str(len(chosen)),
        *(str(outcomes.count(outcome)) for outcome in OUTCOMES),
        str(len(judged)),
        str(judged.count([])),
        str(side),
    ]


def check_claims(found: list[dict[str, Any]]) -> dict[str, bool]:
    """Say which claims hold."""
    bad = [one for one in found if one["outcome"] not in OUTCOMES[:3]]
    judged = [one["diagnosis"] for one in found if "diagnosis" in one]
    reports = [one["wrong"] for one in judged]
    single = sum(len(one["truth"]["causes"]) == 1 for one in judged)
    share = reports.count([]) / max(len(reports), 1)
    return {
        f"{len(found)} times memory ran out: the fit goes on and is right, or ends with advice "
        f"({len(bad)} not)": not bad,
        f"reports name cause, phase and the largest owner in {share:.1%} of {len(reports)}; in "
        f"{single} the figures allow one cause only": share >= SHARE_RIGHT,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Attack, print and write what became of the fits."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.virtual_gpu out_of_memory", description=__doc__
    )
    parser.add_argument("--number", type=int, default=300, help="of cases; some never run out")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0, help="of the cases")
    parser.add_argument("--presets", nargs="*", choices=PRESETS, default=[*PRESETS], help="only")
    parser.add_argument("--places", nargs="*", choices=PLACES, default=PLACES, help="only")
    parser.add_argument("--to", type=Path, help="a file to which results are added as they come")
    parser.add_argument("--read", type=Path, nargs="*", help="files that `--to` made: run nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    options = parser.parse_args(argv)
    if options.read:
        lines = [line for path in options.read for line in path.read_text().splitlines()]
        found = [json.loads(line) for line in lines]
        for one in (one for one in found if "diagnosis" in one):  # as it is judged today
            judged = one["diagnosis"]
            judged["wrong"] = find_wrong(
                judged["truth"], judged["report"], one["error"], one["preset"]
            )
    else:
        found = _attack(options)
    found = [one for one in found if one["outcome"] != ENOUGH]
    claims = check_claims(found)
    said = [f"- {'' if holds else 'Does not hold: '}{claim}" for claim, holds in claims.items()]
    text = "\n".join([make_table(found), "", *said])
    results = {"claims": claims, "attacks": [_shortened(one) for one in found]}
    path = write_results("virtual_gpu_out_of_memory", results, text, folder=options.results)
    print(f"{text}\n\nWritten to {path}")
    return int(not all(claims.values()))


# The rest, for whoever looks into a single run, is in the file of `--to`.
def _shortened(one: dict[str, Any]) -> dict[str, Any]:
    short = {n: v for n, v in one.items() if n not in {"said", "traceback", "told", "ooms"}}
    short["ooms"] = [[oom["phase"], oom["requested_bytes"]] for oom in one.get("ooms", ())]
    if "diagnosis" in one:
        report = one["diagnosis"]["report"] or {}
        kept = {name: report.get(name) for name in ("cause", "phase", "stage", "alive")}
        short["diagnosis"] = one["diagnosis"] | {"report": kept}
    return short


def _attack(options: argparse.Namespace) -> list[dict[str, Any]]:
    allow_forks()
    models = [name for name, model in MODELS.items() if model.is_small == IS_EXACT]
    attack, found = Attack(), []
    for number in range(options.first, options.first + options.number):
        case = draw(number, options.seed, models, options.presets, options.places)
        one = attack.run(case)
        found.append(one)
        wrong = one.get("diagnosis", {}).get("wrong", "")
        print(case, one["outcome"], wrong, (one.get("error") or "")[:100], sep=" | ", flush=True)
        if options.to is not None:
            with options.to.open("a") as file:
                file.write(json.dumps(one) + "\n")
    return found
