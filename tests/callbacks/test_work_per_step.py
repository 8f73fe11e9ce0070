"""What the callback itself does in a step, once the first ones have shown what steps need."""

import functools
import sys
from collections import Counter
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import GPUMemoryMonitor
from lightning_memsave.techniques.micro_batching import training_state
from tests.callbacks.lit import (
    SmallerFrom,
    assert_same,
    callback_with,
    fit,
    make_lit,
    model_step,
    only,
    quiet,
)
from tests.out_of_memory import MESSAGE

pytestmark = pytest.mark.usefixtures("no_prediction")

RETRIED = "ignore:Out of memory with:lightning_memsave.errors.MemsaveWarning"


class Beside(nn.Module):
    """A linear layer, and modules that no sample reaches: only a visit to all of them costs."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(1, 1)) for _ in range(num_experts))
        self.head = nn.Linear(6, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(batch).square().mean()


def lit_beside(num_experts: int, **methods: Any) -> Any:
    data = DataLoader(cast(Any, torch.ones(40, 6)), batch_size=4)
    defaults = {
        "training_step": model_step,
        "configure_optimizers": lambda self: torch.optim.AdamW(self.parameters(), lr=0.1),
        "train_dataloader": lambda self: data,
    }
    return make_lit(model=Beside(num_experts), **(defaults | methods))


def bytecodes_of_a_step(num_experts: int, callbacks: list[Any], **settings: Any) -> Counter[str]:
    """Count the bytecodes of the seventh batch by file: loops count, and no clock is read."""
    counts: Counter[str] = Counter()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            counts[frame.f_code.co_filename] += 1
        return trace

    def start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 6:
            sys.settrace(trace)
            sys._getframe(1).f_trace = trace

    traced = callback_with(
        on_train_batch_start=start, on_train_batch_end=lambda *_: sys.settrace(None)
    )
    before = sys.gettrace()
    try:
        # Hooks of callbacks after it are in; those of the callbacks before it are of no concern.
        limits: Any = {"limit_val_batches": 0, "limit_train_batches": 8, "log_every_n_steps": 50}
        fit(lit_beside(num_experts), traced, *callbacks, **(limits | settings))
    finally:
        sys.settrace(before)
    return counts


@pytest.mark.parametrize(
    "settings", [{}, {"micro_batch_size": None}, {"micro_batch_size": 4}], ids=str
)
def test_does_not_grow_with_the_model(settings):
    """As much for 2,000 modules as for 20, beyond what Lightning and torch do without us."""

    def added(num_experts: int) -> int:
        monitor = GPUMemoryMonitor(print_summary=False)
        ours = bytecodes_of_a_step(num_experts, [quiet(**settings), monitor])
        plain = bytecodes_of_a_step(num_experts, [])
        assert sum(plain.values()) > 20 * num_experts  # torch does visit all parameters
        assert any("lightning_memsave" in file for file in ours)
        return ours.total() - plain.total()

    few, many = added(10), added(1000)
    # A hash table may be probed once more.
    assert abs(many - few) < 50
    assert 0 < few < 40_000


class Stateful(nn.Module):
    """Every kind of state that a step changes, in modules of their own, beside one it does not."""

    counter: Any

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(6, 1)
        self.through_data = nn.Module()
        self.through_data.register_buffer("count", torch.zeros(1))
        self.counter = nn.Module()
        self.counter.__class__ = type("Counter", (nn.Module,), {})
        self.counter.calls = 0
        self.idle = nn.BatchNorm1d(6)
        self.fails_at = -1
        self.fails_with = 4

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(batch))
        if torch.is_grad_enabled():
            self.through_data.count.data.add_(1)
            self.counter.calls += 1
            if len(batch) >= self.fails_with and self.fails_at == self.counter.calls:
                raise torch.OutOfMemoryError(MESSAGE)
        return (
            self.head(hidden * (1 + self.through_data.count * self.counter.calls)).square().mean()
        )


def fit_stateful(fails_at: int = -1, smaller_from: int | None = None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Stateful()
    model.fails_at = fails_at
    data = DataLoader(cast(Any, torch.randn(40, 6)), batch_size=4)
    lit = make_lit(model=model, training_step=model_step, train_dataloader=lambda self: data)
    callback = only("auto")
    smaller = SmallerFrom(callback, smaller_from)
    torch.manual_seed(1)
    limits: Any = {"limit_val_batches": 0, "limit_train_batches": 8}
    return fit(lit, callback, smaller, **limits), callback


@pytest.mark.filterwarnings(RETRIED, "ignore:.*and batch normalisation")
def test_a_batch_is_repeated_from_the_state_before_it_long_after_the_first_steps(monkeypatch):
    saved = []
    init = training_state.TrainingState.__init__

    @functools.wraps(init)
    def noted(self, module, *, gradients, known=None):
        saved.append(None if known is None else {type(m).__name__ for m in known.changing})
        init(self, module, gradients=gradients, known=known)

    monkeypatch.setattr(training_state.TrainingState, "__init__", noted)
    result, callback = fit_stateful(fails_at=7)
    assert callback._micro_batches.size == 2
    assert saved[:2] == [None, None]
    # Neither the linear layer nor the batch normalisation that no step reaches.
    changing = {"Lit", "Stateful", "BatchNorm1d", "Module", "Counter"}
    assert [s for s in saved[2:] if s is None] == []
    assert all(s >= changing - {"Lit", "Stateful"} and "Linear" not in s for s in saved[2:])
    monkeypatch.undo()
    assert_same(result, fit_stateful(smaller_from=6)[0])


@pytest.mark.filterwarnings(RETRIED, "ignore:.*and batch normalisation")
def test_what_changed_for_the_first_time_is_said():
    """A module that the watched steps left alone, and that this step or a hook has changed."""
    forward = Stateful.forward

    def also_idle(self, batch):
        if self.counter.calls == 5 and torch.is_grad_enabled():
            self.idle(batch)
        return forward(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stateful, "forward", also_idle)
        with pytest.warns(match="`model.idle` stay as they are"):
            fit_stateful(fails_at=6)


@pytest.mark.parametrize("settings", [{"precision": "32-true"}, {"micro_batch_size": "auto"}])
def test_a_backward_pass_inside_of_a_late_step_is_zeroed(settings):
    """Gradients are freed before the forward pass, and after it only if there may be some."""

    def run(*callbacks: Any) -> Any:
        def training_step(self, batch, batch_idx):
            if batch_idx > 3 and torch.is_grad_enabled():
                self.model(3 * batch).backward()
            return self.model(batch)

        lit = lit_beside(2, training_step=training_step)
        for parameter in lit.parameters():
            torch.nn.init.constant_(parameter, 0.1)
        return fit(lit, *callbacks, limit_val_batches=0, limit_train_batches=8)

    callback = only(**settings)
    assert_same(run(callback), run())
