"""Parameters on the host that pass the device whole, for optimizers that no tiles are made for."""

import copy
import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_memsave import (
    LowPrecisionWeights,
    MemSaveCallback,
    NamedOptimizer,
    Offloading,
    OptimizerInBackward,
)
from lightning_memsave.core.memory import is_fake, is_host
from lightning_memsave.techniques import optimizer_step
from lightning_memsave.techniques.flat_memory import is_in_piece
from lightning_memsave.techniques.offloading import host_updates, whole_on_device
from tests.callbacks.lit import loader_of, make_trainer
from tests.cases import make_batch, make_model
from tests.helpers import InAutocast, assert_same, in_pairs
from tests.techniques.test_device_tiles import Lit

OWN = "tests.own_optimizers"
TRANSFORMERS = "transformers.optimization:Adafactor"
SETTINGS: dict[str, dict[str, Any]] = {
    TRANSFORMERS: {"relative_step": False, "beta1": 0.9},
    "torch.optim:Adafactor": {"weight_decay": 0.1},
    f"{OWN}:CountsInGroups": {"weight_decay": 0.1},
    f"{OWN}:Preconditions": {},
}
MODES = ("float32", "bfloat16 weights", "transposed weights", "resident")
OF_TORCH = ("torch.optim:Adam", "torch.optim:NAdam", "muon", "adamw_bf16_state")


def _model(mode: str) -> nn.Module:
    model = make_model("dropout").train().cuda()
    if mode == "bfloat16 weights":
        model.blocks.bfloat16()
    for param in model.parameters():
        param.own_scale = 1 + param.numel() / 1000  # type: ignore[attr-defined]
        if mode == "transposed weights" and param.ndim == 2:
            param.data = param.data.T.contiguous().T
    return model


def _run(
    name: str, mode: str, what: str | None, *, in_backward: bool = False, reloads: bool = False
) -> Any:
    model = _model(mode)
    with ExitStack() as stack:
        if what:
            resident = 1 if mode == "resident" else 0
            offloading = Offloading(what, resident=resident)
            stack.enter_context(offloading.apply(model))
        if mode in ("split", "master"):
            stack.enter_context(LowPrecisionWeights(mode).apply(model))
        whole = model if mode in ("float32", "resident") else InAutocast(model)
        params = [*model.parameters()]
        # Where a group has several types, torch's Adafactor takes its epsilon of the first one.
        groups = [
            {"params": [p for p in params if p.dtype is dtype], "lr": lr}
            for dtype, lr in ((torch.float32, 1e-3), (torch.bfloat16, 1e-2))
        ]
        adamw = torch.optim.AdamW([group for group in groups if group["params"]])
        how: Any = {"module": model, "blocks": "re:blocks|head"}
        named = NamedOptimizer(name, optimizer_kwargs=SETTINGS.get(name), **how)
        optimizer = named.apply(adamw).target
        if in_backward:
            OptimizerInBackward().apply(optimizer)
        if what:
            handle = stack.enter_context(offloading.update_in_background(optimizer))
            assert "on the device, parameter by parameter" in handle.changes[0]
        devices = stack.enter_context(_noted_devices())
        losses = []
        for number in range(5):
            if reloads and number == 2:
                saved = tree_map_only(Tensor, Tensor.cpu, copy.deepcopy(optimizer.state_dict()))
                optimizer.load_state_dict(saved)
            torch.manual_seed(number)
            loss = whole(make_batch(number).cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
            if what:
                on_host = [t for p in params for t in _tensors(optimizer, p) if t.ndim]
                assert all(is_host(t.untyped_storage()) for t in on_host if not t.is_cuda)
                assert any(map(is_in_piece, on_host))
                if mode != "resident":
                    assert not any(t.is_cuda for t in on_host)
    assert devices == {"cuda"} or not what
    states = [dict(optimizer.state[param]) for param in params]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return tree_map_only(Tensor, Tensor.cpu, [losses, groups, dict(model.state_dict()), states])


@contextmanager
def _noted_devices() -> Iterator[set[str]]:
    """Where steps are made: elsewhere kernels would round in another way."""
    devices = set[str]()
    step = optimizer_step.step_without_hooks

    def note(optimizer: Any, *closure: Any) -> Any:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        devices.update(p.device.type for p in params if p.grad is not None)
        return step(optimizer, *closure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_step, "step_without_hooks", note)
        yield devices


def _tensors(optimizer: torch.optim.Optimizer, param: Tensor) -> list[Tensor]:
    return [v for v in tree_leaves(dict(optimizer.state[param])) if isinstance(v, Tensor)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "mode", "what", "in_backward"),
    in_pairs([*SETTINGS], MODES, ["optimizer", "parameters"], [False, True]),
)
def test_the_same_bits_as_without_offloading(name, mode, what, in_backward):
    ours = _run(name, mode, what, in_backward=in_backward)
    assert_same(ours, _run(name, mode, None, in_backward=in_backward))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "mode", "what"),
    in_pairs(OF_TORCH, ["bfloat16 weights", "transposed weights"], ["optimizer", "parameters"]),
)
def test_what_does_not_fit_tiles_passes_whole(name, mode, what):
    assert_same(_run(name, mode, what), _run(name, mode, None))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
def test_a_loaded_state_goes_on_with_the_same_bits(name):
    how: Any = {"mode": "float32", "reloads": True}
    assert_same(_run(name, what="parameters", **how), _run(name, what=None, **how))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
def test_halves_are_updated_in_float32(name):
    """But for ties, which halves round away from zero."""
    split, master = (_run(name, mode, "parameters") for mode in ("split", "master"))
    torch.testing.assert_close(split[0], master[0], rtol=0, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
def test_a_fit_needs_what_is_predicted(name, monkeypatch):
    """And has the bits of a fit without offloading."""
    how: Any = {"preset": "off", "predict": 60, "report": False}
    named = NamedOptimizer(name, optimizer_kwargs=SETTINGS[name])
    found: list[Any] = []
    steps: list[Any] = []

    def note(optimizer, updates, *args):
        steps.extend([] if is_fake(updates[0].param) else updates)
        whole_on_device.step_on_device(optimizer, updates, *args)

    monkeypatch.setattr(host_updates, "step_on_device", note)
    batches = [torch.randn(4, 512) for _ in range(3)]
    for offload in ("parameters", None):
        callback, lit = MemSaveCallback(**how, optimizer=named, offload=offload), Lit()
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # which the fit needs, and a prediction counts
        before = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
        torch.cuda.reset_peak_memory_stats()
        trainer = make_trainer(pl, callback, accelerator="gpu", devices=1)
        trainer.fit(lit, loader_of(batches))
        assert callback.prediction is not None
        measured = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        if offload:
            assert callback.prediction.peak_bytes == measured
        found.append(tree_map_only(Tensor, Tensor.cpu, dict(lit.state_dict())))
        del trainer, lit
    assert_same(*found)
    assert len(steps) == len(batches) * len([*Lit().parameters()])


@pytest.mark.gpu
def test_what_updates_all_together_says_why_it_cannot_in_two_places():
    model = _model("float32")
    offloading = Offloading("parameters", resident=1)
    with offloading.apply(model):
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = NamedOptimizer(f"{OWN}:ClipsTogether").apply(adamw).target
        with offloading.update_in_background(optimizer):
            model(make_batch(0).cuda()).backward()
            with pytest.raises(RuntimeError, match="same device") as caught:
                optimizer.step()
    assert "`ClipsTogether` updates all parameters together" in caught.value.__notes__[0]
