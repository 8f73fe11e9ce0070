"""The prediction of a run on two ranks: rank zero alone makes it, and nobody waits for ever.

`ranks` runs every scenario on both.
"""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, distributed
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_memsave import MemSaveCallback
from lightning_memsave.callbacks.run_prediction import step_of
from tests.callbacks.lit import Trace, Vectors, make_lit, make_trainer, summary_of
from tests.callbacks.ranks import RANKS, Notes
from tests.cases import Model


def train(*, predict: float | bool, through_ddp: bool = False, **settings: Any) -> Notes:
    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch)
        # Each of these meets the other rank.
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log("loss", loss, sync_dist=True)
        self.gathered.append(self.all_gather(loss.detach()).sum().item())
        if distributed.is_initialized():
            distributed.all_reduce(loss.detach().clone())
        return loss

    torch.manual_seed(1)
    lit = make_lit(model=Model(), training_step=training_step)
    lit.mean, lit.gathered = MeanMetric(dist_sync_on_step=True), []
    trace = Trace(pl)
    arguments: Any = {"optimizer": None} | ({"micro_batch_size": None} if through_ddp else {})
    callback = MemSaveCallback(predict=predict, **arguments)
    strategy = {"devices": RANKS, "strategy": "ddp"}
    trainer = make_trainer(pl, callback, trace.callback, **(strategy | settings))
    torch.manual_seed(3)
    trainer.fit(lit, DataLoader(Vectors(40), batch_size=4))
    summary, prediction = summary_of(callback), callback.prediction
    step = step_of(trainer, lit, torch.zeros(1), MemSaveCallback, {})
    assert step.fit is not None
    return {
        "processes": step.fit.num_processes,
        "losses": trace.losses,
        "gathered": lit.gathered,
        "predicted": None if prediction is None else prediction.peak.by_category(),
        "measured": dict(summary.by_category),
        "note": callback._prediction.note,
    }


SCENARIOS = {
    "predicted": lambda: train(predict=60.0),
    "plain": lambda: train(predict=False),
    "accumulated": lambda: train(predict=60.0, through_ddp=True, accumulate_grad_batches=2),
    "through_ddp": lambda: train(predict=60.0, through_ddp=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["predicted", "accumulated", "through_ddp"])
def test_rank_zero_predicts_what_is_measured(report, name):
    first, second = report(name)
    assert second["predicted"] is None
    assert (first["note"], second["note"]) == ("", "")
    assert first["processes"] == RANKS
    predicted_bytes = sum(first["predicted"].values())
    assert predicted_bytes == pytest.approx(sum(first["measured"].values()), rel=0.01)


@pytest.mark.slow
def test_both_ranks_train_as_without_it(report):
    for predicted, plain in zip(report("predicted"), report("plain"), strict=True):
        assert predicted["losses"] == plain["losses"]
        assert predicted["gathered"] == plain["gathered"]
