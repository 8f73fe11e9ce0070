"""Gradients that are read after a step with updates in backward are right or refused."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_memsave.errors import IncompatibleError
from lightning_memsave.techniques.optimizer_in_backward.freed_gradients import READING_HOOKS
from tests.callbacks.lit import callback_with, fit, make_lit, make_trainer, quiet, rows_of

UPDATES = "optimizer_in_backward"
CALLED = [hook for hook in READING_HOOKS if hook != "on_save_checkpoint"]


def norms_of(module: nn.Module) -> list[float]:
    return [-1.0 if p.grad is None else p.grad.norm().item() for p in module.parameters()]


def hidden_norms_of(module: nn.Module) -> list[float]:
    """What no search in the code finds."""
    grads = [getattr(p, "".join(("gr", "ad"))) for p in module.parameters()]
    return [-1.0 if grad is None else grad.norm().item() for grad in grads]


class Read:
    """Makes hooks that note norms of gradients."""

    def __init__(self, norms: Any = norms_of) -> None:
        self.seen: list[Any] = []
        self.norms = norms

    def in_module(self, hook: str) -> Any:
        norms, seen, base = self.norms, self.seen, getattr(pl.LightningModule, hook)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(norms(self))
            return base(self, *args, **kwargs)

        return make_lit(**{hook: call})

    def in_callback(self, hook: str) -> Any:
        norms, seen = self.norms, self.seen

        def call(self: Any, trainer: Any, pl_module: Any, *args: Any) -> None:
            seen.append(norms(pl_module))

        return callback_with(**{hook: call})


def project(read: Read, hook: str, where: str) -> tuple[Any, list[Any]]:
    if where == "module":
        return read.in_module(hook), []
    return make_lit(), [read.in_callback(hook)]


PLACES = [(hook, "module") for hook in CALLED] + [
    (hook, "callback") for hook in CALLED if hook != "lr_scheduler_step"
]


def with_scheduler(self: Any) -> Any:
    optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
    return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("hook", "where"), PLACES)
def test_a_preset_yields_where_a_hook_reads_gradients(hook, where, accumulate):
    found = []
    for callbacks in [], [quiet(preset="bitwise")]:
        read = Read()
        lit, readers = project(read, hook, where)
        type(lit).configure_optimizers = with_scheduler
        fit(lit, *callbacks, *readers, accumulate_grad_batches=accumulate, limit_val_batches=0)
        found.append(read.seen)
    assert found[0] == found[1]
    assert any(norm > 0 for norms in found[0] for norm in norms)
    row = rows_of(callbacks[0])[UPDATES]
    assert row.status == "off"
    assert f".{hook}` reads gradients" in row.details[0]


@pytest.mark.parametrize(("hook", "where"), PLACES)
def test_a_value_is_refused_before_the_first_step(hook, where):
    read = Read()
    lit, readers = project(read, hook, where)
    owner = {"module": "Lit", "callback": "Own"}[where]
    why = rf"`{owner}\.{hook}` reads gradients.*or set `optimizer_in_backward=None`"
    with pytest.raises(IncompatibleError, match=why):
        fit(lit, quiet(preset="off", optimizer_in_backward=True), *readers)
    assert read.seen == []


GIVEN: dict[str, Any] = {"preset": "off", UPDATES: True}


@pytest.mark.parametrize(
    "settings", [GIVEN, {"preset": "single_gpu"}, GIVEN | {"offload": "parameters"}]
)
@pytest.mark.parametrize(
    ("hook", "where"), [("on_train_batch_end", "module"), ("on_before_zero_grad", "callback")]
)
def test_a_read_that_no_search_finds_is_refused_at_it(hook, where, settings):
    lit, readers = project(Read(hidden_norms_of), hook, where)
    with pytest.raises(IncompatibleError, match=rf"`\w+\.{hook}`: it reads the gradient of"):
        fit(lit, quiet(**settings), *readers)


@pytest.mark.filterwarnings("ignore")  # of PEFT
def test_importance_that_peft_finds_in_gradients():
    peft = pytest.importorskip("peft")

    def allocate(self: Any, *_: Any) -> None:
        self.model.base_model.update_and_allocate(self.global_step)

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().mean()

    config = peft.AdaLoraConfig(
        target_modules=["0", "2"], total_step=20, tinit=1, tfinal=1, deltaT=1, init_r=4, target_r=2
    )
    model = peft.get_peft_model(Adapted(), config)
    lit = make_lit(model=model, on_train_batch_end=allocate)
    bitwise = quiet(preset="bitwise")
    results = [fit(lit, *callbacks)[:2] for callbacks in ([], [bitwise])]
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1].values(), results[1][1].values()))
    assert "on_train_batch_end` reads gradients" in rows_of(bitwise)[UPDATES].details[0]


class Zeroing(pl.Callback):
    """Finds no gradients with the plain Trainer either."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.optimizers[0].zero_grad()
        self.seen.append(hidden_norms_of(pl_module))

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.seen.append(hidden_norms_of(pl_module))

    def on_train_epoch_end(self, trainer, pl_module):  # after a validation
        self.seen.append(hidden_norms_of(pl_module))

    def on_train_end(self, trainer, pl_module):
        for param in pl_module.parameters():
            param.grad = None
        self.seen.append(hidden_norms_of(pl_module))


@pytest.mark.parametrize("offload", [None, "parameters"])
def test_zeroed_gradients_may_be_read(offload):
    found = []
    for callbacks in [], [quiet(preset="off", optimizer_in_backward=True, offload=offload)]:
        zeroing = Zeroing()
        fit(make_lit(), *callbacks, zeroing)
        found.append(zeroing.seen)
    assert found[0] == found[1]
    assert {norm for norms in found[0] for norm in norms} == {-1.0}


def test_gradients_of_unused_parameters_may_be_read():
    class Unused(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)
            self.batches = make_lit().train_dataloader()

        def train_dataloader(self) -> Any:
            return self.batches

        def training_step(self, batch: Tensor) -> Tensor:
            return self.used(batch).square().mean()

        def on_train_batch_end(self, *_: Any) -> None:
            assert hidden_norms_of(self.unused) == [-1.0, -1.0]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    make_trainer(pl, quiet(preset="off", optimizer_in_backward=True)).fit(Unused())


def clamping(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.clamp_(-1e-3, 1e-3)


def clamped(self: Any, stage: str = "fit") -> None:
    for param in self.parameters():
        param.register_post_accumulate_grad_hook(clamping)


@pytest.mark.parametrize("when", ["setup", "on_fit_start"])
def test_a_preset_yields_to_hooks_of_gradients(when):
    results = []
    for callbacks in [], [quiet(preset="bitwise")]:
        results.append(fit(make_lit(**{when: clamped}), *callbacks)[:2])
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1].values(), results[1][1].values()))
    assert "updated already" in rows_of(callbacks[0])[UPDATES].details[0]


def test_hooks_that_run_after_the_update_are_refused():
    fit(make_lit(setup=clamped), quiet(preset="off", optimizer_in_backward=True))
    with pytest.raises(IncompatibleError, match="Register it in `__init__`, or set"):
        fit(make_lit(on_fit_start=clamped), quiet(preset="off", optimizer_in_backward=True))


class Wrapper(torch.optim.Optimizer):
    """As averages of weights are often kept: around another optimizer."""

    def __init__(self, inner: Any, reads: Any) -> None:
        self.inner, self.reads = inner, reads
        self.seen: list[Any] = []

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self, closure: Any = None, **_: Any) -> Any:
        loss = self.inner.step(closure)
        self.seen.append(self.reads(self))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def norms_in(optimizer: Any) -> list[float]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [-1.0 if p.grad is None else p.grad.norm().item() for p in params]


def sizes_in(optimizer: Any) -> list[float]:
    return [p.norm().item() for group in optimizer.param_groups for p in group["params"]]


class Wrapping(pl.Callback):
    def __init__(self, reads: Any) -> None:
        self.reads = reads

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.optimizers = [Wrapper(each, self.reads) for each in trainer.optimizers]


@pytest.mark.parametrize(("reads", "status"), [(norms_in, "off"), (sizes_in, "on")])
def test_a_preset_yields_to_a_wrapped_optimizer_that_reads_gradients(reads, status):
    results, seen = [], []
    for callbacks in [], [quiet(preset="bitwise")]:
        result = fit(make_lit(), *callbacks, Wrapping(reads))
        seen.append(result[2].optimizers[0].seen)
        results.append(result[:2])
    assert seen[0] == seen[1]
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1].values(), results[1][1].values()))
    row = rows_of(callbacks[0])[UPDATES]
    assert row.status == status
    assert ("`Wrapper.step`: it reads gradients" in "".join(row.details)) is (status == "off")


def test_a_wrapped_optimizer_that_reads_gradients_is_refused():
    with pytest.raises(IncompatibleError, match=r"`Wrapper\.step`: it reads gradients"):
        fit(make_lit(), quiet(preset="off", optimizer_in_backward=True), Wrapping(norms_in))


def hooked(self: Any) -> Any:
    optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
    optimizer.register_step_post_hook(lambda optimizer, *_: self.seen.append(norms_in(optimizer)))
    return optimizer


def test_step_hooks_that_read_gradients():
    found = []
    for callbacks in [], [quiet(preset="bitwise")]:
        lit = make_lit(configure_optimizers=hooked, seen=[])
        fit(lit, *callbacks)
        found.append(type(lit).seen)
    assert found[0] == found[1]
    assert "reads gradients" in rows_of(callbacks[0])[UPDATES].details[0]
    with pytest.raises(IncompatibleError, match="a step hook of `AdamW`: it reads gradients"):
        fit(
            make_lit(configure_optimizers=hooked, seen=[]),
            quiet(preset="off", optimizer_in_backward=True),
        )


def around_closure(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
    def run() -> Any:
        loss = closure()
        self.average = [p.detach().clone() for p in self.parameters()]
        return loss

    optimizer.step(closure=run)


def after_closure(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
    closure()
    optimizer.step()


def clipping(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
    optimizer.step(closure=closure)
    self.norms = norms_of(self)


def own_backward(self: Any, loss: Tensor) -> None:
    loss.backward()
    for param in self.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


@pytest.mark.parametrize(
    ("hook", "method", "why"),
    [
        ("optimizer_step", around_closure, "it runs code between backward and the step"),
        ("optimizer_step", after_closure, "it runs code between backward and the step"),
        ("optimizer_step", clipping, "reads gradients"),
        ("backward", own_backward, "reads gradients"),
    ],
)
def test_code_between_backward_and_step_is_refused(hook, method, why):
    steps: list[Any] = []
    lit = make_lit(**{hook: method}, on_train_batch_end=lambda self, *_: steps.append(0))
    with pytest.raises(IncompatibleError, match=rf"(?s)`Lit\.{hook}`.*{why}"):
        fit(lit, quiet(preset="off", optimizer_in_backward=True))
    assert steps == []
