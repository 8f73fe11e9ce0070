import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.prediction.fake.tensors import fake_tensors


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(3))
        self.head.bias.requires_grad_(False)


class TestCopyOfAModule:
    def test_has_no_data_and_is_else_the_same(self):
        model = Tied().to(torch.bfloat16)
        with fake_tensors() as fakes:
            twin = fakes.copy_module(model)
            state = twin.state_dict(keep_vars=True)
            assert all(isinstance(tensor, FakeTensor) for tensor in state.values())
            for name, tensor in model.state_dict(keep_vars=True).items():
                mine = state[name]
                assert (mine.shape, mine.dtype) == (tensor.shape, tensor.dtype)
                assert mine.requires_grad == tensor.requires_grad
                assert isinstance(mine, nn.Parameter) == isinstance(tensor, nn.Parameter)
                assert str(mine.device) == "cpu"
            assert twin.head.weight is twin.embedding.weight
            assert twin.head is not model.head

    def test_leaves_the_module_as_it_was(self):
        model = Tied()
        before = {n: (t, t.clone()) for n, t in model.state_dict(keep_vars=True).items()}
        with fake_tensors() as fakes:
            twin = fakes.copy_module(model)
            twin.head(torch.randn(2, 4)).sum().backward()
            torch.optim.SGD(twin.parameters(), lr=1.0).step()
        for name, tensor in model.state_dict(keep_vars=True).items():
            assert tensor is before[name][0]
            assert torch.equal(tensor, before[name][1])
        assert model.head.weight.grad is None

    def test_has_none_in_place_of_what_it_shall_not_have(self):
        model: Any = nn.Linear(2, 2)
        model.owner = owner = {"lock": threading.Lock()}
        with fake_tensors() as fakes:
            assert fakes.copy_module(model, without=[owner]).owner is None
        assert model.owner is owner

    def test_can_be_copied_again_and_trains(self):
        with fake_tensors() as fakes:
            twin = fakes.copy_module(fakes.copy_module(Tied()))
            assert twin.head.weight is twin.embedding.weight
            optimizer = torch.optim.AdamW(p for p in twin.parameters() if p.requires_grad)
            twin.head(twin.embedding(twin.positions)).sum().backward()
            optimizer.step()
            assert twin.head.weight.grad.shape == (10, 4)
            assert optimizer.state[twin.head.weight]["exp_avg"].shape == (10, 4)

    def test_lazy_parameters(self):
        model = nn.Sequential(nn.LazyLinear(3))
        with (
            fake_tensors() as fakes,
            pytest.raises(ConfigurationError, match="Run one batch through the module first"),
        ):
            fakes.copy_module(model)

    def test_what_cannot_be_copied(self):
        class Refuses(nn.Linear):
            def __getstate__(self):
                raise TypeError("no state")

        with (
            fake_tensors() as fakes,
            pytest.raises(
                ConfigurationError, match=r"`Refuses` cannot be copied \(TypeError: no state\)"
            ),
        ):
            fakes.copy_module(Refuses(2, 2))

    def test_parametrized_modules(self):
        model = parametrizations.spectral_norm(nn.Linear(4, 4))
        with fake_tensors() as fakes:
            twin = fakes.copy_module(model)
            twin(torch.randn(2, 4)).sum().backward()
            assert twin.parametrizations.weight.original.grad is not None

    def test_states_of_metrics_and_plain_attributes_come_along(self):
        model: Any = nn.Linear(2, 2)
        model.history = {"scale": [torch.ones(3)]}
        with fake_tensors() as fakes:
            twin = fakes.copy_module(model)
            assert isinstance(twin.history["scale"][0], FakeTensor)
        assert type(model.history["scale"][0]) is torch.Tensor


class TestConversion:
    def test_keeps_ties_and_kinds(self):
        with fake_tensors() as fakes:
            twin = fakes.copy_module(Tied()).to(torch.bfloat16)
            assert twin.head.weight is twin.embedding.weight
            assert twin.head.weight.dtype == torch.bfloat16
            assert twin.positions.dtype == torch.int64
            assert isinstance(twin.head.weight, nn.Parameter)
            assert not twin.head.bias.requires_grad

    def test_of_nothing_keeps_the_tensors(self):
        with fake_tensors() as fakes:
            twin = fakes.copy_module(Tied())
            weight = twin.head.weight
            assert twin.float().to("cpu").head.weight is weight

    def test_of_real_modules_meanwhile(self):
        model = nn.Linear(2, 2)
        weight = model.weight
        with fake_tensors():
            pass
        assert model.double().weight is weight
        assert weight.dtype == torch.float64


def test_batches_keep_their_form():
    batch = {"x": [torch.ones(2, 3), ("text", torch.tensor([1, 2]))], "n": 3}
    with fake_tensors() as fakes:
        twin = fakes.copy_batch(batch)
        assert twin["x"][0].shape == (2, 3)
        assert isinstance(twin["x"][0], FakeTensor)
        assert twin["x"][1][0] == "text"
        assert twin["x"][1][1].tolist() == [1, 2]
        assert twin["n"] == 3
        assert fakes.copy_batch(twin)["x"][0] is twin["x"][0]
    assert type(batch["x"][0]) is torch.Tensor


@pytest.mark.gpu
def test_integers_of_a_batch_on_the_gpu_stay_known():
    batch = {"ids": torch.tensor([[3, 0]], device="cuda"), "x": torch.ones(2, device="cuda")}
    with fake_tensors() as fakes:
        twin = fakes.copy_batch(batch)
        assert twin["ids"].tolist() == [[3, 0]]
        assert {str(tensor.device) for tensor in twin.values()} == {"cpu"}
        assert fakes.guesses == ()


def test_random_numbers_are_as_before():
    def draw() -> list[float]:
        return [torch.rand(1).item(), random.random(), float(np.random.rand())]

    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    expected = draw()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    with fake_tensors():
        torch.nn.functional.dropout(torch.ones(100))
        random.random()
        np.random.rand()
    assert draw() == expected


def test_nothing_stays_patched_after_an_error():
    before = (nn.Module._apply, torch.Tensor.__deepcopy__, nn.init._no_grad_trunc_normal_)
    with pytest.raises(KeyError), fake_tensors():
        raise KeyError
    assert (nn.Module._apply, torch.Tensor.__deepcopy__, nn.init._no_grad_trunc_normal_) == before
    assert _get_current_dispatch_mode_stack() == []
    assert type(torch.ones(1)) is torch.Tensor
