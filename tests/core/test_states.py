"""Transitions of states are those of their tables."""

from enum import Enum, auto

import pytest

from lightning_memsave.core.states import next_state
from lightning_memsave.techniques.micro_batching import runner
from lightning_memsave.techniques.offloading import gradients, part_states

TABLES = (part_states.MOVES, part_states.FINDINGS, gradients._COMING, runner._SPLITTING)


class Light(Enum):
    RED = auto()
    GREEN = auto()


def test_what_the_table_lacks_is_an_error_with_both_names():
    table = {Light.RED: (Light.GREEN,), Light.GREEN: ()}
    assert next_state(Light.RED, Light.GREEN, table) is Light.GREEN
    with pytest.raises(AssertionError, match="internal error: Light goes from GREEN to RED"):
        next_state(Light.GREEN, Light.RED, table)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: type(next(iter(table))).__name__)
def test_tables_know_every_state_and_each_can_be_reached(table):
    states = set(type(next(iter(table))).__members__.values())
    assert set(table) == states
    first = next(iter(table))  # in which it begins
    reached, open_states = {first}, [first]
    while open_states:
        following = set(table[open_states.pop()]) - reached
        reached |= following
        open_states += following
    assert reached == states
