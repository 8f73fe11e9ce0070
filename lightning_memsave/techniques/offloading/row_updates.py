"""Update tables on the host row by row, and untouched rows when somebody needs them."""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memsave.core.memory import (
    host_copies,
    is_fake,
    is_host,
    mark_as,
    mark_as_host,
    on_cuda,
)
from lightning_memsave.core.patching import patch_method, previous_method
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.offloading.host_table import HostTable
from lightning_memsave.techniques.offloading.host_worker import wait_for
from lightning_memsave.techniques.offloading.missed_steps import (
    MAX_MISSED,
    NUM_FIRST,
    Settings,
    coefficients,
    has_closed_form,
    kind_of,
    move,
)
from lightning_memsave.techniques.offloading.row_gradient import RowGradient
from lightning_memsave.techniques.optimizer_step import (
    choose_fused,
    double_of,
    group_of,
    scaling_on_host,
    step_without_hooks,
)

_UPDATES: "weakref.WeakKeyDictionary[Optimizer, list[TableUpdates]]" = weakref.WeakKeyDictionary()
_TILE_NUMEL = 2**17  # a step of so many elements, with its temporaries, fits a cache


@dataclass(frozen=True)
class _Rows:
    """Rows of a table, and of its state tensors by name."""

    values: Tensor
    state: dict[str, Tensor]

    def part(self, place: slice) -> "_Rows":
        """Return a view of some rows."""
        return _Rows(self.values[place], {name: t[place] for name, t in self.state.items()})

    def gather(self, ids: Tensor) -> "_Rows":
        """Return copies of some rows."""
        state = {name: tensor.index_select(0, ids) for name, tensor in self.state.items()}
        return _Rows(self.values.index_select(0, ids), state)

    def scatter(self, ids: Tensor, rows: "_Rows") -> None:
        """Replace some rows."""
        self.values.index_copy_(0, ids, rows.values)
        for name, tensor in self.state.items():
            tensor.index_copy_(0, ids, rows.state[name])


class RowUpdates:
    """Lets an optimizer update tables on the host.

    A row without a gradient is left as it is, and brought up to date when it is next used, or when
    all are, for a checkpoint, or after 1,024 steps. State tensors are on the host, in torch's
    layout.

    Note:
        Exactness is *bitwise* with ``replays``, for Adam with weight decay in the gradient, and for
        tables with whole gradients. Otherwise it is *rounding*, but for AdamW with a ``beta2``
        below 0.999 and gradients near its ``eps``: there, the movement in missed steps is wrong by
        up to 0.01 % for 0.98 and 0.2 % for 0.95. A norm for clipping sums over the rows with a
        gradient, and is rounded in another way. What reads the weight directly, as averages of
        weights do, calls `HostTable.bring_up_to_date` before.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 1))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> table = HostTable(model, model[0].weight)
        >>> undo = [*table.start(), *RowUpdates(optimizer, [table]).start()]
        >>> model(torch.tensor([3, 5, 3])).sum().backward()
        >>> model[0].weight.grad.rows.shape
        torch.Size([2, 8])
        >>> optimizer.step()
        >>> for function in reversed(undo):
        ...     _ = function()
    """

    def __init__(
        self, optimizer: Optimizer, tables: Sequence[HostTable], *, replays: bool = False
    ) -> None:
        groups = [group_of(optimizer, table.weight) for table in tables]
        name = type(optimizer).__name__
        if any(kind_of(optimizer, group) is None for group in groups):
            raise IncompatibleError("offloading", [_unknown(name)])
        self._optimizer = weakref.ref(optimizer)
        self._updates = [TableUpdates(optimizer, table, replays=replays) for table in tables]

    def start(self, *, replaces_step: bool = True) -> list[Callable[[], Any]]:
        """Begin to update the tables."""
        optimizer = self._optimizer()
        assert optimizer is not None, "the caller holds it"
        _UPDATES[optimizer] = self._updates
        undo: list[Callable[[], Any]] = [functools.partial(_UPDATES.pop, optimizer, None)]
        for updates in self._updates:
            undo += updates.start(optimizer)
        if replaces_step:
            # Around a rounded step of the other parameters.
            undo += [patch_method(optimizer, new, is_outer=True) for new in (step, zero_grad)]
        return undo


class TableUpdates:
    """Updates one table."""

    def __init__(self, optimizer: Optimizer, table: HostTable, *, replays: bool) -> None:
        self.table = table
        self._optimizer = weakref.ref(optimizer)
        self._replays = replays
        self._num_rows = max(1, _TILE_NUMEL // table.weight.shape[1])  # at a time
        self._steps: list[Settings] = []  # since all rows were up to date
        self._num_before = 0  # steps before these
        self._behind: Tensor | None = None  # number of these steps that a row has had (V,)
        self._updates: list[Future[None]] = []  # that run, one at most

    def start(self, optimizer: Optimizer) -> list[Callable[[], None]]:
        """Register all hooks; returns functions that remove them."""
        self.table.updates = self
        self._adopt_state()
        hooks = [
            optimizer.register_state_dict_pre_hook(self._look),
            optimizer.register_load_state_dict_pre_hook(self._look),
            optimizer.register_load_state_dict_post_hook(self._adopt_state),
        ]
        return [self._stop, self._look, *(hook.remove for hook in hooks)]

    def wait(self) -> None:
        """Wait for the update that runs, and raise what it has raised."""
        wait_for(self._updates)

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> None:
        """Update the table with its gradient, in the background if the table has a thread."""
        self.wait()
        grad, settings = self.table.weight.grad, self._settings(optimizer)
        assert grad is not None, "the caller has looked"
        table = _Rows(self.table.weight.data, self._state(optimizer, settings))
        if is_fake(self.table.weight):
            return
        if self._steps and not _continues(settings, self._steps[-1]):
            self.bring_up_to_date(None)
        double = double_of(optimizer, [], defaultdict(dict))

        def update() -> None:
            if isinstance(grad, RowGradient):
                self._step_rows(double, settings, table, grad)
            else:
                self._step_all(double, settings, table, grad)

        done = self.table.worker.submit(update)
        self._updates.append(done)
        if done.done():
            self.wait()  # raises what it has raised

    @torch.no_grad()
    def bring_up_to_date(self, ids: Tensor | None) -> None:
        """Do the missed steps of some rows, or of all."""
        self.wait()
        optimizer = self._optimizer()
        if self._behind is None or not self._steps or optimizer is None:
            return
        with host_copies():
            double = double_of(optimizer, [], defaultdict(dict))
            table = _Rows(self.table.weight.data, self._tensors(optimizer))
            if ids is None:
                self._bring_all(double, table)
            else:
                self._bring(double, table, ids)

    def _step_rows(
        self, double: Optimizer, settings: Settings, table: _Rows, grad: RowGradient
    ) -> None:
        if len(self._steps) >= MAX_MISSED:
            self._bring_all(double, table)
        if self._behind is None:
            self._behind = torch.zeros(len(grad), dtype=torch.int16, device="cpu")
            mark_as_host(self._behind)
        self._bring(double, table, grad.ids)
        num_steps = self._num_before + len(self._steps)
        num = self._num_rows
        for ids, rows in zip(grad.ids.split(num), grad.rows.split(num), strict=True):
            own = table.gather(ids)
            _run(double, settings, own, rows, num_steps)
            table.scatter(ids, own)
        self._steps.append(settings)
        self._behind.index_fill_(0, grad.ids, len(self._steps))

    def _step_all(self, double: Optimizer, settings: Settings, table: _Rows, grad: Tensor) -> None:
        self._bring_all(double, table)
        num = self._num_rows
        for start in range(0, len(grad), num):
            place = slice(start, start + num)
            _run(double, settings, table.part(place), grad[place], self._num_before)
        self._num_before += 1

    def _bring_all(self, double: Optimizer, table: _Rows) -> None:
        if self._behind is not None and self._steps:
            self._bring(double, table, torch.arange(len(self._behind), device="cpu"))
            self._behind.zero_()
        self._num_before += len(self._steps)
        self._steps = []

    def _bring(self, double: Optimizer, table: _Rows, ids: Tensor) -> None:
        assert self._behind is not None, "rows have had steps"
        num_done = self._behind.index_select(0, ids)
        is_late = num_done < len(self._steps)
        late, num_done = ids[is_late], num_done[is_late]
        if not len(late):
            return
        order = num_done.argsort(stable=True)
        late, num_done = late[order], num_done[order].long()
        first, replays = int(num_done[0]), self._replays
        replays = replays or not has_closed_form(double, self._steps[-1])
        if not replays:
            number = self._num_before + first + 1
            lines = torch.from_numpy(coefficients(double, self._steps[first:], number))
        num = self._num_rows
        for some, done in zip(late.split(num), num_done.split(num), strict=True):
            own = table.gather(some)
            if replays:
                self._replay(double, own, done, len(self._steps))
            else:
                self._move(double, own, done, lines)
            table.scatter(some, own)
        self._behind.index_fill_(0, late, len(self._steps))

    # The first steps one by one: they differ so much that the closed form is less exact for them.
    def _move(self, double: Optimizer, rows: _Rows, done: Tensor, lines: Tensor) -> None:
        has_count = "exp_avg" in rows.state
        until = min(len(self._steps), NUM_FIRST - self._num_before) if has_count else 0
        # Rows that have not had any step have no moments.
        start = int(torch.searchsorted(done, 0 if self._num_before else 1))
        if until > 0 and start < len(done):
            place = slice(start, None)
            self._replay(double, rows.part(place), done[place], until)
            done = torch.cat([done[:start], done[place].clamp_min(until)])
        move(rows.values, rows.state, lines[len(self._steps) - done], self._steps[-1])

    # Rows that have missed most come first, so that those that have missed a step are the first.
    def _replay(self, double: Optimizer, rows: _Rows, done: Tensor, until: int) -> None:
        zeros = torch.zeros_like(rows.values)
        for index in range(int(done[0]), until):
            place = slice(0, int(torch.searchsorted(done, index, right=True)))
            number = self._num_before + index
            _run(double, self._steps[index], rows.part(place), zeros[place], number)

    def _settings(self, optimizer: Optimizer) -> Settings:
        group = group_of(optimizer, self.table.weight)
        found = {
            key: float(value) if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        if self.table.device.type == "cuda" or on_cuda(self.table.weight):  # or a fake one
            choose_fused(optimizer, found)
        # One dictionary for as many steps as have the same.
        return self._steps[-1] if self._steps and self._steps[-1] == found else found

    def _state(self, optimizer: Optimizer, settings: Settings) -> dict[str, Tensor]:
        """Return the state tensors, created if they are missing, after counting a step."""
        kind, weight = kind_of(optimizer, settings), self.table.weight
        if kind is None:
            raise IncompatibleError("offloading", [_unknown(type(optimizer).__name__)])
        held = self._held(optimizer)
        with host_copies():
            if kind.has_count:
                if "step" not in held:
                    held["step"] = torch.zeros((), dtype=torch.get_default_dtype(), device="cpu")
                    mark_as_host(held["step"])
                held["step"] += 1
            for name in kind.state:
                if held.get(name) is None:
                    held[name] = _zeros_like(weight.data)
        return {name: held[name] for name in kind.state}

    def _tensors(self, optimizer: Optimizer) -> dict[str, Tensor]:
        kind = kind_of(optimizer, self._steps[-1])
        held = self._held(optimizer)
        return {name: held[name] for name in ([] if kind is None else kind.state)}

    def _adopt_state(self, *_: object) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            self._num_before = int(self._held(optimizer).get("step", 0))

    def _held(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the table; Lightning moves what it loads to the device."""
        held: dict[str, Any] = optimizer.state[self.table.weight]
        with host_copies():
            for name, value in held.items():
                if isinstance(value, Tensor) and not is_host(value.untyped_storage()):
                    held[name] = value.cpu()
                    mark_as_host(held[name])
        return held

    def _look(self, *_: object) -> None:
        self.bring_up_to_date(None)

    def _stop(self) -> None:
        self.table.updates = None
        optimizer = self._optimizer()
        held = {} if optimizer is None else optimizer.state.get(self.table.weight, {})
        for name, value in held.items():
            if isinstance(value, Tensor):
                is_count = name == "step"  # on the host, usually
                held[name] = value if is_count else value.to(self.table.home)
                mark_as("optimizer_state", held[name])


@contextmanager
def tables_apart(optimizer: Optimizer) -> Iterator[None]:
    """Update the tables of an optimizer, and hide their gradients from it inside."""
    found_inf = getattr(optimizer, "found_inf", None)  # of loss scaling, for fused optimizers
    hidden = []
    for updates in _UPDATES.get(optimizer, []):
        weight = updates.table.weight
        if weight.grad is None:
            continue
        if found_inf is None or not found_inf.item():
            updates.step(optimizer)
        hidden.append((weight, weight.grad))
        weight.grad = None
    try:
        yield
    finally:
        for weight, grad in hidden:
            weight.grad = grad
    for updates in _UPDATES.get(optimizer, []):
        if updates.table.is_watched:
            updates.bring_up_to_date(None)


def wait_for_tables(optimizer: Optimizer) -> None:
    """Wait for the updates of an optimizer's tables that run."""
    for updates in _UPDATES.get(optimizer, []):
        updates.wait()


def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Update all parameters and return the result of the closure; replaces ``Optimizer.step``."""
    self._opt_called = True  # type: ignore[attr-defined] # for schedulers
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    with scaling_on_host(self), tables_apart(self):
        previous_method(self, "step", is_outer=True)()
    return loss


# Without this mark, schedulers would wrap the method in a closure, which cannot be copied.
step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
    """Reset gradients, which an update may still read; replaces ``Optimizer.zero_grad``."""
    if not set_to_none:
        wait_for_tables(self)
    previous_method(self, "zero_grad", is_outer=True)(set_to_none)


def _run(double: Optimizer, settings: Settings, rows: _Rows, grad: Tensor, num_steps: int) -> None:
    """Run a step of some rows, after so many steps, in place."""
    held: dict[str, Any] = dict(rows.state)
    if "exp_avg" in held:
        held["step"] = torch.tensor(float(num_steps), device="cpu")
    values = rows.values
    values.grad = grad
    double.param_groups = [{**settings, "params": [values]}]
    double.state[values] = held
    try:
        step_without_hooks(double)
    finally:
        values.grad, double.param_groups = None, []
        double.state.clear()


# The system gives pages of zeros when they are first used.
def _zeros_like(weight: Tensor) -> Tensor:
    if is_fake(weight):
        made = torch.zeros_like(weight)
    else:
        kind = np.float64 if weight.dtype is torch.float64 else np.float32
        made = torch.from_numpy(np.zeros(weight.shape, kind))
    mark_as_host(made)
    return made


# Of settings that a closed form takes from the last step, for all.
def _continues(settings: Settings, before: Settings) -> bool:
    names = {*settings, *before} - {"lr", "initial_lr", "betas", "weight_decay", "momentum"}
    same = all(settings.get(name) == before.get(name) for name in names)
    return same and bool(settings.get("momentum")) == bool(before.get("momentum"))


def _unknown(name: str) -> Problem:
    return Problem(
        f"`{name}` of a table on the host",
        "which steps its rows have missed is known for torch's AdamW, Adam and SGD only, without "
        "`dampening`, `capturable` and `differentiable`",
        "Use one of them, or keep the table on the device.",
    )
