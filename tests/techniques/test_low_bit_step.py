"""The step of 8-bit optimizers, without waits for the GPU."""

from typing import Any

import bitsandbytes
import pytest
import torch
from bitsandbytes.optim.optimizer import Optimizer8bit
from torch import nn

from benchmarks.low_bit_step.__main__ import main
from lightning_memsave import IncompatibleError, LowBitOptimizer
from lightning_memsave.techniques.optimizer_kinds import KIND_BY_WORD
from lightning_memsave.techniques.optimizer_step import plain_step

NUM_TENSORS = 6


class OnGPU(nn.Parameter):
    """A tensor on the CPU whose device says otherwise, for what decides by it."""

    device = torch.device("cuda", 0)


class Model(nn.Module):
    layers: Any

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [nn.Linear(80, 64, dtype=dtype) for _ in range(NUM_TENSORS // 2)]
        )


def give_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for i, param in enumerate(model.parameters()):
        param.grad = None
        if i != step % (NUM_TENSORS + 2):  # now and then one has none
            grad = torch.randn(param.shape, generator=generator)
            param.grad = grad.to(param.dtype)


def optimizer_for(model, name="8bit", make=torch.optim.AdamW):
    layers = [list(layer.parameters()) for layer in model.layers]
    plain = make(
        [{"params": layers[0]}, {"params": layers[1] + layers[2], "lr": 3e-3, "weight_decay": 0.2}]
    )
    return LowBitOptimizer(name, module=model).apply(plain).target


def tensors_of(model, optimizer):
    states = [optimizer.state[p] for p in model.parameters()]
    return [*model.parameters(), *(t for s in states for t in s.values() if torch.is_tensor(t))]


class Stream:
    """A stream that notes which other it waits for."""

    def __init__(self, name, order):
        self.name, self.order = name, order

    def wait_stream(self, other):
        self.order.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def order():
    """What happens on streams, in order."""
    return []


@pytest.fixture
def waits(monkeypatch, order):
    """Counts the waits of the host for the GPU."""
    found = []
    default = Stream("default", order)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: found.append(device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: default)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: default)
    # State and gradients are where they are.
    monkeypatch.setattr(bitsandbytes.functional, "is_on_gpu", lambda tensors: True)
    return found


def on_gpu(model, optimizer):
    """Make the first step, which makes the state, and let parameters look as if on a GPU."""
    give_gradients(model, NUM_TENSORS)
    optimizer.step()
    for param in model.parameters():
        param.__class__ = OnGPU
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("word", sorted(KIND_BY_WORD.keys() - {"muon"}))  # which is torch's
def test_same_bits_as_bitsandbytes_own_step(word, dtype):
    settings: tuple[Any, ...] = (f"{word}_8bit",)
    if word == "rmsprop":  # cannot be asked for by name
        settings = ("8bit", torch.optim.RMSprop)
    ours, theirs = Model(dtype), Model(dtype)
    optimizers = optimizer_for(ours, *settings), optimizer_for(theirs, *settings)
    for step in range(6):
        for model in (ours, theirs):
            give_gradients(model, step)
        optimizers[0].step()
        Optimizer8bit.step(optimizers[1])
        pairs = zip(tensors_of(ours, optimizers[0]), tensors_of(theirs, optimizers[1]), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert any(t.dtype is torch.uint8 for t in tensors_of(ours, optimizers[0]))


def test_the_host_does_not_wait(waits, order):
    ours, theirs = Model(), Model()
    optimizers = [on_gpu(model, optimizer_for(model)) for model in (ours, theirs)]
    for step in range(3):
        for model in (ours, theirs):
            give_gradients(model, step)
        optimizers[0].step()
        assert waits == []
        Optimizer8bit.step(optimizers[1])
        assert len(waits) == NUM_TENSORS - (step < NUM_TENSORS), "bitsandbytes waits after each"
        waits.clear()
    assert order == []
    for param in ours.parameters():
        plain_step(optimizers[0], [param])
    assert waits == []
    on_cpu = Model()
    give_gradients(on_cpu, 0)
    optimizer_for(on_cpu).step()
    assert waits == []
    for param in theirs.parameters():
        plain_step(optimizers[1], [param])
    pairs = zip(tensors_of(ours, optimizers[0]), tensors_of(theirs, optimizers[1]), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_another_stream_and_the_kernels_are_put_in_order(waits, order, monkeypatch):
    """bitsandbytes' kernels run on the default stream: gradients must be ready before them."""
    own = Stream("own", order)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: own)
    model = Model()
    optimizer = on_gpu(model, optimizer_for(model))
    update = optimizer.update_step
    monkeypatch.setattr(
        optimizer, "update_step", lambda *args: (order.append("update"), update(*args))
    )
    give_gradients(model, NUM_TENSORS)
    optimizer.step()
    once = ["default waits for own", "update", "own waits for default"]
    assert order == once * NUM_TENSORS
    assert waits == []


def test_a_gradient_of_another_type_is_refused():
    """Kernels would read the parameter as if it had the gradient's type."""
    param = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    optimizer: Any = LowBitOptimizer().apply(torch.optim.AdamW([param])).target
    param.grad_dtype = None
    param.grad = torch.ones(64, 64)
    with pytest.raises(IncompatibleError, match=r"torch\.bfloat16 and its gradient torch\.float32"):
        optimizer.step()
    assert not param.any()


def test_paged_state_is_waited_for(waits):
    model = Model()
    optimizer = on_gpu(model, optimizer_for(model))
    optimizer.is_paged = True
    optimizer.prefetch_state = lambda param: None
    give_gradients(model, NUM_TENSORS)
    optimizer.step()
    assert len(waits) == 1
    plain_step(optimizer, [model.layers[0].weight])
    assert len(waits) == 2, "the host may read it at once"


def test_new_pages_are_waited_for(waits, monkeypatch):
    model = Model()
    optimizer = on_gpu(model, optimizer_for(model))
    optimizer.is_paged = True
    optimizer.prefetch_state = lambda param: None
    states = {param: dict(state) for param, state in optimizer.state.items()}
    optimizer.init_state = lambda group, p, i, j: optimizer.state[p].update(states[p])
    optimizer.state.clear()
    give_gradients(model, NUM_TENSORS)
    optimizer.step()
    assert len(waits) == NUM_TENSORS + 1


def test_prefetches_before_each_update(monkeypatch):
    model = Model()
    optimizer = optimizer_for(model)
    order = []

    def noting(name):
        run = getattr(optimizer, name)

        def note(*args):
            order.append((name, next(id(a) for a in args if isinstance(a, nn.Parameter))))
            return run(*args)

        return note

    for name in ("prefetch_state", "update_step"):
        monkeypatch.setattr(optimizer, name, noting(name))
    give_gradients(model, NUM_TENSORS)
    optimizer.step()
    ids = [id(p) for p in model.parameters()]
    names = ("prefetch_state", "update_step")
    assert order == [(name, key) for key in ids for name in names]


def test_benchmark_runs_dry(tmp_path, capsys):
    main(["--dry-run", "--results", str(tmp_path)])
    *_, row = (line for line in capsys.readouterr().out.splitlines() if line.startswith("|"))
    assert row.split("|")[-2].strip() == "yes", "the same bits"
    assert torch.cuda.is_available() == any(tmp_path.iterdir())
