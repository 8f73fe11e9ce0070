"""Parameters on the host whose low-bit optimizer runs on the device, tile by tile."""

import gc
from contextlib import ExitStack, closing
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_memsave import (
    LowBitOptimizer,
    MemSaveCallback,
    NamedOptimizer,
    Offloading,
    OptimizerInBackward,
    predict_memory,
)
from lightning_memsave.techniques import optimizer_step
from lightning_memsave.techniques.flat_memory import is_in_piece
from lightning_memsave.techniques.offloading import device_tiles
from lightning_memsave.techniques.offloading.host_updates import host_updates_of
from lightning_memsave.techniques.optimizer_kinds import ELEMENTWISE
from tests.callbacks.lit import loader_of, make_trainer
from tests.cases import MODELS, make_batch, make_model
from tests.helpers import assert_same, in_pairs
from tests.techniques.offloaded_loops import OPTIMIZERS, Offloaded

KINDS = ("adamw_8bit", "adam_8bit", "lion_8bit", "sgd_8bit", "muon_8bit")
NUMEL = 512  # less than most weights have, so that they have several tiles and a shorter one


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(device_tiles, "MIN_TILE_NUMEL", NUMEL)
    monkeypatch.setattr(device_tiles, "MAX_TILE_NUMEL", NUMEL)
    for kind in (*KINDS, "paged_adamw_8bit"):
        monkeypatch.setitem(OPTIMIZERS, kind, lambda params, kind=kind: _low_bit(params, kind))


def _low_bit(params: Any, kind: str) -> torch.optim.Optimizer:
    block: dict[str, Any] = {
        "module": nn.ModuleList([nn.ParameterList(params)]),
        "blocks": "ParameterList",
    }
    low_bit = LowBitOptimizer(kind, min_8bit_size=512, **(block if "muon" in kind else {}))
    return low_bit.apply(torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)).target


def tiles_of(made: Offloaded) -> device_tiles.DeviceTiles | None:
    updates = host_updates_of(made.optimizer)
    return None if updates is None else updates._tiles


def on_cpu(made: Offloaded) -> Any:
    states = [dict(made.optimizer.state[param]) for param in made.model.parameters()]
    return tree_map_only(Tensor, Tensor.cpu, (dict(made.model.state_dict()), states))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "kind", "what", "in_backward"),
    in_pairs([*MODELS], KINDS, ["optimizer", "parameters"], [False, True]),
)
def test_the_same_bits_as_without_offloading(name, kind, what, in_backward):
    how: dict[str, Any] = {"optimizer": kind, "in_backward": in_backward, "device": "cuda"}
    with closing(Offloaded(name, what, **how)) as ours:
        theirs = Offloaded(name, None, **how)
        for number in range(4):
            assert torch.equal(ours.step(number), theirs.step(number))
        ours.handle.wait()
        assert_same(on_cpu(ours), on_cpu(theirs))
        assert tiles_of(ours) is not None


_OF_TORCH = sorted(cls.__name__ for cls in {*ELEMENTWISE, torch.optim.Muon} - {torch.optim.AdamW})
NAMED: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("muon", "adamw_bf16_state")},
    **{f"torch.optim:{name}": {} for name in _OF_TORCH},
    "muon, fused": {"fused": True},
    "muon, one by one": {"foreach": False},
    "adamw_bf16_state, one by one": {"foreach": False, "fused": False},
    "torch.optim:Adam, fused": {"fused": True, "amsgrad": True},
    "torch.optim:NAdam, capturable": {"capturable": True},
    "torch.optim:SGD, nesterov": {"momentum": 0.9, "nesterov": True},
    "torch.optim:RMSprop, centered": {"momentum": 0.9, "centered": True},
}


def _named(model: nn.Module, name: str) -> torch.optim.Optimizer:
    kind, settings = name.partition(",")[0], NAMED[name]
    is_of_class = ":" in kind
    params = [param for param in model.parameters() if param.requires_grad]
    adamw = torch.optim.AdamW(params, weight_decay=0.1, **({} if is_of_class else settings))
    kwargs = settings if is_of_class else {}
    how: dict[str, Any] = {"module": model, "blocks": "re:blocks|head"}
    return NamedOptimizer(kind, optimizer_kwargs=kwargs, **how).apply(adamw).target


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "what", "in_backward"),
    in_pairs([*NAMED], ["optimizer", "parameters"], [False, True]),
)
def test_named_optimizers_have_the_same_bits_as_without_offloading(
    name, what, in_backward, monkeypatch
):
    """All steps are made on the device: elsewhere kernels would round in another way."""
    devices = set[str]()
    step = optimizer_step.step_without_hooks

    def note(optimizer, *closure):
        devices.update(p.device.type for g in optimizer.param_groups for p in g["params"])
        return step(optimizer, *closure)

    monkeypatch.setattr(optimizer_step, "step_without_hooks", note)
    found = []
    for is_offloaded in (True, False):
        model = make_model("dropout").train().cuda()
        if name == "torch.optim:Muon":
            for param in model.parameters():
                param.requires_grad_(param.ndim == 2)
        with ExitStack() as stack:
            offloading = Offloading(what)
            if is_offloaded:
                stack.enter_context(offloading.apply(model))
            optimizer = _named(model, name)
            if in_backward:
                OptimizerInBackward().apply(optimizer)
            if is_offloaded:
                stack.enter_context(offloading.update_in_background(optimizer))
            losses = []
            for number in range(4):
                torch.manual_seed(number)
                loss = model(make_batch(number).cuda())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach().cpu())
            tiles = host_updates_of(optimizer)
            assert (tiles is not None and tiles._tiles is not None) is is_offloaded
        states = [dict(optimizer.state[param]) for param in model.parameters()]
        found.append(tree_map_only(Tensor, Tensor.cpu, [losses, dict(model.state_dict()), states]))
    assert_same(*found)
    assert devices == {"cuda"}


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ["master", "split"])
def test_weights_in_two_types_are_updated_in_float32(rounding, monkeypatch):
    how: dict[str, Any] = {"optimizer": "adamw_8bit", "rounding": rounding, "device": "cuda"}
    with closing(Offloaded("dropout", "parameters", **how)) as ours:
        losses = [ours.step(number) for number in range(4)]
        assert tiles_of(ours) is not None
    # Without tiles it is the host that updates them, whose kernels round otherwise.
    monkeypatch.setattr(device_tiles, "is_low_bit", lambda optimizer: False)
    with closing(Offloaded("dropout", "parameters", **how)) as theirs:
        expected = [theirs.step(number) for number in range(4)]
        assert tiles_of(theirs) is None
    torch.testing.assert_close(losses, expected, rtol=0, atol=2e-3)


@pytest.mark.gpu
def test_state_on_the_host_is_not_paged():
    """Beside it that of resident blocks is."""
    how: dict[str, Any] = {"optimizer": "paged_adamw_8bit", "device": "cuda"}
    with closing(Offloaded("dropout", "parameters", resident=2, **how)) as ours:
        theirs = Offloaded("dropout", None, **how)
        for number in range(4):
            assert torch.equal(ours.step(number), theirs.step(number))
        ours.handle.wait()
        assert_same(on_cpu(ours), on_cpu(theirs))
        assert ours.optimizer.is_paged  # type: ignore[attr-defined]
        assert tiles_of(ours) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [1, 2])
def test_blocks_that_stay_are_updated_in_backward_meanwhile(resident):
    """Each in its thread: the first update of an optimizer moves no state of the other."""
    how: dict[str, Any] = {"optimizer": "adamw_8bit", "in_backward": True, "device": "cuda"}
    for _ in range(4):
        with closing(Offloaded("dropout", "parameters", resident=resident, **how)) as ours:
            theirs = Offloaded("dropout", None, **how)
            for number in range(2):
                assert torch.equal(ours.step(number), theirs.step(number))
            ours.handle.wait()
            assert_same(on_cpu(ours), on_cpu(theirs))


@pytest.mark.gpu
def test_a_loaded_state_goes_on_with_the_same_bits():
    how: dict[str, Any] = {"optimizer": "adamw_8bit", "device": "cuda"}
    made = [Offloaded("dropout", "parameters", **how) for _ in range(2)]
    with closing(made[0]) as ours, closing(made[1]) as theirs:
        for number in range(2):
            ours.step(number)
        theirs.model.load_state_dict(ours.model.state_dict())
        theirs.optimizer.load_state_dict(ours.optimizer.state_dict())
        for number in range(2, 4):
            assert torch.equal(ours.step(number), theirs.step(number))
        assert_same(ours.optimizer, theirs.optimizer)
        for state in theirs.optimizer.state.values():
            moments = [v for k, v in state.items() if k.startswith(("state", "absmax"))]
            assert all(map(is_in_piece, moments))


@pytest.mark.gpu
def test_a_larger_parameter_may_be_added(monkeypatch):
    for name in ("MIN_TILE_NUMEL", "MAX_TILE_NUMEL"):
        monkeypatch.setattr(device_tiles, name, 2**20)  # a tile for each parameter
    how: dict[str, Any] = {"optimizer": "adamw_8bit", "device": "cuda"}
    with closing(Offloaded("dropout", "parameters", **how)) as ours:
        theirs = Offloaded("dropout", None, **how)
        for made in (ours, theirs):
            (group,) = made.optimizer.param_groups
            most = max(param.numel() for param in group["params"])
            added = [param for param in group["params"] if param.numel() == most]
            group["params"] = [param for param in group["params"] if param.numel() < most]
            made.step(0)
            made.optimizer.add_param_group({"params": added})
            for param in added:
                param.grad = None
        for number in range(1, 3):
            assert torch.equal(ours.step(number), theirs.step(number))


class Lit(pl.LightningModule):
    """Blocks whose weights have two tiles."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512)) for _ in range(3)]
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


SETTINGS: dict[str, dict[str, Any]] = {
    "in the step": {},
    "in backward": {"optimizer_in_backward": True},
    "in two halves": {"low_precision_weights": "split", "precision": "bf16-mixed"},
}
OFFLOADED: dict[str, Any] = {"preset": "off", "optimizer": "8bit", "offload": "parameters"}


@pytest.fixture
def large_tiles(monkeypatch):
    monkeypatch.setattr(device_tiles, "MIN_TILE_NUMEL", 2**18)
    monkeypatch.setattr(device_tiles, "MAX_TILE_NUMEL", 2**18)


ON_A_STREAM: dict[str, dict[str, Any]] = {
    f"{kind} {name}": {"optimizer": kind, **settings}
    for kind in ("muon", "muon_8bit", "adamw_bf16_state", "torch.optim:NAdam")
    for name, settings in SETTINGS.items()
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SETTINGS, *ON_A_STREAM])
@pytest.mark.usefixtures("large_tiles")
def test_a_fit_needs_what_is_predicted(name):
    settings = {**OFFLOADED, **(SETTINGS | ON_A_STREAM)[name]}
    callback = MemSaveCallback(**settings, predict=60, report=False)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    trainer = make_trainer(pl, callback, accelerator="gpu", devices=1)
    trainer.fit(Lit(), loader_of([torch.randn(4, 512)] * 3))
    predicted = callback.prediction
    assert predicted is not None
    peak_bytes = torch.cuda.max_memory_allocated()
    assert predicted.peak_bytes == torch.cuda.memory_stats()["requested_bytes.all.peak"]
    # Blocks on a stream of their own may each be 1 MiB larger than asked.
    unused = {"abs": 2**20} if name in ON_A_STREAM else {"rel": 0.005}
    assert predicted.allocated_bytes == pytest.approx(peak_bytes, **unused)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.usefixtures("large_tiles")
def test_a_prediction_counts_tiles_and_the_bus(name, monkeypatch):
    def predict() -> Any:
        settings = {**OFFLOADED, **SETTINGS[name]}
        return predict_memory(Lit(), torch.zeros(4, 512), settings=settings, gpu="rtx-3060-12gb")

    def num_bytes(found: Any, kind: str) -> float:
        return sum(n * kernel.num_bytes for kernel, n in found.work.kernels if kernel.kind == kind)

    with_tiles = predict()
    monkeypatch.setattr(device_tiles, "is_low_bit", lambda optimizer: False)
    by_host = predict()
    # Two slots of 10 bytes for each number of a tile, and float32 for halves.
    of_tiles = int((2 * (10 + 8 / 256) + 4 * (name == "in two halves")) * 2**18)
    more = with_tiles.peak_bytes - by_host.peak_bytes
    assert of_tiles <= more <= of_tiles + 2**16
    # Of each parameter a gradient, the weight and two moments of 8 bits; the gradient stays.
    numel = sum(param.numel() for param in Lit().parameters())
    for kind, least in (("from_host", 4 + 4 + 2), ("to_host", 4 + 2)):
        added = num_bytes(with_tiles, kind) - num_bytes(by_host, kind)
        assert added == pytest.approx(least * numel, rel=0.03)
    # Gradients of bfloat16 land in float32.
    of_gradients = 6 * numel if name == "in two halves" else 0
    assert num_bytes(with_tiles, "host") - of_gradients < num_bytes(by_host, "host") / 20
