"""Each trained parameter is in one group, and the learning rate goes where it should."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from lightning_memsave import IncompatibleError
from lightning_memsave.modules.steps import make_scheduler, weight_decay_groups
from tests.callbacks.lit import PACKAGES, make_trainer
from tests.modules.tiny import CONFIGS, loader, make_lit

BASE = 0.5


@pytest.mark.parametrize("name", CONFIGS)
def test_each_parameter_is_in_one_group(name):
    lit = make_lit(name)
    groups = weight_decay_groups(lit, 0.1)
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted({id(p) for p in lit.parameters()})
    plain = {id(p) for p in groups[1]["params"]}
    for parameter_name, parameter in lit.named_parameters():
        words = ("bias", "norm", "embed", "wte", "wpe", "ln_")
        is_plain = any(word in parameter_name.lower() for word in words)
        assert (id(parameter) in plain) == is_plain, parameter_name
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_a_head_of_its_own_is_decayed_and_a_shared_one_is_not():
    config = CONFIGS["gpt2"][0]
    for is_tied in (True, False):
        one = copy.deepcopy(config)
        one.tie_word_embeddings = is_tied
        lit = type(make_lit())(one, task="causal_lm")
        decayed = weight_decay_groups(lit, 0.1)[0]["params"]
        assert any(p is lit.model.lm_head.weight for p in decayed) != is_tied


def test_frozen_parameters_are_in_no_group():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    [decayed, plain] = weight_decay_groups(model, 0.1)
    assert decayed["params"][0] is model[1].weight
    assert plain["params"][0] is model[1].bias
    assert len(weight_decay_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1


def test_vectors_and_norms_of_any_name_are_not_decayed():
    class MyRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(2, 2))

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.gamma = MyRMSNorm(), nn.Parameter(torch.ones(3))

    [group] = weight_decay_groups(Scaled(), 0.1)
    assert (group["weight_decay"], len(group["params"])) == (0.0, 2)


def rates(make: Any, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler, values = make(optimizer), []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


DOWN = [BASE * 0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(5)]


@pytest.mark.parametrize(
    ("schedule", "warmup", "total", "expected"),
    [
        ("linear", 2, 6, [0, 0.25, 0.5, 0.375, 0.25, 0.125, 0]),
        ("cosine", 2, 6, [0, 0.25, *DOWN]),
        ("constant", 2, math.inf, [0, 0.25, 0.5, 0.5, 0.5]),
        # A share is of all steps.
        ("linear", 0.5, 4, [0, 0.25, 0.5, 0.25, 0]),
        ("constant", 0.25, 8, [0, 0.25, 0.5, 0.5]),
        ("linear", 0.0, 4, [0.5, 0.375]),
    ],
)
def test_rates(schedule, warmup, total, expected):
    found = rates(lambda one: make_scheduler("Lit", one, schedule, warmup, total), len(expected))
    assert found == pytest.approx(expected)
    assert rates(lambda one: theirs(one, schedule, warmup, total), len(expected)) == found


def theirs(optimizer: torch.optim.Optimizer, schedule: str, warmup: float, total: float) -> Any:
    name = "constant_with_warmup" if schedule == "constant" else schedule
    steps = int(warmup) if total == math.inf or warmup >= 1 else round(warmup * total)
    num_steps = None if total == math.inf else int(total)
    return get_scheduler(name, optimizer, num_warmup_steps=steps, num_training_steps=num_steps)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("settings", "trainer_settings", "num_steps"),
    [
        ({}, {"max_epochs": 2}, 8),
        ({}, {"max_epochs": 2, "accumulate_grad_batches": 2}, 4),
        ({}, {"max_epochs": -1, "max_steps": 3}, 3),
        ({"max_steps": 5}, {"max_epochs": 2}, 5),
        ({"memsave": {"accumulate_grad_batches": 2, "report": False}}, {"max_epochs": 2}, 4),
    ],
    ids=["epochs", "accumulated", "max_steps", "own max_steps", "accumulated by memsave"],
)
def test_the_schedule_is_as_long_as_training(package, settings, trainer_settings, num_steps):
    settings = {"memsave": None, "warmup": 0, "learning_rate": BASE} | settings
    lit = make_lit("bert", package, **settings)
    seen = []

    class Watch(PACKAGES[package].Callback):  # type: ignore[misc]
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            seen.append(optimizer.param_groups[0]["lr"])

    trainer = make_trainer(PACKAGES[package], Watch(), **trainer_settings)
    data = loader("masked_lm")
    trainer.fit(lit, data, data)
    expected = [max(0.0, BASE * (1 - step / num_steps)) for step in range(len(seen))]
    assert seen == pytest.approx(expected)
    assert len(seen) == trainer.global_step
    assert len(seen) >= min(num_steps, 8)


def test_settings_reach_the_optimizer():
    lit = make_lit(
        memsave=None, learning_rate=0.25, betas=[0.7, 0.8], eps=1e-3, weight_decay=0.3, max_steps=9
    )
    optimizer = lit.configure_optimizers()["optimizer"]
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["betas"] == (0.7, 0.8)
    assert optimizer.defaults["eps"] == 1e-3
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


def test_an_unknown_number_of_steps_is_refused():
    lit, data = make_lit(memsave=None), loader("masked_lm")
    with pytest.raises(IncompatibleError, match=r"Use `max_steps=\.\.\.`"):
        make_trainer(max_epochs=-1, limit_train_batches=2).fit(lit, data, data)


def test_a_warmup_longer_than_training_is_refused():
    lit, data = make_lit(memsave=None, warmup=9), loader("masked_lm")
    with pytest.raises(IncompatibleError, match=r"ends after 4 optimizer steps.*warmup=0\.1"):
        make_trainer(max_epochs=1).fit(lit, data, data)
