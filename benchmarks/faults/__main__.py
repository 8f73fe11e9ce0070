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
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import (
    RESULTS,
    markdown_table,
    provenance,
    several_runs,
    write_results,
)
from benchmarks.faults import _modules, _plans, _ranks
from benchmarks.faults._attack import (
    AT_OPERATOR,
    IN_CHECKPOINT,
    Injections,
    kill_and_resume,
)
from benchmarks.faults._environment import FAULTS, disturb
from benchmarks.faults._fits import PRESETS, all_cases
from tests.awkward_projects import all_projects

OF_MEMORY_AND_KILLS = ("right", "wrong", "hung", "lost with advice", "lost without advice")
MOMENTS = (AT_OPERATOR, AT_OPERATOR, IN_CHECKPOINT)
GOOD = (
    *("right", "lost with advice", "went on", "clear error"),
    *(outcome for outcome in _modules.OUTCOMES if outcome not in _modules.BAD),
)
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
    parser.add_argument("--preset", choices=PRESETS, help="attack only fits with these settings")
    parser.add_argument("--injections", type=int, help="over all cases; 1,000, of plans 300")
    parser.add_argument("--kills", type=int, help="over all cases; 100, of plans and ranks 20")
    parser.add_argument("--environment", type=int, default=120, help="faults of it, over all cases")
    parser.add_argument(
        "--resume", action="store_true", help="keep what is right in the result file"
    )
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
        kept = _good_cases(arguments, "faults_modules_cpu", "cells")
        found = _modules.attack(
            [*all_projects()], [*_modules.SETTINGS], [*_modules.CONDITIONS], kept
        )
        cells = [{"commit": provenance()["commit"]} | cell for cell in found]
        path = _write(arguments, "faults_modules_cpu", "cells", cells, _modules.make_table(cells))
        print(path.with_suffix(".md").read_text("utf-8"))
        return
    # Each file has the figures of one command, so that the one may be repeated without the other.
    bad = _attack_cases(injections, kills, arguments) + _disturb_cases(arguments)
    if bad:
        sys.exit("\n".join(["Not as it must be:", *(one["case"] for one in bad)]))


# Written after each case: what has been found so far outlives what ends the benchmark.
def _attack_cases(
    num_injections: int, num_kills: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    attacks = _good_cases(arguments, "faults_cpu", "attacks")
    done = {attack["case"] for attack in attacks}
    cases, commit = all_cases(arguments.preset), provenance()["commit"]
    names = [str(case) for case in cases]
    for index, case in enumerate(cases):
        if str(case) in done:
            continue
        found = []
        injections = _share(num_injections, len(cases), index)
        if injections:
            places = Injections(case, arguments.seed)
            found += [{"kind": "injection", **places.attack()} for _ in injections]
        kills = _share(num_kills, len(cases), index)
        for number in kills:
            seed = arguments.seed + number - kills.start
            killed = kill_and_resume(case, seed, MOMENTS[number % len(MOMENTS)])
            found.append({"kind": "kill", **killed})
        if found:
            attacks += [attack | {"commit": commit} for attack in found]
            attacks.sort(key=lambda attack: names.index(attack["case"]))
            path = _write(arguments, "faults_cpu", "attacks", attacks, _table(attacks))
            print(f"{case}: {_counts(found)}; {len(attacks)} in {path}", flush=True)
    return [one for one in attacks if one["outcome"] not in GOOD]


def _good_cases(arguments: argparse.Namespace, name: str, kind: str) -> list[dict[str, Any]]:
    if not arguments.resume:
        return []
    file = json.loads((arguments.results / f"{name}.json").read_text("utf-8"))
    bad = {_case_of(one) for one in file[kind] if one["outcome"] not in GOOD}
    known = {"commit": file["provenance"]["commit"]}
    return [known | one for one in file[kind] if _case_of(one) not in bad]


def _case_of(one: dict[str, Any]) -> Any:
    return one["case"] if "case" in one else (one["project"], one["settings"])


def _write(
    arguments: argparse.Namespace,
    name: str,
    kind: str,
    found: list[dict[str, Any]],
    table: str,
) -> Path:
    source = None
    if len({one["commit"] for one in found}) > 1:
        command = provenance()["command"].replace(" --resume", "")
        source = {"command": several_runs(command, kind, found)}
    return write_results(name, {kind: found}, table, folder=arguments.results, put_together=source)


def _disturb_cases(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    cases, disturbed = all_cases(arguments.preset), []
    for index, case in enumerate(cases):
        numbers = _share(arguments.environment, len(cases), index)
        for number in numbers:
            seed = arguments.seed + number - numbers.start
            disturbed.append(disturb(case, FAULTS[number % len(FAULTS)], seed))
        if numbers:
            print(f"{case}: {_counts(disturbed)}", flush=True)
            table = _table_of_faults(disturbed)
            found = {"attacks": disturbed}
            write_results("faults_environment_cpu", found, table, folder=arguments.results)
    return [one for one in disturbed if one["outcome"] not in GOOD]


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


def _share(total: int, num_cases: int, index: int) -> range:
    return range(total * index // num_cases, total * (index + 1) // num_cases)


def _counts(found: list[dict[str, Any]]) -> dict[str, int]:
    return dict(collections.Counter(one["outcome"] for one in found))


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
        "phase": f"phase {value}",
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
