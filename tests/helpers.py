"""Training in plain PyTorch, to compare with and without a technique."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave.core.technique import Handle, Technique
from lightning_memsave.techniques.low_bit_optimizer import LowBitOptimizer
from lightning_memsave.techniques.micro_batching import MicroBatching

MakeOptimizer = Callable[[nn.Module], Optimizer]


@dataclass
class Run:
    """What a short training gave: losses, gradients of each step, the final state."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def adamw(model: nn.Module) -> Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3)


Step = Callable[[Any], Tensor]


def step_of(model: nn.Module) -> Step:
    """Forward and backward, as a plain loop has them."""

    def step(batch: Any) -> Tensor:
        loss: Tensor = model(batch)
        loss.backward()
        return loss.detach()

    return step


def switch_on(
    technique: Technique[Any] | None, model: nn.Module, optimizer: Optimizer
) -> tuple[Step, Optimizer, Handle[Any]]:
    """Apply a technique to what it is for; give the step and the optimizer to use from now on."""
    handle: Handle[Any]
    if technique is None:
        return step_of(model), optimizer, Handle(model, ())
    if isinstance(technique, LowBitOptimizer):
        handle = technique.apply(optimizer)
        return step_of(model), handle.target, handle
    if isinstance(technique, MicroBatching):
        handle = technique.apply(model)
        return handle.target, optimizer, handle
    return step_of(model), optimizer, technique.apply(model)


def train(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    technique: Technique[Any] | None = None,
    *,
    steps: int = 3,
    make_optimizer: MakeOptimizer = adamw,
    run_step_of: Callable[[nn.Module], Step] | None = None,
    seed: int = 7,
) -> Run:
    """Train a copy of a model; it returns its loss. The technique is undone afterwards."""
    model = copy.deepcopy(model).train()
    run_step, optimizer, handle = switch_on(technique, model, make_optimizer(model))
    if run_step_of is not None:
        run_step = run_step_of(model)
    run = Run()
    torch.manual_seed(seed)
    for step in range(steps):
        optimizer.zero_grad()
        run.losses.append(run_step(make_batch(step)).clone())
        run.gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
        optimizer.step()
    handle.undo()
    run.state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return run


def assert_bitwise_equal(a: Run, b: Run) -> None:
    for step, (x, y) in enumerate(zip(a.losses, b.losses, strict=True)):
        assert torch.equal(x, y), f"loss of step {step}: {x} and {y}"
    for step, (mine, theirs) in enumerate(zip(a.gradients, b.gradients, strict=True)):
        assert mine.keys() == theirs.keys()
        different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
        assert not different, f"gradients of step {step}: {different}"
    assert a.state.keys() == b.state.keys()
    different = [name for name in a.state if not torch.equal(a.state[name], b.state[name])]
    assert not different, f"state after training: {different}"


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
