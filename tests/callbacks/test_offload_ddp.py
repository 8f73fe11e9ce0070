"""Weights, gradients and state on the host under DDP: processes have one copy of them.

`ranks` runs every scenario on two; as a script, under torchrun, this file trains on four, or on two
that are killed.
"""

import functools
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_memsave import LowBitOptimizer, MemSaveCallback, Offloading
from lightning_memsave.techniques import optimizer_step
from lightning_memsave.techniques.offloading import host_updates, processes
from lightning_memsave.techniques.offloading.processes import is_shared
from tests.callbacks.lit import callback_with, late, rows_of, scaling
from tests.callbacks.ranks import RANKS, Notes, rank_of_this_process
from tests.callbacks.test_strategies import raised_by
from tests.trainer.test_fsdp2 import (
    AT_ONCE,
    NUM_WORDS,
    WIDTH,
    Frozen,
    Tied,
    lit,
    off,
    sgd,
    train,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_prediction", "any_saving_counts")]

# --- what runs on each rank ---


class OnOneRank(Tied):
    """A layer that only the second rank uses, and one that none does."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sometimes, self.never = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        loss = super().forward(tokens)
        if rank_of_this_process() == 1:
            loss = loss + self.sometimes(self.embedding(tokens)).square().mean()
        return loss


class Normed(Tied):
    """Buffers that differ between processes, until the first one's are broadcast."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.norm = nn.BatchNorm1d(WIDTH)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(self.norm(hidden.flatten(0, 1)).view_as(hidden))


def own_parameter(make: Callable[[], nn.Module] = Tied, **methods: Any) -> Any:
    """A parameter of the LightningModule itself, and other weights in each process at first."""

    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(batch) * self.scale.square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    made = lit(make=make, training_step=training_step, **methods)
    made.scale = nn.Parameter(torch.ones(WIDTH))
    if os.environ.get("RANK") == "1":
        nn.init.zeros_(made.model.blocks[0].linear1.weight)
    return made


def momentum(self: Any) -> Any:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in self.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in self.parameters() if p.ndim < 2]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def alternating(self: Any, batch: Tensor, batch_idx: int) -> None:
    """Two optimizers that a step steps itself."""
    for optimizer in self.optimizers():
        loss = self.model(batch)
        self.losses.append(loss.item())
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def of_halves(self: Any) -> Any:
    params = [*self.parameters()]
    return [torch.optim.AdamW(params[::2], lr=3e-3), torch.optim.SGD(params[1::2], lr=0.1)]


def scaled_gradients(self: Any) -> None:
    """A hook that changes gradients in place, in each process: they are its own."""
    for param in self.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


def loads(self: Any) -> None:
    """Look at weights between steps, and load some."""
    self.losses.append(sum(param.double().sum().item() for param in self.parameters()))
    state = {key: 0.5 * value for key, value in self.model.state_dict().items()}
    torch.distributed.barrier()  # state of another process is the same memory
    if self.global_step == 2:
        self.model.load_state_dict(state)


def unused() -> DDPStrategy:
    return DDPStrategy(find_unused_parameters=True)


PARTS = {"micro_batch_size": 1}
Case = tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "optimizer": (lit, {"offload": "optimizer"}, {}),
    "parameters": (lit, {"offload": "parameters"}, {}),
    "at once": (own_parameter, {"offload": "parameters"}, AT_ONCE),
    "recomputed": (
        lit,
        {"offload": "parameters+activations", "activation_checkpointing": "all"},
        AT_ONCE,
    ),
    "clipped by value": (
        lit,
        {"offload": "optimizer"},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "frozen": (functools.partial(lit, make=Frozen), {"offload": "parameters"}, {}),
    "unused": (
        functools.partial(lit, make=OnOneRank),
        {"offload": "parameters"},
        AT_ONCE | {"strategy": unused},
    ),
    "buffers": (functools.partial(lit, make=Normed), {"offload": "parameters"}, AT_ONCE),
    "own buffers": (
        functools.partial(lit, make=Normed),
        {"offload": "optimizer"},
        {"strategy": functools.partial(DDPStrategy, broadcast_buffers=False)},
    ),
    "momentum": (
        functools.partial(lit, configure_optimizers=momentum),
        {"offload": "parameters"},
        {"max_epochs": 2},
    ),
    "two optimizers": (
        functools.partial(
            lit,
            training_step=alternating,
            configure_optimizers=of_halves,
            automatic_optimization=False,
        ),
        {"offload": "parameters"},
        {},
    ),
    "hooks": (
        functools.partial(lit, on_after_backward=scaled_gradients),
        {"offload": "parameters"},
        AT_ONCE,
    ),
    "8bit": (
        lit,
        {"offload": "parameters", "optimizer": LowBitOptimizer("8bit", min_8bit_size=64)},
        AT_ONCE,
    ),
    "muon": (lit, {"offload": "parameters", "optimizer": "muon"}, {}),
    "bf16 state": (lit, {"offload": "parameters", "optimizer": "adamw_bf16_state"}, AT_ONCE),
    # Hooks turn off torch's fused layers, which round otherwise, in evaluations.
    "bf16": (
        lit,
        {"offload": "parameters"},
        {"precision": "bf16-mixed", "limit_val_batches": 0},
    ),
    "scaled": (lambda: lit().double(), {"offload": "parameters"}, {"plugins": scaling}),
    "watched": (
        functools.partial(lit, on_train_batch_end=lambda self, *args: loads(self)),
        {"offload": "parameters"},
        AT_ONCE,
    ),
    "micro-batches": (lit, {"offload": "parameters", **PARTS}, AT_ONCE),
    "halve": (lit, {"offload": "parameters", "micro_batch_size": "halve"}, AT_ONCE),
}


def fit(
    name: str, *, offload: bool, make: Any = None, **more: Any
) -> tuple[Notes, Any, MemSaveCallback]:
    own, arguments, settings = CASES[name]
    arguments = {k: v for k, v in arguments.items() if offload or k != "offload"}
    settings = {"strategy": DDPStrategy} | settings | more
    settings["strategy"] = settings["strategy"]()
    if "plugins" in settings:
        settings["plugins"] = [settings["plugins"](pl)]
    callback = off(predict=False, **arguments)
    notes, trainer = train((make or own)(), callback, **settings)
    buffers = {
        n: b.double().flatten().tolist() for n, b in trainer.lightning_module.named_buffers()
    }
    return notes | {"buffers": buffers}, trainer, callback


def run(name: str) -> Notes:
    notes, trainer, callback = fit(name, offload=True)
    states = [s for o in trainer.optimizers for s in o.state_dict()["state"].values()]
    return {
        "plain": fit(name, offload=False)[0],
        "ours": notes,
        "row": [rows_of(callback)["offload"].status, *rows_of(callback)["offload"].details],
        "is left": [
            type(trainer.strategy.model).__name__,
            any(is_shared(param) for param in trainer.lightning_module.parameters()),
            [key for key in vars(trainer.strategy) if key.startswith("_memsave")],
        ],
        "state": [
            [float(v.double().sum()) for v in s.values() if torch.is_tensor(v)] for s in states
        ],
    }


def steady() -> Any:
    return own_parameter(functools.partial(Tied, dropout=0.0))


def checkpoints(name: str = "at once") -> Notes:
    """Train two epochs; one, and the other in a new Trainer, on either side of the checkpoint."""
    notes: Notes = {"whole": fit(name, offload=False, make=steady, max_epochs=2)[0]}
    for before in (True, False):
        _, trainer, _ = fit(name, offload=before, make=steady)
        path = Path(f"{name} {before}.ckpt").resolve()
        trainer.save_checkpoint(path)
        for after in (True, False) if before else (True,):
            found = fit(name, offload=after, make=steady, max_epochs=2, ckpt_path=path)[0]
            notes[f"{before} {after}"] = found
    return notes | {"path": str(path.with_name(f"{name} True.ckpt"))}


def in_the_middle() -> Notes:
    """Checkpoints that are written while others go on, and a validation between steps."""
    own = Path(f"middle {rank_of_this_process()}").resolve()

    def save(self: Any, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(f"{trainer.global_step}.ckpt")

    settings: dict[str, Any] = {"val_check_interval": 2, "max_epochs": 1, "default_root_dir": own}
    notes: Notes = {}
    for name, offload in (("plain", None), ("ours", "parameters")):
        saving = callback_with(on_train_batch_end=save)
        callback = off(predict=False, offload=offload)
        notes[name], _ = train(lit(), callback, saving, strategy="ddp", **settings)
        found = torch.load("2.ckpt", weights_only=True)
        state = found["optimizer_states"][0]["state"].values()
        values = [*found["state_dict"].values(), *(v for s in state for v in s.values())]
        notes[f"{name} checkpoint"] = [value.double().sum().item() for value in values]
        torch.distributed.barrier()
    return notes


class Large(nn.Module):
    """2,101,248 parameters: 8 MiB, of which activations are few."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.blocks(tokens[:1].float().sum() + torch.ones(1, 512)).square().mean()
        return loss


def mapped_bytes() -> tuple[int, int]:
    """What is mapped of shared memory, and the share of this process in what is there."""
    entries = re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
    own = [entry for entry in entries if "memfd:memsave" in entry.splitlines()[0]]
    sizes, shares = (
        [1024 * int(re.findall(rf"^{name}: +(\d+)", entry, re.M)[0]) for entry in own]
        for name in ("Size", "Pss")
    )
    return sum(sizes), sum(shares)


def memory() -> Notes:
    found: list[tuple[int, int]] = []
    held: list[int] = []

    def note(self: Any, trainer: Any, *args: Any) -> None:
        torch.distributed.barrier()  # after the updates
        found.append(mapped_bytes())
        state = trainer.optimizers[0].state.values()
        held.append(sum(v.nbytes for s in state for v in s.values() if not is_shared(v)))
        torch.distributed.barrier()

    gc.collect()
    before = mapped_bytes()[0]
    callback = off(predict=False, offload=Offloading("parameters", blocks=nn.Linear))
    looking = callback_with(on_train_batch_end=note)
    _, trainer = train(lit(make=Large), callback, looking, strategy="ddp")
    assert trainer.optimizers
    gc.collect()
    return {
        "before": before,
        "numel": sum(p.numel() for p in Large().parameters()),
        "size": found[-1][0],
        "share": found[-1][1],
        "private state": held[-1],
        "after": mapped_bytes()[0],
    }


class Sparse(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(NUM_WORDS, WIDTH, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.rows(tokens).square().mean()


class Writes(Tied):
    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            self.blocks[0].norm1.weight.data.mul_(0.5)
        return super().forward(tokens)


class Decay(pl.Callback):
    """Changes weights between steps, which all processes would do to the same ones."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for param in pl_module.parameters():
            param.data.mul_(0.99)


def lbfgs(self: Any) -> Any:
    return torch.optim.LBFGS(self.parameters(), max_iter=1)


def damped(self: Any) -> Any:
    return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, dampening=0.1)


class Unfreezes(pl.callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None: ...
    def finetune_function(self, *args: Any) -> None: ...


def compressed() -> DDPStrategy:
    return DDPStrategy(ddp_comm_hook=default_hooks.fp16_compress_hook)


Refused = tuple[Callable[[], Any], tuple[Any, ...], dict[str, Any], dict[str, Any], str]
REFUSED: dict[str, Refused] = {
    "embeddings": (lit, (), {"offload": "parameters+embeddings"}, {}, 'Use `offload="parameters"`'),
    "sparse": (lambda: lit(make=Sparse), (), {}, {}, "`model.rows.weight`: it is trained"),
    "coupled": (lambda: lit(configure_optimizers=lbfgs), (), {}, {}, "such as AdamW"),
    "late state": (lambda: lit(configure_optimizers=damped), (), {}, {}, "such as AdamW"),
    "averaged": (lit, (WeightAveraging(),), {}, {}, "averages weights"),
    "changed": (lit, (Decay(),), {}, {}, "was changed between two steps"),
    "unfrozen": (lit, (Unfreezes(),), {}, {}, "more is later"),
    "compressed": (lit, (), {}, {"strategy": compressed}, "ddp_comm_hook"),
    "synchronized": (
        lambda: lit(make=Normed), (), {}, {"sync_batchnorm": True}, "SyncBatchNorm"
    ),
    "late layers": (lambda: late(lit()), (), {}, {}, "Make its layers in `__init__`"),
    "written": (lambda: lit(make=Writes), (), {}, {}, "forward changes its own weights"),
    "half": (lit, (), {"low_precision_weights": "master"}, {"precision": "bf16-mixed"}, "DDP"),
    "in backward": (lit, (), {"optimizer_in_backward": True}, {}, "optimizer_in_backward"),
}  # fmt: skip


def refused() -> Notes:
    notes: Notes = {}
    for name, (make, callbacks, arguments, settings, _) in REFUSED.items():
        made = make()
        callback = off(predict=False, **({"offload": "parameters"} | arguments))
        how = settings | {"strategy": settings.get("strategy", DDPStrategy)()}
        notes[name] = raised_by(functools.partial(train, made, callback, *callbacks, **how))
    return notes


def late_processes() -> Notes:
    """One process averages late and the other one updates late."""
    is_second, average, step = (
        rank_of_this_process() == 1,
        processes._average,
        optimizer_step.plain_step,
    )

    def average_late(*args: Any) -> None:
        time.sleep(0.002 * (not is_second))
        average(*args)

    def step_late(*args: Any) -> None:
        time.sleep(0.02 * is_second)
        step(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "_average", average_late)
        patch.setattr(host_updates, "plain_step", step_late)
        return run("at once")


SCENARIOS: dict[str, Callable[[], Notes]] = {
    **{name: functools.partial(run, name) for name in CASES},
    "late": late_processes,
    "checkpoints": checkpoints,
    "8-bit checkpoints": functools.partial(checkpoints, "8bit"),
    "in the middle": in_the_middle,
    "memory": memory,
    "refused": refused,
}


# --- what pytest compares ---


@pytest.mark.parametrize("name", [*CASES, "late"])
def test_training_is_that_of_ddp(report, name):
    first, second = report(name)
    for notes in (first, second):
        assert notes["ours"] == notes["plain"]
        assert notes["row"][0] == "on"
        assert "2 processes share weights and optimizer state" in notes["row"]
    assert first["ours"]["weights"] == second["ours"]["weights"]
    assert first["state"] == second["state"]


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_of_it(report, name):
    for notes in report(name):
        assert notes["is left"][1:] == [False, []]


@pytest.mark.parametrize("name", ["checkpoints", "8-bit checkpoints"])
def test_checkpoints_resume_bit_for_bit(report, name):
    for notes in report(name):
        number = len(notes["whole"]["losses"]) // 2
        for way in ("True True", "True False", "False True"):
            assert notes[way]["losses"] == notes["whole"]["losses"][number:], way
            assert notes[way]["weights"] == notes["whole"]["weights"], way


def test_a_checkpoint_loads_in_one_process(report):
    found = torch.load(report("checkpoints")[0]["path"], weights_only=True)
    made = steady()
    made.load_state_dict(found["state_dict"])
    optimizer = made.configure_optimizers()
    optimizer.load_state_dict(found["optimizer_states"][0])
    assert len(optimizer.state) == len([*made.parameters()])


def test_checkpoints_while_training_are_whole(report):
    for notes in report("in the middle"):
        assert notes["ours"] == notes["plain"]
        assert notes["ours checkpoint"] == notes["plain checkpoint"]


def test_the_host_has_one_copy_of_weights_and_state(report):
    both = report("memory")
    numel = both[0]["numel"]
    weights, state, gradients = 4 * numel, 8 * numel, RANKS * 4 * numel
    for notes in both:
        assert notes["size"] == pytest.approx(weights + state + gradients, rel=0.02)
        assert notes["private state"] == 0
    # Without sharing, it would be this of each process.
    assert sum(notes["share"] for notes in both) == pytest.approx(both[0]["size"], rel=0.02)
    for notes in both:  # the optimizer, which the Trainer still has, keeps its state
        assert notes["before"] == 0
        assert notes["after"] == pytest.approx(state, rel=0.02)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(report, name):
    *_, text = REFUSED[name]
    for notes in report("refused"):
        kind, message = notes[name]
        assert kind == "IncompatibleError"
        assert text in message


# --- other processes ---


def exact() -> Any:
    return lit(make=functools.partial(Tied, dropout=0.0), configure_optimizers=sgd).double()


def train_on_four(folder: Path) -> None:
    notes = {}
    for name, offload in (("plain", None), ("ours", "parameters"), ("again", "parameters")):
        callback = off(predict=False, offload=offload)
        notes[name], _ = train(exact(), callback, strategy="ddp", **AT_ONCE)
    (folder / f"{rank_of_this_process()}.json").write_text(json.dumps(notes))
    torch.distributed.destroy_process_group()


def die() -> None:
    """Train, and be killed in the third step like the other process."""

    def kill(self: Any, *args: Any) -> None:
        if args[-1] == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    callback = off(predict=False, offload="parameters")
    train(lit(make=Large), callback, callback_with(on_train_batch_end=kill), strategy="ddp")


def die_in_update() -> None:
    """Train; the second process is killed in an update that the first one waits for."""
    step = optimizer_step.plain_step

    def kill(*args: Any) -> None:
        if rank_of_this_process() == 1 and args[0].state:
            os.kill(os.getpid(), signal.SIGKILL)
        step(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_updates, "plain_step", kill)
        train(lit(), off(predict=False, offload="parameters"), strategy="ddp", max_epochs=99)


def torchrun(number: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={number}", "-m", "tests.callbacks.test_offload_ddp"]
    return subprocess.run(
        [*command, *arguments],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_process_that_is_killed_in_an_update_ends_the_other():
    """It waits for memory to change, and not in a collective."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    first, second = (
        subprocess.Popen(
            [sys.executable, "-m", "tests.callbacks.test_offload_ddp", "die in update"],
            cwd=Path(__file__).parents[2],
            env=os.environ | own | {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    )
    second.communicate(timeout=120)
    assert second.returncode == -signal.SIGKILL
    _, said = first.communicate(timeout=60)
    assert first.returncode == 1
    assert "Rank 1 has ended" in said


def near(found: Any, expected: Any) -> None:
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-10,
        atol=1e-10,
    )


def test_four_processes(tmp_path):
    """Sums of four are those of DDP but for rounding, and the same each time; as of one process."""
    done = torchrun(4, "four", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    notes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for own in notes:
        assert own["ours"] == own["again"]
        assert own["ours"]["weights"] == notes[0]["ours"]["weights"]
        near(own["ours"]["losses"], own["plain"]["losses"])
        for name, weight in own["ours"]["weights"].items():
            near(weight, own["plain"]["weights"][name])


def test_processes_that_are_killed_leave_nothing():
    before = {*Path("/dev/shm").iterdir()}
    done = torchrun(RANKS, "die")
    assert done.returncode != 0
    assert len(re.findall("exitcode *: -9", done.stderr)) >= 1, done.stderr
    assert {*Path("/dev/shm").glob("*memsave*")} <= before


if __name__ == "__main__":
    if sys.argv[1] == "four":
        train_on_four(Path(sys.argv[2]))
    else:
        {"die": die, "die in update": die_in_update}[sys.argv[1]]()
