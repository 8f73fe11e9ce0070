"""Updates in backward on two processes, beside DistributedDataParallel.

Run as a script, under torchrun, this file trains every scenario on its rank; see `ranks`.
"""

import sys
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_memsave.errors import IncompatibleError
from lightning_memsave.techniques.optimizer_in_backward import OptimizerInBackward
from tests.callbacks.ranks import Notes, Report, make_report, write_notes
from tests.cases import make_batch, make_model
from tests.techniques.in_backward import adamw, apply, assert_same, assert_same_state


def batch(step: int) -> torch.Tensor:
    """Other data on each rank."""
    return make_batch(100 * dist.get_rank() + step)


def compare(name: str, **settings: Any) -> Notes:
    """Train with and without the technique; the reference is torch's own way."""
    optimizers = []
    ours, theirs = make_model(name).eval(), make_model(name).eval()
    wrapped = DistributedDataParallel(theirs)
    for net in (ours, wrapped):
        optimizer = adamw(net.parameters())
        optimizers.append(optimizer)
        group = dist.group.WORLD
        handle = apply(optimizer, process_group=group, **settings) if net is ours else None
        for step in range(3):
            with wrapped.no_sync() if handle is None else handle.accumulating():
                net(batch(10 + step)).backward()
            net(batch(step)).backward()
            if handle is None and settings:
                nn.utils.clip_grad_norm_(net.parameters(), settings["clip_norm"])
            optimizer.step()
            optimizer.zero_grad()
    assert_same(ours, theirs)
    assert_same_state(*optimizers)
    return {"sum": sum(float(p.double().sum()) for p in ours.parameters())}


def refused() -> Notes:
    optimizer = adamw(make_model("dropout").parameters())
    return {"problems": [str(p) for p in OptimizerInBackward().check(optimizer)]}


def wrapped_all_the_same() -> Notes:
    model = DistributedDataParallel(make_model("dropout").eval())
    optimizer = adamw(model.parameters())
    apply(optimizer, process_group=dist.group.WORLD)
    model(batch(0)).backward()
    try:
        optimizer.step()
    except IncompatibleError as error:
        return {"error": str(error)}
    return {"error": ""}


SCENARIOS = {
    "dropout": lambda: compare("dropout"),
    "tied": lambda: compare("tied"),
    "clip_norm": lambda: compare("dropout", clip_norm=1e-3),
    "refused": refused,
    "wrapped_all_the_same": wrapped_all_the_same,
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return make_report(tmp_path_factory, __file__, 120)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout", "tied", "clip_norm"])
def test_trains_as_under_ddp(report, name):
    ranks = report(name)  # each has compared already
    assert ranks[0] == ranks[1]


@pytest.mark.slow
def test_processes_without_a_group_are_refused(report):
    for notes in report("refused"):
        assert len(notes["problems"]) == 1
        assert "pass `process_group=torch.distributed.group.WORLD`" in notes["problems"][0]


@pytest.mark.slow
def test_ddp_beside_it_is_an_error(report):
    for notes in report("wrapped_all_the_same"):
        assert "in place of DistributedDataParallel" in notes["error"]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    write_notes(SCENARIOS, sys.argv[1:])
    dist.destroy_process_group()
