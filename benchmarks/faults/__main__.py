"""Attack small fits: memory that runs out at random operators, processes that are killed.

A fit for which memory ran out is right if its parameters are, bit for bit, those of a fit that was
told to use the smaller size from that batch on, or of one that never ran out; a fit that was killed
and resumed, if they are those of a fit that was not. CPU only: what runs out is injected.
"""

import argparse
import collections
import logging
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, markdown_table, write_results
from benchmarks.faults._attack import Injections, kill_and_resume
from benchmarks.faults._fits import all_cases

OUTCOMES = ("right", "wrong", "hung", "lost with advice", "lost without advice")


def main() -> None:
    """Attack, print and write what became of the fits."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--injections", type=int, default=360, help="over all cases")
    parser.add_argument("--kills", type=int, default=60, help="over all cases")
    parser.add_argument("--seed", type=int, default=0, help="of the places")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    arguments = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric"):  # a thousand fits would say it all
        logging.getLogger(name).setLevel(logging.ERROR)
    cases = all_cases()
    attacks: list[dict[str, Any]] = []
    for index, case in enumerate(cases):
        share = _share(arguments.injections, len(cases), index)
        if share:
            injections = Injections(case, arguments.seed)
            attacks += [{"kind": "injection", **injections.attack()} for _ in range(share)]
        for number in range(_share(arguments.kills, len(cases), index)):
            found = kill_and_resume(case, arguments.seed + number)
            attacks.append({"kind": "kill", **found})
        print(f"{case}: {_counts(attacks, str(case))}", flush=True)
    table = _table(attacks)
    print(table)
    path = write_results("faults_cpu", {"attacks": attacks}, table, folder=arguments.results)
    print(f"\nWritten to {path}")


def _share(total: int, num_cases: int, index: int) -> int:
    return total * (index + 1) // num_cases - total * index // num_cases


def _counts(attacks: list[dict[str, Any]], case: str) -> dict[str, int]:
    return dict(collections.Counter(a["outcome"] for a in attacks if a["case"] == case))


def _table(attacks: list[dict[str, Any]]) -> str:
    rows = []
    stacks = list(dict.fromkeys(attack["case"].split(", ")[1] for attack in attacks))
    for kind in ("injection", "kill"):
        for stack in [*stacks, "all"]:
            chosen = [
                attack["outcome"]
                for attack in attacks
                if attack["kind"] == kind and stack in (attack["case"].split(", ")[1], "all")
            ]
            if chosen:
                counts = [str(chosen.count(outcome)) for outcome in OUTCOMES]
                rows.append([f"{kind}, {stack}", str(len(chosen)), *counts])
    return markdown_table(["attack", "number", *OUTCOMES], rows)


if __name__ == "__main__":
    main()
