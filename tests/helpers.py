"""Training in plain PyTorch, to compare with and without a technique."""

import contextlib
import copy
import ctypes
import dataclasses
import gc
import inspect
import itertools
import os
import resource
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave.core import clock
from lightning_memsave.core.technique import Handle, Technique
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.low_precision_weights.technique import LowPrecisionWeights
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.techniques.named_optimizer.technique import NamedOptimizer
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.optimizer_in_backward.technique import OptimizerInBackward

IN_CI = "MEMSAVE_CI" in os.environ
"""Whether `.ci/run` runs the tests, which installs the programs that they need."""
OF_OPTIMIZER = (LowBitOptimizer, NamedOptimizer, OptimizerInBackward)

# What fits of small models do not need, by the name of the fixture that a test asks for it with.
OTHER_DEFAULTS: dict[str, dict[str, Any]] = {
    "no_prediction": {
        "lightning_memsave.callbacks.settings.arguments.TIME_LIMIT_S": None,
        "lightning_memsave.callbacks.oom_observer.PREDICT_LIMIT_S": None,
    },
    "any_saving_counts": {"lightning_memsave.callbacks.settings.setting.SMALLEST_SAVING_BYTES": 0},
}

MakeOptimizer = Callable[[nn.Module], Optimizer]


@dataclass
class Run:
    """What a short training gave: losses, gradients of each step, the final state."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def set_other_defaults(fixture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OTHER_DEFAULTS[fixture].items():
        monkeypatch.setattr(name, value)


def in_pairs(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few of all combinations of values, in which each two values are together."""
    cases = list(itertools.product(*values))
    # Values as their places: not all have a hash.
    places = [list(enumerate(c)) for c in itertools.product(*(range(len(v)) for v in values))]
    pairs_of = [{*itertools.combinations(place, 2)} for place in places]
    missing, chosen = set().union(*pairs_of), list[int]()
    while missing:
        best = max(range(len(cases)), key=lambda number: len(pairs_of[number] & missing))
        chosen.append(best)
        missing -= pairs_of[best]
    return [cases[number] for number in sorted(chosen)]


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, **options)


# `torch.manual_seed` writes down its whole traceback for each GPU library that is not there, which
# takes a millisecond.
seed_torch = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


def seed_all(seed: int) -> None:
    """Seed torch's random numbers, and NumPy's, with which transformers masks sound."""
    seed_torch(seed)
    np.random.seed(seed)


Step = Callable[[Any], Tensor]


def step_of(model: nn.Module) -> Step:
    """Forward and backward, as a plain loop has them."""

    def step(batch: Any) -> Tensor:
        loss: Tensor = model(batch)
        loss.backward()
        return loss.detach()

    return step


def in_parts(model: nn.Module, sizes: tuple[int, ...]) -> Step:
    """A loop over parts of a batch as one writes it by hand."""

    def forward_and_backward(batch: Any) -> Tensor:
        total = torch.zeros(())
        for part in batch.split(list(sizes)):
            loss = model(part) * (len(part) / len(batch))
            loss.backward()
            total = total + loss.detach()
        return total.to(loss.dtype)

    return forward_and_backward


class InAutocast(nn.Module):
    """A model that computes in bfloat16 where that is safe."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Tensor:
        with torch.autocast(batch.device.type, torch.bfloat16):
            loss: Tensor = self.model(batch)
        return loss


def autocast_step_of(model: nn.Module) -> Step:
    """As a plain loop in autocast, in which attention on CUDA draws the masks of its kernel."""
    return step_of(InAutocast(model))


def switch_on(
    technique: Technique[Any] | None, model: nn.Module, optimizer: Optimizer
) -> tuple[Step, Optimizer, Handle[Any]]:
    """Apply a technique to what it is for; give the step and the optimizer to use from now on."""
    handle: Handle[Any]
    if technique is None:
        return step_of(model), optimizer, Handle(model, ())
    if isinstance(technique, OF_OPTIMIZER):
        handle = technique.apply(optimizer)
        return step_of(model), handle.target, handle
    if isinstance(technique, MicroBatching):
        handle = technique.apply(model)
        return handle.target, optimizer, handle
    handle = technique.apply(model)
    if isinstance(technique, Offloading):
        undo = (handle.undo, technique.update_in_background(optimizer).undo)
        return step_of(model), optimizer, _with_undo(handle, *undo)
    if isinstance(technique, LowPrecisionWeights):
        rounded = technique.round_updates(optimizer)
        # As micro-batches ask for it; one batch at once gives the same.
        sums = technique.sum_gradients_in_fp32(model)
        handle = _with_undo(handle, handle.undo, rounded.undo, sums.undo)
        return step_of(InAutocast(model)), optimizer, handle
    return step_of(model), optimizer, handle


def _with_undo(handle: Handle[Any], *undo: Callable[[], None]) -> Handle[Any]:
    return Handle(handle.target, handle.changes, handle.skipped, undo, handle.summary)


def set_clock(monkeypatch: Any, now_s: Callable[[], float]) -> None:
    """Let time limits be measured with another clock than the processor's."""
    monkeypatch.setattr(clock, "time", SimpleNamespace(thread_time=now_s))


def gradients_of(model: nn.Module) -> list[Tensor]:
    """The gradients of a model's parameters, in their order."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def switch_all_on(
    techniques: Sequence[Technique[Any]], model: nn.Module, optimizer: Optimizer
) -> tuple[Step, Optimizer, Callable[[], None]]:
    """Apply several techniques, in the order of the registry; give also what undoes them."""
    whole: nn.Module = model
    run_step, undo = step_of(model), []
    for technique in techniques:
        is_in_parts = isinstance(technique, MicroBatching)
        step, optimizer, handle = switch_on(technique, whole if is_in_parts else model, optimizer)
        if isinstance(technique, LowPrecisionWeights):
            whole = InAutocast(model)
            run_step = step_of(whole)
        if is_in_parts:
            run_step = step
        undo.append(handle.undo)

    def take_back() -> None:
        for function in reversed(undo):
            function()

    return run_step, optimizer, take_back


def train(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    technique: Technique[Any] | Sequence[Technique[Any]] | None = None,
    *,
    steps: int = 3,
    make_optimizer: MakeOptimizer = adamw,
    run_step_of: Callable[[nn.Module], Step] | None = None,
    seed: int = 7,
) -> Run:
    """Train a copy of a model; it returns its loss. The techniques are undone afterwards."""
    model = copy.deepcopy(model).train()
    techniques = technique if isinstance(technique, Sequence) else [technique]
    chosen = [for_model(each, model) for each in techniques if each is not None]
    run_step, optimizer, undo = switch_all_on(chosen, model, make_optimizer(model))
    if run_step_of is not None:
        run_step = run_step_of(model)
    run = Run()
    seed_all(seed)
    for step in range(steps):
        optimizer.zero_grad()
        run.losses.append(_copy(run_step(make_batch(step))))
        run.gradients.append(
            {n: _copy(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        )
        optimizer.step()
    undo()
    run.state = {name: _copy(tensor) for name, tensor in model.state_dict().items()}
    return run


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)  # offloading keeps gradients there


def for_model(technique: Technique[Any], model: nn.Module) -> Technique[Any]:
    """Tell a technique whose parameters and modules it works with, where it asks for that."""
    if isinstance(technique, LowBitOptimizer | MicroBatching | NamedOptimizer):
        return dataclasses.replace(technique, module=model)
    return technique


def assert_bitwise_equal(a: Run, b: Run) -> None:
    for step, (x, y) in enumerate(zip(a.losses, b.losses, strict=True)):
        assert torch.equal(x, y), f"loss of step {step}: {x} and {y}"
    for step, (mine, theirs) in enumerate(zip(a.gradients, b.gradients, strict=True)):
        if mine and theirs:  # otherwise used in backward; the state shows what they were
            assert_same(mine, theirs, where=f"gradients of step {step}")
    assert_same(a.state, b.state, where="state after training")


def assert_same(one: Any, other: Any, *, where: str = "") -> None:
    """Compare tensors bit for bit, wherever they are: in containers, modules and optimizers."""
    if isinstance(one, nn.Module | Optimizer):
        assert_same(one.state_dict(), other.state_dict(), where=where)
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            assert_same(value, other[key], where=f"{where} {key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (x, y) in enumerate(zip(one, other, strict=True)):
            assert_same(x, y, where=f"{where} {index}")
    elif isinstance(one, Tensor):
        assert one.dtype is other.dtype, where
        assert torch.equal(one, other), where
    else:
        assert one == other, where


def clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors of a state, which may be those of a model."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything of a module that a technique must leave as it was."""
    return {
        name: (
            module,
            type(module),
            {k: v for k, v in vars(module).items() if not k.startswith("_")},
            sorted(vars(module)),
            [(n, id(p)) for n, p in module.named_parameters(recurse=False)],
            [(n, id(b)) for n, b in module.named_buffers(recurse=False)],
            len(module._forward_hooks) + len(module._forward_pre_hooks),
            len(module._backward_hooks) + len(module._backward_pre_hooks),
        )
        for name, module in model.named_modules()
    }


def saved_bytes(compute_loss: Callable[[], Tensor]) -> int:
    """Bytes of distinct storages that the forward pass saves for backward, parameters included."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compute_loss()
    assert loss.requires_grad
    return sum(storages.values())


def names_of_cache() -> list[str]:
    """Names under which Hugging Face's models take a key-value cache; 5.24 renamed it."""
    from transformers import GPT2Model

    renamed = "cache" in inspect.signature(GPT2Model.forward).parameters
    return ["past_key_values", "cache"] if renamed else ["past_key_values"]


@contextlib.contextmanager
def nothing_waits() -> Iterator[None]:
    """Raise an error where the host waits for the GPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class ResidentGrowth:
    """By how many bytes the resident memory of this process grows inside, looked at often."""

    def __enter__(self) -> "ResidentGrowth":
        self._process = psutil.Process()
        self._start_bytes = self._process.memory_info().rss
        self.num_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(0.002)
            growth = self._process.memory_info().rss - self._start_bytes
            self.num_bytes = max(self.num_bytes, growth)


@contextlib.contextmanager
def full_disk(room_bytes: int = 0) -> Iterator[None]:
    """Let each file grow to so many bytes and no further: "File too large", as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def return_free_memory() -> None:
    """Give back to the system what was freed: with memory to spare a process does not grow."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
