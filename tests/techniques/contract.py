"""What every technique promises, alone and with others."""

import copy
import functools
import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave import Exactness, LowPrecisionWeights, MicroBatching, Offloading
from lightning_memsave.core.technique import Technique
from tests.cases import CASES, DEVICE, ON_A_REAL_GPU, fused, make_batch, make_model
from tests.helpers import (
    OF_OPTIMIZER,
    InAutocast,
    MakeOptimizer,
    Run,
    adamw,
    assert_bitwise_equal,
    autocast_step_of,
    for_model,
    in_parts,
    snapshot,
    switch_all_on,
    train,
)

PARTS = (6, 6, 4)


def make_double_batch(step: int) -> Tensor:
    return make_batch(step).double()


def exactness_of(techniques: Sequence[Technique[Any]]) -> Exactness:
    """The least exact; micro-batches are compared with a loop over the same parts."""
    order = list(Exactness)
    declared = [t.exactness for t in techniques if not isinstance(t, MicroBatching)]
    if ON_A_REAL_GPU and any(isinstance(t, Offloading) for t in techniques):
        declared.append(Exactness.ROUNDING)
    return max(declared, key=order.index, default=Exactness.BITWISE)


@functools.cache
def plain_run(
    name: str,
    steps: int,
    make_optimizer: MakeOptimizer,
    *,
    is_in_parts: bool,
    is_double: bool,
    is_in_autocast: bool,
) -> Run:
    """Training without any technique; by hand in parts where batches are to pass in parts."""
    model = make_model(name).double() if is_double else make_model(name)
    by_hand: Any = autocast_step_of if is_in_autocast else None
    if is_in_parts:
        by_hand = lambda m: in_parts(InAutocast(m) if is_in_autocast else m, PARTS)  # noqa: E731
    make = make_double_batch if is_double else make_batch
    return train(model, make, steps=steps, make_optimizer=make_optimizer, run_step_of=by_hand)


def assert_as_exact_as_declared(techniques: Sequence[Technique[Any]], name: str) -> None:
    """Losses, gradients and weights are those of training without them, as far as they say."""
    exactness, make_optimizer = exactness_of(techniques), fused(adamw, *techniques)
    is_approximate, is_double = (
        exactness is e for e in (Exactness.APPROXIMATE, Exactness.ROUNDING)
    )
    steps = 30 if is_approximate else 3
    plain = plain_run(
        *(name, steps, adamw if is_approximate else make_optimizer),
        is_in_parts=MicroBatching(6) in techniques,
        is_double=is_double,
        # Whose kernels draw masks of their own.
        is_in_autocast=DEVICE == "cuda" and any(type(t) is LowPrecisionWeights for t in techniques),
    )
    model, make = make_model(name), make_batch
    if is_double:
        model, make = model.double(), make_double_batch
    options: Any = {} if is_approximate else {"make_optimizer": make_optimizer}
    saving = train(model, make, techniques, steps=steps, **options)
    if exactness is Exactness.BITWISE:
        assert_bitwise_equal(plain, saving)
    elif is_double:
        assert_same_in_float64(plain, saving)
    else:
        # Below dropout's noise, so that the masks, which are the same, do not hide a difference.
        factor = max(CASES[technique.name].loss_factor for technique in techniques)
        assert saving.losses[-1] <= plain.losses[-1] * factor
        moved = [torch.equal(saving.state[k], plain.state[k]) for k in saving.state]
        assert not all(moved), "the technique did nothing: its exactness would be bitwise"


def assert_same_in_float64(plain: Run, saving: Run) -> None:
    """In float64 what is only another order of operations differs by next to nothing."""
    for truth, loss in zip(plain.losses, saving.losses, strict=True):
        assert abs(truth - loss) <= 1e-12 * abs(truth) + 1e-14
    for theirs, ours in zip(plain.gradients, saving.gradients, strict=True):
        if ours:  # otherwise used in backward; the state shows what they were
            for key, gradient in theirs.items():
                assert (ours[key] - gradient).norm() <= 1e-11 * gradient.norm() + 1e-15, key
    for key, value in plain.state.items():
        assert torch.allclose(saving.state[key], value, rtol=1e-7, atol=1e-9), key


class Fit:
    """Training of a copy of a model, to go on with step by step."""

    def __init__(self, techniques: Sequence[Technique[Any]], model: nn.Module) -> None:
        self.model = model.train()
        chosen = [for_model(technique, model) for technique in techniques]
        switched = switch_all_on(chosen, model, adamw(model))
        self.run_step, self.optimizer, self.undo = switched

    def train(self, *steps: int) -> list[Tensor]:
        torch.manual_seed(steps[0])
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            losses.append(self.run_step(make_batch(step)))
            self.optimizer.step()
        return losses


def assert_one_fit_keeps_promises(techniques: Sequence[Technique[Any]], name: str) -> None:
    """It is checked, saved, gone on with from the file, copied, pickled and undone."""
    model = make_model(name).train()
    anew, before = copy.deepcopy(model), snapshot(model)
    state = copy.deepcopy(model.state_dict())
    if len(techniques) == 1:
        technique = for_model(techniques[0], model)
        target: Any = adamw(model) if isinstance(technique, OF_OPTIMIZER) else model
        assert technique.check(target) == []
        assert snapshot(model) == before
        assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())

    fit = Fit(techniques, model)
    assert list(model.state_dict()) == list(state)
    fit.train(0, 1)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": fit.optimizer.state_dict()}, file)
    straight = fit.train(2, 3)

    resumed = Fit(techniques, anew)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    anew.load_state_dict(saved["model"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    assert torch.equal(torch.stack(resumed.train(2, 3)), torch.stack(straight))
    resumed.undo()
    make_model(name).load_state_dict(saved["model"])

    fit.optimizer.zero_grad()
    assert_a_copy_is_independent(techniques, model)
    values = {key: value.float() for key, value in model.state_dict().items()}
    fit.undo()
    fit.undo()
    assert snapshot(model) == before
    assert all(p.dtype == torch.float32 for p in model.parameters())
    for key, value in model.state_dict().items():
        assert torch.equal(value.float(), values[key].to(value.device)), key
    assert_trains(model)


def assert_a_copy_is_independent(techniques: Sequence[Technique[Any]], model: nn.Module) -> None:
    """It trains without what it is a copy of; pickled, it is whole."""
    twin = copy.deepcopy(model).to(DEVICE)  # what is offloaded is copied in host memory
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    is_low = any(isinstance(technique, LowPrecisionWeights) for technique in techniques)
    run = InAutocast if is_low else nn.Sequential
    run(twin)(make_batch(0)).backward()
    assert all(p.grad is None for p in model.parameters())
    assert any(p.grad is not None for p in twin.parameters())
    if not any("parametrizations" in key for key in twin.state_dict()):  # torch refuses to pickle
        loaded = pickle.loads(pickle.dumps(twin)).to(DEVICE)
        assert list(loaded.state_dict()) == list(twin.state_dict())
        assert torch.isfinite(run(loaded)(make_batch(0)))
    for parameter, value in zip(model.parameters(), kept, strict=True):
        parameter.data.copy_(value)


def assert_trains(model: nn.Module) -> None:
    """What is left trains as any module does."""
    optimizer = adamw(model)
    loss = model(make_batch(1))
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)
