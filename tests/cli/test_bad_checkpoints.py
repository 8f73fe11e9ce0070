"""Every checkpoint that `memsave convert` cannot use: one message with what to do instead."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memsave.cli.main import main
from lightning_memsave.techniques.low_bit_optimizer.state_checks import NESTED
from lightning_memsave.techniques.optimizer_step import COMPENSATION
from tests.cli.shell import message_of


@pytest.fixture(autouse=True)
def files():
    Path("notes.txt").write_text("hello")
    Path("folder").mkdir()
    Path("empty.ckpt").write_bytes(b"")
    torch.save({"a": torch.ones(200, 200)}, "weights.pt")
    whole = Path("weights.pt").read_bytes()
    Path("cut.ckpt").write_bytes(whole[: len(whole) // 2])


LIGHTNING = {"pytorch-lightning_version": "2.6.6", "state_dict": {}}
EARLIER = "Use an earlier checkpoint, or load its weights only"
AS_IT_IS = "Resume from the original checkpoint"
WRITTEN = "`trainer.save_checkpoint` has written"


@functools.cache
def adamw_state() -> dict[str, Any]:
    weight = nn.Parameter(torch.ones(512, 512))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    return {"state_dict": {"w": weight.detach()}, "optimizer_states": [optimizer.state_dict()]}


def saved(**changes: Any) -> dict[str, Any]:
    return {**LIGHTNING, **adamw_state(), **changes}


def with_group(**changes: Any) -> dict[str, Any]:
    (state,) = adamw_state()["optimizer_states"]
    group = {**state["param_groups"][0], **changes}
    return saved(optimizer_states=[{**state, "param_groups": [group]}])


def with_state(**changes: Any) -> dict[str, Any]:
    (state,) = adamw_state()["optimizer_states"]
    return saved(optimizer_states=[{**state, "state": {0: {**state["state"][0], **changes}}}])


def with_8bit_state(**changes: Any) -> dict[str, Any]:
    torch.save(saved(), "wide.ckpt")
    assert main(["convert", "wide.ckpt", "--to", "8bit"]) == 0
    checkpoint: dict[str, Any] = torch.load("wide-8bit.ckpt")
    state = checkpoint["optimizer_states"][0]["state"][0]
    state.update(changes)
    for name in [name for name, value in changes.items() if value is ...]:
        del state[name]
    return checkpoint


def of_states(*states: Any) -> Callable[[], dict[str, Any]]:
    return lambda: saved(optimizer_states=list(states))


class TestConvert:
    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("", "Save a full one: `FSDPStrategy(state_dict_type='full')`"),
            ("nowhere.ckpt", WRITTEN),
            ("empty.ckpt", WRITTEN),
            ("cut.ckpt", WRITTEN),
            ("notes.txt", WRITTEN),
            ("weights.pt", WRITTEN),
        ],
    )
    def test_files(self, source, said, capsys):
        assert said in message_of(capsys, "convert", source, "--to", "32bit", status=1)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--output", ""], "Pass the name of a file in it"),
            (["--output", "folder"], "Pass the name of a file in it"),
            (["--output", "nowhere/x.ckpt"], "Create it first"),
            (["--output", "notes.txt/x.ckpt"], "Create it first"),
            (["--output", "notes.txt"], "Pass --force, or another --output"),
            (["--keep-32bit", "nope*"], "Use a pattern over names such as w"),
            (["--keep-32bit", ""], "Use a pattern over names such as w"),
        ],
    )
    def test_options(self, options, said, capsys):
        torch.save(saved(), "last.ckpt")
        arguments = ("convert", "last.ckpt", "--to", "8bit", *options)
        assert said in message_of(capsys, *arguments, status=1)

    @pytest.mark.parametrize(
        ("checkpoint", "said"),
        [
            (lambda: saved(optimizer_states=None), "Load it without conversion"),
            (lambda: saved(optimizer_states=3), EARLIER),
            (lambda: saved(optimizer_states={"a": 1}), EARLIER),
            (of_states(3), EARLIER),
            (of_states({}), EARLIER),
            (of_states({"state": [1], "param_groups": []}), EARLIER),
            (of_states({"state": {}, "param_groups": [3]}), EARLIER),
            (of_states({"state": {}, "param_groups": [{}]}), EARLIER),
            (of_states({"state": {}, "param_groups": [{"params": 3}]}), EARLIER),
            (of_states({"state": {0: 3}, "param_groups": [{"params": [0]}]}), EARLIER),
            (lambda: saved(state_dict=3), EARLIER),
            (lambda: with_group(params=[[0]]), EARLIER),
            (lambda: with_group(lr="fast"), EARLIER),
            (lambda: with_group(betas=3), EARLIER),
            (lambda: with_group(param_names=[]), EARLIER),
            (lambda: with_group(params=[1]), AS_IT_IS),
            (lambda: with_state(exp_avg="x"), EARLIER),
            (lambda: with_state(step="x"), EARLIER),
            (lambda: with_state(step=torch.ones(3)), EARLIER),
            (lambda: with_state(bogus="x"), AS_IT_IS),
            (lambda: with_state(**{COMPENSATION: torch.ones(3)}), EARLIER),
        ],
    )
    def test_checkpoints_to_8bit(self, checkpoint, said, capsys):
        torch.save(checkpoint(), "bad.ckpt")
        assert said in message_of(capsys, "convert", "bad.ckpt", "--to", "8bit", status=1)
        assert not Path("bad-8bit.ckpt").exists()

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("step", ...),
            ("state1", "x"),
            ("state1", torch.zeros(3, dtype=torch.uint8)),
            ("state2", None),
            ("absmax1", ...),
            ("absmax1", torch.ones(1)),
            ("qmap1", torch.ones(3)),
            (NESTED, "x"),
            (COMPENSATION, 3),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_8bit_checkpoints_to_32bit(self, name, value, capsys):
        torch.save(with_8bit_state(**{name: value}), "bad.ckpt")
        said = message_of(capsys, "convert", "bad.ckpt", "--to", "32bit", status=1)
        assert "load its weights only: `MyModule.load_from_checkpoint(path)`" in said
        assert not Path("bad-32bit.ckpt").exists()
