"""Every wrong argument and every conflict: a clear error with what to type instead."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_memsave import (
    ActivationCheckpointing,
    AttentionKernel,
    ChunkedCrossEntropy,
    LowBitOptimizer,
    LowPrecisionWeights,
    MemSaveCallback,
    MicroBatching,
    OptimizerInBackward,
)
from lightning_memsave.errors import ConfigurationError, IncompatibleError
from tests.callbacks.lit import fit, make_lit

pytestmark = pytest.mark.usefixtures("no_prediction")

NAN, INF = float("nan"), float("inf")


# Arguments, what to type instead, and values that are wrong by themselves.
ALONE: list[tuple[str, str, list[Any]]] = [
    (
        "activation_checkpointing",
        r'Use "all", "nested", "selective"',
        [
            *("some", "al", "", "0%", "101%", "every:1.5", b"all", ["all"], {"which": "all"}),
            *(True, False, NAN, INF, 0.0, -0.5, nn.Linear(1, 1), torch.tensor(3)),
        ],
    ),
    (
        "activation_checkpointing",
        r"such as \"50%\", .*, or `None`",
        ["none", "off", "full", "6", "50 %", "200%", "every:-1", (1, 2)],
    ),
    ("activation_checkpointing", r"a number of blocks such as 6", [0, -3]),
    ("activation_checkpointing", r'Write "50%" for this share', [0.5]),
    ("activation_checkpointing", r'"every:2"', ["every:0", "every:"]),
    (
        "activation_checkpointing",
        r"Use `activation_checkpointing=ActivationCheckpointing\(\)`",
        [ActivationCheckpointing, LowBitOptimizer()],
    ),
    ("blocks", r"Write for example \"re:encoder", ["re:(", ["re:("]]),
    ("blocks", r"Pass a class name", [()]),
    (
        "blocks",
        r'Pass a class name such as "BertLayer"',
        [3, [None], "", [""], {"Block": 1}, b"Block", True, nn.Linear(1, 1), int, [int]],
    ),
    ("optimizer", r"adamw_8bit", ["adamw8bit"]),
    ("optimizer", r"8bit", ["4bit", 8]),
    ("optimizer", r"or `None` to keep yours", ["none", "off", "adafactor", "sgd", "int8"]),
    ("optimizer", r'Did you mean "8bit"', ["8-bit", "8 bit"]),
    ("optimizer", r"`optimizer=AdamW`: it is an optimizer class", [torch.optim.AdamW]),
    (
        "optimizer",
        r"`optimizer=AdamW\(\.\.\.\)`.* Return it there, and use `optimizer=\"8bit\"`",
        [torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])],
    ),
    (
        "optimizer",
        r"Use `optimizer=LowBitOptimizer\(\)`",
        [LowBitOptimizer, ActivationCheckpointing()],
    ),
    (
        "optimizer",
        r'Choose one of "8bit"',
        ["", True, False, 8.0, {"optimizer": "8bit"}, nn.Linear(1, 1)],
    ),
    ("optimizer", r'Did you mean "adamw_8bit"', ["AdamW"]),
    ("optimizer", r'Did you mean "8bit"', [["8bit"]]),
    (
        "precision",
        r'Use "auto", `None` or one of 32-true',
        [
            "fp16",
            "16bit",
            "bfloat16",
            "mixed",
            8,
            True,
            "",
            "bf16-mixd",
            17,
            16.5,
            NAN,
            ["16"],
            {},
            b"16",
            torch.bfloat16,
        ],
    ),
    (
        "accumulate_grad_batches",
        r"Use `accumulate_grad_batches=4`",
        [0, 2.0, True, -1, "4", NAN, [4], {0: 4}, torch.tensor(4)],
    ),
    ("accumulate_grad_batches", r"or `None` to leave it to the Trainer", ["auto"]),
    (
        "budget",
        r'Use a size such as `budget="12GiB"`, a share of the device such as `budget=0\.9`',
        ["12", 12, "12 gigs", "-3GiB", "0GiB", "50%", 1.5, True, NAN, "", [12], "RTX 3060"],
    ),
    (
        "exactness",
        r"Use 'bitwise' or 'rounding' or 'approximate'",
        ["lossless", "exact", "bit-wise"],
    ),
    ("exactness", r"Use 'bitwise' or 'rounding'", ["", "Bitwise", None, 1, True, ["bitwise"], {}]),
    ("report", r"Use one of `report=True`", ["memsave.json", None, 1, ["x"]]),
    (
        "preset",
        r"Use 'off', 'classic', 'bitwise'",
        ["all", "none", "single-gpu", "Single_GPU", "", 1, True, ["bitwise"]],
    ),
    ("predict", r"Use `predict=60`", ["yes", "60", "auto", 0, -5, NAN, INF, None, [60]]),
    (
        "micro_batch_size",
        r'Use `micro_batch_size=1`.*or `"halve"`',
        [0, -4, 2.0, NAN, "8", "atuo", "half", "Auto", True, [2]],
    ),
    (
        "micro_batch_size",
        r"Use `micro_batch_size=MicroBatching\(\)`",
        [MicroBatching, LowBitOptimizer()],
    ),
    (
        "chunked_cross_entropy",
        r"Use `chunked_cross_entropy=True`, `chunked_.*=512`",
        ["yes", 0, -1, 1.5, NAN, [256], ChunkedCrossEntropy, LowBitOptimizer()],
    ),
    (
        "offload",
        r'Use `offload=True`, `offload="optimizer"`.*, or `None`',
        ["disk", "cpu", "none", "optim", "optimizer,parameters", 1, {}, ["optimizer"]],
    ),
    ("host_budget", r"`host_budget='much'`", ["much"]),
    ("attention", r"Use one of 'sdpa'.*, or `None`", ["flash2", "", "SDPA", "none", "xformers"]),
    ("attention", r"Use `None` to keep it", ["eager"]),
    ("attention", r'Use `attention="sdpa"`', [1, True, False, ["sdpa"], AttentionKernel]),
    (
        "low_precision_weights",
        r'Use `low_precision_weights="stochastic"`, `low_',
        ["bf16", "none", "Stochastic", "", True, False, 1, ["kahan"], LowPrecisionWeights],
    ),
    (
        "optimizer_in_backward",
        r"Use `optimizer_in_backward=True`, `optimizer_in_",
        ["yes", "", 0, 1, ["x"], OptimizerInBackward, torch.ones(2)],
    ),
]
TOGETHER: list[tuple[dict[str, Any], str]] = [
    (
        {"activation_checkpointing": ActivationCheckpointing(), "blocks": "Block"},
        r"Use `activation_checkpointing=ActivationCheckpointing\(\.\.\., blocks=\.\.\.\)`",
    ),
    ({"activation_checkpointing": None, "blocks": "Block"}, r"or remove `blocks`"),
    ({"offload": None, "host_budget": "1GiB"}, r"is not used with `offload=None`"),
    (
        {"low_precision_weights": "kahan", "precision": "16-mixed"},
        r"Use `precision='bf16-mixed'`, or set `low_precision_weights=None`",
    ),
    ({"exactness": "rounding", "precision": "bf16-mixed"}, r"Use `exactness='approximate'`"),
    ({"exactness": "bitwise", "accumulate_grad_batches": 2}, r"Use `exactness='rounding'`"),
    *(
        ({"exactness": exactness, name: value}, rf"or `{name}=None`")
        for exactness, name, value in (
            ("bitwise", "optimizer", "8bit"),
            ("bitwise", "micro_batch_size", 2),
            ("rounding", "low_precision_weights", LowPrecisionWeights()),
            ("bitwise", "chunked_cross_entropy", True),
            ("bitwise", "attention", "sdpa"),
            ("bitwise", "low_precision_weights", "kahan"),
        )
    ),
]
ARGUMENTS = [
    *(({name: value}, remedy) for name, remedy, values in ALONE for value in values),
    *TOGETHER,
]


@pytest.mark.parametrize(("arguments", "remedy"), ARGUMENTS, ids=lambda value: str(value)[:60])
def test_wrong_arguments_are_refused_with_the_remedy(arguments, remedy):
    with pytest.raises(ConfigurationError, match=remedy) as caught:
        MemSaveCallback(**arguments)
    first = str(caught.value).splitlines()[0]
    assert first.startswith("MemSaveCallback cannot be created")


def test_all_wrong_arguments_are_in_one_message():
    with pytest.raises(ConfigurationError, match=r"\(4 problems\)") as caught:
        MemSaveCallback("some", precision="fp16", accumulate_grad_batches=0, attention="on")
    for word in ("some", "fp16", "accumulate_grad_batches=0", "attention='on'"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("optimizer_in_bckward", "Did you mean `optimizer_in_backward`"),
        ("tf32", r'Write `torch\.set_float32_matmul_precision\("high"\)` before fit'),
        ("early_release", "Remove it: tensors are always freed early"),
        ("monitor", r"Put `GPUMemoryMonitor\(\.\.\.\)` beside `MemSaveCallback` in the Trainer's"),
        ("eval_micro_batch_size", r"`micro_batch_size=MicroBatching\(\.\.\., evaluation=False"),
        ("optimizer_kwargs", r'Write it as `optimizer=LowBitOptimizer\("8bit", keep_32bit='),
        ("keep_32bit", r'Write it as `optimizer=LowBitOptimizer\("8bit", keep_32bit='),
        ("force_8bit", r'Write it as `optimizer=LowBitOptimizer\("8bit", keep_32bit='),
        ("loss_weight", r"Write `micro_batch_size=MicroBatching\(8, loss_weight="),
        ("split_batch", r"Write `micro_batch_size=MicroBatching\(8, split_batch="),
        ("something", "Use `activation_checkpointing`, `optimizer`, "),
    ],
)
def test_unknown_arguments_name_what_to_write(name, remedy):
    with pytest.raises(ConfigurationError, match=f"`{name}` is not an argument.* {remedy}"):
        MemSaveCallback(**{name: 1})  # type: ignore[arg-type]


def test_all_conflicts_are_in_one_message():
    callback = MemSaveCallback(9, precision="bf16-mixed", accumulate_grad_batches=2)
    with pytest.raises(IncompatibleError, match=r"\(3 problems\)") as caught:
        fit(make_lit(), callback, precision="bf16-true", accumulate_grad_batches=3)
    assert len(caught.value.problems) == 3
