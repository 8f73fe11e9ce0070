"""``memsave convert`` on checkpoints that Trainers of both packages have written."""

import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memsave import LowBitOptimizer, MemSaveCallback
from lightning_memsave.cli.main import main
from tests.callbacks.lit import PACKAGES, Trace, make_lit, make_trainer
from tests.cli.shell import message_of
from tests.helpers import full_disk

# Lightning asks for the callback whose state is in the checkpoint; going on without it is the aim.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")

packages = pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)


def fit(package, *callbacks: Any, max_epochs: int = 2, ckpt_path: str | None = None) -> Any:
    """Losses, final parameters and the Trainer of a fit whose dropout depends on the step only."""

    class Reseed(package.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            torch.manual_seed(trainer.global_step)

    lit, trace = make_lit(package), Trace(package)
    trainer = make_trainer(package, *callbacks, Reseed(), trace.callback, max_epochs=max_epochs)
    trainer.fit(lit, ckpt_path=ckpt_path)
    parameters = torch.cat([p.detach().flatten() for p in lit.parameters()])
    return trace.losses, parameters, trainer


def low_bit() -> MemSaveCallback:
    return MemSaveCallback(None, optimizer="8bit", predict=False, report=False)


def save(package, *callbacks: Any, name: str = "last.ckpt") -> None:
    fit(package, *callbacks, max_epochs=1)[2].save_checkpoint(name)


def optimizer_state(name: str) -> Any:
    return torch.load(name, weights_only=True)["optimizer_states"][0]["state"]


def forget_state(name: str) -> str:
    """Write a checkpoint whose optimizer starts anew, for comparison."""
    checkpoint = torch.load(name, weights_only=True)
    checkpoint["optimizer_states"][0]["state"] = {}
    torch.save(checkpoint, "forgetful.ckpt")
    return "forgetful.ckpt"


@packages
def test_a_plain_trainer_goes_on_from_an_8bit_run(package, capsys):
    save(package, low_bit())
    straight = fit(package, low_bit())
    assert main(["convert", "last.ckpt", "--to", "32bit"]) == 0
    out = capsys.readouterr().out
    assert "optimizer 0: AdamW: 9 of 26 tensors were 8-bit, optimizer state" in out
    assert out.splitlines()[-1].startswith("last-32bit.ckpt (")
    losses, parameters, trainer = fit(package, ckpt_path="last-32bit.ckpt")
    assert type(trainer.optimizers[0]) is torch.optim.AdamW
    assert trainer.global_step == 12
    assert losses == pytest.approx(straight[0][6:], rel=0.01)
    forgotten = fit(package, ckpt_path=forget_state("last-32bit.ckpt"))[1]
    difference = (parameters - straight[1]).abs().mean()
    assert difference < 0.1 * (forgotten - straight[1]).abs().mean()


@packages
def test_without_conversion_a_plain_trainer_fails(package):
    save(package, low_bit())
    with pytest.raises(KeyError, match="exp_avg"):
        fit(package, ckpt_path="last.ckpt")


@packages
def test_the_callback_goes_on_from_a_32bit_run(package, capsys):
    save(package)
    straight = fit(package)
    assert main(["convert", "last.ckpt", "--to", "8bit", "--output", "small.ckpt"]) == 0
    assert "AdamW -> 8-bit AdamW: 9 of 26 tensors" in capsys.readouterr().out
    assert Path("small.ckpt").stat().st_size < 0.7 * Path("last.ckpt").stat().st_size
    losses, parameters, trainer = fit(package, low_bit(), ckpt_path="small.ckpt")
    assert hasattr(trainer.optimizers[0], "uses_8bit")
    assert losses == pytest.approx(straight[0][6:], rel=0.01)
    forgotten = fit(package, ckpt_path=forget_state("last.ckpt"))[1]
    difference = (parameters - straight[1]).abs().mean()
    assert difference < 0.1 * (forgotten - straight[1]).abs().mean()


@packages
def test_only_the_optimizer_states_change(package):
    save(package, low_bit())
    assert main(["convert", "last.ckpt", "--to", "32bit"]) == 0
    assert main(["convert", "last-32bit.ckpt", "--to", "8bit", "--output", "back.ckpt"]) == 0
    old, new, back = (
        torch.load(name, weights_only=True)
        for name in ("last.ckpt", "last-32bit.ckpt", "back.ckpt")
    )
    assert list(old) == list(new) == list(back)
    for key in old.keys() - {"optimizer_states", "state_dict"}:
        assert repr(old[key]) == repr(new[key]) == repr(back[key])
    for key, tensor in old["state_dict"].items():
        assert torch.equal(tensor, new["state_dict"][key])
    assert old["optimizer_states"][0]["param_groups"] == back["optimizer_states"][0]["param_groups"]
    fit(package, low_bit(), ckpt_path="back.ckpt")


class TestOutput:
    def test_nothing_is_overwritten_without_force(self, capsys):
        save(PACKAGES["lightning"], low_bit())
        Path("out.ckpt").write_text("precious")
        before = Path("last.ckpt").read_bytes()
        for output in ("out.ckpt", "last.ckpt"):
            assert main(["convert", "last.ckpt", "--to", "32bit", "--output", output]) == 1
            assert f"`{output}` exists. Pass --force" in capsys.readouterr().err
        assert Path("out.ckpt").read_text() == "precious"
        assert Path("last.ckpt").read_bytes() == before
        assert (
            main(["convert", "last.ckpt", "--to", "32bit", "--output", "last.ckpt", "--force"]) == 0
        )
        assert "exp_avg" in optimizer_state("last.ckpt")[0]

    @pytest.mark.parametrize("room_bytes", [0, 1000, 100_000])
    def test_a_full_disk_keeps_what_was_there(self, room_bytes, capsys):
        save(PACKAGES["lightning"], low_bit())
        Path("out.ckpt").write_text("precious")
        args = ["convert", "last.ckpt", "--to", "32bit", "--output", "out.ckpt", "--force"]
        with full_disk(room_bytes):
            assert main(args) == 1
        said = "memsave convert: `out.ckpt` cannot be written: File too large. Nothing was changed."
        assert said in capsys.readouterr().err
        assert Path("out.ckpt").read_text() == "precious"
        assert sorted(path.name for path in Path.cwd().iterdir()) == ["last.ckpt", "out.ckpt"]

    def test_a_link_to_nowhere_is_not_written_through(self, capsys):
        Path("last-8bit.ckpt").symlink_to("elsewhere")
        assert main(["convert", "last.ckpt", "--to", "8bit"]) == 1
        assert "`last-8bit.ckpt` exists. Pass --force" in capsys.readouterr().err

    def test_permissions_are_those_of_the_checkpoint(self):
        save(PACKAGES["lightning"], low_bit())
        Path("last.ckpt").chmod(0o640)
        assert main(["convert", "last.ckpt", "--to", "32bit"]) == 0
        assert stat.S_IMODE(Path("last-32bit.ckpt").stat().st_mode) == 0o640


class Unknown:
    """What a user may have put into a checkpoint."""


LIGHTNING = {"pytorch-lightning_version": "2.6.6", "state_dict": {}}


@pytest.fixture
def files() -> None:
    """What someone may give by mistake, and what cannot be converted."""
    Path("notes.txt").write_text("hello")
    Path("folder").mkdir()
    Path("empty.ckpt").write_bytes(b"")
    torch.save({"a": torch.ones(200, 200)}, "weights.pt")
    whole = Path("weights.pt").read_bytes()
    Path("cut.ckpt").write_bytes(whole[: len(whole) // 2])
    torch.save({**LIGHTNING, "hyper_parameters": {"x": Unknown()}}, "objects.ckpt")
    torch.save(
        {**LIGHTNING, "optimizer_states": [{"state": {}, "param_groups": []}]}, "stateless.ckpt"
    )
    save(PACKAGES["lightning"])


WRITTEN = "`trainer.save_checkpoint` has written"


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([""], "Save a full one: `FSDPStrategy(state_dict_type='full')`"),
        *(([name], WRITTEN) for name in ("nowhere.ckpt", "empty.ckpt", "cut.ckpt")),
        *(([name], WRITTEN) for name in ("notes.txt", "weights.pt")),
        (["objects.ckpt"], "it has an object of `tests.cli.test_convert.Unknown`, and loading"),
        (["stateless.ckpt"], "Conversion to 8bit cannot be applied: optimizer 0: it has no state"),
        (["last.ckpt", "--output", ""], "Pass the name of a file in it"),
        (["last.ckpt", "--output", "folder"], "Pass the name of a file in it"),
        (["last.ckpt", "--output", "nowhere/x.ckpt"], "Create it first"),
        (["last.ckpt", "--output", "notes.txt/x.ckpt"], "Create it first"),
        (["last.ckpt", "--output", "notes.txt"], "Pass --force, or another --output"),
        (["last.ckpt", "--keep-32bit", "nope*"], "Use a pattern over names such as "),
        (["last.ckpt", "--keep-32bit", ""], "Use a pattern over names such as "),
    ],
)
def test_what_cannot_be_converted_is_said_in_one_message(arguments, said, capsys):
    assert said in message_of(capsys, "convert", *arguments, "--to", "8bit", status=1)
    assert not list(Path.cwd().glob("*-8bit.ckpt"))


def test_keep_32bit(capsys):
    save(PACKAGES["lightning"])
    pattern = ["--keep-32bit", "*.down.weight"]
    assert main(["convert", "last.ckpt", "--to", "8bit", *pattern]) == 0
    assert "AdamW: 5 of 26 tensors" in capsys.readouterr().out
    assert main(["convert", "last-8bit.ckpt", "--to", "32bit", *pattern]) == 1
    assert "--keep-32bit works only with --to 8bit" in capsys.readouterr().err


@packages
def test_other_optimizers_of_the_callback(package, capsys):
    save(package, MemSaveCallback(None, optimizer=LowBitOptimizer("lion_8bit")))
    assert main(["convert", "last.ckpt", "--to", "32bit"]) == 1
    assert "written by Lion, which torch.optim does not have" in capsys.readouterr().err


def test_the_default_output_keeps_the_name():
    save(PACKAGES["lightning"], low_bit(), name="epoch=1-step=6.ckpt")
    assert main(["convert", "epoch=1-step=6.ckpt", "--to", "32bit"]) == 0
    assert Path("epoch=1-step=6-32bit.ckpt").exists()
