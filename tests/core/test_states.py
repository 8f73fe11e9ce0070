"""Transitions of states are those of their tables."""

from enum import Enum, auto

import pytest
import torch
from torch import nn

from lightning_memsave.core.states import next_state
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.micro_batching import runner
from lightning_memsave.techniques.offloading import gradients, part
from lightning_memsave.techniques.offloading.copies import copies_for
from lightning_memsave.techniques.offloading.host_worker import HostWorker
from lightning_memsave.techniques.offloading.part import Part

TABLES = (part._MOVES, part._FINDINGS, gradients._COMING, runner._SPLITTING)


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


def test_a_part_is_sent_before_it_enters_and_enters_before_it_leaves():
    memory = HostMemory()
    param = nn.Parameter(torch.ones(3))
    own = Part([param], memory, is_streamed=True)
    copies = copies_for(param, HostWorker(in_background=False), memory)
    seen = [own._place.name]

    def note(step):
        step()
        seen.append(own._place.name)

    note(lambda: own.send(copies, param.device))
    note(lambda: own.enter(copies, param.device))
    note(own.take_back)
    note(own.leave)
    assert seen == ["HOST", "SENT", "DEVICE", "TAKEN_BACK", "HOST"]
    with pytest.raises(AssertionError, match="Place goes from HOST to DEVICE"):
        own._move(part.Place.DEVICE)
    own.enter(copies, param.device)
    with pytest.raises(AssertionError, match="Place goes from DEVICE to SENT"):
        own.send(copies, param.device)
    with pytest.raises(AssertionError, match="Place goes from DEVICE to HOST"):
        own.set_device_dtype(param, torch.bfloat16)


def test_a_proof_is_not_asked_for_where_batches_stay_whole():
    own = runner.MicroBatchRunner("auto", "auto", None)
    own.keep_whole()
    with pytest.raises(AssertionError, match="Splitting goes from WHOLE to UNPROVEN"):
        own.require_proof()
