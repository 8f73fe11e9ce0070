"""A budget on two ranks: rank zero plans, and both do the same. `ranks` runs every scenario."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_memsave import MemSaveCallback
from lightning_memsave.callbacks.settings.budget import BudgetSetting
from lightning_memsave.errors import InfeasiblePlanError
from tests.callbacks.lit import Trace, Vectors, make_lit, make_trainer, peak_of
from tests.callbacks.ranks import RANKS, Notes, rank_of_this_process
from tests.callbacks.test_budget import FAILURES, Encoder


class FailsOnOneRank(pl.Callback):
    """Lets rank one alone run out of memory, twice for one batch."""

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1 and rank_of_this_process() == 1:
            FAILURES["left"] = 2


def train(*callbacks: Any, **arguments: Any) -> Notes:
    torch.manual_seed(1)
    lit, trace = make_lit(model=Encoder()), Trace(pl)
    callback = MemSaveCallback(exactness="bitwise", **arguments)
    strategy = {"devices": RANKS, "strategy": "ddp", "max_steps": 6}
    trainer = make_trainer(pl, callback, trace.callback, *callbacks, **strategy)
    torch.manual_seed(3)
    try:
        trainer.fit(lit, DataLoader(Vectors(48), batch_size=4))
    except InfeasiblePlanError as error:
        return {"error": str(error)}
    state: Notes = {"plan": {"settings": None}}
    if callback.plan is not None:
        state = callback._settings.find(BudgetSetting).state()
    return {
        "losses": trace.losses,
        "weights": [p.sum().item() for p in lit.parameters()],
        "plan": None if callback.plan is None else callback.plan.plan.to_dict(),
        "in_force": state["plan"]["settings"],
        "measured": peak_of(callback),
    }


BUDGET = 6 * 2**20

SCENARIOS = {
    "plain": lambda: train(preset="off"),
    "planned": lambda: train(budget=BUDGET),
    "failing": lambda: train(FailsOnOneRank(), budget=BUDGET),
    "infeasible": lambda: train(budget="1MiB"),
}


@pytest.mark.slow
def test_both_ranks_have_the_plan_of_rank_zero(report):
    first, second = report("planned")
    assert first["plan"] == second["plan"]
    assert first["plan"]["settings"]["activation_checkpointing"] is not None
    assert first["plan"]["settings"]["optimizer_in_backward"] is None  # DDP refuses it
    for planned, plain in zip((first, second), report("plain"), strict=True):
        assert planned["losses"] == plain["losses"]
        assert planned["weights"] == plain["weights"]
        assert planned["measured"] <= BUDGET < plain["measured"]


@pytest.mark.slow
def test_both_change_their_plan_where_one_runs_out_of_memory(report):
    first, second = report("failing")
    assert first["in_force"] == second["in_force"] != first["plan"]["settings"]
    for failing, plain in zip((first, second), report("plain"), strict=True):
        assert failing["losses"] == plain["losses"]
        assert failing["weights"] == plain["weights"]


@pytest.mark.slow
def test_all_ranks_end_where_nothing_fits(report):
    first, second = report("infeasible")
    assert first["error"] == second["error"]
    assert "No settings fit" in first["error"]
