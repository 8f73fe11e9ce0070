"""Host memory from the start of a fit to its end, and checkpoints that are written through."""

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_memsave.techniques.offloading.late_weights import LateWeight
from lightning_memsave.trainer.checkpoint_files import streams_checkpoints
from tests.callbacks.life_of_a_run import FORMS, Lit, batches, make_trainer
from tests.callbacks.lit import fit, make_lit, quiet

ROOT = Path(__file__).parents[2]
WIDTH = 64


def run(*arguments: Any) -> list[Any]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.callbacks.life_of_a_run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *map(str, arguments)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert not done.returncode, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line[0] in "[{"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("form", FORMS)
def test_no_moment_needs_more_than_a_step_and_a_block(form, tmp_path):
    """Saving, the end, and a start that resumes; the process is measured, and not our counters."""
    block_bytes = 2 * 4 * 1024**2
    path = tmp_path / "last.ckpt"
    for _resumed in (False, True):
        (peaks,) = run("measure", form, path)
        in_steps = max(peaks["steps"], peaks["step after"])
        for moment in ("setup", "saving", "end"):
            assert peaks[moment] <= 1.05 * in_steps + block_bytes, peaks


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("form", ["checkpointed", "split"])
def test_a_kill_at_any_byte_leaves_the_last_checkpoint(form, tmp_path):
    path = tmp_path / "last.ckpt"
    generator = torch.Generator().manual_seed(0)
    sizes = [0, 1, *torch.randint(2, 100_000, (6,), generator=generator).tolist(), 10**8]
    found = run("kill", form, path, *sizes)
    assert [is_killed for _, is_killed, _ in found] == [True] * 8 + [False]
    assert [step for *_, step in found] == [1] * 8 + [2]
    assert [*tmp_path.iterdir()] == [path]  # what the killed ones have left is gone


class Saving(pl.Callback):
    def __init__(self, save: Any) -> None:
        self.save = save

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.save(trainer)


def train(form: str, save: Any, lit: Any = None, **settings: Any) -> Any:
    lit = Lit(WIDTH, 2) if lit is None else lit
    trainer = make_trainer(form, Saving(save), **settings)
    trainer.fit(lit, batches(3, WIDTH))
    assert all(p.isfinite().all() for p in lit.parameters())
    return trainer


class Reading(Lit):
    """Uses the weights of a checkpoint as projects do."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        some = weights["blocks.0.first.weight"]
        assert isinstance(some, torch.Tensor)
        assert (some.shape, some.dtype) == ((WIDTH, WIDTH), torch.float32)
        for other in (some.clone(), copy.deepcopy(some), pickle.loads(pickle.dumps(some))):
            assert type(other) is torch.Tensor
            assert torch.equal(other, some)
        assert some.isfinite().all()
        assert some.data_ptr() == weights["blocks.0.first.weight"].data_ptr()
        checkpoint["half"] = {k: v.half() for k, v in weights.items() if "second" in k}
        del weights["blocks.1.first.bias"]
        weights["blocks.1.first.weight"] = 2 * weights["blocks.1.first.weight"]


@pytest.mark.parametrize("lit", [Lit, Reading])
@pytest.mark.parametrize("form", FORMS)
def test_files_have_the_bytes_of_lightning(form, lit, tmp_path):
    kinds: set[type] = set()

    def save(trainer: Any) -> None:
        assert streams_checkpoints(trainer.strategy)
        checkpoint = trainer._checkpoint_connector.dump_checkpoint()
        kinds.update(map(type, checkpoint["state_dict"].values()))
        trainer.strategy.save_checkpoint(checkpoint, tmp_path / "folder" / "ours.ckpt")
        plugin = trainer.strategy.checkpoint_io
        TorchCheckpointIO.save_checkpoint(plugin, checkpoint, tmp_path / "theirs.ckpt")

    trainer = train(form, save, lit(WIDTH, 2))
    assert (LateWeight in kinds) == (form == "split")
    ours = (tmp_path / "folder" / "ours.ckpt").read_bytes()
    assert ours == (tmp_path / "theirs.ckpt").read_bytes()
    assert not vars(trainer.strategy.checkpoint_io)
    assert not streams_checkpoints(trainer.strategy)


def test_a_state_dict_of_the_user_has_plain_tensors(tmp_path):
    def save(trainer: Any) -> None:
        weights = trainer.lightning_module.state_dict()
        assert {type(value) for value in weights.values()} == {torch.Tensor}
        torch.save(weights, tmp_path / "weights.pt")

    train("split", save)
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert all(value.isfinite().all() for value in found.values())


def test_other_file_systems_and_links(tmp_path):
    from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

    target, link = tmp_path / "first.ckpt", tmp_path / "last.ckpt"
    target.write_bytes(b"first")
    link.symlink_to(target)

    def save(trainer: Any) -> None:
        for path in (link, "memory://folder/last.ckpt"):
            trainer.save_checkpoint(path)

    train("split", save)
    assert target.read_bytes() == b"first"
    assert not link.is_symlink()
    stored = MemoryFileSystem.store["/folder/last.ckpt"].getvalue()
    assert len(stored) == link.stat().st_size
    MemoryFileSystem.store.clear()


class Own(TorchCheckpointIO):
    """A project's own plugin."""


@pytest.mark.parametrize("plugin", [Own, AsyncCheckpointIO])
def test_plugins_of_users_are_left_alone(plugin, tmp_path):
    def save(trainer: Any) -> None:
        assert not streams_checkpoints(trainer.strategy)
        trainer.save_checkpoint(tmp_path / "last.ckpt")

    train("split", save, plugins=[plugin()])
    found = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_was_resumed_needs_its_file_no_more(form, tmp_path):
    """It is mapped while it is loaded; what stays of it is in memory."""
    path = tmp_path / "last.ckpt"
    train(form, lambda trainer: trainer.save_checkpoint(path))
    ends = []

    class Overwriting(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            with path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))

    for callbacks in ((), (Overwriting(),)):
        lit = Lit(WIDTH, 2)
        make_trainer(form, *callbacks).fit(lit, batches(3, WIDTH), ckpt_path=path)
        ends.append(lit.state_dict())
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_nothing_is_left_after_an_exception(package):
    trainers: list[Any] = []

    class Failing(package.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainers.append(trainer)
            assert streams_checkpoints(trainer.strategy)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fit(make_lit(package), quiet(), Failing(), package=package)
    assert not vars(trainers[0].strategy.checkpoint_io)
