"""Updates of bfloat16 weights as one kernel: the same as step by step, eager and compiled."""

import functools
import itertools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave import LowBitOptimizer, LowPrecisionWeights
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.techniques.low_precision_weights import fused_steps
from lightning_memsave.techniques.low_precision_weights.fused_steps import (
    Numbers,
    adam,
    adam_8bit,
    matches_eager,
    random_bits,
)
from tests.helpers import IN_CI

BF16 = torch.bfloat16
CPU = torch.device("cpu")
SHAPE = (37, 300)  # the last block of 8-bit state is shorter
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and not IN_CI, reason="needs a C++ compiler"
)


@pytest.fixture
def fused(monkeypatch):
    """Fused updates on a CPU too, and how many there were."""
    updates: list[Any] = []
    run = fused_steps.step_fused

    def step_fused(*args: Any, **kwargs: Any) -> None:
        updates.append(args[2])
        run(*args, **kwargs)

    monkeypatch.setattr(fused_steps, "on_cuda", lambda tensor: True)
    monkeypatch.setattr(fused_steps, "_works_on", lambda param: True)
    monkeypatch.setattr(
        "lightning_memsave.techniques.low_precision_weights.rounded_updates.step_fused", step_fused
    )
    return updates


def make(name: str, param: nn.Parameter, **settings: Any) -> Optimizer:
    settings = {"lr": 1e-2, "weight_decay": 0.1, **settings}
    cls = torch.optim.Adam if name.startswith("adam_") or name == "adam" else torch.optim.AdamW
    optimizer: Optimizer = cls([param], **settings)
    if "bit" in name:
        is_large = "8bit" in name
        if not is_large:  # another one must have 8 bits
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(200, 200))]})
        size = 2**12 if is_large else 20_000
        optimizer = LowBitOptimizer("8bit", min_8bit_size=size).apply(optimizer).target
    return optimizer


def train(name: str, rounding: str, steps: int = 4, **settings: Any) -> tuple[Tensor, Any]:
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(SHAPE, generator=generator).to(BF16))
    optimizer = make(name, param, **settings)
    LowPrecisionWeights(rounding=rounding).round_updates(optimizer)
    for _ in range(steps):
        param.grad = torch.randn(SHAPE, generator=generator).to(BF16)
        optimizer.step()
    return param.detach(), optimizer.state[param]


NAMES = ("adamw", "adam", "adamw_8bit", "adam_8bit", "adamw_32bit")


@pytest.mark.parametrize("name", NAMES)
def test_gives_what_the_optimizer_gives(name, fused):
    """Kahan summation keeps 16 bits more, in which both must agree."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_steps, "on_cuda", lambda tensor: False)
        expected, state = train(name, "kahan")
    assert not fused
    found, fused_state = train(name, "kahan")
    # torch's optimizers create their state in their own first step.
    assert len(fused) == (4 if "bit" in name else 3)
    # One code of 8-bit state may differ where a value lies between two: 1 % of its block's largest.
    tolerance = 3e-3 if "8bit" in name else 1e-5
    values = found.float() + fused_state["compensation"]
    others = expected.float() + state["compensation"]
    torch.testing.assert_close(values, others, rtol=tolerance, atol=tolerance)
    assert fused_state.keys() == state.keys()
    for key, value in state.items():
        other = fused_state[key]
        if key == "step":
            assert int(other) == int(value) == 4
        elif isinstance(value, Tensor) and value.dtype is torch.uint8:
            table = state[key.replace("state", "qmap")]
            differences = (table[value.int()] - table[other.int()]).abs()
            assert differences.max() < 0.02
            assert (differences > 0).float().mean() < 0.01
        elif isinstance(value, Tensor) and key != "compensation":
            torch.testing.assert_close(other, value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_rounds_to_one_of_both_neighbours_unbiased(name, fused):
    steps = {}
    for rounding in ("stochastic", "kahan"):
        param, state = train(name, rounding, steps=2, lr=1e-4, weight_decay=0.0)
        rest = state["compensation"].float() if rounding == "kahan" else 0.0
        steps[rounding] = param.double() + rest
    is_large = steps["kahan"].abs() > 0.01  # of the same magnitude in both steps
    exact, rounded = steps["kahan"][is_large], steps["stochastic"][is_large]
    largest = torch.maximum(exact.abs(), rounded.abs())
    spacing = torch.finfo(BF16).eps * 2.0 ** largest.log2().floor()
    error = (rounded - exact) / spacing
    assert error.abs().max() < 2.02  # two roundings
    # 11,000 numbers with a standard deviation of at most 0.5 for each of two roundings.
    assert error.mean().abs() < 4 * 0.71 / error.numel() ** 0.5
    assert error.std() > 0.05


def test_the_same_seed_gives_the_same_bits(fused):
    first, second = (train("adamw_8bit", "stochastic")[0] for _ in range(2))
    assert torch.equal(first, second)


def test_random_bits_are_uniform_and_independent():
    index = torch.arange(2**20)
    bits = {seed: random_bits(index, seed) for seed in (0, 1, 2**32 - 1)}
    for found in bits.values():
        assert (int(found.min()), int(found.max())) == (0, 2**16 - 1)
        counts = torch.bincount(found, minlength=2**16).double()
        # 16 in each of 65,536 on average: chi-squared / degrees of freedom is 1 +- 0.0055.
        assert ((counts - 16) ** 2 / 16).sum() / (2**16 - 1) == pytest.approx(1, abs=0.03)
        centred = found.double() - found.double().mean()
        for shift in (1, 2, 256):
            correlation = (centred[:-shift] * centred[shift:]).mean() / centred.square().mean()
            assert correlation.abs() < 5e-3
    correlation = torch.corrcoef(torch.stack([b.double() for b in bits.values()]))
    assert (correlation - torch.eye(3)).abs().max() < 5e-3
    # By index alone, in whatever part of a tensor.
    assert torch.equal(random_bits(index[1000:1010], 1), bits[1][1000:1010])


def test_what_is_exact_stays():
    special = [0.0, -0.0, 1.5, float("inf"), -float("inf"), float("nan")]
    param = torch.tensor(special * 100).to(BF16)
    before = param.clone()
    zeros = [torch.zeros(600), torch.ones(600)]
    adam(param, torch.zeros(600), zeros, None, Numbers(1.0, 0.0, 0.9, 0.99, 0.0, 1.0, 1.0, 3))
    assert torch.equal(param.isnan(), before.isnan())
    assert torch.equal(param.nan_to_num(), before.nan_to_num())


def test_what_it_does_not_know_goes_step_by_step(fused):
    settings: Any
    for settings in ({"amsgrad": True}, {"maximize": True}, {"lr": torch.tensor(0.1)}):
        train("adamw", "stochastic", **settings)
        assert not fused, settings
    param = nn.Parameter(torch.randn(8, 4, 3, 3).to(BF16, memory_format=torch.channels_last))
    for optimizer in (torch.optim.AdamW([param]), torch.optim.SGD([param], momentum=0.9)):
        LowPrecisionWeights().round_updates(optimizer)
        for _ in range(2):
            param.grad = torch.ones_like(param)
            optimizer.step()
    assert not fused


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("inductor_in_this_thread")
@pytest.mark.parametrize("function", [adam, pytest.param(adam_8bit, marks=pytest.mark.exhaustive)])
def test_compiled_is_eager(function):
    """With the compiler of torch for CPUs; on a GPU this comparison decides whether it is used."""
    assert matches_eager(function, CPU)


def test_one_graph_serves_all_sizes_and_steps():
    """After `recompile_limit` graphs torch would run the eager form, and need its memory."""
    torch._dynamo.reset()  # other tests have traced it with other types
    traced = torch.compile(adam, dynamic=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step, size in enumerate((1000, 2, 777, 2**20 + 1, 5), start=1):
            numbers = Numbers(1 - 1e-3 / step, 0.0, 0.9, 0.99, 0.1 / step, 0.3 * step, 1e-8, step)
            zeros = torch.zeros(size)
            traced(zeros.bfloat16(), zeros, [zeros, zeros.clone()], None, numbers)


def test_more_versions_than_torch_keeps_of_other_functions(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    traced = fused_steps.compiled.__wrapped__(adam)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for dtype, rest, coupled in itertools.product(
            (torch.float16, BF16, torch.float32), (None, BF16, torch.float32), (0.0, 0.1)
        ):
            zeros = torch.zeros(8)
            others = zeros.to(dtype), [zeros, zeros.clone()], rest and zeros.to(rest)
            traced(zeros.bfloat16(), *others, Numbers(1.0, coupled, 0.9, 0.99, 0.1, 0.3, 1e-8, 1))


def test_a_count_of_steps_in_a_tensor_is_read_once(fused, monkeypatch):
    """On a GPU, where fused optimizers have it, the host waits for it."""
    num_read, convert = 0, Tensor.__int__

    def read(tensor: Tensor) -> int:
        nonlocal num_read
        num_read += 1
        return convert(tensor)

    monkeypatch.setattr(Tensor, "__int__", read)
    param = nn.Parameter(torch.ones(SHAPE, dtype=BF16))
    optimizer = torch.optim.AdamW([param], fused=True)
    LowPrecisionWeights().round_updates(optimizer)

    def step() -> None:
        param.grad = torch.ones_like(param)
        optimizer.step()

    for _ in range(5):
        step()
    assert len(fused) == 4
    assert num_read == 1
    state = optimizer.state_dict()
    assert state["state"][0]["step"].item() == 5
    optimizer.state[param]["step"].fill_(9)  # what others write counts
    step()
    assert num_read == 2
    assert optimizer.state[param]["step"].item() == 10


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_does_not_wait_for_fused_updates_on_a_gpu():
    params = [nn.Parameter(torch.ones(SHAPE, dtype=BF16, device="cuda")) for _ in range(2)]
    optimizer = torch.optim.AdamW(params, fused=True)
    LowPrecisionWeights().round_updates(optimizer)

    def step() -> None:
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()

    for _ in range(2):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_compiled_form_that_is_wrong_or_fails_is_not_used(monkeypatch):
    def wrong(param: Tensor, *others: Any) -> None:
        adam(param, *others)
        param.mul_(1.1)

    def fails(*arguments: Any) -> None:
        raise RuntimeError("no compiler")

    for form in (wrong, fails):
        monkeypatch.setattr(fused_steps, "compiled", lambda function, form=form: form)
        assert not matches_eager(adam, CPU)
    monkeypatch.setattr(fused_steps, "compiled", lambda function: function)
    assert matches_eager(adam, CPU)


@pytest.mark.parametrize("works", [True, False])
def test_says_and_predicts_where_updates_need_more_memory(works, monkeypatch):
    monkeypatch.setattr(fused_steps, "_is_proven", lambda device: works)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    param = nn.Parameter(torch.zeros(4))
    said = fused_steps.describe_missing_kernel(torch.optim.AdamW([param]), CPU)
    assert ("more memory" in said) is not works
    assert not fused_steps.describe_missing_kernel(torch.optim.SGD([param]), CPU)
    with fake_tensors():
        assert fused_steps._works_on(torch.zeros(4)) is works


def test_the_module_can_be_reloaded():
    """In a process of its own: other modules hold functions of this one."""
    code = (
        "import importlib, torch\n"
        "from lightning_memsave.techniques.low_precision_weights import fused_steps\n"
        "importlib.reload(importlib.reload(fused_steps))\n"
        "param, grad = torch.zeros(2, 4, dtype=torch.bfloat16).add(1)\n"
        "update = torch.ops.lightning_memsave.rounded_adam\n"
        "state = [torch.zeros(4), torch.zeros(4)]\n"
        "update(param, grad, state, None, 1.0, 0.0, 0.9, 0.99, 0.5, 0.1, 0.0, 1)\n"
        "assert (param < 1).all()\n"
    )
    root = Path(fused_steps.__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
