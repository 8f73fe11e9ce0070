"""Choose a model and habits from a seed."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from tests.fuzz.habit import Habit, State, pick
from tests.fuzz.habits import Average, Extra, Flag, Gradients, Memory, Save
from tests.fuzz.script import Model, Script
from tests.fuzz.statistics import Observer, Renormalization

_HABITS: Mapping[type[Habit], int] = {
    State: 45,
    Average: 14,
    Gradients: 12,
    Extra: 13,
    Memory: 9,
    Flag: 6,
    Save: 2,
    Observer: 8,
    Renormalization: 6,
}
_CHANCES = {
    "dropout": 0.25,
    "tied": 0.2,
    "twice": 0.15,
    "clip": 0.15,
    "scheduler": 0.2,
    "manual": 0.05,
    "halfway": 0.4,
}


@dataclass(frozen=True)
class Program:
    """A small training program: its model and its habits."""

    seed: int
    model: Model
    habits: tuple[Habit, ...]

    def source(self, settings: str = "preset='bitwise'") -> str:
        """Return the program as a script, which runs itself plain and with these settings."""
        script = Script(self.model)
        for habit in self.habits:
            habit.add_to(script)
        return script.text(f"seed {self.seed}: {self}", self.seed, settings)

    def __str__(self) -> str:
        return f"{' & '.join(map(str, self.habits))} [{self.model}]"


def generate(seed: int) -> Program:
    random = Random(seed)
    blocks, width = random.choice((3, 4)), random.choice((8, 12, 16))
    flags = {name: random.random() < chance for name, chance in _CHANCES.items()}
    model = Model(
        blocks,
        width,
        **flags,
        norm=pick(random, {"layer": 6, "batch": 2, "group": 1}),
        accumulate=pick(random, {1: 5, 2: 1}),
        optimizer=pick(random, {"adamw": 3, "sgd": 3, "adam": 1}),
    )
    count = pick(random, {1: 5, 2: 3, 3: 1})
    return Program(seed, model, tuple(_habit(random, model, number) for number in range(count)))


def _habit(random: Random, model: Model, number: int) -> Habit:
    kind, block = pick(random, _HABITS), random.randrange(model.blocks)
    registered = pick(random, {"__init__": 4, "on_fit_start": 2, "configure_optimizers": 2})
    return kind.by_chance(random, number=number, block=block, registered=registered)
