"""`MemSaveCLI` of both packages: flags, YAML, precision, and what the Trainer gets."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_memsave
from lightning_memsave import (
    ConfigurationError,
    MemSaveCallback,
    MemSaveCLIMixin,
)
from lightning_memsave.cli import lightning_pytorch, pytorch_lightning
from tests.callbacks.lit import PACKAGES, make_lit, make_trainer

# lightning 2.6.6 calls jsonargparse 4.53 by names of older releases.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:.*:DeprecationWarning:(lightning\.pytorch|pytorch_lightning)\.cli"
)

CLIS: dict[str, Any] = {
    "lightning": lightning_pytorch.MemSaveCLI,
    "pytorch_lightning": pytorch_lightning.MemSaveCLI,
}
packages = pytest.mark.parametrize("name", CLIS)

TRAINER = [
    "--trainer.accelerator=cpu",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.max_epochs=1",
]


@pytest.fixture(autouse=True)
def no_arguments_of_pytest(monkeypatch):
    """LightningCLI warns about `args` where the process itself was given some."""
    monkeypatch.setattr("sys.argv", ["train.py"])
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # `seed_everything` leaves them behind
        monkeypatch.setenv(variable, "0")


def run_cli(name: str, *args: str, run: bool = False, **settings: Any) -> Any:
    cls = settings.pop("cls", CLIS[name])
    defaults: dict[str, Any] = {"save_config_callback": None, "seed_everything_default": False}
    lit_class = type(make_lit(PACKAGES[name]))
    args = (args[0], *TRAINER, *args[1:]) if run else (*TRAINER, *args)
    return cls(lit_class, args=list(args), run=run, **(defaults | settings))


def callback_of(cli: Any) -> Any:
    found = [c for c in cli.trainer.callbacks if isinstance(c, MemSaveCallback)]
    return found[0] if found else None


@packages
def test_without_flags_it_is_the_bare_callback(name):
    cli = run_cli(name)
    assert repr(callback_of(cli)) == "MemSaveCallback()"
    assert type(cli.trainer) is PACKAGES[name].Trainer


def test_the_public_name_is_the_one_for_lightning():
    assert lightning_memsave.MemSaveCLI is lightning_pytorch.MemSaveCLI
    assert issubclass(pytorch_lightning.MemSaveCLI, MemSaveCLIMixin)


@packages
def test_every_argument_of_the_callback_is_a_flag(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        run_cli(name, "fit", "--help", run=True)
    out = capsys.readouterr().out
    flags = {line.split()[0].rstrip(",") for line in out.splitlines() if "  --memsave." in line}
    expected = {f"--memsave.{argument}" for argument in MemSaveCallback().arguments}
    assert expected | {"--memsave.enabled"} <= flags
    assert "(type: Literal['bitwise', 'rounding'," in " ".join(out.split())


@packages
def test_a_saved_configuration_gives_the_same_run(name):
    save = sys.modules[CLIS[name].__mro__[2].__module__].SaveConfigCallback
    args = (
        "--memsave.precision=bf16-mixed",
        "--memsave.optimizer=sgd_8bit",
        "--trainer.precision=bf16-mixed",
    )
    cli = run_cli(
        name, "fit", *args, "--trainer.fast_dev_run=false", run=True, save_config_callback=save
    )
    assert cli.trainer.global_step == 6
    again = run_cli(name, "fit", "--config=config.yaml", run=True)
    assert repr(callback_of(again)) == repr(callback_of(cli))
    assert again.trainer.precision == "bf16-mixed"


@packages
def test_enabled_false_leaves_the_trainer_alone(name):
    cli = run_cli(name, "--memsave.enabled=false", "--memsave.precision=bf16-mixed")
    assert callback_of(cli) is None
    assert cli.trainer.precision == "32-true"
    assert callback_of(run_cli(name, "--memsave.enabled=false", "--memsave.optimizer=null")) is None


@packages
def test_callbacks_of_the_user_stay(name):
    path = f"{PACKAGES[name].__name__}.callbacks.LearningRateMonitor"
    cli = run_cli(name, f"--trainer.callbacks+={path}")
    classes = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert classes[:2] == ["LearningRateMonitor", "MemSaveCallback"]
    own = PACKAGES[name].callbacks.DeviceStatsMonitor()
    cli = run_cli(name, trainer_defaults={"callbacks": own})
    assert own in cli.trainer.callbacks
    assert callback_of(cli) is not None


class TestPrecision:
    @packages
    @pytest.mark.parametrize(
        ("memsave", "trainer", "in_trainer", "in_callback"),
        [
            ("auto", None, "32-true", "auto"),
            ("auto", "32-true", "32-true", None),  # the callback alone cannot know that
            ("auto", "bf16-mixed", "bf16-mixed", None),
            ("null", None, "32-true", None),
            ("null", "bf16-mixed", "bf16-mixed", None),
            ("bf16-mixed", None, "bf16-mixed", "bf16-mixed"),
            ("bf16", "bf16-mixed", "bf16-mixed", "bf16"),
            ("64", None, "64-true", 64),
            ("32", "32-true", "32-true", 32),
        ],
    )
    def test_trainer_is_built_with_it(self, name, memsave, trainer, in_trainer, in_callback):
        given = [] if trainer is None else [f"--trainer.precision={trainer}"]
        cli = run_cli(name, f"--memsave.precision={memsave}", *given)
        assert cli.trainer.precision == in_trainer
        assert callback_of(cli).arguments["precision"] == in_callback

    @packages
    @pytest.mark.parametrize("is_default", [False, True])
    def test_disagreement_is_an_error(self, name, is_default, capsys):
        given = () if is_default else ("--trainer.precision=64-true",)
        defaults = {"precision": "64-true"} if is_default else {}
        with pytest.raises(SystemExit, match="2"):
            run_cli(name, "--memsave.precision=bf16-mixed", *given, trainer_defaults=defaults)
        message = (
            "--memsave.precision=bf16-mixed and --trainer.precision=64-true disagree. Remove one"
        )
        assert f"error: {message}" in capsys.readouterr().err


@packages
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("precision=bf17", "`precision='bf17'` is not a precision that Lightning supports"),
        ("optimizer=adamx_8bit", 'there is no such optimizer. Did you mean "adam'),
        ("accumulate_grad_batches=0", "Use `accumulate_grad_batches=4` for a step every four"),
        ("exactness=exact", "Expected a typing.Literal['bitwise', 'rounding', 'approximate']"),
        ("nonsense=1", "`nonsense` is not an argument of `MemSaveCallback`. Use `enabled`, `"),
        ("keep_32bit=[a]", "Write it as `optimizer=LowBitOptimizer("),
    ],
)
def test_wrong_settings_exit_with_2_and_a_message(name, flag, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_cli(name, f"--memsave.{flag}")
    assert message in capsys.readouterr().err


@packages
def test_wrong_settings_raise_where_python_asks_for_it(name):
    settings: dict[str, Any] = {"parser_kwargs": {"exit_on_error": False}}
    with pytest.raises(Exception, match="is not a precision that Lightning supports") as caught:
        run_cli(name, "--memsave.precision=bf17", **settings)
    assert isinstance(caught.value.__cause__, ConfigurationError)


@packages
@pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
def test_subcommands(name, subcommand, capsys):
    cli = run_cli(name, subcommand, "--memsave.optimizer=8bit", "--memsave.predict=false", run=True)
    assert repr(callback_of(cli)) == "MemSaveCallback(optimizer='8bit', predict=False)"
    assert ("AdamW -> 8-bit AdamW" in capsys.readouterr().out) == (subcommand == "fit")


@packages
def test_fit_gives_what_the_callback_alone_gives(name):
    flags = ["accumulate_grad_batches=4", "optimizer=sgd_8bit", "precision=bf16-mixed"]
    given = [f"--memsave.{flag}" for flag in flags]
    cli = run_cli(name, "fit", *given, run=True, seed_everything_default=3)
    # 6 batches in windows of 4 and 2: the second is scaled by the callback, not by the Trainer.
    assert cli.trainer.global_step == 2

    PACKAGES[name].seed_everything(3, verbose=False)
    own = type(cli.model)()
    callback = MemSaveCallback(
        accumulate_grad_batches=4, optimizer="sgd_8bit", precision="bf16-mixed"
    )
    make_trainer(PACKAGES[name], callback).fit(own)
    pairs = zip(own.state_dict().values(), cli.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@packages
def test_a_subclass_sets_its_own_defaults_without_calling_super(name):
    class MyCLI(CLIS[name]):  # type: ignore[misc, valid-type]
        def add_arguments_to_parser(self, parser):
            parser.set_defaults({"memsave.optimizer": "lion_8bit"})

        def before_instantiate_classes(self):
            self.config.memsave.activation_checkpointing = 2

    expected = "MemSaveCallback(activation_checkpointing=2, optimizer='lion_8bit')"
    assert repr(callback_of(run_cli(name, cls=MyCLI))) == expected


@packages
def test_the_mixin_works_on_an_own_cli(name):
    base = CLIS[name].__mro__[2]

    class Middle(base):  # type: ignore[misc, valid-type]
        def add_core_arguments_to_parser(self, parser):
            super().add_core_arguments_to_parser(parser)
            parser.add_argument("--greeting", default="hello")

    class MyCLI(MemSaveCLIMixin, Middle):
        pass

    cli = run_cli(name, "--greeting=hi", "--memsave.report=false", cls=MyCLI)
    assert cli.config.greeting == "hi"
    assert repr(callback_of(cli)) == "MemSaveCallback(report=False)"


SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
from {package} import Callback
from {package}.demos.boring_classes import BoringModel
from lightning_memsave.cli.{module} import MemSaveCLI

class Watch(Callback):
    def setup(self, trainer, pl_module, stage):
        assert "bitsandbytes" not in sys.modules

    def on_train_start(self, trainer, pl_module):
        print(type(trainer.optimizers[0]).__name__, hasattr(trainer.optimizers[0], "uses_8bit"))

class Model(BoringModel):
    def __init__(self):
        super().__init__()
        import torch
        self.layer = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Linear(256, 2))

MemSaveCLI(Model, trainer_defaults={{"callbacks": [Watch()]}}, save_config_callback=None)
assert "bitsandbytes" in sys.modules
"""


@packages
@pytest.mark.slow
def test_optimizers_of_torch_by_short_name_and_no_bitsandbytes_before_fit(name):
    """Importing bitsandbytes would make `--optimizer=AdamW` ambiguous."""
    module = CLIS[name].__module__.rpartition(".")[2]
    script = SCRIPT.format(package=PACKAGES[name].__name__, module=module)
    Path("train.py").write_text(script)
    args = ["fit", *TRAINER, "--trainer.fast_dev_run=2", "--optimizer=AdamW", "--optimizer.lr=0.01"]
    args += ["--memsave.optimizer=8bit"]  # what "auto" leaves out for so small a model
    done = subprocess.run(
        [sys.executable, "train.py", *args], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "AdamW True" in done.stdout
