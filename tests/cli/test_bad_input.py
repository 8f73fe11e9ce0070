"""Every wrong flag, file and argument around a prediction: one message with what to type."""

import json
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
from tests.cli.shell import BATCH, message_of

NAN = float("nan")

FORMS = "Pass `module:Class`, `path/to/file.py:Class`"
PRINTED = "Write it as `python train.py fit --print_config` does"
BITS = 'Choose one of "8bit"'

YAML = {
    "value.yaml": "model: {class_path: net.Lit, init_args: {width: wide}}",
    "misspelt.yaml": "model: {class_path: net.Lit}\ntrainer: {precison: 16}",
    "callback.yaml": "model: {class_path: net.Lit}\ntrainer: {callbacks: [3]}",
    "memsave.yaml": "model: {class_path: net.Lit}\nmemsave: all",
    "memsave_name.yaml": "model: {class_path: net.Lit}\nmemsave: {optimiser: 8bit}",
    "optimizer.yaml": "model: {class_path: net.Lit}\noptimizer: torch.optim.Nope",
}


def join(value: str | list[str]) -> str:
    return "" if isinstance(value, str) else " ".join(value)


@pytest.fixture(autouse=True)
def files(project):
    for name, text in YAML.items():
        (project / name).write_text(text)
    (project / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (project / "cut.json").write_text('{"by_phase": 3, "modules": 3}')
    (project / "report.json").write_text('{"changes": 3, "settings": 3}')


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["net.py:BATCH"], "Write `net.py:Net` or"),
        (["bytes.yaml"], PRINTED),
        (["value.yaml"], 'Parser key "width"'),
        (["misspelt.yaml"], "Did you mean `precision`?"),
        (["callback.yaml"], PRINTED),
        (["memsave.yaml"], PRINTED),
        (["memsave_name.yaml"], "Did you mean `optimizer`"),
        (["optimizer.yaml"], "Check its class and arguments"),
        (["net.py:Lit", "--gpu", "T4,T5"], 'Use "T4"'),
        (["net.py:Lit", "--gpu", "99TiB"], 'the size of its memory, such as "12GiB"'),
        (["net.py:Lit", "--gpu", "12"], 'Write for example "12GiB"'),
        (["net.py:Lit", "--arg", "width"], "Write `name=value`"),
        (["net.py:Lit", "--task", "masked_lm"], "Remove it"),
        (["net.py:Lit", "--model", "net:Lit"], "Remove it"),
        (["net.py:Lit", "--precision", "bf17"], "one of 32-true"),
        (["net.py:Lit", "--html", "nowhere/page.html"], "nowhere"),
        (
            ["net.py:Lit", "--snapshot", "nowhere/snapshot.pickle"],
            "Name a file in a folder that exists",
        ),
        (["net.py:Lit", "--variant", "optimizr=8bit"], "Did you mean `optimizer`"),
        (["net.py:Lit", "--variant", "optimizer"], "Write `name=value`"),
        (["net.py:Lit", "--variant", ""], "Remove one"),
        (["net.py:Lit", "--optimizer", ""], "Write `module:Class`"),
        (["net.py:Lit", "--optimizer-arg", "lr=1"], "Add --optimizer"),
        (["net.py:Lit", "--set", "optimizer=9bit"], BITS),
        (
            ["net.py:Lit", "--set", "optimizer={"],
            "with quotes around a string with special characters",
        ),
        (["net.py:Lit", "--set", "keep_32bit=3"], "Write it as `optimizer=LowBitOptimizer("),
        (["net.py:Lit", "--set", "tf32=true"], "`torch.set_float32_matmul_precision("),
        (["net.py:Lit", "--set", "activation_checkpointing=9"], "activation_checkpointing"),
        (["net.py:Lit", "--set", "blocks=Nope"], "blocks"),
        (["net.py:Net", "--optimizer", "torch.optim"], "Write for example torch.optim.AdamW"),
        (["net.py:Net", "--optimizer", "net.py:nope"], "net.py:Net"),
        (["net.py:Net", "--optimizer", "SGD", "--optimizer-arg", "lr"], "Write `name=value`"),
        (
            ["net.py:Net", "--optimizer", "SGD", "--optimizer-arg", "lr=-1"],
            "Check its arguments: --optimizer-arg",
        ),
        (["net.py:needs_gpu"], "requires a GPU"),
        (["net.py:Lit", "--arg", "size=3"], "Its arguments are `width`, `depth`"),
        (["net.py:Lit", "--gpu=-3GiB"], "must be between"),
        (["net.py:Lit", "--gpu", "T4", "--device", "cpu"], "Remove one of the two"),
        (["net.py:Lit", "--set", "batch=3"], "`batch` is not an argument of `MemSaveCallback`"),
        (["net.py:Lit", "--set", "micro_batch_size=0"], "micro_batch_size=0"),
        (["net.py:Lit", "--precision", "16", "--set", "precision=bf16"], "disagree"),
        (["net.py:Lit", "--optimizer", "SGD"], "--set optimizer=8bit"),
        (["net.py:Net", "--optimizer", "8bit"], "--set optimizer=8bit"),
        (["net.py:Net", "--optimizer", "nowhere:make"], "There is no module `nowhere`"),
        (["net.py:Net", "--optimizer", "torch.optim.Nope"], "`torch.optim` has no `Nope`"),
        (["net.py:Net", "--optimizer", "builtins:list"], "returned a list"),
        (["net.py:Manual", "--set", "micro_batch_size=2"], "automatic_optimization"),
        (["net.py:Lit", "--variant", "optimizer='8bit"], "No closing quotation"),
        (["net.py:Lit", "--html", "net.py/page.html"], "cannot be written"),
        (["net.py:Lit", "--variant", "optimizer=8bit", "--variant", "optimizer=8bit"], "twice"),
        (["net.py"], "Name the class of the model: `net.py:Class`"),
        (["net.Lit"], "Did you mean `net:Lit`?"),
        (["net:lit"], "Write `net:Lit`"),
        (["gpt2/config.yaml"], "does not exist. Pass `module:Class`"),
        (["."], "has no config.json"),
        (["net.py:Lit", "--gpu", "A100"], 'Use "A100-40GB" or "A100-80GB"'),
        (["net.py:Lit", "--world-size", "2"], '`strategy="fsdp2", world_size=8`'),
        (["gpt2", "--task", "causal"], "Did you mean `causal_lm`?"),
        (["gpt2", "--arg", "n_layers=3"], "Did you mean `n_layer`?"),
        (["gpt2", "--arg", "n_layer=three"], "Check that its values fit this `model_type`"),
        (["gpt2", "--arg", "n_head=3"], "Check its values"),
    ],
    ids=join,
)
def test_predict(arguments, said, capsys):
    assert said in message_of(capsys, "predict", *arguments, "--batch", BATCH)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ("8", "Describe each tensor that its `training_step` uses"),
        *((b, "does not describe a tensor") for b in ("8x", "8*64", "8,64", "float32(8,64)")),
        *((b, "a whole number of at least 1") for b in ("0x64", "8x0", "float32[8,sixty]")),
        ("x=int64[8],x=int64[8]", "Use each name once"),
        ("net.py:nothing", "`net.py` has no `nothing`. Write"),
    ],
)
def test_batch(batch, said, capsys):
    assert said in message_of(capsys, "predict", "net.py:Lit", "--batch", batch)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["envv"], "choose from"),
        (["predict"], "required: MODEL, --batch"),
        (["predict", "gpt2", "--batch", "2x8", "--time-limit", "soon"], "a number of seconds"),
        (["plan", "gpt2", "--batch", "2x8", "--time-limit", "0"], "a number of seconds above 0"),
        (["predict", "gpt2", "--batch", "2x8", "--depth=-1"], "a whole number of at least 0"),
        (["predict", "gpt2", "--batch", "2x8", "--strategy", "fsdp"], "choose from 'ddp', 'fsdp2'"),
        (["plan", "gpt2", "--batch", "2x8", "--exactness", "exact"], "choose from 'bitwise'"),
        (["plan", "gpt2", "--batch", "2x8", "--world-size", "two"], "is not a whole number"),
        (["convert", "last.ckpt", "--to", "4bit"], "choose from"),
        (["convert", "last.ckpt"], "required: --to"),
        (["convert", "a.ckpt", "b.ckpt", "--to", "8bit"], "unrecognized arguments: b.ckpt"),
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
        *(({"loss": lambda o, b, w=w: o if w else w}, LOSS) for w in (None, True)),
        ({"optimizer": "adamw"}, "`optimizer=torch.optim.AdamW`"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(ROWS)])}, "`optimizer=torch.optim.SGD`"),
        ({"optimizer": lambda parameters: None}, "`optimizer=torch.optim.AdamW`"),
        *(({"module": wrong}, FUNCTION) for wrong in (None, "gpt2")),
        ({"module": give_3}, "Return the module"),
        ({"module": fail}, "or pass the module itself"),
        ({"module": nn.Linear}, "or pass the module itself"),
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
        ({"model": {"a": ROWS}}, FUNCTION),
        ({"batch": "8x4"}, '"x=float32[8,10],y=int64[8]"'),
        ({"factors": ["batch"]}, "Use 'batch size'"),
        *(({"factors": w}, "Write for example `factors=[") for w in ("batch size", 3, True)),
        *(({"sequence_axis": wrong}, "(samples, tokens, features) it is 1") for wrong in (7, -9)),
        *(({"sequence_axis": wrong}, "it must be from 1 to 1") for wrong in ("time", 1.0, True)),
        ({"device": "tpu", "batch": None}, '`device="cuda", gpu="T4"`'),
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
        (3, "A int cannot be compared. Pass a module, a function that returns one"),
        (nn.Linear, ITSELF),
        ("nowhere.json", FORMS),
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
