"""Code that reads gradients is found without running it."""

import functools
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import nn

from lightning_memsave.core.gradient_reads import reads_gradients


class Norms:
    def of(self, module: nn.Module) -> Any:
        return [p.grad.norm() for p in module.parameters() if p.grad is not None]

    def count(self, module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if p.requires_grad)

    def __call__(self, module: nn.Module) -> Any:
        return self.of(module)


class PassingOn(nn.Module):
    """As wrappers of PEFT, which pass on what they do not have."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = [inner]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner[0], name)


def helper(module: nn.Module) -> Any:
    return Norms().of(module)


def make_hook() -> Any:
    norms = Norms()

    def hook(module: nn.Module) -> Any:
        return norms.of(module)

    return hook


class Reading(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.norms, self.several, self.by_name = Norms(), [Norms()], {"all": Norms()}
        self.wrapper = PassingOn(Norms())

    @property
    def sizes(self) -> Any:
        return self.norms.of(self)

    def by_loop(self) -> Any:
        return max(p.grad.abs().max() for p in self.parameters())

    def by_name_of_attribute(self) -> Any:
        return [getattr(p, "grad") for p in self.parameters()]  # noqa: B009 - on purpose

    def by_method_of_attribute(self) -> Any:
        return self.norms.of(self)

    def by_element(self) -> Any:
        return self.several[0].of(self), self.by_name["all"]

    def by_wrapper(self) -> Any:
        return self.wrapper.of(self)

    def by_property(self) -> Any:
        return self.sizes

    def by_helper(self) -> Any:
        return helper(self)

    def by_lightning(self) -> Any:
        self.log_dict(grad_norm(self, 2))

    def by_torch(self) -> Any:
        return nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def by_inner_function(self) -> Any:
        def norm(param: Any) -> Any:
            return param.grad.norm()

        return [*map(norm, self.parameters())]

    @torch.no_grad()
    def by_decorated(self) -> Any:
        return helper(self)


class Other(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.norms, self.net = Norms(), nn.Linear(2, 2)
        self.kept = torch.ones(3)

    def writes(self) -> None:
        for param in self.parameters():
            param.grad = None

    def calls_others(self) -> Any:
        self.log("size", self.norms.count(self) + self.kept.sum())
        self.trainer.logger.log_metrics({})
        return self.net(torch.ones(2))

    @torch.no_grad()
    def computes(self) -> Any:
        return torch.autograd.grad(self.net(torch.ones(2)).sum(), [*self.parameters()])


def methods_of(cls: type) -> list[str]:
    return [name for name, each in vars(cls).items() if callable(each) and name[0] != "_"]


@pytest.mark.parametrize("name", methods_of(Reading))
def test_finds_what_reads_gradients(name):
    assert reads_gradients(getattr(Reading(), name))


@pytest.mark.parametrize("name", methods_of(Other))
def test_finds_nothing_in_other_code(name):
    assert not reads_gradients(getattr(Other(), name))


def test_looks_into_functions_of_every_form():
    assert reads_gradients(make_hook())
    assert reads_gradients(functools.partial(helper, nn.Linear(2, 2)))
    assert reads_gradients(Norms())
    assert reads_gradients(lambda module: module.by_loop(), Reading())
    assert not reads_gradients(len)
    assert not reads_gradients(torch.optim.SGD.step)
