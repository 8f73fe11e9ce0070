"""Hooks of a project beside updates on the host: they find what they would find without them."""

import contextlib
import copy
import io
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.techniques.offloading.host_worker import HostWorker
from lightning_memsave.techniques.offloading.part import Part
from lightning_memsave.techniques.offloading.technique import Offloading
from tests.callbacks.lit import callback_with, fit, make_lit, quiet, rows_of
from tests.helpers import assert_same, clones

pytestmark = pytest.mark.usefixtures("no_prediction")

SETTINGS: dict[str, dict[str, Any]] = {
    "optimizer": {"offload": "optimizer"},
    "blocks": {"offload": "parameters"},
    "early": {"offload": Offloading("parameters", early_updates="100%")},
    "masters": {
        "offload": "parameters",
        "precision": "bf16-mixed",
        "low_precision_weights": "master",
    },
    "halves in backward": {
        "offload": "parameters",
        "precision": "bf16-mixed",
        "low_precision_weights": "split",
        "optimizer_in_backward": True,
        "optimizer": "8bit",
        "micro_batch_size": MicroBatching("halve"),
    },
}


def _pickled(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save([*module.parameters()], file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _square(weight: Tensor) -> Tensor:
    return weight.square().sum()


READS: dict[str, Any] = {
    "norms": lambda module: [p.norm() for p in module.parameters()],
    "norms together": lambda module: torch._foreach_norm([*module.parameters()]),
    "one": lambda module: next(module.parameters()).view(-1)[3].item(),
    "list": lambda module: next(module.parameters()).tolist(),
    "text": lambda module: str(next(module.parameters())),
    "data": lambda module: [p.data.sum() for p in module.parameters()],
    "numpy": lambda module: [p.detach().cpu().numpy().tolist() for p in module.parameters()],
    "data in numpy": lambda module: [p.data.numpy().tolist() for p in module.parameters()],
    "array": lambda module: [np.asarray(p.detach()).tolist() for p in module.parameters()],
    "vector": lambda module: nn.utils.parameters_to_vector(module.parameters()).detach(),
    "state dict": lambda module: clones(module.state_dict()),
    "copy": lambda module: clones(copy.deepcopy(module.model).state_dict()),
    "pickle": lambda module: [p.detach() for p in _pickled(module)],
    "moved": lambda module: [p.to(torch.float64).detach() for p in module.parameters()],
    "gradient": lambda module: [torch.func.grad(_square)(p) for p in module.parameters()],
    "vmap": lambda module: [
        torch.vmap(torch.sum)(p.detach()) for p in module.parameters() if p.dim() == 2
    ],
    "state of the optimizer": lambda module: [
        value.sum()
        for param in module.parameters()
        for value in module.trainer.optimizers[0].state.get(param, {}).values()
        if isinstance(value, Tensor)
    ],
    "output": lambda module: module.model(torch.ones(4, 16, device=module.device)).detach(),
}


def _clamp(module: nn.Module) -> None:
    for param in module.parameters():
        param.data.clamp_(-0.1, 0.1)


def _halve_together(module: nn.Module) -> None:
    torch._foreach_mul_([p.data for p in module.parameters()], 0.5)


def _set_data(module: nn.Module) -> None:
    for param in module.parameters():
        param.data = param.data * 0.5


def _halve_in_numpy(module: nn.Module) -> None:
    for param in module.parameters():
        array = param.detach().numpy()
        array *= 0.5


def _step_again(module: Any) -> None:
    optimizer = module.optimizers(use_pl_optimizer=False)
    with torch.enable_grad():
        optimizer.zero_grad()
        module.model(torch.ones(4, 16, device=module.device)).backward()
        optimizer.step()
        optimizer.zero_grad()


WRITES: dict[str, Any] = {
    "another step": _step_again,
    "clamp": _clamp,
    "together": _halve_together,
    "write in numpy": _halve_in_numpy,
    "set data": _set_data,
    "first only": lambda module: next(module.parameters()).data.zero_().shape,
}


@pytest.fixture(autouse=True)
def slow_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let updates end late."""
    run = HostWorker._run

    def run_late(self: HostWorker, work: Any) -> None:
        time.sleep(0.003)
        run(self, work)
        time.sleep(0.005)

    monkeypatch.setattr(HostWorker, "_run", run_late)


MOVES = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def _train(
    settings: dict[str, Any], hook: str, use: Any, *, is_announced: bool = False, **how: Any
) -> Any:
    """Fit; give what a hook found in each batch, losses and weights, and the row of the setting.

    If it is announced, as by ``optimizer_step``, updates end in the step.
    """
    found: list[Any] = []

    def call(module: Any) -> None:
        with torch.no_grad():
            found.append(use(module))

    own = _hooks_of_a_module(call).get(hook, {})
    if is_announced:
        own["optimizer_step"] = lambda self, epoch, batch_idx, optimizer, closure: optimizer.step(
            closure=closure
        )
    callbacks = []
    if hook not in own:
        callbacks.append(callback_with(**{hook: lambda self, _, module, *rest: call(module)}))
    if hook == "on_validation_model_eval":
        how |= {"val_check_interval": 1, "num_sanity_val_steps": 0}
    saving = quiet(**{"preset": "off"} | settings)
    losses, weights, _ = fit(make_lit(model="tied", **own), saving, *callbacks, **how)
    return [found, losses, weights], rows_of(saving)["offload"].details


def _hooks_of_a_module(call: Any) -> dict[str, dict[str, Any]]:
    """Give methods by the name of the hook that is one of them, and that calls a function."""

    def step_schedule(self: Any, scheduler: Any, metric: Any) -> None:
        call(self)
        scheduler.step()

    def step(self: Any, batch: Tensor, batch_idx: int) -> Any:
        call(self)
        loss = self.model(batch)
        self.log("loss", loss)
        return loss

    def move(self: Any, batch: Tensor, *_: Any) -> Tensor:
        call(self)
        return batch

    def evaluate(self: Any) -> None:
        call(self)
        self.eval()

    def zero_gradients(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
        call(self)
        optimizer.zero_grad()

    hooks = {
        "lr_scheduler_step": step_schedule,
        "training_step": step,
        "on_validation_model_eval": evaluate,
        "optimizer_zero_grad": zero_gradients,
    } | dict.fromkeys(MOVES, move)
    found: dict[str, dict[str, Any]] = {name: {name: hook} for name, hook in hooks.items()}
    found["lr_scheduler_step"]["configure_optimizers"] = _with_schedule
    return found


def _with_schedule(self: Any) -> Any:
    optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad"),
    *("optimizer_zero_grad", "lr_scheduler_step", "training_step", "on_validation_model_eval"),
    *MOVES,
)


def _assert_as_without(name: str, hook: str, use: Any) -> None:
    """Compare with a plain fit or, where weights are of 16 bits, with hooks after all updates."""
    settings = SETTINGS[name]
    if "precision" in settings:
        expected, details = _train(settings, hook, use, is_announced=True)
        assert any("updates end before" in detail for detail in details)
    else:
        expected, _ = _train({"offload": None}, hook, use)
    found, details = _train(settings, hook, use)
    assert_same(found, expected)
    assert any("beside the next step" in detail for detail in details)


@pytest.mark.parametrize("use", READS | WRITES)
@pytest.mark.parametrize("name", SETTINGS)
def test_of_each_batch(name, use):
    _assert_as_without(name, "on_train_batch_end", (READS | WRITES)[use])


@pytest.mark.gpu
@pytest.mark.parametrize("use", sorted((READS | WRITES).keys() - {"gradient"}))  # of the host
@pytest.mark.parametrize("name", ["blocks", "halves in backward"])
def test_on_a_gpu(name, use):
    """Where a hook computes on the device with what waits on the host."""
    how = SETTINGS[name], "on_train_batch_end", (READS | WRITES)[use]
    expected, _ = _train(*how, is_announced=True, accelerator="gpu")
    found, _ = _train(*how, accelerator="gpu")
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        (name, hook)
        for name, settings in SETTINGS.items()
        for hook in HOOKS
        if hook != "optimizer_zero_grad" or "optimizer_in_backward" not in settings  # refused
    ],
)
def test_of_any_kind(name, hook):
    def look_and_change(module: Any) -> Any:
        if "zero_grad" not in hook:  # within a step: the graph has the weights
            _clamp(module)
        return READS["data"](module)

    _assert_as_without(name, hook, look_and_change)


@pytest.mark.parametrize("name", ["optimizer", "blocks"])
def test_a_mode_that_one_hook_enters_and_another_one_leaves(name):
    """As those that count what a step does."""

    class Counts(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    modes: list[Any] = []

    def enter(self: Any, trainer: Any, module: Any, *_: Any) -> None:
        modes.append(Counts().__enter__())
        next(module.parameters()).detach()

    def leave(self: Any, *_: Any) -> None:
        modes[-1].__exit__(None, None, None)

    counting = callback_with(on_train_batch_start=enter, on_train_batch_end=leave)
    saving = quiet(preset="off", **SETTINGS[name])
    found = fit(make_lit(model="tied"), saving, counting)
    assert all(mode.count > 10 for mode in modes)
    assert_same(found[:2], fit(make_lit(model="tied"), quiet(preset="off"))[:2])
    assert torch.overrides._get_current_function_mode_stack() == []


@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize("name", ["optimizer", "blocks", "early"])
def test_of_the_step_of_an_optimizer(name, is_global):
    def fit_hooked(saving: Any) -> Any:
        norms: list[Any] = []
        with contextlib.ExitStack() as stack:

            def halve(optimizer: Any, *_: Any) -> None:
                for param in optimizer.param_groups[0]["params"]:
                    if param.grad is not None:
                        param.grad.mul_(0.5)  # of the step before: Lightning zeroes it afterwards

            def note(optimizer: Any, *_: Any) -> None:
                params = optimizer.param_groups[0]["params"]
                norms.append([param.detach().norm() for param in params])

            def configure(self: Any) -> Any:
                made = torch.optim.AdamW(self.parameters(), lr=1e-3)
                owner: Any = sys.modules["torch.optim.optimizer"] if is_global else made
                name = "register_optimizer_step" if is_global else "register_step"
                for hook, kind in ((halve, "pre"), (note, "post")):
                    stack.callback(getattr(owner, f"{name}_{kind}_hook")(hook).remove)
                return made

            found = fit(make_lit(model="tied", configure_optimizers=configure), saving)
        return [norms, *found[:2]]

    saving = quiet(preset="off", **SETTINGS[name])
    assert_same(fit_hooked(saving), fit_hooked(quiet(preset="off")))
    assert any("AdamW.step" in detail for detail in rows_of(saving)["offload"].details)


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_end"])
@pytest.mark.parametrize("name", ["optimizer", "blocks", "early"])
def test_other_data_after_the_last_step(name, hook):
    """As averages of weights take their place."""
    _assert_as_without(name, hook, WRITES["set data"])


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - {"halves in backward"}))
def test_memory_that_a_hook_keeps(name):
    """Torch does not see that it is written in later steps."""

    def halve(module: Any) -> None:
        arrays = getattr(module, "arrays", None)
        if arrays is None:
            module.arrays = arrays = [p.detach().numpy() for p in module.parameters()]
        for array in arrays:
            np.multiply(array, 0.5, out=array)

    _assert_as_without(name, "on_train_batch_end", halve)


@pytest.mark.parametrize("name", SETTINGS)
def test_what_uses_no_weight_waits_for_none(name, monkeypatch):
    settled: list[Part] = []
    join = Part.join

    def note(part: Part) -> None:
        settled.append(part)
        join(part)

    def describe(module: Any) -> Any:
        params = [*module.parameters()]
        count = sum(p.numel() for p in params if p.requires_grad and p.is_leaf)
        forms = [(p.shape, p.dtype, p.device, p.size(0), p.dim(), len(p)) for p in params]
        return count, forms, len(dict.fromkeys(params)), torch.ones(2).sum()

    def watched(use: Any) -> Any:
        def call(module: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(Part, "join", note)
                return use(module)

        return call

    _train(SETTINGS[name], "on_train_batch_end", watched(describe))
    assert not settled
    _train(SETTINGS[name], "on_train_batch_end", watched(READS["one"]))
    assert settled
