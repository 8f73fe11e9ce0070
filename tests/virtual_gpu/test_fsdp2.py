"""FSDP2 on two virtual GPUs, over gloo. As a script, under torchrun, it trains on one of them."""

import functools
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_memsave import FSDP2Strategy, predict_memory
from lightning_memsave.prediction.cuda.gpus import local_gpu
from tests.callbacks.lit import loader_of, make_trainer
from tests.trainer.test_fsdp2 import ManyTokens, Tied, batches, off, without_validation

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "8bit": {"optimizer": "8bit"},
    "optimizer_in_backward": {"optimizer_in_backward": True},
    "offload": {"activation_checkpointing": "all", "offload": "activations"},
}


def module() -> Any:
    # Weights and logits that are large beside what gloo holds of a block.
    return without_validation(functools.partial(ManyTokens, dropout=0.0), num_words=8000)


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
            strategy=FSDP2Strategy(process_group_backend="gloo"),
            use_distributed_sampler=False,
            limit_val_batches=0,
        )
        trainer.fit(own, loader_of(batches(int(os.environ["RANK"]))))
        found[name] = [own.losses, torch.cuda.max_memory_allocated()]
        del own, trainer
    if os.environ["RANK"] == "0":
        print(json.dumps(found))  # noqa: T201


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node=2", "-m", "tests.virtual_gpu.test_fsdp2"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"VGPU_DEVICES": "2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"nothing"')]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


@pytest.mark.parametrize("name", ["optimizer_in_backward", "offload"])
def test_techniques_change_nothing(found, name):
    assert found[name][0] == found["nothing"][0]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_process_needs_what_is_predicted(found, name):
    settings = {"preset": "off", **SETTINGS[name]}
    predicted = predict_memory(
        module(),
        batches(0)[0],
        settings=settings,
        gpu=local_gpu(torch.device("cuda", 0)),
        strategy="fsdp2",
        world_size=2,
    )
    # At times a thread of gloo still holds what it has sent of a block when the next one is there.
    block_bytes = sum(p.nbytes for p in Tied().blocks[0].parameters())
    measured_bytes = found[name][1]
    assert 0.99 * measured_bytes - block_bytes <= predicted.peak_bytes <= 1.01 * measured_bytes


if __name__ == "__main__":
    train()
