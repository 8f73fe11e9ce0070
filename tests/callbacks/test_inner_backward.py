"""A backward pass inside of ``training_step``, and gradients that others look at there."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_memsave.errors import IncompatibleError
from tests.callbacks.lit import (
    LIGHTNING,
    WithLoss,
    assert_same,
    fit,
    make_lit,
    model_step,
    only,
    rows_of,
)
from tests.cases import WIDTH

pytestmark = pytest.mark.usefixtures("no_prediction")


def model():
    """Without dropout, so that another forward pass changes nothing."""
    torch.manual_seed(0)
    return WithLoss(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)))


def lit_with_step(training_step, **methods):
    return make_lit(model=model(), training_step=training_step, **methods)


def inner_backward(self, batch, batch_idx):
    self.model(2 * batch).backward()
    return self.model(batch)


SETTINGS: list[dict[str, Any]] = [
    {"precision": "32-true"},
    {"micro_batch_size": "auto"},
    {"micro_batch_size": 4},
    {"optimizer_in_backward": True},
    {"optimizer_in_backward": True, "micro_batch_size": "auto"},
]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("settings", SETTINGS, ids="-".join)
def test_its_gradients_count_as_in_lightning(settings, accumulate):
    """They are zeroed with the old ones; batches between two steps do not zero."""
    lit = lit_with_step(inner_backward)
    plain = fit(lit, accumulate_grad_batches=accumulate)
    assert_same(plain, fit(lit, only(**settings), accumulate_grad_batches=accumulate))


def test_updates_nothing():
    """Not even what the real backward pass does not reach, which no second gradient would show."""

    def training_step(self, batch, batch_idx):
        self.aside.sum().backward()
        return self.model(batch)

    lit = lit_with_step(training_step)
    lit.aside = nn.Parameter(torch.ones(3))
    plain = fit(lit)
    saving = fit(lit, only(optimizer_in_backward=True))
    assert_same(plain, saving)
    assert torch.equal(saving[1]["aside"], torch.ones(3))


def test_is_refused_where_earlier_parts_have_gradients():
    callback = only(2)
    with pytest.raises(IncompatibleError, match=r"`torch\.autograd\.grad` there"):
        fit(lit_with_step(inner_backward), callback)


def test_is_refused_where_earlier_batches_have_gradients():
    def training_step(self, batch, batch_idx):
        return (inner_backward if batch_idx == 1 else model_step)(self, batch, batch_idx)

    lit = lit_with_step(training_step)
    with pytest.raises(IncompatibleError, match="gradients itself"):
        fit(lit, only(2), accumulate_grad_batches=2)


def test_is_undone_in_the_first_part():
    parts: list[int] = []  # but those of the proof, which have no gradients

    def training_step(self, batch, batch_idx):
        parts.extend([batch_idx] * torch.is_grad_enabled())
        return (inner_backward if len(parts) % 2 else model_step)(self, batch, batch_idx)

    expected = fit(lit_with_step(model_step), only(2))
    assert_same(fit(lit_with_step(training_step), only(2)), expected)


def test_gradients_may_be_taken_without_backward():
    def training_step(self, batch, batch_idx):
        torch.autograd.grad(self.model(batch), list(self.parameters()))
        return self.model(batch)

    plain = fit(lit_with_step(model_step), only(2))
    assert_same(plain, fit(lit_with_step(training_step), only(2)))


class Norms(Callback):
    """Norms of the old gradients, where Lightning documents that they are still there."""

    def __init__(self):
        self.seen: list[Any] = []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.seen.append(sum(g.norm().item() for g in grads))


def noting(seen, **methods):
    def training_step(self, batch, batch_idx):
        if torch.is_grad_enabled():  # not where it is proven that the loss can be split
            seen.append("step")
        return self.model(batch)

    return lit_with_step(training_step, **methods)


@pytest.mark.parametrize(
    "settings", [{"precision": "32-true"}, {"micro_batch_size": "auto"}, {"micro_batch_size": 4}]
)
def test_hooks_before_zeroing_see_old_gradients_after_the_step(settings):
    found = []
    for callbacks in ([], [only(**settings)]):
        norms = Norms()
        fit(noting(norms.seen), *callbacks, norms)
        found.append(norms.seen)
    assert found[1] == found[0]
    assert found[0][:3] == ["step", 0, "step"]
    assert found[0][3] > 0


HOOKS = ("on_before_backward", "on_before_zero_grad", "on_after_backward")


def lit_with_hooks(events, package, *names):
    methods = {n: lambda self, *_, name=n: events.append(name) for n in names}
    update = lambda self, optimizer: events.append("update")  # noqa: E731
    return noting(events, package=package, on_before_optimizer_step=update, **methods)


def test_hooks_before_zeroing_run_between_forward_and_backward(package):
    events: list[str] = []
    lit = lit_with_hooks(events, package, *HOOKS)
    fit(lit, only("auto"), package=package, limit_train_batches=1, limit_val_batches=0)
    assert events[-5:] == ["step", *HOOKS[1::-1], HOOKS[2], "update"]


def test_hooks_after_backward_run_once_for_a_batch(package):
    events: list[str] = []
    lit = lit_with_hooks(events, package, "on_after_backward")
    fit(lit, only(2), package=package, limit_train_batches=1, limit_val_batches=0)
    assert events[-4:] == ["step", "step", "on_after_backward", "update"]


@pytest.mark.parametrize("hook", [*HOOKS[:2], "backward", "optimizer_zero_grad"])
def test_hooks_that_would_run_for_each_part_are_named(hook):
    lit = lit_with_hooks([], LIGHTNING, hook)
    with pytest.raises(IncompatibleError, match=rf"`Lit\.{hook}` would run for each micro-batch"):
        fit(lit, only(2))
    callback = only("auto")
    fit(lit, callback, limit_train_batches=1)
    assert f"`Lit.{hook}` would run" in str(rows_of(callback)["micro_batch_size"].details)


def test_own_zeroing_is_kept():
    # Gradients live on over two steps.
    zero = lambda self, epoch, batch_idx, optimizer: (  # noqa: E731
        None if batch_idx % 2 else optimizer.zero_grad()
    )
    lit = make_lit(model=model(), optimizer_zero_grad=zero)
    callback = only("auto")
    assert_same(fit(lit, callback), fit(lit))


def test_the_row_says_who_reads_old_gradients():
    fit(make_lit(model=model()), callback := only(precision="32-true"), Norms())
    found = rows_of(callback)["early_release"]
    assert found.details[0] == (
        "gradients of the previous step are kept in the forward pass, as "
        "`Norms.on_before_zero_grad` may read them"
    )
    assert found.status == "off"  # the Trace of these tests looks at outputs


def test_a_package_with_a_name_like_lightnings_is_foreign():
    class Helper(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert outputs["loss"] is not None

    hook: Any = Helper.on_train_batch_end
    hook.__module__ = "pytorch_lightning_helpers.mixin"
    callback = only(precision="32-true")
    fit(make_lit(model=model()), callback, Helper())  # before the Trace of these tests
    outputs = rows_of(callback)["early_release"].details[1]
    assert outputs == "outputs are kept, as `Helper.on_train_batch_end` may read them"


def test_lbfgs_reports_the_loss_of_its_last_closure():
    lit = make_lit(
        model=model(),
        configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters(), max_iter=4),
    )
    plain = fit(lit, limit_train_batches=2)
    assert_same(plain, fit(lit, only("auto"), limit_train_batches=2))
