"""`SyncBatchNorm` under DDP on two virtual GPUs. As a script it trains on one of them."""

import gc
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_memsave import predict_memory
from lightning_memsave.prediction.cuda.gpus import local_gpu
from tests.callbacks.lit import loader_of, make_trainer
from tests.trainer.test_fsdp2 import off
from tests.virtual_gpu.pair import backend, on_gpus, rank, tell, train_on_two

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.real_gpu_too]

CHANNELS = 8
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "activation_checkpointing": {"activation_checkpointing": "all"},
    "micro_batch_size": {"micro_batch_size": 2},
}


class Block(nn.Sequential):
    def __init__(self) -> None:
        layers = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU()
        super().__init__(*layers)


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = (self.blocks(batch) - 1).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches(number: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(number)
    return [torch.randn(4, CHANNELS, 32, 32, generator=made) + number for _ in range(4)]


def fit(module: Lit, batches: list[Tensor], callback: Any, **how: Any) -> Any:
    trainer = make_trainer(pl, callback, use_distributed_sampler=False, **how)
    trainer.fit(module, loader_of(batches))
    return {
        "losses": module.losses,
        "state": {name: t.flatten().tolist() for name, t in module.state_dict().items()},
    }


def train() -> None:
    found = {}
    for name, settings in SETTINGS.items():
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        callback = off(predict=60.0, **settings)
        how = on_gpus(DDPStrategy(process_group_backend=backend()))
        found[name] = fit(Lit(), batches(rank()), callback, sync_batchnorm=True, **how)
        found[name]["bytes"] = torch.cuda.max_memory_allocated()
        said = callback.prediction
        found[name]["predicted"] = [callback._prediction.note, said and said.allocated_bytes]
    tell(found)


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return train_on_two("tests.virtual_gpu.test_sync_batch_norm")


@pytest.mark.parametrize(("name", "parts"), [("nothing", 1), ("micro_batch_size", 2)])
def test_it_computes_what_one_process_does_with_both_batches(found, name, parts):
    own = [[part for batch in batches(number) for part in batch.chunk(parts)] for number in (0, 1)]
    both = [torch.cat(pair) for pair in zip(*own, strict=True)]
    how: dict[str, Any] = {"accelerator": "gpu", "devices": 1, "accumulate_grad_batches": parts}
    whole = fit(Lit(), both, off(predict=False), **how)
    losses = [sum(pair) / 2 for pair in zip(*(own[name]["losses"] for own in found), strict=True)]
    assert losses == pytest.approx(whole["losses"], rel=1e-4)
    for key, values in whole["state"].items():
        for own in found:
            assert own[name]["state"][key] == pytest.approx(values, rel=1e-3, abs=1e-4)


def test_checkpointing_changes_nothing(found):
    for own in found:
        for part in ("losses", "state"):
            assert own["activation_checkpointing"][part] == own["nothing"][part]
        assert own["activation_checkpointing"]["bytes"] < own["nothing"]["bytes"]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_process_needs_what_is_predicted(found, name):
    predicted = predict_memory(
        Lit(),
        batches(0)[0],
        settings={"preset": "off", **SETTINGS[name]},
        gpu=local_gpu(torch.device("cuda", 0)),
        strategy="ddp",
        world_size=2,
    )
    assert found[0][name]["predicted"] == ["", predicted.allocated_bytes]
    for own in found:
        assert predicted.allocated_bytes == pytest.approx(own[name]["bytes"], rel=0.01)


if __name__ == "__main__":
    train()
