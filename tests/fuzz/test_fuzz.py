"""Small random programs train the same with every setting; `make fuzz` runs many more of them."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memsave import MemSaveCallback
from lightning_memsave.errors import IncompatibleError, Problem
from tests.fuzz import campaign, fit
from tests.fuzz.__main__ import main
from tests.fuzz.campaign import Fault, Tally, check, examine, shrink
from tests.fuzz.compare import Kind, plain_outcome, verdict
from tests.fuzz.exclusions import (
    ALLOWED_REFUSALS,
    EXCLUSIONS,
    EXPECTED_FAILURES,
    MOST,
    ExpectedFailure,
    expected_to_fail,
)
from tests.fuzz.grammar import Program, generate
from tests.fuzz.habit import State
from tests.fuzz.script import Model
from tests.fuzz.settings import LEAST_SHARE, SETTINGS, techniques_of

DOCS = Path(__file__).parents[2] / "docs"
# Fresh programs, which `make fuzz` looks at, still disagree now and then: until they do no more,
# the tests train the same ones for each commit.
FIRST_SEED, NUM_CASES, PROGRAMS_PER_CASE = 1_000_000, 12, 10


@pytest.mark.parametrize("case", range(NUM_CASES))
def test_programs_train_the_same_with_settings(case: int) -> None:
    first, tally = FIRST_SEED + case * PROGRAMS_PER_CASE, Tally()
    seeds = range(first, first + PROGRAMS_PER_CASE)
    faults = [fault for seed in seeds for fault in examine(seed, tally)]
    lines = [str(fault) for fault in faults]
    assert not faults, "\n\n".join([*lines, faults[0].report(), str(tally)])
    assert sum(count for (_, status), count in tally.status.items() if status == "on") >= 10, tally


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_setting_is_on_in_most_programs(setting: str) -> None:
    outcomes = [fit.run(generate(seed).source(), setting) for seed in range(10)]
    found = [outcome.status(techniques_of(setting)) for outcome in outcomes]
    assert found.count("on") / len(found) >= LEAST_SHARE, found


def _state(**choices: Any) -> State:
    common: dict[str, Any] = {
        "number": 0,
        "block": 1,
        "registered": "__init__",
        "path": "",
        "use": "note",
    }
    return State(**common | {"value": "self", "way": "copy_", "read": "plain"} | choices)


BUFFER = _state(kind="buffer", owner="block", at="block.before", read_at="block.after")
READ_ONLY = _state(kind="buffer", owner="lit", at="step.after", read_at="lit:on_before_backward")


def _program(*habits: Any, **model: Any) -> Program:
    return Program(0, Model(**model), habits)


class _Faulty(MemSaveCallback):
    """A callback that breaks one promise at the end of the second step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args, **kwargs)
        if trainer.global_step == 2:
            self.fail(pl_module)

    def fail(self, lit: Any) -> None:
        raise NotImplementedError


class _DropsAWrite(_Faulty):
    def fail(self, lit: Any) -> None:
        lit.net.blocks[1].s0.fill_(-0.5)


class _SpoilsAReading(_Faulty):
    def fail(self, lit: Any) -> None:
        name, value = lit.seen.pop()
        lit.seen.append((name, value + 1.0))


class _DrawsNumbers(_Faulty):
    def fail(self, lit: Any) -> None:
        torch.rand(1)


class _LeavesAHook(_Faulty):
    def fail(self, lit: Any) -> None:
        lit.net.register_forward_hook(lambda *_: None)


class _LeavesGradientsOff(_Faulty):
    def fail(self, lit: Any) -> None:
        torch.set_grad_enabled(False)


class _Raises(_Faulty):
    def fail(self, lit: Any) -> None:
        raise KeyError(0)


class _RefusesLate(_Faulty):
    def fail(self, lit: Any) -> None:
        raise IncompatibleError("it", [Problem("this", "of that", "Do the other.")])


class _Hangs(_Faulty):
    def fail(self, lit: Any) -> None:
        while True:
            pass


@pytest.mark.parametrize(
    ("callback", "habit", "kind"),
    [
        (_DropsAWrite, BUFFER, Kind.WRONG),
        (_SpoilsAReading, READ_ONLY, Kind.READINGS),
        (_DrawsNumbers, BUFFER, Kind.RANDOM),
        (_LeavesAHook, BUFFER, Kind.LEFTOVERS),
        (_Raises, BUFFER, Kind.CRASH),
        (_RefusesLate, BUFFER, Kind.LATE),
        (_Hangs, BUFFER, Kind.HANG),
    ],
)
def test_a_fault_of_each_kind_is_found(callback, habit, kind, monkeypatch):
    program = _program(habit)
    plain, _ = plain_outcome(program.source())
    assert plain is not None
    assert check(program, "all", plain).kind is Kind.EQUAL
    monkeypatch.setattr(fit, "MemSaveCallback", callback)
    monkeypatch.setattr(fit, "TIME_LIMIT_S", 1.0)
    assert check(program, "all", plain).kind is kind


def test_a_failing_program_shrinks_and_runs_as_a_script(monkeypatch, capsys):
    monkeypatch.setattr(fit, "MemSaveCallback", _DropsAWrite)
    other = _state(number=1, kind="attr", owner="net", at="net.before", read_at="net.after")
    program = _program(other, BUFFER, dropout=True, width=16, optimizer="adamw")
    source = program.source()
    plain, _ = plain_outcome(source)
    assert plain is not None
    found = verdict(plain, fit.run(source, "all+in_backward"), "all+in_backward")
    small = shrink(Fault(program, "all+in_backward", found))
    unread = dataclasses.replace(BUFFER, read_at="lit:on_train_end")
    assert (small.program.habits, small.program.model) == ((unread,), Model())
    assert small.setting == "all"
    monkeypatch.setattr("lightning_memsave.MemSaveCallback", _DropsAWrite)
    monkeypatch.setattr("sys.argv", ["program.py"])
    script = small.report()
    assert "python -m tests.fuzz --shrink 0 --settings all" in script
    with fit.quiet():
        exec(compile(script, "program", "exec"), {"__name__": "__main__"})
    assert "differs by" in capsys.readouterr().out


def test_the_command_counts_what_it_compared(capsys):
    main(["--seed", "3", "--count", "2", "--settings", "all"])
    text = capsys.readouterr().out
    assert "2 programs" in text
    assert "all: 2 on, 0 off, 0 refused" in text


def test_a_setting_that_is_seldom_on_fails_the_command(monkeypatch, capsys):
    monkeypatch.setattr(campaign, "LEAST_RUNS", 1)
    monkeypatch.setattr(fit.Outcome, "status", lambda *_: "refused")
    assert main(["--seed", "3", "--count", "1", "--settings", "all"]) == 1
    assert "all: on in 0% of its runs: it tests too little" in capsys.readouterr().out


def test_a_page_of_the_documentation_says_what_is_excluded():
    found = (*EXCLUSIONS, *ALLOWED_REFUSALS)
    assert len(found) <= MOST
    for each in found:
        text = " ".join((DOCS / each.page).read_text().replace("**", "").split())
        assert each.sentence in text, each.name


def _expected(known: ExpectedFailure) -> Any:
    reason = f"issue {known.issue}: {known.name}"
    mark = pytest.mark.xfail(reason=reason, raises=AssertionError, strict=not known.is_race)
    return pytest.param(known, id=re.sub(r"\W+", "-", known.name), marks=mark)


# When one of these passes, its class is no longer a known failure: delete it.
@pytest.mark.parametrize("known", [*map(_expected, EXPECTED_FAILURES)])
def test_known_failures_train_the_same(known: ExpectedFailure) -> None:
    program = _program(known.example, halfway=True)
    plain, why = plain_outcome(program.source())
    if plain is None or expected_to_fail(program, known.setting) != known.name:
        pytest.fail(f"the example tests nothing: {why}")
    found = verdict(plain, fit.run(program.source(), known.setting), known.setting)
    assert not found.kind.is_fault, found
