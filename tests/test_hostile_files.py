"""Files made to do harm: no command runs what is in them, and each says what is wrong with it."""

import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memsave import MemoryBreakdown, MemoryPrediction, MemSaveCallback
from lightning_memsave.cli.main import main
from lightning_memsave.errors import IncompatibleError
from tests.callbacks.lit import PACKAGES, make_lit, make_trainer
from tests.cli.shell import BATCH, write_project

MARKER = "marker"
TOUCH = f"{{class_path: subprocess.Popen, init_args: {{args: [touch, {MARKER}]}}}}"
SAVE = f"{{class_path: torch.save, init_args: {{f: {MARKER}}}}}"
LIT = "model: {class_path: net.Lit}\n"
ESCAPE, ESCAPED = "\x1b]0;title\x07", r"\x1b]0;title"


class Touch:
    """Creates the marker when it is unpickled."""

    def __reduce__(self) -> Any:
        return open, (MARKER, "w")


CODE = pickle.dumps(Touch())
ADAM = {"step": torch.tensor(1.0), "exp_avg": torch.ones(99), "exp_avg_sq": torch.ones(99)}
WIDE = {**ADAM, **dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.ones(1).expand(2**20, 2**18))}
GROUP = dict(
    torch.optim.AdamW([torch.ones(99, requires_grad=True)]).state_dict()["param_groups"][0]
)


def lightning(state: Any = ADAM, **changes: Any) -> dict[str, Any]:
    optimizer = {"state": {0: state}, "param_groups": [GROUP]}
    found = {"state_dict": {"w": torch.ones(3)}, "optimizer_states": [optimizer], **changes}
    return {"pytorch-lightning_version": "2.6.6", **found}


def saved(value: Any, **how: Any) -> bytes:
    torch.save(value, file := io.BytesIO(), **how)
    return file.getvalue()


def changed(change: Any, how: int = zipfile.ZIP_STORED) -> bytes:
    """Change files inside a checkpoint."""
    old, new = zipfile.ZipFile(io.BytesIO(saved(lightning()))), io.BytesIO()
    with old, zipfile.ZipFile(new, "w", how) as archive:
        for name in old.namelist():
            archive.writestr(name, change(name, old.read(name)))
    return new.getvalue()


def tar() -> bytes:
    with tarfile.open(fileobj=(file := io.BytesIO()), mode="w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            info = tarfile.TarInfo(name)
            info.size = len(CODE)
            archive.addfile(info, io.BytesIO(CODE))
    return file.getvalue()


def script() -> bytes:
    file = io.BytesIO(saved(lightning()))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("archive/constants.pkl", CODE)
    return file.getvalue()


def safetensors(header_bytes: int | None = None, name: str = "w", **changes: Any) -> bytes:
    tensor = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}
    header = json.dumps({name: tensor}).encode()
    return struct.pack("<Q", header_bytes or len(header)) + header + bytes(16)


def laughs() -> str:
    """Ten lines that stand for 9**9 values."""
    pairs = zip("abcdefghi", "bcdefghij", strict=True)
    lines = [f"{one}: &{one} [{', '.join([f'*{before}'] * 9)}]" for before, one in pairs]
    return "\n".join(["a: &a x", *lines, "model: {class_path: net.Lit, init_args: {width: *j}}"])


def report(**changes: Any) -> str:
    prediction = MemoryPrediction("cpu", "Net", MemoryBreakdown(parameter_bytes=400), {})
    return json.dumps(prediction.to_dict() | changes)


def config(**changes: Any) -> str:
    return json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **changes})


def short(name: str, data: bytes) -> bytes:
    return data[:16] if "/data/" in name else data


def nested(name: str, data: bytes) -> bytes:
    return b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"." if name.endswith("pkl") else data


RUNS = "it has an object of `io.open`, and loading that could run code"
PREDICT, COMPARE, CONVERT = "predict", "compare", "convert"
# Name, content or what makes the file, and which command says what.
FILES: list[tuple[str, Any, str, str]] = [
    ("pickle.ckpt", CODE, CONVERT, "it is not a file of torch"),
    ("protocol0.pt", pickle.dumps(Touch(), protocol=0), PREDICT, RUNS),
    ("legacy.bin", saved(Touch(), _use_new_zipfile_serialization=False), COMPARE, RUNS),
    ("arguments.ckpt", saved(lightning(hyper_parameters={"x": Touch()})), PREDICT, RUNS),
    ("state.ckpt", saved(lightning({**ADAM, "step": Touch()})), CONVERT, RUNS),
    ("tar.pt", tar(), PREDICT, "the legacy .tar format). Pass a checkpoint of Lightning"),
    ("script.pt", script(), PREDICT, "TorchScript archives passed to ``torch.load``). Pass"),
    ("bomb.ckpt", changed(lambda *_: bytes(2**20), zipfile.ZIP_DEFLATED), CONVERT, "a zip bomb"),
    ("short.ckpt", changed(short), CONVERT, "record size (16 bytes) does not match expected"),
    ("nested.ckpt", changed(nested), CONVERT, "is not a checkpoint of Lightning"),
    ("wide.ckpt", saved(lightning(WIDE)), CONVERT, "`exp_avg_sq` repeats one value"),
    (f"{ESCAPE}.ckpt", b"x", PREDICT, f"`{ESCAPED}"),
    ("names.ckpt", saved({"state_dict": {ESCAPE: torch.ones(3)}}), "explain", ESCAPED),
    ("link.ckpt", lambda name: Path(name).symlink_to("/dev/zero"), CONVERT, "not a regular"),
    ("pipe.ckpt", os.mkfifo, CONVERT, "is not a regular file"),
    ("header.safetensors", safetensors(2**62), PREDICT, "header too large"),
    ("shape.safetensors", safetensors(shape=[1000]), COMPARE, "invalid shape, data type, or"),
    ("offsets.safetensors", safetensors(data_offsets=[0, 2**40]), "explain", "invalid shape"),
    ("overflow.safetensors", safetensors(shape=[2**62, 2**62]), PREDICT, "overflow computing"),
    ("names.safetensors", safetensors(name=ESCAPE), "explain", ESCAPED),
    ("tag.yaml", f"model: !!python/object/apply:os.system [touch {MARKER}]", PREDICT, "construct"),
    ("model.yaml", f"model: {TOUCH}", PREDICT, "Import path subprocess.Popen does not"),
    ("optimizer.yaml", f"{LIT}optimizer: {SAVE}", PREDICT, "is not a class of optimizers"),
    ("technique.yaml", f"{LIT}memsave: {{optimizer: {TOUCH}}}", PREDICT, "Check classes and arg"),
    ("trainer.yaml", f"{LIT}trainer: {{strategy: {TOUCH}, logger: {TOUCH}}}", PREDICT, "ignored"),
    ("laughs.yaml", laughs(), PREDICT, "with its aliases written out it has over 100,000 values"),
    ("itself.yaml", "model: &m {init_args: {width: *m}}", PREDICT, "with its aliases written out"),
    (
        "nested.yaml",
        f"trainer: {'[' * 1000}",
        PREDICT,
        "cannot be read as YAML (while increasing flow level",
    ),
    ("nested.json", "[" * 10**5, COMPARE, "is not JSON (maximum recursion"),
    ("digits.json", f"[{'9' * 5000}]", PREDICT, "cannot be read as JSON (Exceeds the limit"),
    ("kernel.json", config(_attn_implementation="evil/kernel"), PREDICT, "code on the Hub, which"),
    ("own.json", config(model_type="evil", auto_map={"AutoConfig": "net.Lit"}), PREDICT, "not run"),
    ("list.json", config(model_type=["gpt2"]), PREDICT, "Did you mean `gpt2`"),
    ("text.json", report(by_category={"parameter": "9"}), COMPARE, "an incomplete prediction"),
    ("huge.json", report(by_category={"parameter": 10**400}), COMPARE, "', not a size"),
    ("settings.json", report(settings=3), COMPARE, "is an incomplete prediction"),
    ("unnamed.json", report(model=3), COMPARE, "model is '3'"),
]


def commands(name: str) -> dict[str, list[str]]:
    return {
        PREDICT: [PREDICT, name, "--batch", BATCH, "--device", "cpu"],
        "plan": ["plan", name, "--batch", BATCH, "--budget", "1GiB", "--time-limit", "0.01"],
        "explain": ["explain", name],
        COMPARE: [COMPARE, name, name],
        CONVERT: [CONVERT, name, "--to", "8bit", "--output", "out.ckpt"],
    }


@pytest.mark.filterwarnings("ignore")  # torch's, of formats
@pytest.mark.parametrize("file", FILES, ids=[repr(file[0]) for file in FILES])
def test_no_command_runs_a_file(file, tmp_path, capsys):
    name, content, command, said = file
    write_project(tmp_path)
    if callable(content):
        content(name)
    else:
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    shown: dict[str, str] = {}
    for verb, arguments in commands(name).items():
        main(arguments)
        shown[verb] = "".join(capsys.readouterr())
        assert not Path(MARKER).exists(), verb
        for bad in ("\x1b", "\x07", "weights_only` set to `False`"):
            assert bad not in shown[verb], verb
    assert said in shown[command]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step": Touch()}, "Unsupported global: GLOBAL io.open"),  # Lightning loads it
        ({"exp_avg": "text"}, "it cannot be read .* Use an earlier checkpoint"),
        ({"exp_avg_sq": WIDE["exp_avg_sq"]}, r"of shape \(1048576, 262144\), but the parameter"),
    ],
)
def test_no_resumed_fit_runs_a_file(change, said):
    package = PACKAGES["lightning"]
    trainer = make_trainer(package, max_epochs=1)
    trainer.fit(make_lit(package))
    trainer.save_checkpoint("last.ckpt")
    checkpoint = torch.load("last.ckpt", weights_only=True)
    checkpoint["optimizer_states"][0]["state"][0] |= change
    torch.save(checkpoint, "last.ckpt")
    resumed = make_trainer(package, MemSaveCallback(None, optimizer="8bit"), max_epochs=2)
    with pytest.raises((IncompatibleError, pickle.UnpicklingError), match=f"(?s){said}"):
        resumed.fit(make_lit(package), ckpt_path="last.ckpt")
    assert not Path(MARKER).exists()
