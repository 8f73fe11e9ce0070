"""FSDP1 on two virtual GPUs, over gloo: it refuses a CPU. As a script it trains on one of them."""

import functools
import gc
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from lightning_memsave import GPUMemoryMonitor
from tests.callbacks.lit import loader_of, make_trainer
from tests.callbacks.test_ddp import Language
from tests.trainer.test_fsdp2 import Tied, batches, lit, off
from tests.virtual_gpu.pair import backend, on_gpus, rank, tell, train_on_two

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.real_gpu_too]

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "activation_checkpointing": ({"activation_checkpointing": "all"}, {}),
    "micro_batch_size": ({"micro_batch_size": 1}, {}),
    "plain accumulate_grad_batches": ({}, {"accumulate_grad_batches": 2}),
    "accumulate_grad_batches": ({"accumulate_grad_batches": 2}, {}),
    "plain precision": ({}, {"precision": "bf16-mixed"}),
    "precision": ({"precision": "bf16-mixed"}, {}),
    "plain sdpa": ({}, {}),
    "plain eager": ({}, {}),
    "attention": ({"attention": "sdpa"}, {}),
}
"""Settings of the callback, and of the Trainer."""

MODELS = {
    "plain sdpa": functools.partial(Language, "sdpa"),
    "plain eager": functools.partial(Language, "eager"),
    "attention": functools.partial(Language, "eager"),
}


def train() -> None:
    found = {}
    wrap: set[type[nn.Module]] = {nn.TransformerEncoderLayer, GPT2Block}
    for name, (settings, of_trainer) in WAYS.items():
        gc.collect()
        own = lit(make=MODELS.get(name, functools.partial(Tied, dropout=0.0)))
        own.log = lambda *args, **kwargs: None
        monitor = GPUMemoryMonitor(print_summary=False)
        trainer = make_trainer(
            pl,
            off(predict=False, **settings),
            monitor,
            **on_gpus(FSDPStrategy(process_group_backend=backend(), auto_wrap_policy=wrap)),
            use_distributed_sampler=False,
            limit_val_batches=0,
            **of_trainer,
        )
        trainer.fit(own, loader_of(batches(rank())))
        assert monitor.summary is not None
        found[name] = [own.losses, monitor.summary.peak_bytes]
        del own, trainer
    tell(found)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return train_on_two("tests.virtual_gpu.test_fsdp1")[0]


def test_checkpointing_is_bitwise(found):
    assert found["activation_checkpointing"][0] == found["plain"][0]


@pytest.mark.parametrize("name", ["accumulate_grad_batches", "precision"])
def test_settings_are_those_of_the_trainer(found, name):
    assert found[name][0] == found[f"plain {name}"][0] != found["plain"][0]


def test_attention_is_as_hugging_face_sets_it(found):
    assert found["attention"][0] == found["plain sdpa"][0] != found["plain eager"][0]


def test_micro_batches_train_as_whole_ones(found):
    parts = found["micro_batch_size"][0]
    means = [(a + b) / 2 for a, b in zip(parts[::2], parts[1::2], strict=True)]
    assert means == pytest.approx(found["plain"][0], rel=1e-5)


def test_the_monitor_reads_the_device(found):
    assert all(peak_bytes > 0 for _, peak_bytes in found.values())


if __name__ == "__main__":
    train()
