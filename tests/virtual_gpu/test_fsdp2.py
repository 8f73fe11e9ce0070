"""FSDP2 on one and two GPUs. As a script, under torchrun, it trains on one of them."""

import functools
import gc
import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from lightning_memsave import FSDP2Strategy, predict_memory
from lightning_memsave.prediction.cuda.gpus import local_gpu
from tests.callbacks.lit import loader_of, make_trainer
from tests.trainer.test_fsdp2 import (
    ManyTokens,
    Tied,
    batches,
    from_meta,
    lit,
    llama,
    of_labels,
    off,
    without_validation,
)
from tests.virtual_gpu import counters
from tests.virtual_gpu.pair import (
    backend,
    on_gpus,
    rank,
    tell,
    train_on,
    train_on_two,
)

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


ON_HOST: dict[str, dict[str, Any]] = {
    "nothing": {},
    "8bit": {"optimizer": "8bit"},
    "optimizer_in_backward": {"optimizer_in_backward": True},
    "clipping": {},
    "meta": {},
}
"""What trains with shards on the host, too."""


def wide(name: str) -> Any:
    """Weights of 25 MB, most of them in blocks."""

    class Wide(Tied):
        def __init__(self) -> None:
            super().__init__(dropout=0.0)
            layer = functools.partial(nn.TransformerEncoderLayer, 64, 4, 6000, 0.0)
            self.blocks = nn.Sequential(*[layer(batch_first=True) for _ in range(8)])

    made = from_meta(llama) if name == "meta" else lit(make=Wide)
    if name == "meta":
        type(made).training_step = of_labels
    made.log = lambda *args, **kwargs: None
    return made


def train() -> None:
    found = {name: fit(module(), settings) for name, settings in SETTINGS.items()}
    on_host = CPUOffloadPolicy()
    # The host of a real GPU rounds updates otherwise.
    is_tried = counters.is_on and sys.argv[1:] == ["and on the host"]
    for name, settings in ON_HOST.items() if is_tried else ():
        how: dict[str, Any] = {"gradient_clip_val": 0.3} if name == "clipping" else {}
        found[f"{name} wide"] = fit(wide(name), settings, **how)
        found[f"{name} on host"] = fit(wide(name), settings, on_host, "half.ckpt", **how)
        resumed = fit(wide(name), settings, on_host, ckpt_path="half.ckpt", max_epochs=2, **how)
        found[f"{name} resumed"] = resumed
        found[f"{name} without"] = fit(
            wide(name), settings, ckpt_path="half.ckpt", max_epochs=2, **how
        )
    tell(found)


def fit(
    own: Any,
    settings: dict[str, Any],
    policy: CPUOffloadPolicy | None = None,
    path: str | None = None,
    ckpt_path: str | None = None,
    **how: Any,
) -> list[Any]:
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    trainer = make_trainer(
        pl,
        off(predict=False, **settings),
        **on_gpus(FSDP2Strategy(process_group_backend=backend(), offload_policy=policy)),
        use_distributed_sampler=False,
        limit_val_batches=0,
        **how,
    )
    kept: list[int] = []
    # After what threads of gloo may still hold of a step.
    own.on_train_end = lambda: kept.append(torch.cuda.memory_allocated())
    trainer.fit(own, loader_of(batches(rank())), ckpt_path=ckpt_path)
    if path is not None:
        trainer.save_checkpoint(path)
    return [own.losses, torch.cuda.max_memory_allocated(), *kept]


MODULE = "tests.virtual_gpu.test_fsdp2"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return train_on_two(MODULE, "and on the host")[0]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train_on(1, MODULE)[0]


@pytest.mark.real_gpu_too
@pytest.mark.parametrize("name", ["optimizer_in_backward", "offload"])
def test_techniques_change_nothing(found, name):
    assert found[name][0] == found["nothing"][0]


@pytest.mark.parametrize("name", ON_HOST)
def test_shards_on_the_host_train_bit_for_bit_and_leave_the_device(found, name):
    assert found[f"{name} resumed"][0] == found[f"{name} without"][0]
    if name != "meta":  # a small one, of which the host draws other values
        assert found[f"{name} on host"][0] == found[f"{name} wide"][0]
        shards = sum(p.nbytes for p in wide(name).parameters()) / 2
        # Weights, gradients and state.
        left = {"8bit": 2.5, "optimizer_in_backward": 3}.get(name, 4) * shards
        assert found[f"{name} wide"][2] - found[f"{name} on host"][2] > left
        assert found[f"{name} wide"][1] > found[f"{name} on host"][1]


@pytest.mark.real_gpu_too
@pytest.mark.parametrize("name", SETTINGS)
def test_a_process_needs_what_is_predicted(found, name):
    # At times a thread of gloo still holds what it has sent of a block when the next one is there.
    is_gloo = counters.is_on or torch.cuda.device_count() < 2
    block_bytes = sum(p.nbytes for p in Tied().blocks[0].parameters()) * is_gloo
    measured_bytes, predicted_bytes = found[name][1], predict(name, 2)
    assert 0.99 * measured_bytes - block_bytes <= predicted_bytes <= 1.01 * measured_bytes


@pytest.mark.real_gpu_too
@pytest.mark.parametrize("name", SETTINGS)
def test_one_process_alone(alone, name):
    """Over NCCL where the GPU is a real one."""
    assert predict(name, 1) == pytest.approx(alone[name][1], rel=0.01)
    if name in {"optimizer_in_backward", "offload"}:
        assert alone[name][0] == alone["nothing"][0]


def predict(name: str, world_size: int) -> int:
    """Bytes that a process needs."""
    return predict_memory(
        module(),
        batches(0)[0],
        settings={"preset": "off", **SETTINGS[name]},
        gpu=local_gpu(torch.device("cuda", 0)),
        strategy="fsdp2",
        world_size=world_size,
    ).peak_bytes


if __name__ == "__main__":
    train()
