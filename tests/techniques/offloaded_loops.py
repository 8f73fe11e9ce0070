"""Loops with everything that training has, with and without offloaded weights."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_memsave import ActivationCheckpointing, ChunkedCrossEntropy, LowBitOptimizer
from lightning_memsave.core.memory import HOST, category_in_context, is_host, mark_as_host
from lightning_memsave.measure.live_tensors import in_backward
from lightning_memsave.techniques.low_precision_weights.technique import LowPrecisionWeights
from lightning_memsave.techniques.offloading.copies import Copies
from lightning_memsave.techniques.offloading.gradients import Gradients
from lightning_memsave.techniques.offloading.handle import OffloadingHandle
from lightning_memsave.techniques.offloading.residence import Residence
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.optimizer_in_backward.technique import OptimizerInBackward
from tests.cases import make_batch, make_model
from tests.helpers import InAutocast, assert_same, clones


class Offloaded:
    """A model of the contract suite with something of it on the host, and its optimizer.

    With ``what=None`` the same without offloading, to compare with.
    """

    def __init__(
        self,
        name: str = "dropout",
        what: str | None = "optimizer",
        *,
        optimizer: str = "AdamW",
        chunks: bool = False,
        rounding: str | None = None,
        in_backward: bool | OptimizerInBackward = False,
        in_background: bool = True,
        recomputes: bool = False,
        device: str = "cpu",
        **settings: Any,
    ) -> None:
        self.device = device
        self.model = make_model(name).train().to(device)
        if chunks:
            ChunkedCrossEntropy(heads="head", chunk_size=2).apply(self.model)
        if recomputes:
            ActivationCheckpointing().apply(self.model)
        self._undo: list[Callable[[], None]] = []
        if what is not None:
            technique = Offloading(what, **settings)
            self.handle: OffloadingHandle = technique.apply(self.model)
            self._undo.append(self.handle.undo)
        if rounding is not None:
            LowPrecisionWeights(rounding).apply(self.model)
        self.whole = self.model if rounding is None else InAutocast(self.model)
        self.optimizer = optimizer_of(self.model, optimizer)
        if in_backward:
            chosen = OptimizerInBackward() if in_backward is True else in_backward
            self.in_backward = chosen.apply(self.optimizer)
        if in_background and what not in (None, "activations"):
            self.updates = technique.update_in_background(self.optimizer)
            self._undo.append(self.updates.undo)

    @property
    def residence(self) -> Residence:
        assert self.handle.residence is not None, "there are weights"
        return self.handle.residence

    def step(self, number: int = 0, num_parts: int = 1) -> Tensor:
        """A step with the dropout masks of its number; give the last loss."""
        for part in range(num_parts):
            torch.manual_seed(number)
            loss: Tensor = self.whole(make_batch(number + 10 * part).to(self.device))
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach().cpu()

    def close(self) -> None:
        for function in reversed(self._undo):
            function()


class HostOperators(TorchDispatchMode):
    """Finds operators, other than copies and work of the host, that compute with host memory.

    Tensors made on the host's behalf are marked, as LiveTensors counts them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mixed: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.ndim > 0]
        kinds = {is_host(t.untyped_storage()) for t in found}
        is_copy = func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._to_copy)
        # Without a mode autograd adds in place.
        is_sum = func is torch.ops.aten.add.Tensor and in_backward()
        if len(kinds) > 1 and not is_copy:
            self.mixed.append(str(func))
        if kinds == {True} and not (is_copy or is_sum) and category_in_context() != HOST:
            made = str(func)
            if not any(view in made for view in ("slice", "detach", "view", "alias", "empty")):
                self.mixed.append(made)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            is_made = category_in_context() == HOST or (is_sum and kinds == {True})
            if is_made and isinstance(tensor, Tensor):
                mark_as_host(tensor)
        return result


def assert_bitwise(ours: Offloaded, theirs: Offloaded, num_steps: int = 4) -> None:
    """Train both, and compare all that they have."""
    for number in range(num_steps):
        assert torch.equal(ours.step(number), theirs.step(number))
    assert_same(ours.model, theirs.model)
    assert_same(ours.optimizer, theirs.optimizer)


class Own(torch.optim.AdamW):
    """Nobody knows whether it couples parameters."""


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-3),
    "8bit": lambda params: LowBitOptimizer().apply(torch.optim.AdamW(params, lr=1e-3)).target,
    "unknown": lambda params: Own(params, lr=1e-3, weight_decay=0.1),
    "two groups": lambda params: torch.optim.AdamW(
        [{"params": params[::2], "weight_decay": 0.0}, {"params": params[1::2]}], lr=1e-3
    ),
}
LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped by norm": {"norm": 0.1},
    "clipped by value": {"value": 1e-3},
    "accumulated": {"accumulated": 4, "norm": 0.1},
    "scaled": {"scales": True, "norm": 0.1},
    "two batches in a loss": {"batches": 2, "accumulated": 2},
    "on gradients that somebody has set": {"given": 0.5},
    "reset after forward": {"resets_late": True},
}


def run_loop(model: nn.Module, optimizer: torch.optim.Optimizer, **how: Any) -> list[Any]:
    """Four steps of a loop with everything; give losses, norms and rates."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=how.get("scales", False))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        *(optimizer, 1e-2),
        total_steps=8,
        cycle_momentum=not {"momentum", "betas"}.isdisjoint(optimizer.defaults),
    )
    found: list[Any] = []
    for number in range(4):
        torch.manual_seed(number)
        for param in model.parameters() if "given" in how else ():
            param.grad = torch.full(param.shape, how["given"])  # reads no weights
        for part in range(how.get("accumulated", 1)):
            first = 100 * number + 10 * part
            losses = [model(make_batch(first + index)) for index in range(how.get("batches", 1))]
            loss = torch.stack(losses).sum()
            if how.get("resets_late"):  # as Lightning does
                optimizer.zero_grad()
            scaler.scale(loss).backward()
            found.append(loss.item())
        scaler.unscale_(optimizer)
        if "norm" in how:
            found.append(nn.utils.clip_grad_norm_(model.parameters(), how["norm"]).item())
        if "value" in how:
            nn.utils.clip_grad_value_(model.parameters(), how["value"])
        scaler.step(optimizer)
        scaler.update()
        if not how.get("resets_late"):
            optimizer.zero_grad()
        scheduler.step()
        if number == 1:
            with torch.inference_mode():
                found.append(model.eval()(make_batch(99)).item())
            model.train()
    return [*found, scheduler.get_last_lr()]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, loop: str) -> list[Any]:
    """Losses, norms and rates of a loop, weights, and the optimizer's state."""
    found = run_loop(model, optimizer, **LOOPS[loop])
    return [found, clones(model.state_dict()), optimizer.state_dict()]


@functools.cache
def trained_without(name: str, loop: str, kind: str) -> list[Any]:
    """What a loop gives without offloading."""
    model = make_model(name).train()
    return trained(model, optimizer_of(model, kind), loop)


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """One of `OPTIMIZERS` for what a model trains."""
    return OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad])


def count_moves(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count copies of weights to the device, and gradients that come to the host."""
    calls: Counter[str] = Counter()
    for owner, name in ((Copies, "to_device"), (Gradients, "receive")):
        original = getattr(owner, name)

        def count(*args: Any, name: str = name, original: Any = original, **how: Any) -> Any:
            calls[name] += 1
            return original(*args, **how)

        monkeypatch.setattr(owner, name, count)
    return calls
