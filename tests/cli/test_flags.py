"""The callback under the stock LightningCLI, and `MemSaveCLI` of both packages: flags and YAML."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_memsave import (
    ActivationCheckpointing,
    LowBitOptimizer,
    MemSaveCallback,
    MicroBatching,
    NamedOptimizer,
)
from lightning_memsave.cli import lightning_pytorch, pytorch_lightning
from lightning_memsave.core.nested import split_samples
from tests.callbacks.lit import PACKAGES, make_lit

pytestmark = [
    # lightning 2.6.6 calls jsonargparse 4.53 by names of older releases.
    pytest.mark.filterwarnings(
        r"ignore:.*:DeprecationWarning:(lightning\.pytorch|pytorch_lightning)\.cli"
    ),
    # `MemSaveCLI` gives the precision to the Trainer.
    pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU"),
]

STOCK = "stock"
CLIS: dict[str, Any] = {
    STOCK: LightningCLI,
    "lightning": lightning_pytorch.MemSaveCLI,
    "pytorch_lightning": pytorch_lightning.MemSaveCLI,
}
OURS = "--trainer.callbacks+=lightning_memsave.MemSaveCallback"
every_cli = pytest.mark.parametrize("cli", CLIS)


@pytest.fixture(autouse=True)
def no_arguments_of_pytest(monkeypatch):
    """LightningCLI warns about `args` where the process itself was given some."""
    monkeypatch.setattr("sys.argv", ["train.py"])


def from_command_line(cli: str, *args: str) -> MemSaveCallback:
    lit = BoringModel if cli == STOCK else type(make_lit(PACKAGES[cli]))
    made = CLIS[cli](
        lit,
        args=["--trainer.accelerator=cpu", "--trainer.logger=false", *args],
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
    )
    return next(c for c in made.trainer.callbacks if isinstance(c, MemSaveCallback))


def from_flags(cli: str, *flags: str) -> MemSaveCallback:
    if cli == STOCK:
        return from_command_line(cli, OURS, *(f"--trainer.callbacks.{flag}" for flag in flags))
    return from_command_line(cli, *(f"--memsave.{flag}" for flag in flags))


FLAGS: list[tuple[str, Any]] = [
    ("activation_checkpointing=2", 2),
    ("activation_checkpointing=50%", "50%"),
    ("activation_checkpointing=auto", "auto"),
    ("activation_checkpointing=every:2", "every:2"),
    ("activation_checkpointing=null", None),
    ("optimizer=paged_lion_8bit", "paged_lion_8bit"),
    ("optimizer=torch.optim:NAdam", "torch.optim:NAdam"),
    ("optimizer=null", None),
    ("precision=bf16-mixed", "bf16-mixed"),
    ("precision=32", 32),
    ("precision=null", None),
    ("micro_batch_size=4", 4),
    ("micro_batch_size=halve", "halve"),
    ("micro_batch_size=null", None),
    ("accumulate_grad_batches=4", 4),
    ("accumulate_grad_batches=null", None),
    ("chunked_cross_entropy=true", True),
    ("chunked_cross_entropy=512", 512),
    ("optimizer_in_backward=true", True),
    ("optimizer_in_backward=false", False),
    ("low_precision_weights=kahan", "kahan"),
    ("offload=parameters", "parameters"),
    ("offload=null", None),
    ("host_budget=null", None),
    ("attention=sdpa", "sdpa"),
    ("attention=null", None),
    ("preset=single_gpu", "single_gpu"),
    ("budget=12GiB", "12GiB"),
    ("budget=0.5", 0.5),
    ("budget=null", None),
    ("blocks=Block", "Block"),
    (r"blocks=re:layers\.\d+", r"re:layers\.\d+"),
    (r'blocks=["re:layer[.]x", Block]', ["re:layer[.]x", "Block"]),
    ("exactness=bitwise", "bitwise"),
    ("predict=5.5", 5.5),
    ("report=false", False),
]


@pytest.mark.parametrize(
    ("cli", "flag", "value"),
    # Each with one of them: the callback's own annotations give the types.
    [(list(CLIS)[number % 3], flag, value) for number, (flag, value) in enumerate(FLAGS)],
)
def test_flags(cli, flag, value):
    name = flag.partition("=")[0].rstrip("+")
    got = from_flags(cli, flag).arguments[name]
    assert (got, type(got)) == (value, type(value))


def test_every_argument_has_a_flag_here():
    tested = {flag.partition("=")[0].rstrip("+") for flag, _ in FLAGS}
    assert tested == MemSaveCallback().arguments.keys()


@every_cli
@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("block_micro_batch_size=4", 'Write `micro_batch_size=MicroBatching(8, of="blocks")`'),
        ("early_release=true", "Remove it: tensors are always freed early."),
        ("stack=classic", "Write `preset=...`, with the same values."),
        ("optimizer_in_bckward=true", "Did you mean `optimizer_in_backward`"),
    ],
)
def test_names_that_went_say_what_to_write(cli, flag, instead, capsys):
    with pytest.raises(SystemExit, match="2"):
        from_flags(cli, flag)
    assert instead in capsys.readouterr().err
    config = write_config(cli, flag.replace("=", ": "))
    with pytest.raises(SystemExit, match="2"):
        from_command_line(cli, "--config", config)
    assert instead in capsys.readouterr().err


@every_cli
def test_flags_of_technique_objects(cli):
    callback = from_flags(
        cli,
        "activation_checkpointing=lightning_memsave.ActivationCheckpointing",
        "activation_checkpointing.which=every:2",
        "optimizer=lightning_memsave.LowBitOptimizer",
        "optimizer.min_8bit_size=64",
        'optimizer.keep_32bit=["*.head.*"]',
        'optimizer.optimizer_kwargs={"betas": [0.9, 0.95]}',
        "optimizer.optimizer=adamw_8bit",
        "micro_batch_size=lightning_memsave.MicroBatching",
        "micro_batch_size.micro_batch_size=2",
        "micro_batch_size.loss_weight=tokens_shifted",
        "micro_batch_size.split_batch=lightning_memsave.core.nested.split_samples",
    )
    checkpointing = ActivationCheckpointing("every:2")
    assert callback.arguments["activation_checkpointing"] == checkpointing
    assert callback.arguments["optimizer"] == LowBitOptimizer(
        "adamw_8bit",
        optimizer_kwargs={"betas": [0.9, 0.95]},
        min_8bit_size=64,
        keep_32bit=("*.head.*",),
    )
    parts = MicroBatching(2, loss_weight="tokens_shifted", split_batch=split_samples)
    assert callback.arguments["micro_batch_size"] == parts


@every_cli
def test_flags_of_a_named_optimizer(cli):
    callback = from_flags(
        cli,
        "optimizer=lightning_memsave.NamedOptimizer",
        "optimizer.optimizer=torch.optim:NAdam",
        'optimizer.optimizer_kwargs={"betas": [0.9, 0.95]}',
    )
    technique = NamedOptimizer("torch.optim:NAdam", optimizer_kwargs={"betas": (0.9, 0.95)})
    assert callback.arguments["optimizer"] == technique


CONFIGS = {
    "values": r"""
        activation_checkpointing: 2
        optimizer: lion_8bit
        precision: 32
        accumulate_grad_batches: 4
        blocks: ["re:layers[.]x", Block]
        report: false
""",
    "objects": """
        activation_checkpointing:
          class_path: lightning_memsave.ActivationCheckpointing
          init_args: {which: 'every:2'}
        optimizer:
          class_path: lightning_memsave.LowBitOptimizer
          init_args:
            optimizer: paged_adamw_8bit
            keep_32bit: ['*.head.*']
            optimizer_kwargs: {betas: [0.9, 0.95]}
        micro_batch_size:
          class_path: lightning_memsave.MicroBatching
          init_args: {micro_batch_size: 2, loss_weight: samples, split_batch: torch.split}
""",
    "a named optimizer": """
        optimizer:
          class_path: lightning_memsave.NamedOptimizer
          init_args:
            optimizer: muon
            blocks: Block
            optimizer_kwargs: {betas: [0.9, 0.95]}
""",
    "micro-batches of blocks": """
        micro_batch_size:
          class_path: lightning_memsave.MicroBatching
          init_args: {micro_batch_size: 1, of: blocks, blocks: Block}
""",
}


def write_config(cli: str, arguments: str) -> str:
    head = "memsave:\n"
    if cli == STOCK:
        head = "trainer:\n  callbacks:\n  - class_path: lightning_memsave.MemSaveCallback\n"
        head += "    init_args:\n"
    text = textwrap.indent(textwrap.dedent(arguments), " " * 8)
    Path("config.yaml").write_text(head + text)
    return "config.yaml"


@every_cli
def test_yaml(cli):
    callback = from_command_line(cli, "--config", write_config(cli, CONFIGS["values"]))
    assert callback.arguments == {
        "activation_checkpointing": 2,
        "optimizer": "lion_8bit",
        "precision": 32,
        "micro_batch_size": "auto",
        "accumulate_grad_batches": 4,
        "chunked_cross_entropy": "auto",
        "optimizer_in_backward": "auto",
        "low_precision_weights": "auto",
        "offload": "auto",
        "attention": "auto",
        "preset": None,
        "budget": None,
        "blocks": ["re:layers[.]x", "Block"],
        "host_budget": None,
        "exactness": "approximate",
        "predict": True,
        "report": False,
    }


@every_cli
@pytest.mark.parametrize("name", CONFIGS)
def test_a_printed_configuration_gives_the_same_callback(cli, name, capsys):
    config = write_config(cli, CONFIGS[name])
    first = from_command_line(cli, "--config", config)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        from_command_line(cli, "--config", config, "--print_config")
    Path("printed.yaml").write_text(capsys.readouterr().out)
    second = from_command_line(cli, "--config", "printed.yaml")
    assert repr(second) == repr(first)
    assert repr(second) != "MemSaveCallback()"
