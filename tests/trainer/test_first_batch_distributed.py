"""A look at the first batch on two ranks: both look, rank zero gets it, and nobody waits for ever.

`ranks` runs every scenario on both.
"""

import random
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import distributed
from torch.utils.data import DataLoader, Sampler

from lightning_memsave.trainer.distributed import broadcast_from_rank_zero
from lightning_memsave.trainer.first_batch import before_strategy_setup, first_batch
from tests.callbacks.lit import Vectors, make_lit, make_trainer
from tests.callbacks.ranks import RANKS, Notes, rank_of_this_process
from tests.helpers import seed_all


class Communicating(Sampler[int]):
    """Agrees with the other rank on an order whenever it is iterated over."""

    def __init__(self) -> None:
        self.length = 24

    def __iter__(self) -> Iterator[int]:
        order = [torch.randperm(self.length).tolist()]
        distributed.broadcast_object_list(order, 0)
        return iter(order[0][rank_of_this_process() :: RANKS])

    def __len__(self) -> int:
        return self.length // RANKS


class Look(pl.Callback):
    """Looks, and lets rank zero decide."""

    def __init__(self, looks: bool) -> None:
        self.looks = looks
        self.notes: Notes = {"batches": [], "losses": [], "look": None, "decided": None}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.looks:
            self.undo = before_strategy_setup(trainer, lambda: self.look(trainer))

    def look(self, trainer: Any) -> None:
        batch = first_batch(trainer)
        self.notes["look"] = None if batch is None else batch[:, 0].tolist()
        decided = {"rank": trainer.global_rank, "settings": ("8bit", batch is not None)}
        self.notes["decided"] = broadcast_from_rank_zero(trainer, decided)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.notes["batches"].append(batch[:, 0].tolist())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.notes["losses"].append(outputs["loss"].item())

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.looks:
            self.undo()


def train(looks: bool, loader: Any, draws_on: int | None = None, **settings: Any) -> Notes:
    calls: list[int] = []

    def train_dataloader(self: Any) -> Any:
        calls.append(1)
        if draws_on is not None:
            distributed.barrier()  # would hang if only one rank called it again
        if draws_on == rank_of_this_process():
            random.random()
        return loader()

    def configure_optimizers(self: Any) -> Any:
        random.random()
        return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = Look(looks)
    hooks = {"train_dataloader": train_dataloader, "configure_optimizers": configure_optimizers}
    lit = make_lit(pl, **hooks)
    defaults = {"strategy": "ddp", "max_epochs": 2, "limit_val_batches": 0, "devices": RANKS}
    trainer = make_trainer(pl, callback, **(defaults | settings))
    seed_all(3)
    random.seed(3)
    trainer.fit(lit)
    weights = torch.cat([p.detach().flatten() for p in lit.parameters()]).sum().item()
    return callback.notes | {"calls": len(calls), "end": [weights, random.random()]}


def compare(loader: Any, draws_on: int | None = None, **settings: Any) -> Notes:
    plain, looked = (train(looks, loader, draws_on, **settings) for looks in (False, True))
    return {"plain": plain, "looked": looked}


def shuffled(**settings: Any) -> Any:
    return lambda: DataLoader(Vectors(), batch_size=4, shuffle=True, **settings)


def decide_before_setup(strategy: Any) -> Notes:
    """Broadcast under a strategy that needs a GPU later."""
    seen: Notes = {}

    class Callback(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            before_strategy_setup(trainer, lambda: self.decide(trainer))

        def decide(self, trainer):
            seen["rank"] = broadcast_from_rank_zero(trainer, {"rank": trainer.global_rank})["rank"]
            seen["restores_later"] = trainer.strategy.restore_checkpoint_after_setup
            raise KeyError("far enough")

    trainer = make_trainer(pl, Callback(), strategy=strategy, devices=RANKS)
    with pytest.raises(KeyError, match="far enough"):
        trainer.fit(make_lit(pl))
    return seen


class OnCpu(FSDPStrategy):
    """Without a GPU Lightning refuses `FSDPStrategy` itself."""


SCENARIOS = {
    "sampler_of_lightning": lambda: compare(shuffled()),
    "workers": lambda: compare(shuffled(num_workers=2, persistent_workers=True)),
    "communicating": lambda: compare(
        lambda: DataLoader(Vectors(), batch_size=4, sampler=Communicating()),
        use_distributed_sampler=False,
    ),
    "drawing_on_one": lambda: compare(shuffled(), draws_on=1),
    "fsdp": lambda: decide_before_setup(OnCpu()),
    "fsdp2": lambda: decide_before_setup(
        ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["sampler_of_lightning", "workers", "communicating", "drawing_on_one"]
)
def test_both_ranks_train_as_without_it(report, name):
    calls = 2 if name == "drawing_on_one" else 1  # again on both, as one draws
    for rank, notes in enumerate(report(name)):
        plain, looked = notes["plain"], notes["looked"]
        assert len(plain["batches"]) == 6
        for key in ("batches", "losses", "end"):
            assert looked[key] == plain[key], key
        assert (plain["calls"], looked["calls"]) == (1, calls)
        assert looked["look"] == (plain["batches"][0] if rank == 0 else None)
        assert looked["decided"] == {"rank": 0, "settings": ["8bit", True]}
    first, second = report(name)
    assert first["plain"]["batches"] != second["plain"]["batches"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "fsdp2"])
def test_rank_zero_decides_before_other_strategies_are_set_up(report, name):
    assert report(name) == [{"rank": 0, "restores_later": True}] * RANKS
