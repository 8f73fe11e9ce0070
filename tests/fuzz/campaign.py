"""Train programs with settings, count what happened, and make failing programs smaller."""

import dataclasses
import gc
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.fuzz.compare import Kind, Verdict, plain_outcome, verdict
from tests.fuzz.exclusions import excluded, expected_to_fail
from tests.fuzz.fit import Outcome, run
from tests.fuzz.grammar import Program, generate
from tests.fuzz.script import Model
from tests.fuzz.settings import SETTINGS, as_text, parts_of, settings_for, techniques_of

SIMPLER: dict[str, Any] = {
    "way": "copy_",
    "read": "plain",
    "value": "self",
    "use": "note",
    "registered": "__init__",
    "update": "lerp_",
    "keep": "list",
    "read_at": "lit:on_train_end",
}
"""Choices of a habit that are tried in place of others."""

LEAST_RUNS = 20
"""Of fewer runs no share is taken."""


@dataclass(frozen=True)
class Fault:
    """A program that disagrees with a setting."""

    program: Program
    setting: str
    verdict: Verdict

    def __str__(self) -> str:
        seed, found = self.program.seed, self.verdict
        return f"{seed} | {self.setting} | {found.kind} | {self.program} | {found.details}"

    def report(self) -> str:
        """Return the smallest program that still disagrees, and how to run it again."""
        small = shrink(self)
        again = f"python -m tests.fuzz --shrink {self.program.seed} --settings {self.setting}"
        title = f"{small.verdict.kind} with {small.setting}: {small.verdict.details}"
        return f"# {title}\n# {again}\n{small.program.source(as_text(small.setting))}"


@dataclass
class Tally:
    """What happened to programs, and how often each setting was on."""

    programs: int = 0
    runs: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    status: Counter[tuple[str, str]] = field(default_factory=Counter)

    def share_on(self, setting: str) -> float:
        """Return the share of runs in which a setting was on; 1 where there are too few."""
        count = sum(self.status[setting, each] for each in ("on", "off", "refused"))
        return self.status[setting, "on"] / count if count >= LEAST_RUNS else 1.0

    def add(self, other: "Tally") -> None:
        self.programs += other.programs
        self.runs += other.runs
        for name in ("skipped", "kinds", "status"):
            getattr(self, name).update(getattr(other, name))

    def __str__(self) -> str:
        lines = [f"{self.programs} programs, {self.runs} runs with settings"]
        lines += [f"{count:6d} {kind}" for kind, count in sorted(self.kinds.items())]
        lines += [f"{count:6d} not run: {why}" for why, count in sorted(self.skipped.items())]
        for setting in sorted({setting for setting, _ in self.status}):
            counts = (f"{self.status[setting, each]} {each}" for each in ("on", "off", "refused"))
            lines.append(f"       {setting}: {', '.join(counts)}")
        return "\n".join(lines)


def examine(seed: int, tally: Tally, settings: list[str] | None = None) -> Iterator[Fault]:
    """Train the program of a seed with some settings, and give what disagrees."""
    program = generate(seed)
    plain, why = plain_outcome(program.source())
    tally.programs += 1
    if plain is None:
        tally.skipped[why.partition(":")[0]] += 1
        return
    why_not = {setting: excluded(program, setting) for setting in settings or SETTINGS}
    tally.skipped.update(f"documented: {why}" for why in {*why_not.values()} - {""})
    allowed = [setting for setting, why in why_not.items() if not why]
    for setting in allowed if settings else settings_for(seed, allowed):
        ours = run(program.source(), setting)
        tally.runs += 1
        tally.status[setting, ours.status(techniques_of(setting))] += 1
        found = verdict(plain, ours, setting)
        known = expected_to_fail(program, setting) if found.kind.is_fault else ""
        tally.kinds[f"expected: {known}" if known else found.kind] += 1
        if found.kind.is_fault and not known:
            yield Fault(program, setting, found)


def examine_all(seeds: Iterable[int], settings: list[str] | None) -> tuple[Tally, list[str]]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tally = Tally()
    faults = [str(fault) for seed in seeds for fault in examine(seed, tally, settings)]
    gc.collect()
    return tally, faults


def check(program: Program, setting: str, plain: Outcome | None = None) -> Verdict:
    """Compare one program; equal, too, where it fails alone or is excluded."""
    if plain is None:
        plain, _ = plain_outcome(program.source())
    if plain is None or excluded(program, setting) or expected_to_fail(program, setting):
        return Verdict(Kind.EQUAL)
    return verdict(plain, run(program.source(), setting), setting)


def shrink(fault: Fault) -> Fault:
    """Drop habits, parts of the model, choices and settings while the kind stays the same."""
    while True:
        smaller = (
            Fault(program, setting, found)
            for program, setting in _smaller(fault)
            if (found := check(program, setting)).kind is fault.verdict.kind
        )
        next_one = next(smaller, None)
        if next_one is None:
            return fault
        fault = next_one


def _smaller(fault: Fault) -> Iterator[tuple[Program, str]]:
    program, setting = fault.program, fault.setting
    for habit in program.habits if len(program.habits) > 1 else ():
        rest = tuple(each for each in program.habits if each is not habit)
        yield replace(program, habits=rest), setting
    for part in parts_of(setting) if "+" in setting else ():
        yield program, part
    simplest = Model()
    for each in dataclasses.fields(Model):
        value = getattr(simplest, each.name)
        if getattr(program.model, each.name) != value:
            yield replace(program, model=replace(program.model, **{each.name: value})), setting
    for number, habit in enumerate(program.habits):
        for name, value in SIMPLER.items():
            is_choice = value in getattr(type(habit), "choices", {}).get(name, (value,))
            if is_choice and getattr(habit, name, value) != value:
                habits = [*program.habits]
                habits[number] = replace(habit, **{name: value})
                yield replace(program, habits=tuple(habits)), setting
