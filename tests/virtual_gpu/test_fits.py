"""Fits of a Trainer on CUDA: with each setting as exactly as it declares, beside a plain fit."""

import copy
import functools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from benchmarks.faults._modules import HALF, MAX_LOSS, SETTINGS, run
from lightning_memsave import MemSaveCallback
from lightning_memsave.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.techniques.offloading.technique import Offloading
from tests.callbacks.lit import fit, loader, make_lit
from tests.callbacks.test_micro_batching import wide_lit
from tests.cases import MODELS, WIDTH, Model
from tests.virtual_gpu import counters
from tests.virtual_gpu.processes import run_python

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*chunked_cross_entropy. saves nothing"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes"),
]

QUIET: dict[str, Any] = {"preset": "off", "predict": False, "report": False}


class OwnCheckpointing(Model):
    """Its author recomputes the blocks already."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def has_bf16() -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False)


def build(name: str) -> nn.Module:
    """On the CPU: the Trainer moves it to the GPU of the fit."""
    torch.manual_seed(1)
    return (MODELS | {"own checkpointing": OwnCheckpointing})[name]()


@dataclass(frozen=True)
class Case:
    """Settings of the callback and of the Trainer; what the losses may differ by.

    ``like`` is the precision that a preset chooses where the card has it: a GPU's kernels draw
    other dropout masks for it.
    """

    settings: dict[str, Any]
    trainer: dict[str, Any] = field(default_factory=dict)
    model: str = "dropout"
    tolerance: float = 0.0
    num_workers: int = 0
    is_fused: bool = False
    like: str | None = None

    def reference(self) -> Any:
        trainer = self.trainer | ({"precision": self.like} if self.like and has_bf16() else {})
        options = (tuple(sorted(trainer.items())), self.num_workers, self.is_fused)
        return plain_fit(self.model, *options)


def offload(what: str, **more: Any) -> dict[str, Any]:
    return {"offload": Offloading(what, min_bytes=1)} | more


def offloaded(what: str, trainer: dict[str, Any] | None = None, **more: Any) -> Case:
    """The host updates with the CPU's fused kernels: so does the plain fit, for equal bits."""
    fields = {name: more.pop(name) for name in ("model", "num_workers") if name in more}
    return Case(offload(what, **more), trainer or {}, is_fused=True, **fields)


ALL = "optimizer+parameters+activations"
HEAD: dict[str, Any] = {
    "offload": Offloading("parameters+embeddings", min_table_bytes=2**12),
    "chunked_cross_entropy": ChunkedCrossEntropy(heads="model.head"),
}
CASES = {
    "checkpointing": Case({"activation_checkpointing": "all"}),
    "nested": Case({"activation_checkpointing": "nested"}),
    "checkpointing in 16 bits": Case(
        {"activation_checkpointing": "all"}, {"precision": "16-mixed"}
    ),
    "in backward": Case({"optimizer_in_backward": True}),
    "in backward, clipped": Case({"optimizer_in_backward": True}, {"gradient_clip_val": 1e3}),
    "whole batches": Case({"micro_batch_size": MicroBatching("halve")}),
    "micro-batches": Case({"micro_batch_size": 2}, model="unrepeated", tolerance=1e-5),
    "early release": Case({"precision": "32-true"}),
    "preset bitwise": Case({"preset": "bitwise"}),
    "preset bitwise, accumulated": Case({"preset": "bitwise"}, {"accumulate_grad_batches": 2}),
    "chunked": Case(
        {"chunked_cross_entropy": ChunkedCrossEntropy(heads="model.head")},
        model="classifier",
        tolerance=1e-5,
    ),
    "8-bit": Case({"optimizer": "8bit"}, tolerance=0.05),
    "paged": Case({"optimizer": "paged_8bit"}, tolerance=0.05),
    "preset classic": Case({"preset": "classic"}, tolerance=0.05, like=HALF),
    "defaults": Case({"preset": None}, tolerance=0.05, like=HALF),
    "preset single_gpu": Case({"preset": "single_gpu"}, tolerance=0.05, like=HALF),
    "preset single_gpu, clipped": Case(
        {"preset": "single_gpu"}, {"gradient_clip_val": 1e3}, tolerance=0.05, like=HALF
    ),
    "preset offload": Case({"preset": "offload"}, tolerance=0.05, like=HALF),
    "offloaded optimizer": offloaded("optimizer"),
    "offloaded optimizer, clipped": offloaded("optimizer", {"gradient_clip_val": 0.1}),
    "offloaded optimizer, accumulated": offloaded("optimizer", {"accumulate_grad_batches": 2}),
    "offloaded optimizer in 16 bits": offloaded("optimizer", {"precision": "16-mixed"}),
    "offloaded parameters": offloaded("parameters"),
    "offloaded activations": offloaded("activations", activation_checkpointing="all"),
    "all offloaded": offloaded(ALL, activation_checkpointing="all"),
    "all offloaded, in backward": offloaded(
        ALL, activation_checkpointing="all", optimizer_in_backward=True
    ),
    "all offloaded in 16 bits": offloaded(ALL, {"precision": "16-mixed"}),
    "all offloaded beside workers": offloaded(ALL, num_workers=4),
    "all offloaded, own checkpointing": offloaded(ALL, model="own checkpointing"),
    "offloaded tables": Case(
        {"offload": Offloading("parameters+embeddings", min_table_bytes=2**12)},
        model="classifier",
        is_fused=True,
    ),
    "offloaded head": Case(HEAD, model="classifier", tolerance=1e-5, is_fused=True),
    "offloaded head in 16 bits": Case(
        HEAD, {"precision": "16-mixed"}, model="classifier", tolerance=1e-3, is_fused=True
    ),
    "offloaded head, in backward": Case(
        HEAD | {"optimizer_in_backward": True},
        {"accumulate_grad_batches": 2},
        model="classifier",
        tolerance=1e-5,
        is_fused=True,
    ),
}


def run_fit(case: Case, *callbacks: Any) -> Any:
    lit = make_lit(model=build(case.model))
    cls = type(lit)
    cls.configure_optimizers = lambda self: torch.optim.AdamW(
        self.parameters(), lr=1e-3, fused=True if case.is_fused else None
    )
    data = loader()
    cls.train_dataloader = lambda self: torch.utils.data.DataLoader(
        data.dataset, batch_size=4, num_workers=case.num_workers
    )
    settings: dict[str, Any] = {"accelerator": "gpu", "limit_val_batches": 0} | case.trainer
    losses, state, trainer_ = fit(lit, *callbacks, **settings)
    return losses, {name: tensor.cpu() for name, tensor in state.items()}, trainer_


@functools.cache
def plain_fit(
    model: str, trainer: tuple[tuple[str, Any], ...], num_workers: int, is_fused: bool
) -> Any:
    case = Case({}, dict(trainer), model, num_workers=num_workers, is_fused=is_fused)
    return run_fit(case)[:2]


def check(name: str, **trainer: Any) -> None:
    """Compare a fit with a plain one on the same GPU."""
    case = replace(CASES[name], trainer=CASES[name].trainer | trainer)
    callback = MemSaveCallback(**QUIET | case.settings)
    losses, state, _ = run_fit(case, callback)
    expected, expected_state = case.reference()
    assert any(row.status == "on" for row in callback.rows), callback.rows
    assert len(losses) == 6
    # Only on the virtual GPU is the host's update the same kernel as that of the device.
    is_rounded = case.is_fused and not counters.is_on
    tolerance = case.tolerance or (1e-4 if is_rounded else 0.0)
    if tolerance:
        assert losses == pytest.approx(expected, rel=tolerance)
        assert state.keys() == expected_state.keys()
        return
    assert losses == expected
    assert [k for k, v in expected_state.items() if not torch.equal(v, state[k])] == []


@pytest.mark.real_gpu_too
@pytest.mark.parametrize("name", CASES)
def test_trains_as_exactly_as_it_declares(name):
    check(name)


@pytest.mark.filterwarnings("ignore:.*ut of memory")
def test_goes_on_in_micro_batches_where_the_gpu_is_full():
    """Another job takes the memory; the driver fails, not a limit of torch's allocator."""
    callback = MemSaveCallback(**QUIET | {"micro_batch_size": MicroBatching("halve")})
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    counters.set_memory(total - free + 2**28)
    try:
        shrunk = fit(wide_lit(), callback, accelerator="gpu", limit_val_batches=0)
    finally:
        counters.set_memory(total)
    size = callback._micro_batches.size
    assert size in {8192, 4096, 2048}
    fixed = MemSaveCallback(**QUIET | {"micro_batch_size": size})
    parts = fit(wide_lit(), fixed, accelerator="gpu", limit_val_batches=0)
    assert shrunk[0] == pytest.approx(parts[0], rel=1e-5)


ON_THE_SECOND = ["preset bitwise", "preset single_gpu", "all offloaded, in backward", "8-bit"]


def test_on_the_second_of_two_gpus():
    """The first one is left alone: nothing is allocated there."""
    found = run_python(
        f"""
        import json, torch
        from tests.virtual_gpu import test_fits
        for name in {ON_THE_SECOND}:
            test_fits.check(name, devices="1,")
        print(json.dumps([torch.cuda.max_memory_reserved(i) for i in (0, 1)]))
        """,
        VGPU_DEVICES="2",
    )
    assert found[1] > 0
    assert found[0] == 0


@pytest.mark.real_gpu_too
@pytest.mark.parametrize("name", ["offload", "offload parameters"])
def test_generates_in_validation_with_weights_on_the_host(name):
    """Hugging Face's `generate` brings tokens to `model.device`."""
    precision = HALF if name == "offload" and has_bf16() else None
    plain = run("Generates", None, "plain", drops=True, precision=precision)
    found = run("Generates", SETTINGS[name][0], "plain", drops=True)
    assert found["error"] is None
    assert found["loss"] == pytest.approx(plain["loss"], rel=MAX_LOSS)


@pytest.mark.real_gpu_too
def test_a_table_that_was_made_on_the_gpu_stays_on_the_host_at_the_end():
    """With its state it would need four times its size, when training is done: seen on an H200."""
    in_fit = []

    class _Watch(Callback):
        def on_train_end(self, *_: Any) -> None:
            in_fit.append(torch.cuda.max_memory_allocated())

    with torch.device("cuda"):
        model = build("classifier")
        model.embedding = nn.Embedding(2**16, WIDTH)
        lit = make_lit(model=model)
    technique = Offloading("parameters+embeddings", min_table_bytes=2**12)
    memsave = MemSaveCallback(**QUIET | {"offload": technique})
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    fit(lit, memsave, _Watch(), accelerator="gpu", limit_val_batches=0)
    assert any(row.status == "on" for row in memsave.rows), memsave.rows
    assert torch.cuda.max_memory_allocated() == in_fit[0]


class _Teachers(Callback):
    """Follow weights in hooks between steps, each in another way, and one writes into them."""

    def __init__(self) -> None:
        self.teachers: list[list[Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        weights = [*pl_module.parameters()]
        if not self.teachers:
            self.teachers = [[p.detach().clone() for p in weights] for _ in range(4)]
        first, second, third, fourth = self.teachers
        with torch.no_grad():
            torch._foreach_lerp_(first, weights, 0.1)
            for index, weight in enumerate(weights):
                second[index].mul_(0.9).add_(weight * 0.1)
                torch.sub(weight, third[index], out=third[index])
                fourth[index] = torch.stack([weight, fourth[index]]).mean(0)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in pl_module.parameters()]).norm()
        for param in pl_module.parameters():
            param.grad.div_(norm.to(pl_module.device) + 1)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.teachers:
            weights = [*pl_module.parameters()]
            mixed = [*weights, self.teachers[0][0]]
            with torch.no_grad():
                torch._foreach_mul_(mixed, 0.999)
                weights[0].view(-1).lerp_(self.teachers[1][0].view(-1), 0.01)


@pytest.mark.real_gpu_too
@pytest.mark.parametrize("what", ["optimizer", "parameters"])
def test_hooks_between_steps_meet_weights_on_the_host_as_if_on_the_device(what):
    found = []
    for settings in ({}, {"offload": what}):
        teachers, lit = _Teachers(), make_lit(model=build("dropout"))
        callbacks = [MemSaveCallback(**QUIET | settings), teachers]
        fit(lit, *callbacks, accelerator="gpu", limit_val_batches=0)
        assert all(each.is_cuda for kind in teachers.teachers for each in kind)
        found.append(
            [*lit.cpu().parameters(), *(t.cpu() for kind in teachers.teachers for t in kind)]
        )
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


class _Average(Callback):
    """Copies the module in one hook, and averages its weights in another."""

    def copy_module(self, trainer: Any, pl_module: Any) -> None:
        self.average = copy.deepcopy(pl_module.model)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        weights = pl_module.model.parameters()
        for mean, weight in zip(self.average.parameters(), weights, strict=True):
            mean.data.lerp_(weight.detach(), 0.1)


@pytest.mark.real_gpu_too
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_a_copy_from_before_the_first_step_is_on_the_device(hook):
    found = []
    for settings in ({}, {"offload": "parameters"}):
        average = _Average()
        setattr(average, hook, average.copy_module)
        callbacks = [MemSaveCallback(**QUIET | settings), average]
        lit = make_lit(model=build("dropout"))
        fit(lit, *callbacks, accelerator="gpu", limit_val_batches=0)
        assert all(each.is_cuda for each in average.average.parameters())
        found.append([each.cpu() for each in average.average.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.real_gpu_too
def test_weights_of_a_loss_that_wait_on_the_host_are_refused():
    """Autograd computes their gradients on another thread, beside those of the device."""
    found = run("Penalty", SETTINGS["offload parameters"][0], "plain", drops=True)
    assert found["steps"] == 0
    assert found["has_advice"]
    optimizer = run("Penalty", SETTINGS["offload optimizer"][0], "plain", drops=True)
    assert optimizer["error"] is None


class _CountsBatches(Callback):
    """Enters a mode in one hook, and leaves it in another."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.mode = _Counting()
        self.mode.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.mode.__exit__(None, None, None)
        self.numbers.append(self.mode.number)


class _Counting(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.real_gpu_too
def test_a_mode_may_be_entered_in_one_hook_and_left_in_another():
    numbers = []
    for settings in ({}, {"offload": "optimizer"}):
        counts = _CountsBatches()
        callbacks = [MemSaveCallback(**QUIET | settings), counts]
        fit(make_lit(model=build("dropout")), *callbacks, accelerator="gpu", limit_val_batches=0)
        assert len(_get_current_dispatch_mode_stack()) == 0
        numbers.append(counts.numbers)
    assert all(number > 100 for number in numbers[0])
    assert all(b > 0.5 * a for a, b in zip(*numbers, strict=True))
