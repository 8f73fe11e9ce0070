"""DDP on one and two GPUs needs what is predicted. As a script it trains on one of them."""

import gc
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_memsave import predict_memory
from lightning_memsave.prediction.cuda.gpus import local_gpu
from tests.callbacks.lit import loader_of, make_trainer
from tests.trainer.test_fsdp2 import batches, off
from tests.virtual_gpu.pair import backend, on_gpus, rank, tell, train_on
from tests.virtual_gpu.test_fsdp2 import module

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.real_gpu_too]

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
            **on_gpus(DDPStrategy(process_group_backend=backend())),
            use_distributed_sampler=False,
            limit_val_batches=0,
        )
        trainer.fit(own, loader_of(batches(rank())))
        found[name] = torch.cuda.max_memory_allocated()
        del own, trainer
    tell(found)


@pytest.fixture(scope="module", params=[1, 2])
def measured(request: pytest.FixtureRequest) -> list[dict[str, int]]:
    return train_on(request.param, "tests.virtual_gpu.test_ddp_prediction")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_process_needs_what_is_predicted(measured, name):
    predicted = predict_memory(
        module(),
        batches(0)[0],
        settings={"preset": "off", **SETTINGS[name]},
        gpu=local_gpu(torch.device("cuda", 0)),
        strategy="ddp",
        world_size=len(measured),
    )
    for own in measured:
        assert predicted.allocated_bytes == pytest.approx(own[name], rel=0.01)


if __name__ == "__main__":
    train()
