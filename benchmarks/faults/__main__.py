"""Attack small fits: memory that runs out, processes that are killed, an environment that fails.

A fit for which memory ran out is right if its parameters are, bit for bit, those of a fit that was
told to use the smaller size from that batch on, or of one that never ran out; a fit that was killed
and resumed, if they are those of a fit that was not. Disk, log folder, output, checkpoint and
driver that fail have a table of their own. CPU only: what fails is injected. Nothing is injected
with `--modules`: awkward Lightning modules with every preset beside plain training. With `--ranks`
one of two processes is killed, and the other must end and name it.
"""

import argparse
import collections
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, markdown_table, write_results
from benchmarks.faults import _modules, _plans, _ranks
from benchmarks.faults._attack import (
    AT_OPERATOR,
    IN_CHECKPOINT,
    Injections,
    kill_and_resume,
)
from benchmarks.faults._environment import FAULTS, disturb
from benchmarks.faults._fits import all_cases
from tests.awkward_projects import all_projects

OF_MEMORY_AND_KILLS = ("right", "wrong", "hung", "lost with advice", "lost without advice")
OF_ENVIRONMENT = ("went on", "clear error", "wrong", "hung", "lost")


def main(argv: Sequence[str] | None = None) -> None:
    """Attack, print and write what became of the fits.

    Args:
        argv: Options; those of the command line if not given.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--plans", action="store_true", help="attack fits with a budget instead")
    parser.add_argument("--modules", action="store_true", help="train awkward modules instead")
    parser.add_argument("--ranks", action="store_true", help="kill one of two processes instead")
    parser.add_argument("--injections", type=int, help="over all cases; 1,000, of plans 300")
    parser.add_argument("--kills", type=int, help="over all cases; 100, of plans and ranks 20")
    parser.add_argument("--environment", type=int, default=120, help="faults of it, over all cases")
    parser.add_argument("--seed", type=int, default=0, help="of the places")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    arguments = parser.parse_args(argv)
    injections, kills = (300, 20) if arguments.plans or arguments.ranks else (1000, 100)
    injections = injections if arguments.injections is None else arguments.injections
    kills = kills if arguments.kills is None else arguments.kills
    if arguments.plans:
        _attack_plans(injections, kills, arguments)
        return
    if arguments.ranks:
        _attack_ranks(kills, arguments)
        return
    if arguments.modules:
        cells = _modules.attack([*all_projects()], [*_modules.SETTINGS], [*_modules.CONDITIONS])
        table = _modules.make_table(cells)
        path = write_results(
            "faults_modules_cpu", {"cells": cells}, table, folder=arguments.results
        )
        print(f"{table}\n\nWritten to {path}")
        return
    _attack_cases(injections, kills, arguments)


# Written after each case: what has been found so far outlives the one that ends the benchmark.
def _attack_cases(num_injections: int, num_kills: int, arguments: argparse.Namespace) -> None:
    cases = all_cases()
    attacks: list[dict[str, Any]] = []
    disturbed: list[dict[str, Any]] = []
    faults = itertools.cycle(FAULTS)
    moments = itertools.cycle((AT_OPERATOR, AT_OPERATOR, IN_CHECKPOINT))
    for index, case in enumerate(cases):
        share = _share(num_injections, len(cases), index)
        if share:
            places = Injections(case, arguments.seed)
            attacks += [{"kind": "injection", **places.attack()} for _ in range(share)]
        for number in range(_share(num_kills, len(cases), index)):
            found = kill_and_resume(case, arguments.seed + number, next(moments))
            attacks.append({"kind": "kill", **found})
        numbers = range(_share(arguments.environment, len(cases), index))
        disturbed += [disturb(case, next(faults), arguments.seed + number) for number in numbers]
        print(f"{case}: {_counts(attacks + disturbed, str(case))}", flush=True)
        _write(attacks, disturbed, arguments.results)
    bad = [
        one["case"]
        for one in attacks + disturbed
        if one["outcome"] not in ("right", "lost with advice", "went on", "clear error")
    ]
    if bad:
        sys.exit("\n".join(["Not as it must be:", *bad]))


# Each file has the figures of one run, so that the one may be repeated without the other.
def _write(attacks: list[dict[str, Any]], disturbed: list[dict[str, Any]], folder: Path) -> None:
    if attacks:
        write_results("faults_cpu", {"attacks": attacks}, _table(attacks), folder=folder)
    if disturbed:
        table = _table_of_faults(disturbed)
        write_results("faults_environment_cpu", {"attacks": disturbed}, table, folder=folder)


def _attack_plans(num_injections: int, num_kills: int, arguments: argparse.Namespace) -> None:
    found = _plans.attack(num_injections, num_kills, arguments.seed)
    claims = _plans.check_claims(found)
    text = f"{_plans.make_table(found)}\n\n{_plans.make_reasons(found)}\n" + "".join(
        f"\n- {'' if holds else 'Does not hold: '}{claim}" for claim, holds in claims.items()
    )
    results = {"attacks": found, "claims": claims}
    path = write_results("faults_plans_cpu", results, text, folder=arguments.results)
    print(f"{text}\n\nWritten to {path}")
    failed = [claim for claim, holds in claims.items() if not holds]
    if failed:
        sys.exit("\n".join(failed))


def _attack_ranks(num_kills: int, arguments: argparse.Namespace) -> None:
    numbers = range(arguments.seed, arguments.seed + num_kills)
    plain: list[dict[str, Any]] = [
        {"with_us": False, "launcher": name} for name in _ranks.LAUNCHERS
    ]
    out_of_memory: dict[str, Any] = {"moment": _ranks.OUT_OF_MEMORY, "strategy": "ddp"}
    attacks: list[dict[str, Any]] = []
    planned: list[dict[str, Any]] = [
        *({"seed": number} for number in numbers),
        *(out_of_memory | {"seed": number} for number in (0, 1, 2)),
        *({"seed": number, "moment": "step"} | way for way in plain for number in (0, 1)),
        *({"seed": 0} | out_of_memory | way for way in plain),
    ]
    for chosen in planned:
        attacks.append(_ranks.kill(**chosen))
        print(attacks[-1], flush=True)
    table = _ranks.make_table(attacks)
    path = write_results("faults_ranks_cpu", {"attacks": attacks}, table, folder=arguments.results)
    print(f"{table}\n\nWritten to {path}")
    ours = [attack for attack in attacks if attack["with_us"]]
    if not all(attack["outcome"] == "ended and named" for attack in ours):
        sys.exit("A process did not end, or did not name the one that was killed.")


def _share(total: int, num_cases: int, index: int) -> int:
    return total * (index + 1) // num_cases - total * index // num_cases


def _counts(attacks: list[dict[str, Any]], case: str) -> dict[str, int]:
    return dict(collections.Counter(a["outcome"] for a in attacks if a["case"] == case))


def _table(attacks: list[dict[str, Any]]) -> str:
    rows = []
    for kind, kinds in (
        ("injection", ("preset", "model", "accumulate", "clip", "phase", "all")),
        ("kill", ("preset", "model", "accumulate", "clip", "moment", "all")),
    ):
        of_kind = [attack for attack in attacks if attack["kind"] == kind]
        for key in kinds:
            for value in dict.fromkeys(attack.get(key) for attack in of_kind):
                outcomes = [one["outcome"] for one in of_kind if one.get(key) == value]
                counts = [str(outcomes.count(outcome)) for outcome in OF_MEMORY_AND_KILLS]
                rows.append([_row_name(kind, key, value), str(len(outcomes)), *counts])
    return markdown_table(["attack", "number", *OF_MEMORY_AND_KILLS], rows)


def _row_name(kind: str, key: str, value: Any) -> str:
    names = {
        "accumulate": f"accumulates {value}",
        "clip": "clipped" if value else "not clipped",
        "phase": f"in {value}",
        "all": "all",
    }
    return f"{kind}, {names.get(key, value)}"


def _table_of_faults(disturbed: list[dict[str, Any]]) -> str:
    rows = []
    for fault in [*FAULTS, "all"]:
        chosen = [d["outcome"] for d in disturbed if fault in (d["fault"], "all")]
        counts = [str(chosen.count(outcome)) for outcome in OF_ENVIRONMENT]
        rows.append([fault, str(len(chosen)), *counts])
    return markdown_table(["fault", "number", *OF_ENVIRONMENT], rows)


if __name__ == "__main__":
    main()
