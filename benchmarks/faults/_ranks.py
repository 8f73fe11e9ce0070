"""Kill one of two processes that train together. As a script it is one of them."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks._common import markdown_table
from lightning_memsave import MemSaveCallback
from lightning_memsave.trainer import lost_ranks

LIMIT_S = 60
"""The other process must have ended so long after the kill."""

LAUNCHERS = ("lightning", "torchrun", "by hand")
STRATEGIES = ("ddp", "memsave_fsdp2")
MOMENTS = ("fit start", "probe", "step", "checkpoint")
OUT_OF_MEMORY = "out of memory"
"""Not a kill: memory runs out after the probe, and the process stays when its fit has failed."""
OUTCOMES = ("ended and named", "ended, not named", "hung", "not killed")
_START_S, _STEP_S = 120, 0.01
_ROOT = Path(__file__).parents[2]


class Lit(pl.LightningModule):
    """Blocks, and steps that take a while."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3)]
        self.blocks = nn.Sequential(*layers)

    def training_step(self, batch: Tensor) -> Tensor:
        time.sleep(_STEP_S)
        loss: Tensor = self.blocks(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        data: Any = torch.randn(4000, 4, 32)
        return DataLoader(data, batch_size=4)


class Kill(Callback):
    """Kill this process a while after a moment of the fit."""

    def __init__(self, moment: str, after_s: float, folder: Path) -> None:
        self.moment, self.after_s, self.folder = moment, after_s, folder

    def _kill(self) -> None:
        (self.folder / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def _reach(self, moment: str) -> None:
        if moment == self.moment:
            self.moment = ""
            threading.Timer(self.after_s, self._kill).start()

    def on_fit_start(self, *_: Any) -> None:
        self._reach("fit start")

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._reach("probe" if trainer.global_step < 2 else "step")
        if self.moment == OUT_OF_MEMORY and trainer.global_step == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def on_save_checkpoint(self, *_: Any) -> None:
        self._reach("checkpoint")


def train(settings: dict[str, Any]) -> None:
    """Be one of two processes."""
    folder, is_by_hand = Path(settings["folder"]), settings["launcher"] == "by hand"
    rank = int(os.environ.get("NODE_RANK" if is_by_hand else "LOCAL_RANK", "0"))
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    callbacks: list[Callback] = [MemSaveCallback()] if settings["with_us"] else []
    if rank == settings["rank"]:
        callbacks.append(Kill(settings["moment"], settings["after_s"], folder))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if is_by_hand else 2,
        num_nodes=2 if is_by_hand else 1,
        strategy=settings["strategy"],
        callbacks=[*callbacks, ModelCheckpoint(folder, every_n_train_steps=3)],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
    )
    lost_ranks.GRACE_S = settings.get("grace_s", lost_ranks.GRACE_S)
    try:
        trainer.fit(Lit())
    except torch.OutOfMemoryError:
        (folder / "killed").write_text(str(time.time()))
        time.sleep(2 * LIMIT_S)


def kill(seed: int, *, with_us: bool = True, **chosen: Any) -> dict[str, Any]:
    """Kill one process of a fit at a random moment, and see what becomes of the other.

    Args:
        seed: Of what is killed and when. Launchers, strategies and moments take turns.
        with_us: Whether the fit has a `MemSaveCallback`.
        **chosen: What is not random.

    Returns:
        What was killed, the outcome, and the seconds until the other process had ended.
    """
    numbers = random.Random(seed)
    known = {
        "launcher": LAUNCHERS[seed % len(LAUNCHERS)],
        "strategy": STRATEGIES[seed // len(LAUNCHERS) % len(STRATEGIES)],
        "moment": MOMENTS[seed // 2 % len(MOMENTS)],
        "rank": numbers.randrange(2),
        "after_s": numbers.random() * 0.05,
        "with_us": with_us,
    } | chosen
    with tempfile.TemporaryDirectory() as folder:
        return known | _attack(Path(folder), known)


def _attack(folder: Path, known: dict[str, Any]) -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    script = ["-m", __spec__.name, json.dumps(known | {"folder": str(folder)})]
    command, of_processes = [sys.executable, *script], [environment]
    if known["launcher"] == "torchrun":
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [sys.executable, *run, *script]
    elif known["launcher"] == "by hand":
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
        of_processes = [environment | {"NODE_RANK": str(rank)} for rank in range(2)]
    with (folder / "output").open("w") as output:
        started = [
            subprocess.Popen(
                command, cwd=_ROOT, env=env, stdout=output, stderr=output, start_new_session=True
            )
            for env in of_processes
        ]
        try:
            return _watch(folder, known["rank"], started)
        finally:
            for process in started:
                _end_group(process)


def _watch(folder: Path, killed: int, started: "list[subprocess.Popen[bytes]]") -> dict[str, Any]:
    def is_killed() -> bool:
        return (folder / "killed").exists()

    _wait(lambda: is_killed() or all(p.poll() is not None for p in started), _START_S)
    if not is_killed():
        return {"outcome": "not killed", "said": (folder / "output").read_text()[-500:]}
    other = int((folder / f"pid-{1 - killed}").read_text())
    has_ended = _wait(lambda: not _runs(other), LIMIT_S)
    seconds = time.time() - float((folder / "killed").read_text())
    time.sleep(0.5 if has_ended else 0)  # what launchers say of it
    said = (folder / "output").read_text()
    lines = [line.strip() for line in said.splitlines() if _names(line, killed)]
    outcome = "hung" if not has_ended else "ended and named" if lines else "ended, not named"
    return {"outcome": outcome, "seconds": round(seconds, 1), "said": (lines or [""])[0][:200]}


# Ours, Lightning's launcher's, torchrun's.
def _names(line: str, rank: int) -> bool:
    says = (f"Rank {rank} has ended", f"[rank: {rank}] Child process", f"(local_rank: {rank})")
    return any(text in line for text in says)


def _wait(condition: Callable[[], bool], limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def make_table(attacks: list[dict[str, Any]]) -> str:
    """Show what became of the other process, for each launcher with and without us."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for attack in sorted(attacks, key=lambda a: (not a["with_us"], a["moment"] == OUT_OF_MEMORY)):
        kind = "fails and stays" if attack["moment"] == OUT_OF_MEMORY else "is killed"
        who = f"{'with' if attack['with_us'] else 'without'} `MemSaveCallback`"
        name = f"{kind}, {attack['launcher']}, {who}"
        kinds.setdefault(name, []).append(attack)
    rows = []
    for name, chosen in kinds.items():
        outcomes = [attack["outcome"] for attack in chosen]
        counts = [str(outcomes.count(outcome)) for outcome in OUTCOMES]
        longest_s = max(attack.get("seconds", 0) for attack in chosen)
        rows.append([name, str(len(chosen)), *counts, f"{longest_s:.1f}"])
    return markdown_table(["one process", "number", *OUTCOMES, "longest, s"], rows)


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
