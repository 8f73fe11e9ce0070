"""Layers under bf16 autocast, on CUDA as far as it can be emulated."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import FastGELUActivation, NewGELUActivation

from lightning_memsave.prediction.cuda.kernels import cuda_kernels
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.techniques.low_precision_weights.technique import LowPrecisionWeights

LAYERS: dict[str, Any] = {
    "LayerNorm": lambda: nn.LayerNorm(64),
    "RMSNorm": lambda: nn.RMSNorm(64),
    "GroupNorm": lambda: nn.GroupNorm(4, 64),
    "NewGELU": NewGELUActivation,
    "FastGELU": FastGELUActivation,
}


class Net(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(64, 64), layer, nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(self.first(x))
        return hidden


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_are_what_the_layer_gives_in_float32_rounded(name):
    net = Net(LAYERS[name]())
    x = torch.randn(8, 64)
    with LowPrecisionWeights().apply(net), torch.autocast("cpu", torch.bfloat16):
        hidden = net.first(x)
        found = net.layer(hidden)
        assert found.dtype == torch.bfloat16
    truth = net.layer(hidden.float())
    # Half of the distance of two bfloat16 numbers, and one more rounding of the weights.
    assert (found.float() - truth).abs().max() <= 2**-7 * truth.abs().max()


@pytest.mark.parametrize("name", ["LayerNorm", "NewGELU"])
def test_cuda_keeps_them_in_bfloat16(name):
    dtypes = {}
    for technique in (None, LowPrecisionWeights()):
        with fake_tensors() as fakes:
            net = fakes.copy_module(Net(LAYERS[name]()))
            if technique is not None:
                technique.apply(net)
            with cuda_kernels(), torch.autocast("cpu", torch.bfloat16):
                dtypes[technique is not None] = net(torch.randn(8, 64)).dtype
    assert dtypes == {False: torch.float32, True: torch.bfloat16}


@pytest.mark.parametrize("name", LAYERS)
def test_outside_of_autocast_and_afterwards_nothing_changes(name):
    net = Net(LAYERS[name]())
    x = torch.randn(8, 64)
    before, attributes = net.layer(x), set(vars(net.layer))
    handle = LowPrecisionWeights().apply(net)
    assert torch.equal(net.layer(x), before)
    handle.undo()
    assert torch.equal(net.layer(x), before)
    assert set(vars(net.layer)) == attributes


def test_gradients_reach_the_float32_weights():
    net = Net(nn.LayerNorm(64))
    x = torch.randn(8, 64)
    with LowPrecisionWeights().apply(net), torch.autocast("cpu", torch.bfloat16):
        net(x).float().square().sum().backward()
    assert net.layer.weight.grad.dtype == torch.float32
    assert net.layer.weight.grad.abs().min() > 0
