"""Who made what, when and for whom, in steps that one can follow by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_memsave.core.clock import processor_time_s
from lightning_memsave.core.memory import host_copies
from lightning_memsave.prediction.recording import Event, Recording, StepProfile


class Net(nn.Module):
    """Two layers, each with an activation of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False)
        self.act = nn.Tanh()
        self.is_checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.act(self.first(x))
        if self.is_checkpointed:
            inner = lambda h: self.second(h.exp())  # noqa: E731
            return checkpoint(inner, hidden, use_reentrant=False).sum()
        return self.second(hidden).sum()


X = torch.ones(3, 4)


def record(
    model: nn.Module, step: Callable[[], Any], *optimizers: torch.optim.Optimizer
) -> Recording:
    with StepProfile(model, optimizers) as profile:
        step()
        profile.end_batch()
    return profile.recording


def made(recording: Recording, phase: str) -> list[tuple[str, str, int]]:
    """Module, operator and bytes of what was made in a phase, in order."""
    return [
        (event.storage.origin.module, event.op, event.change)
        for event in recording.events
        if event.change > 0 and event.phase == phase and event.storage.origin.op
    ]


def test_modules_and_their_parameters():
    model = Net()
    recording = record(model, lambda: None)
    assert [(m.name, m.class_name, m.num_parameters) for m in recording.modules] == [
        ("", "Net", 0),
        ("first", "Linear", 32),
        ("second", "Linear", 16),
        ("act", "Tanh", 0),
    ]
    assert [(e.storage.category, e.change) for e in recording.events] == [
        ("parameter", 4 * 32),
        ("parameter", 4 * 16),
    ]
    assert [e.storage.origin.module for e in recording.events] == ["first", "second"]
    assert recording.batch_ends == [2]


def test_forward_belongs_to_the_innermost_module():
    model = Net()
    with torch.no_grad():
        recording = record(model, lambda: model(X))
    assert made(recording, "forward") == [
        ("first", "aten.mm", 3 * 8 * 4),
        ("act", "aten.tanh", 3 * 8 * 4),
        ("second", "aten.mm", 3 * 2 * 4),
        ("", "aten.sum", 4),
    ]
    origin = next(e.storage.origin for e in recording.events if e.op == "aten.tanh")
    assert (origin.shape, origin.dtype, origin.phase) == ((3, 8), "float32", "forward")


def test_what_is_older_was_made_by_no_operator():
    model, x, mask = Net(), torch.ones(3, 4), torch.ones(3, 2)

    def step() -> None:
        profile.track_input(x)
        (model.second(model.first(x)) * mask).sum()

    with StepProfile(model) as profile:
        step()
    found = {e.storage.category: e.storage.origin.op for e in profile.recording.events[:3]}
    assert found == {"parameter": "", "input": ""}
    assert ("other", "") in [
        (e.storage.category, e.storage.origin.op) for e in profile.recording.events
    ]


def test_backward_belongs_to_the_module_whose_forward_it_undoes():
    model = Net()
    recording = record(model, lambda: model(X).backward())
    found = made(recording, "backward")
    by_op = [(module, op) for module, op, _ in found]
    assert ("second", "aten.mm") in by_op
    assert ("act", "aten.tanh_backward") in by_op
    assert ("first", "aten.mm") in by_op
    modules = [module for module, _ in by_op if module]
    # In the order of autograd: from the last module to the first.
    assert [m for i, m in enumerate(modules) if i == 0 or modules[i - 1] != m] == [
        *("second", "act", "first"),
    ]


def test_a_second_forward_is_told_from_the_first():
    model = Net()

    def step() -> None:
        model(X).backward()
        model(X).backward()

    found = made(record(model, step), "backward")
    assert [module for module, op, _ in found if op == "aten.tanh_backward"] == ["act", "act"]


def test_what_is_computed_again_belongs_to_the_module_that_runs():
    model = Net()
    model.is_checkpointed = True
    recording = record(model, lambda: model(X).backward())
    again = [(e.storage.origin.module, e.storage.category) for e in recording.events if is_exp(e)]
    # Once in forward, once more in backward; `exp` is the model's own code.
    assert [e.phase for e in recording.events if is_exp(e) and e.change > 0] == [
        *("forward", "backward"),
    ]
    assert {category for _, category in again} == {"activation"}
    mm_again = [
        e.storage.origin.module
        for e in recording.events
        if e.op == "aten.mm" and e.phase == "backward" and e.change == 3 * 2 * 4
    ]
    assert set(mm_again) <= {"second"}


def is_exp(event: Event) -> bool:
    return bool(event.storage.origin.op == "aten.exp")


def test_gradients_and_state_belong_to_the_owner_of_their_parameter():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(X).backward()
        optimizer.step()

    events = record(model, step, optimizer).events
    by_owner: dict[tuple[str, str], int] = {}
    for event in events:
        if event.storage.category in {"gradient", "optimizer_state"}:
            key = event.storage.category, event.storage.origin.module
            by_owner[key] = by_owner.get(key, 0) + event.change
    assert by_owner == {
        ("gradient", "first"): 128,
        ("gradient", "second"): 64,
        ("optimizer_state", "first"): 2 * 128 + 4,  # two moments and the number of the step
        ("optimizer_state", "second"): 2 * 64 + 4,
    }
    assert {e.phase for e in events if e.storage.category == "optimizer_state"} == {"optimizer"}


def test_gradients_that_were_there_before():
    model = Net()
    model(X).backward()
    events = record(model, lambda: None).events
    found = [(e.storage.category, e.storage.origin.module) for e in events]
    assert found == [
        *(("parameter", "first"), ("parameter", "second")),
        *(("gradient", "first"), ("gradient", "second")),
    ]


def test_tied_weights_belong_to_the_first_module():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()

    def step() -> None:
        model.head(model.embedding(torch.tensor([1, 2]))).sum().backward()

    recording = record(model, step)
    sizes = {m.name: m.num_parameters for m in recording.modules}
    assert sizes == {"": 0, "embedding": 24, "head": 0}
    owners = {
        e.storage.category: e.storage.origin.module
        for e in recording.events
        if e.storage.category in {"parameter", "gradient"}
    }
    assert owners == {"parameter": "embedding", "gradient": "embedding"}


def test_buffers_belong_to_their_module():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    events = record(model, lambda: None).events
    buffers = [e for e in events if e.storage.category == "buffer"]
    assert [e.storage.origin.module for e in buffers] == ["1", "1", "1"]
    assert sum(e.change for e in buffers) == 8 + 8 + 8


def test_host_copies_are_no_events():
    def step() -> None:
        with host_copies():
            torch.ones(10)
        torch.ones(5)

    model = nn.Module()
    with StepProfile(model) as profile:
        step()
        profile.end_batch()
    # Neither when it is made nor when it is freed.
    assert [e.change for e in profile.recording.events] == [20, -20]
    assert profile.recording.host_bytes == 40


def test_an_error_in_forward_leaves_the_module():
    model = Net()

    def step() -> None:
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 5))
        torch.ones(10)

    assert made(record(model, step), "forward")[-1][0] == ""


def test_nothing_stays_where_the_time_is_over_at_once():
    profile = StepProfile(model := Net(), deadline_s=processor_time_s() - 1)
    with pytest.raises(TimeoutError), profile:
        pass
    assert not torch.nn.modules.module._has_any_global_hook()
    assert "resize_" not in vars(torch.UntypedStorage)
    assert not model.first.weight._post_accumulate_grad_hooks


class TestAllocations:
    """As CUDA makes them: in its order, and none that only a mode or a fake tensor causes."""

    def test_a_sum_of_gradients_in_place_is_the_storage_of_the_first(self):
        x = torch.ones(3, 4, requires_grad=True)

        def step():
            y = x.exp()
            (y.sin() + y.cos()).sum().backward()

        changes = [(e.op, e.change) for e in record(nn.Module(), step).events]
        assert not [change for op, change in changes if op == "aten.add" and change > 0][1:]
        live: dict[int, int] = {}
        for event in record(nn.Module(), step).events:
            key = id(event.storage)
            live[key] = live.get(key, 0) + event.change
            assert live[key] >= 0

    def test_the_gradient_of_an_index_is_written_into_zeros(self):
        x = torch.ones(3, 4, requires_grad=True)
        recording = record(nn.Module(), lambda: x[torch.tensor([0, 2])].sum().backward())
        assert "aten.index_put" not in {e.op for e in recording.events if e.change > 0}
        assert "aten.new_zeros" in {e.op for e in recording.events if e.change > 0}

    def test_dropout_makes_its_mask_first(self):
        recording = record(nn.Module(), lambda: torch.native_dropout(X, 0.5, True))
        sizes = [e.change for e in recording.events if e.op == "aten.native_dropout"]
        assert sizes[:2] == [X.numel(), X.nbytes]

    def test_the_first_products_of_both_threads(self):
        model = Net()
        recording = record(model, lambda: model(X).backward())
        names = [recording.events[at - 1].op for at in recording.first_products.values()]
        assert list(recording.first_products) == ["forward", "backward"]
        assert names == ["aten.mm", "aten.mm"]

    def test_parameters_lie_in_the_order_in_which_a_model_is_moved(self):
        model = Net()
        model.register_parameter("last", nn.Parameter(torch.ones(5)))
        events = record(model, lambda: None).events
        assert [e.change for e in events][:3] == [4 * 32, 4 * 16, 4 * 5]


@pytest.mark.parametrize("product", ["mm", "addmm", "addmm_", "baddbmm_"])
def test_the_first_product_is_noted_in_place_too(product):
    """There cuBLAS takes its workspace."""
    x = torch.ones(4, 4) if "b" not in product else torch.ones(2, 4, 4)

    def step() -> None:
        y = x.exp()
        getattr(y, product)(*([x] if product == "mm" else [x, x]))

    recording = record(Net(), step)
    op = recording.events[recording.first_products["forward"] - 1].op
    assert op == ("aten.exp" if product.endswith("_") else f"aten.{product}")
