"""Every wrong flag, file and argument around a prediction: one message with what to type."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memsave import (
    ConfigurationError,
    MemSaveCallback,
    compare_memory,
    explain_memory,
    predict_memory,
)
from lightning_memsave.cli.main import main
from tests.cli.shell import BATCH, message_of, write_project

NAN = float("nan")

FORMS = "Pass `module:Class`, `path/to/file.py:Class`"
PRINTED = "Write it as `python train.py fit --print_config` does"
BITS = 'Choose one of "8bit"'

YAML = {
    "empty.yaml": "",
    "list.yaml": "[1, 2]",
    "no_model.yaml": "trainer: {}",
    "number.yaml": "model: 3",
    "no_class.yaml": "model: {class_path: net.Nope}",
    "no_module.yaml": "model: {class_path: nowhere.Lit}",
    "argument.yaml": "model: {class_path: net.Lit, init_args: {widht: 3}}",
    "value.yaml": "model: {class_path: net.Lit, init_args: {width: wide}}",
    "arguments.yaml": "model: {class_path: net.Lit, init_args: [1]}",
    "trainer.yaml": "model: {class_path: net.Lit}\ntrainer: [1]",
    "misspelt.yaml": "model: {class_path: net.Lit}\ntrainer: {precison: 16}",
    "precision.yaml": "model: {class_path: net.Lit}\ntrainer: {precision: 9}",
    "accumulation.yaml": "model: {class_path: net.Lit}\ntrainer: {accumulate_grad_batches: 0}",
    "callback.yaml": "model: {class_path: net.Lit}\ntrainer: {callbacks: [3]}",
    "settings.yaml": "model: {class_path: net.Lit}\ntrainer: {callbacks: "
    "[{class_path: lightning_memsave.MemSaveCallback, init_args: [1]}]}",
    "memsave.yaml": "model: {class_path: net.Lit}\nmemsave: all",
    "memsave_value.yaml": "model: {class_path: net.Lit}\nmemsave: {optimizer: 9bit}",
    "memsave_name.yaml": "model: {class_path: net.Lit}\nmemsave: {optimiser: 8bit}",
    "optimizer.yaml": "model: {class_path: net.Lit}\noptimizer: torch.optim.Nope",
    "optimizer_3.yaml": "model: {class_path: net.Lit}\noptimizer: 3",
}


def join(value: str | list[str]) -> str:
    return "" if isinstance(value, str) else " ".join(value)


@pytest.fixture(autouse=True)
def project(tmp_path):
    write_project(tmp_path)
    for name, text in YAML.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "cut.json").write_text('{"by_phase": 3, "modules": 3}')
    (tmp_path / "report.json").write_text('{"changes": 3, "settings": 3}')
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.ckpt").write_bytes(b"")
    torch.save({"a": torch.ones(200, 200)}, tmp_path / "weights.pt")
    whole = (tmp_path / "weights.pt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    yield tmp_path
    for name in [n for n in sys.modules if n == "net" or n.startswith("_memsave_target_")]:
        del sys.modules[name]


class TestPredict:
    @pytest.mark.parametrize(
        ("target", "said"),
        [
            ("", FORMS),
            ("folder", FORMS),
            ("notes.txt", FORMS),
            ("net.py:", "Did you mean `net.py`?"),
            ("net.Lit", "Did you mean `net:Lit`?"),
            ("net.py", "Name the class of the model: `net.py:Class`"),
            ("net.py:BATCH", "Write `net.py:Net` or"),
            ("net.py:torch", "Name a class or a function that returns an `nn.Module`"),
            ("syntax.py:f", "write `package.module:Class` instead of its path"),
            ("raises.py:f", "write `package.module:Class` instead of its path"),
            ("exits.py:f", "write `package.module:Class` instead of its path"),
            ("list.json", "or name the code: `module:Class`"),
            ("empty.ckpt", "a file written by `torch.save(model.state_dict(), path)`"),
            ("cut.ckpt", "a file written by `torch.save(model.state_dict(), path)`"),
            ("weights.pt", "Name the class too: `--model module:Class`"),
            ("bytes.yaml", PRINTED),
            ("empty.yaml", PRINTED),
            ("list.yaml", PRINTED),
            ("no_model.yaml", "Add `model: {class_path: module.Class}`"),
            ("number.yaml", "Add `model: {class_path: module.Class}`"),
            ("no_class.yaml", "`python train.py fit --config ...` fails likewise"),
            ("no_module.yaml", "`python train.py fit --config ...` fails likewise"),
            ("argument.yaml", "Option 'widht' is not accepted"),
            ("value.yaml", 'Parser key "width"'),
            ("arguments.yaml", PRINTED),
            ("trainer.yaml", PRINTED),
            ("misspelt.yaml", "Did you mean `precision`?"),
            ("precision.yaml", "one of 32-true"),
            ("accumulation.yaml", "`accumulate_grad_batches=4`"),
            ("callback.yaml", PRINTED),
            ("settings.yaml", PRINTED),
            ("memsave.yaml", PRINTED),
            ("memsave_value.yaml", BITS),
            ("memsave_name.yaml", "Did you mean `optimizer`"),
            ("optimizer.yaml", "Check its class and arguments"),
            ("optimizer_3.yaml", PRINTED),
        ],
    )
    def test_models(self, target, said, capsys):
        assert said in message_of(capsys, "predict", target, "--batch", BATCH)

    @pytest.mark.parametrize(
        ("batch", "said"),
        [
            ("", 'Write "8x512"'),
            ("{", 'Write "8x512"'),
            ("x=float32[8", 'Write "8x512"'),
            ("float32[1e3,64]", 'Write "8x512"'),
            ("x=float33[8,64]", "Use for example `float32`"),
            ("float32[8,64],int64[8]<0", "Use a bound of at least 1"),
        ],
    )
    def test_batches(self, batch, said, capsys):
        assert said in message_of(capsys, "predict", "net.py:Lit", "--batch", batch)

    @pytest.mark.parametrize(
        ("option", "value", "said"),
        [
            ("--gpu", "T4,T5", 'Use "T4"'),
            ("--gpu", "99TiB", 'the size of its memory, such as "12GiB"'),
            ("--gpu", "12", 'Write for example "12GiB"'),
            ("--arg", "width", "Write `name=value`"),
            ("--task", "masked_lm", "Remove it"),
            ("--model", "net:Lit", "Remove it"),
            ("--precision", "bf17", "one of 32-true"),
            ("--html", "nowhere/page.html", "nowhere"),
            ("--html", "folder", "folder"),
            ("--snapshot", "nowhere/snapshot.pickle", "Name a file in a folder that exists"),
            ("--variant", "optimizr=8bit", "Did you mean `optimizer`"),
            ("--variant", "optimizer", "Write `name=value`"),
            ("--variant", "", "Remove one"),
            ("--optimizer", "", "Write for example torch.optim.AdamW"),
            ("--optimizer-arg", "lr=1", "Add --optimizer"),
            ("--set", "optimizer=9bit", BITS),
            ("--set", "optimizer={", "with quotes around a string with special characters"),
            ("--set", "keep_32bit=3", "Write it as `optimizer=LowBitOptimizer("),
            ("--set", "tf32=true", "`torch.set_float32_matmul_precision("),
            ("--set", "activation_checkpointing=9", "activation_checkpointing"),
            ("--set", "blocks=Nope", "blocks"),
        ],
    )
    def test_options(self, option, value, said, capsys):
        arguments = ("predict", "net.py:Lit", "--batch", BATCH, option, value)
        assert said in message_of(capsys, *arguments)

    @pytest.mark.parametrize(
        ("optimizer", "said"),
        [
            (["torch.optim"], "Write for example torch.optim.AdamW"),
            (["net.py:nope"], "net.py:Net"),
            (["SGD", "--optimizer-arg", "lr"], "Write `name=value`"),
            (["SGD", "--optimizer-arg", "lr=-1"], "Check its arguments: --optimizer-arg"),
        ],
        ids=join,
    )
    def test_optimizers(self, optimizer, said, capsys):
        arguments = ("predict", "net.py:Net", "--batch", BATCH, "--optimizer", *optimizer)
        assert said in message_of(capsys, *arguments)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (
                ["cut.ckpt", "--model", "net:Lit"],
                "written by `torch.save(model.state_dict(), path)`",
            ),
            (["weights.pt", "--model", "nowhere:Lit"], "nowhere"),
            (["weights.pt", "--model", "net"], "Write `module:Class`"),
            (["gpt2", "--task", "translation"], "masked_lm"),
            (["gpt2", "--model", "net:Lit"], "Remove it"),
            (["gpt2", "--arg", "n_heads=2"], "n_head"),
        ],
        ids=join,
    )
    def test_checkpoints_and_configs(self, arguments, said, capsys):
        assert said in message_of(capsys, "predict", *arguments, "--batch", "2x8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["notes.txt"], FORMS),
        (["confg.yaml"], "Did you mean `config.yaml`?"),
        (["--oom", "folder"], "or `--oom -` and paste it"),
        (["--oom", ""], "or `--oom -` and paste it"),
        (["--oom", "empty.ckpt"], 'Pass the message, such as "CUDA out of memory'),
        (["gpt2", "--cardinality", "=3"], "Write for example --cardinality merchant=867599"),
        (["gpt2", "--cardinality", "a=-1"], "Write for example --cardinality merchant=867599"),
        (["gpt2", "--memsave"], "add --batch"),
        (["gpt2", "--attention", "flash"], "add --batch"),
        (["gpt2", "--optimizer-arg", "lr=1"], "Add --optimizer"),
    ],
    ids=join,
)
def test_explain(arguments, said, capsys):
    assert said in message_of(capsys, "explain", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gpt2", "folder"], FORMS),
        (["", "weights.pt"], FORMS),
        (["weights.pt", "cut.ckpt"], "a file written by `torch.save(model.state_dict(), path)`"),
        (["cut.json", "cut.json"], "Write it again with `memsave predict --json`"),
        (["report.json", "report.json"], "Run it again with `MemSaveCallback(predict=True)`"),
        (["weights.pt", "weights.pt", "--batch", "2x8"], "`--model module:Class`"),
        (["weights.pt", "weights.pt", "--task", "x"], "Remove it"),
        (["weights.pt", "weights.pt", "--html", "x.html"], "Add --batch"),
        (["weights.pt", "weights.pt", "--precision", "16"], "compare two models with --batch"),
    ],
    ids=join,
)
def test_compare(arguments, said, capsys):
    assert said in message_of(capsys, "compare", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["--verison"], "required: COMMAND"),
        (["envv"], "choose from"),
        (["env", "x"], "unrecognized arguments: x"),
        (["env", "--json=3"], "--json"),
        (["predict"], "required: MODEL, --batch"),
        (["predict", "gpt2"], "required: --batch"),
        (["predict", "gpt2", "--gpus", "T4"], "--batch"),
        (["predict", "gpt2", "--batch", "2x8", "--device", "tpu"], "choose from"),
        (["predict", "gpt2", "--batch", "2x8", "--time-limit", "soon"], "a number of seconds"),
        (["predict", "gpt2", "--batch", "2x8", "--depth", "x"], "a whole number of at least 0"),
        (["explain", "gpt2", "--attention", "fast"], "choose from"),
        (["compare", "gpt2"], "required: B"),
        (["convert", "last.ckpt"], "required: --to"),
        (["convert", "last.ckpt", "--to", "4bit"], "choose from"),
        (["convert", "--to", "8bit"], "required: CKPT"),
    ],
    ids=join,
)
def test_what_cannot_be_parsed_exits_with_2_and_the_usage(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    out, err = capsys.readouterr()
    assert err.startswith("usage: memsave")
    assert said in err.splitlines()[-1]
    assert out == ""


def make() -> nn.Module:
    return nn.Linear(4, 2)


def give_3() -> Any:
    return 3


def fail() -> Any:
    raise KeyError("width")


def take_one(output: Any) -> Any:
    return output.mean()


ROWS = torch.ones(8, 4)
FUNCTION = "Pass the module, or for example `lambda: Model(config)`"
ITSELF = "or pass the module itself"
LOSS = "`loss=lambda output, batch: "
NAMED = "Write for example `settings={"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *(({"loss": wrong}, LOSS) for wrong in ("mse", nn.MSELoss, take_one)),
        ({"loss": lambda output, batch: None}, LOSS),
        ({"loss": lambda output, batch: 3.0}, LOSS),
        ({"loss": lambda output, batch: output}, LOSS),
        ({"optimizer": "adamw"}, "`optimizer=torch.optim.AdamW`"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(ROWS)])}, "`optimizer=torch.optim.SGD`"),
        ({"optimizer": lambda parameters: None}, "`optimizer=torch.optim.AdamW`"),
        *(({"module": wrong}, FUNCTION) for wrong in (None, "gpt2")),
        ({"module": give_3}, "Return the module"),
        ({"module": fail}, "or pass the module itself"),
        ({"module": nn.Linear}, "or pass the module itself"),
        ({"module": make().requires_grad_(False)}, "Set `requires_grad=True` for some of them"),
        ({"module": nn.ReLU()}, "Set `requires_grad=True` for some of them"),
        ({"batch": None}, "`next(iter(train_dataloader))`"),
        ({"batch": lambda: None}, "`next(iter(train_dataloader))`"),
        ({"batch": torch.ones(0, 4)}, "Pass one of the size that you train with"),
        *(({"settings": w}, NAMED) for w in ("all", MemSaveCallback)),
        ({"settings": {"optimiser": "8bit"}}, "Did you mean `optimizer`"),
        ({"settings": {3: 1}}, "Use `activation_checkpointing`, `optimizer`"),
        ({"settings": {"optimizer": "9bit"}}, BITS),
        *(
            ({"device": wrong}, '`device="cuda", gpu="T4"`')
            for wrong in ("cuda:0", None, torch.device("cpu"))
        ),
        ({"gpu": "T5"}, 'Use "T4"'),
        ({"gpu": "-3GiB"}, 'Write for example "12GiB"'),
        ({"gpu": 16}, 'Use `gpu="T4"`'),
        ({"device": "cuda", "attention": "fast"}, "Use one of 'flash', 'efficient', 'math'"),
        *(({"time_limit_s": wrong}, "`time_limit_s=60`") for wrong in (0, NAN, "60")),
        *(({"trainer_arguments": w}, "Write for example `trainer_arg") for w in ("16", ["x"])),
        ({"trainer_arguments": {"precison": "16"}}, "Did you mean `precision`?"),
        ({"trainer_arguments": {3: "16"}}, "Remove it"),
        ({"trainer_arguments": {"precision": "9"}}, "one of 32-true"),
        ({"trainer_arguments": {"accumulate_grad_batches": 0}}, "`accumulate_grad_batches=4`"),
        ({"trainer_arguments": {"gradient_clip_val": "a"}}, "`gradient_clip_val=1.0`"),
        (
            {"trainer_arguments": {"gradient_clip_algorithm": "x"}},
            "`gradient_clip_algorithm='norm'`",
        ),
        ({"trainer_arguments": {"max_steps": "x"}}, "`max_steps=1000`"),
        ({"trainer_arguments": {"max_epochs": 1.5}}, "`max_epochs=3`"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_predict_memory(arguments, said):
    given = {"module": make(), "batch": ROWS, "device": "cpu"} | arguments
    with pytest.raises(ConfigurationError) as caught:
        predict_memory(**given)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *(({"model": wrong}, FUNCTION) for wrong in (None, {"a": ROWS}, [make()])),
        ({"model": fail}, ITSELF),
        ({"model": give_3}, "Return the module only"),
        *(({"model": wrong}, FORMS) for wrong in ("nowhere", ".")),
        ({"model": Path("confg.yaml")}, "Did you mean `config.yaml`?"),
        ({"batch": "8x4"}, '"x=float32[8,10],y=int64[8]"'),
        ({"factors": ["batch"]}, "Use 'batch size'"),
        *(({"factors": w}, "Write for example `factors=[") for w in ("batch size", 3, True)),
        *(
            ({"cardinalities": wrong}, "`cardinalities={'country': 195}`")
            for wrong in ("x=3", [3], 7)
        ),
        *(({"cardinalities": {"a": w}}, "such as `{'country': 195}`") for w in ("many", -1, 1.5)),
        *(({"sequence_axis": wrong}, "(samples, tokens, features) it is 1") for wrong in (7, -9)),
        *(({"sequence_axis": wrong}, "it must be from 1 to 1") for wrong in ("time", 1.0, True)),
        ({"settings": {"optimiser": "8bit"}}, "Did you mean `optimizer`"),
        ({"device": "tpu", "batch": None}, '`device="cuda", gpu="T4"`'),
        ({"gpu": 5, "batch": None}, 'Use `gpu="T4"`'),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_explain_memory(arguments, said):
    given = {"model": make(), "batch": ROWS, "device": "cpu", "remedies": False}
    with pytest.raises(ConfigurationError) as caught:
        explain_memory(**(given | arguments))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("side", "said"),
    [
        *((wrong, "Pass a module, a function that returns one") for wrong in (3, None, [1], True)),
        (fail, ITSELF),
        (give_3, "Return the module only"),
        (nn.Linear, ITSELF),
        ("", FORMS),
        (".", FORMS),
        ("nowhere.json", FORMS),
        ("list.json", "or name the code: `module:Class`"),
        ("cut.json", "Write it again with `memsave predict --json`"),
        ("report.json", "Run it again with `MemSaveCallback(predict=True)`"),
        ({"a": "b"}, "a shape such as `(10, 4)`"),
        ({"a": (-3, 2)}, "a shape such as `(10, 4)`"),
        ({"a": ("x", 2)}, "a shape such as `(10, 4)`"),
        ({3: (10, 4)}, "`{'head.weight': (10, 4)}`"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value))[:20],
)
def test_compare_memory(side, said):
    with pytest.raises(ConfigurationError) as caught:
        compare_memory(side, make())
    assert said in str(caught.value)


@pytest.mark.parametrize("labels", ["ab", ("a",), ("a", "b", "c"), 3], ids=str)
def test_labels(labels):
    with pytest.raises(ConfigurationError, match=r'`labels=\("before", "after"\)`'):
        compare_memory(make(), make(), labels=labels)


def test_a_prediction_cut_short_is_named(capsys, project):
    assert main(["predict", "net.py:Lit", "--batch", BATCH, "--device", "cpu", "--json"]) == 0
    prediction = json.loads(capsys.readouterr().out)
    del prediction["by_category"]
    (project / "cut.json").write_text(json.dumps(prediction))
    said = message_of(capsys, "compare", "cut.json", "cut.json")
    assert "Write it again with `memsave predict --json`" in said
