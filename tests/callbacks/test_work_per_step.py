"""What the callback itself does in a step, once the first ones have shown what steps need."""

import sys
from collections import Counter
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import GPUMemoryMonitor
from tests.callbacks.lit import (
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


class ChangesLate(nn.Module):
    """A module inside changes in its fifth step, and memory runs out in the sixth."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.idle, self.calls = nn.Linear(6, 1), nn.BatchNorm1d(6), 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.calls += torch.is_grad_enabled()  # not in the proof
        if self.calls == 5:
            self.idle(batch)
        if self.calls == 6 and len(batch) == 4:
            raise torch.OutOfMemoryError(MESSAGE)
        return self.head(batch).square().mean()


@pytest.mark.filterwarnings(RETRIED, "ignore:.*and batch normalisation")
def test_what_changed_for_the_first_time_is_said():
    """A module that the watched steps left alone, and that this step or a hook has changed."""
    data = DataLoader(cast(Any, torch.randn(40, 6)), batch_size=4)
    loaders = {"train_dataloader": lambda self: data}
    lit = make_lit(model=ChangesLate(), training_step=model_step, **loaders)
    with pytest.warns(match="`model.idle` stay as they are"):
        fit(lit, only("auto"), limit_val_batches=0, limit_train_batches=8)


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
