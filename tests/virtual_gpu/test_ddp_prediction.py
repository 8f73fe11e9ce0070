"""DDP on two virtual GPUs, over gloo, needs what is predicted. As a script it trains on one."""

import gc
import json
import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_memsave import predict_memory
from lightning_memsave.prediction.cuda.gpus import local_gpu
from tests.callbacks.lit import loader_of, make_trainer
from tests.trainer.test_fsdp2 import batches, off
from tests.virtual_gpu.pair import train_on_two
from tests.virtual_gpu.test_fsdp2 import module

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "8bit": {"optimizer": "8bit"},
    "accumulate_grad_batches": {"accumulate_grad_batches": 2},
}


def train() -> None:
    found = {}
    for name, settings in SETTINGS.items():
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        own = module()
        trainer = make_trainer(
            pl,
            off(predict=False, **settings),
            accelerator="gpu",
            devices=2,
            strategy=DDPStrategy(process_group_backend="gloo"),
            use_distributed_sampler=False,
            limit_val_batches=0,
        )
        trainer.fit(own, loader_of(batches(int(os.environ["RANK"]))))
        found[name] = torch.cuda.max_memory_allocated()
        del own, trainer
    if os.environ["RANK"] == "0":
        print(json.dumps(found))  # noqa: T201


@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    return train_on_two("tests.virtual_gpu.test_ddp_prediction")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_process_needs_what_is_predicted(measured, name):
    predicted = predict_memory(
        module(),
        batches(0)[0],
        settings={"preset": "off", **SETTINGS[name]},
        gpu=local_gpu(torch.device("cuda", 0)),
        strategy="ddp",
        world_size=2,
    )
    assert predicted.allocated_bytes == pytest.approx(measured[name], rel=0.01)


if __name__ == "__main__":
    train()
