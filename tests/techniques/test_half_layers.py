"""Layers under bf16 autocast, on CUDA as far as it can be emulated."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.activations import FastGELUActivation, NewGELUActivation

from lightning_memsave import LowPrecisionWeights, predict_memory
from lightning_memsave.prediction.cuda.kernels import cuda_kernels
from lightning_memsave.prediction.fake.tensors import fake_tensors

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


# "master" keeps float32 weights on the host only where they are offloaded.
@pytest.mark.parametrize(
    ("rounding", "weights"),
    [("stochastic", torch.float32), ("stochastic", torch.bfloat16), ("master", torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("name", ["LayerNorm", "NewGELU"])
def test_cuda_keeps_them_in_bfloat16(name, rounding, weights):
    dtypes = {}
    for technique in (None, LowPrecisionWeights(rounding)):
        with fake_tensors() as fakes:
            net = fakes.copy_module(Net(LAYERS[name]()).to(weights))
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


@pytest.mark.parametrize("name", LAYERS)
def test_of_weights_that_are_bfloat16_already(name):
    net = Net(LAYERS[name]()).bfloat16()
    before = vars(net.layer).copy()
    with LowPrecisionWeights().apply(net) as handle:
        assert handle.changes == ("outputs of 1 norms and activations in bfloat16",)
        assert "forward" in vars(net.layer)
    assert vars(net.layer) == before


def test_a_prediction_of_bfloat16_weights_is_that_of_the_model():
    # As the copy that a fit predicts with, which is made after the techniques were applied.
    config = GPT2Config(
        vocab_size=100, n_embd=64, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    model, tokens = GPT2LMHeadModel(config), torch.zeros(4, 128, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}

    def predicted_bytes() -> int:
        settings = {"precision": None, "low_precision_weights": "stochastic"}
        mixed = {"precision": "bf16-mixed"}
        prediction = predict_memory(
            model, batch, None, settings, gpu="A100-40GB", trainer_arguments=mixed
        )
        return prediction.peak.total_bytes

    expected_bytes = predicted_bytes()
    for param in model.parameters():
        if param.ndim > 1:
            param.data = param.data.bfloat16()
            param.grad_dtype = torch.bfloat16
    assert predicted_bytes() == expected_bytes


def test_gradients_reach_the_float32_weights():
    net = Net(nn.LayerNorm(64))
    x = torch.randn(8, 64)
    with LowPrecisionWeights().apply(net), torch.autocast("cpu", torch.bfloat16):
        net(x).float().square().sum().backward()
    assert net.layer.weight.grad.dtype == torch.float32
    assert net.layer.weight.grad.abs().min() > 0
