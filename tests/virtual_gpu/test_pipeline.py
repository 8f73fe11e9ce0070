"""Stages on two GPUs, against one. As a script, under torchrun, it trains on one of them."""

import functools
from typing import Any

import pytest
import torch

from lightning_memsave import PipelineStrategy
from tests.callbacks.lit import callback_with
from tests.modules.test_pipeline import STAGES, Tied, close, lit, off, sgd, train
from tests.virtual_gpu import counters
from tests.virtual_gpu.pair import backend, on_gpus, tell, train_on, train_on_two

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

RUNS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "checkpointing": {"callback": {"activation_checkpointing": "all"}},
    "8bit": {"callback": {"optimizer": "8bit"}},
    "bf16-mixed": {"precision": "bf16-mixed"},
}


def run(schedule: str = "1f1b", callback: Any = None, precision: str = "32-true") -> dict[str, Any]:
    kept: list[int] = []
    end = callback_with(on_train_end=lambda *_: kept.append(torch.cuda.memory_allocated()))
    given: dict[str, Any] = {"accelerator": "gpu", "devices": 1}
    if STAGES > 1:
        given = on_gpus(PipelineStrategy(schedule=schedule, process_group_backend=backend()))
    callbacks = [end] if callback is None else [off(predict=False, **callback), end]
    methods = {} if callback and "optimizer" in callback else {"configure_optimizers": sgd}
    module = lit(functools.partial(Tied, number=8), **methods).float()
    notes, _ = train(module, *callbacks, gradient_clip_val=0.5, precision=precision, **given)
    return notes | {"kept": kept[0], "all": sum(p.nbytes for p in module.parameters())}


@pytest.fixture(scope="module", autouse=True)
def two_gpus() -> None:
    if torch.cuda.device_count() < 2 and not counters.is_on:
        pytest.skip("stages on one real GPU would need gloo, which sends no tensors of a GPU")


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train_on(1, __name__)[0]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return train_on_two(__name__)


@pytest.mark.real_gpu_too
@pytest.mark.parametrize("name", RUNS)
def test_two_gpus_train_as_one(found, alone, name):
    rtol = {"8bit": 1e-4, "bf16-mixed": 1e-2}.get(name, 1e-5)
    for notes in found:
        close(notes[name]["losses"], alone[name]["losses"], rtol)
        if rtol == 1e-5:
            close(notes[name]["weights"], alone[name]["weights"], rtol)


def test_a_gpu_holds_half_of_the_blocks(found, alone):
    # Gradients are freed by then, and momentum is kept beside the weights.
    for notes in found:
        left = alone["1f1b"]["kept"] - notes["1f1b"]["kept"]
        block_bytes = sum(p.nbytes for p in Tied(number=8).blocks[:4].parameters())
        assert left >= 2 * block_bytes


if __name__ == "__main__":
    tell({name: run(**settings) for name, settings in RUNS.items()})
