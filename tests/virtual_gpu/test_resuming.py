"""A resumed fit on CUDA: the memory and the weights of one that was not interrupted."""

import gc
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_memsave import MemSaveCallback
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.optimizer_step import bring
from lightning_memsave.techniques.waiting_state import leave_on_host, waiting_bytes
from tests.callbacks.lit import make_lit, make_trainer
from tests.cases import WIDTH
from tests.helpers import seed_torch

pytestmark = pytest.mark.gpu

ACCUMULATED: dict[str, Any] = {"accumulate_grad_batches": 2, "precision": "16-mixed"}
BF16: dict[str, Any] = {"precision": "bf16-mixed"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "nothing, in 16 bits": ({}, ACCUMULATED),
    "in backward": ({"optimizer_in_backward": True}, {}),
    "8-bit": ({"optimizer": "8bit"}, {}),
    "8-bit, in 16 bits": ({"optimizer": "8bit"}, ACCUMULATED),
    "8-bit, in backward": ({"optimizer": "8bit", "optimizer_in_backward": True}, {}),
    "paged": ({"optimizer": "paged_8bit"}, {}),
    "rounded": ({"low_precision_weights": "stochastic"}, BF16),
    "rounded, in backward": (
        {"low_precision_weights": "kahan", "optimizer_in_backward": True},
        BF16,
    ),
    "bitwise": ({"preset": "bitwise"}, {}),
    "offload": ({"preset": "offload"}, {}),
    "table on the host": ({"offload": Offloading("embeddings", min_table_bytes=1)}, {}),
    "table on the host, the rest in backward": (
        {
            "offload": Offloading("embeddings", min_table_bytes=1),
            "optimizer_in_backward": True,
        },
        {},
    ),
}
NUM_STEPS, NUM_SAVED = 3, 1


class Wide(nn.Module):
    """Wide enough for state in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(2, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table((x[:, 0] > 0).long())
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x).square().mean()


class Watch(pl.Callback):
    """Bytes of each batch over those before the fit, state on the device before it, and losses."""

    def __init__(self) -> None:
        self.before = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
        self.peaks: list[int] = []
        self.state_bytes: list[int] = []
        self.losses: list[float] = []

    @override
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        held = [v for o in trainer.optimizers for s in o.state.values() for v in s.values()]
        own = [v for v in held if isinstance(v, Tensor) and v.is_cuda and v.numel() != 256]
        self.state_bytes.append(sum(v.nbytes for v in own if not hasattr(v, "is_paged")))

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        self.peaks.append(peak - self.before)
        self.losses.append(outputs["loss"].item())


def run(
    settings: dict[str, Any],
    *,
    resumes: Path | None = None,
    saves: Path | None = None,
    **trainer: Any,
) -> Any:
    gc.collect()  # the Trainer before
    seed_torch(1)
    lit = make_lit(model=Wide())
    watch = Watch()
    quiet: dict[str, Any] = {"preset": "off", "report": False, "predict": False}
    callback = MemSaveCallback(**quiet | settings)
    # An epoch is a step: a Trainer resumes where epochs begin.
    options = {
        "accelerator": "gpu",
        "limit_val_batches": 0,
        "limit_train_batches": trainer.get("accumulate_grad_batches", 1),
        "max_epochs": NUM_STEPS if saves is None else NUM_SAVED,
    }
    used = make_trainer(pl, watch, callback, **options | trainer)
    seed_torch(2)
    used.fit(lit, ckpt_path=resumes)
    if saves is not None:
        used.save_checkpoint(saves)
    weights = {name: value.cpu() for name, value in lit.state_dict().items()}
    return watch, weights, callback.prediction


@pytest.mark.parametrize("name", CASES)
def test_needs_the_memory_of_a_fit_from_the_start(name, tmp_path):
    settings, trainer = CASES[name]
    run(settings, saves=(path := tmp_path / "half.ckpt"), **trainer)
    fresh, weights, _ = run(settings, **trainer)
    resumed, found, _ = run(settings, resumes=path, **trainer)
    assert resumed.losses == fresh.losses[-len(resumed.losses) :]
    assert all(torch.equal(found[key], weights[key]) for key in weights)
    assert max(resumed.peaks) == max(fresh.peaks)
    assert resumed.state_bytes[0] == 0


def trained_adamw() -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    return model, optimizer


def test_state_waits_for_the_gradients_of_a_closure():
    model, optimizer = trained_adamw()
    seen = []

    def closure() -> Tensor:
        seen.append(waiting_bytes([optimizer]))
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 8, device="cuda")).sum()
        loss.backward()
        return loss

    leave_on_host([optimizer])
    for step in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        step()
    assert seen == [2 * 4 * 2 * (64 + 8), 0]
    states = optimizer.state.values()
    assert all(s["exp_avg"].is_cuda and not s["step"].is_cuda for s in states)


def test_what_waits_is_saved_and_what_was_loaded_meanwhile_stays():
    model, optimizer = trained_adamw()
    before = [s["exp_avg"].clone() for s in optimizer.state.values()]
    leave_on_host([optimizer])
    saved = optimizer.state_dict()
    assert all(
        torch.equal(s["exp_avg"].cuda(), old)
        for s, old in zip(saved["state"].values(), before, strict=True)
    )
    optimizer.load_state_dict(saved)
    bring(optimizer, [next(model.parameters())])
    bring(optimizer)
    assert all(
        torch.equal(s["exp_avg"], old)
        for s, old in zip(optimizer.state.values(), before, strict=True)
    )


def test_what_parameters_share_stays():
    _, optimizer = trained_adamw()
    shared = torch.zeros(4, device="cuda")
    for state in optimizer.state.values():
        state["shared"] = shared
    leave_on_host([optimizer])
    assert all(state["shared"] is shared for state in optimizer.state.values())
    assert waiting_bytes([optimizer]) == 2 * 4 * 2 * (64 + 8)


@pytest.mark.parametrize(
    ("settings", "size"), [({}, "99.01 KiB"), ({"optimizer": "8bit"}, "27.38 KiB")], ids=str
)
def test_its_prediction_says_so(settings, size, tmp_path):
    run(settings, saves=(path := tmp_path / "half.ckpt"))
    *_, fresh = run(settings | {"predict": True})
    *_, resumed = run(settings | {"predict": True}, resumes=path)
    assert resumed.peak_bytes == fresh.peak_bytes
    assert [line for line in resumed.assumptions if line not in fresh.assumptions] == [
        f"resumed as from the start: optimizer state of the checkpoint ({size}) waits on the host "
        "until the first update"
    ]


def test_other_keys_of_state_and_other_optimizers_are_left_alone():
    _, optimizer = trained_adamw()
    optimizer.state["all"] = {"seen": torch.zeros(4, device="cuda")}
    leave_on_host([optimizer, object()])
    assert optimizer.state["all"]["seen"].is_cuda
    assert waiting_bytes([optimizer]) == 2 * 4 * 2 * (64 + 8)
