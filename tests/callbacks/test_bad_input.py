"""Every wrong argument and every conflict: a clear error with what to type instead."""

from typing import Any

import lightning.pytorch
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
from tests.callbacks.lit import fit, make_lit, make_trainer
from tests.helpers import snapshot

pytestmark = pytest.mark.usefixtures("no_prediction")

NAN, INF = float("nan"), float("inf")


def any_of(*values: Any) -> tuple[Any, ...]:
    return values


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"activation_checkpointing": "some"}, r'Use "all", "nested", "selective"'),
    ({"activation_checkpointing": 0}, r"a number of blocks such as 6"),
    ({"activation_checkpointing": -3}, r"a number of blocks such as 6"),
    ({"activation_checkpointing": 0.5}, r'Write "50%" for this share'),
    ({"activation_checkpointing": True}, r'Use "all"'),
    ({"activation_checkpointing": "every:0"}, r'"every:2"'),
    ({"activation_checkpointing": "every:"}, r'"every:2"'),
    ({"activation_checkpointing": ["all"]}, r'Use "all"'),
    (
        {"activation_checkpointing": ActivationCheckpointing},
        r"Use `activation_checkpointing=ActivationCheckpointing\(\)`",
    ),
    ({"activation_checkpointing": LowBitOptimizer()}, r"Use `activation_checkpointing=Activation"),
    (
        {"activation_checkpointing": ActivationCheckpointing(), "blocks": "Block"},
        r"Use `activation_checkpointing=ActivationCheckpointing\(\.\.\., blocks=\.\.\.\)`",
    ),
    ({"activation_checkpointing": None, "blocks": "Block"}, r"or remove `blocks`"),
    ({"blocks": "re:("}, r"Write for example \"re:encoder"),
    ({"blocks": ()}, r"Pass a class name"),
    ({"blocks": 3}, r'Pass a class name such as "BertLayer"'),
    ({"blocks": [None]}, r'Pass a class name such as "BertLayer"'),
    ({"optimizer": "adamw8bit"}, r"adamw_8bit"),
    ({"optimizer": "4bit"}, r"8bit"),
    ({"optimizer": 8}, r"8bit"),
    ({"optimizer": torch.optim.AdamW}, r"`optimizer=AdamW`: it is an optimizer class"),
    (
        {"optimizer": torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])},
        r"`optimizer=AdamW\(\.\.\.\)`.* Return it there, and use `optimizer=\"8bit\"`",
    ),
    ({"optimizer": LowBitOptimizer}, r"Use `optimizer=LowBitOptimizer\(\)`"),
    ({"optimizer": ActivationCheckpointing()}, r"Use `optimizer=LowBitOptimizer\(\)`"),
    ({"precision": "fp16"}, r'Use "auto", `None` or one of 32-true'),
    ({"precision": 8}, r'Use "auto", `None` or one of 32-true'),
    ({"precision": True}, r'Use "auto", `None` or one of 32-true'),
    ({"accumulate_grad_batches": 0}, r"Use `accumulate_grad_batches=4`"),
    ({"accumulate_grad_batches": 2.0}, r"Use `accumulate_grad_batches=4`"),
    ({"accumulate_grad_batches": "auto"}, r"or `None` to leave it to the Trainer"),
    ({"accumulate_grad_batches": True}, r"Use `accumulate_grad_batches=4`"),
    ({"exactness": "lossless"}, r"Use 'bitwise' or 'rounding' or 'approximate'"),
    ({"exactness": "bitwise", "optimizer": "8bit"}, r"or `optimizer=None`"),
    ({"exactness": "rounding", "precision": "bf16-mixed"}, r"Use `exactness='approximate'`"),
    ({"report": "memsave.json"}, r"Use one of `report=True`"),
    *(({"preset": wrong}, r"Use 'off', 'classic', 'bitwise'") for wrong in ("all", "", 1, True)),
    ({"preset": ["bitwise"]}, r"Use 'off', 'classic', 'bitwise'"),
    *(
        ({"activation_checkpointing": wrong}, r'Use "all", "nested"')
        for wrong in (
            "al",
            "",
            NAN,
            INF,
            0.0,
            -0.5,
            "0%",
            "101%",
            "every:1.5",
            {"which": "all"},
            b"all",
            False,
        )
    ),
    ({"activation_checkpointing": nn.Linear(1, 1)}, r'Use "all", "nested"'),
    ({"activation_checkpointing": torch.tensor(3)}, r'Use "all", "nested"'),
    *(
        ({"blocks": wrong}, r'Pass a class name such as "BertLayer"')
        for wrong in ("", [""], {"Block": 1}, b"Block", True, nn.Linear(1, 1), int, [int])
    ),
    ({"blocks": ["re:("]}, r"Write for example \"re:encoder"),
    *(
        ({"optimizer": wrong}, r'Choose one of "8bit"')
        for wrong in ("", True, False, 8.0, {"optimizer": "8bit"}, nn.Linear(1, 1))
    ),
    ({"optimizer": "AdamW"}, r'Did you mean "adamw_8bit"'),
    ({"optimizer": ["8bit"]}, r'Did you mean "8bit"'),
    *(
        ({"precision": wrong}, r'Use "auto", `None` or one of 32-true')
        for wrong in any_of("", "bf16-mixd", 17, 16.5, NAN, ["16"], {}, b"16", torch.bfloat16)
    ),
    *(
        ({"accumulate_grad_batches": wrong}, r"Use `accumulate_grad_batches=4`")
        for wrong in (-1, "4", NAN, [4], {0: 4}, torch.tensor(4))
    ),
    *(
        ({"exactness": wrong}, r"Use 'bitwise' or 'rounding'")
        for wrong in any_of("", "Bitwise", None, 1, True, ["bitwise"], {})
    ),
    ({"exactness": "bitwise", "micro_batch_size": 2}, r"or `micro_batch_size=None`"),
    (
        {"exactness": "rounding", "low_precision_weights": LowPrecisionWeights()},
        r"or `low_precision_weights=None`",
    ),
    ({"exactness": "bitwise", "chunked_cross_entropy": True}, r"or `chunked_cross_entropy=None`"),
    ({"exactness": "bitwise", "attention": "sdpa"}, r"or `attention=None`"),
    ({"exactness": "bitwise", "accumulate_grad_batches": 2}, r"Use `exactness='rounding'`"),
    (
        {"exactness": "bitwise", "low_precision_weights": "kahan"},
        r"or `low_precision_weights=None`",
    ),
    *(({"report": wrong}, r"Use one of `report=True`") for wrong in (None, 1, ["x"])),
    *(
        ({"predict": wrong}, r"Use `predict=60`")
        for wrong in ("yes", "60", 0, -5, NAN, INF, None, [60])
    ),
    *(
        ({"micro_batch_size": wrong}, r'Use `micro_batch_size=1`.*or `"halve"`')
        for wrong in (0, -4, 2.0, NAN, "8", "atuo", True, [2])
    ),
    ({"micro_batch_size": MicroBatching}, r"Use `micro_batch_size=MicroBatching\(\)`"),
    ({"micro_batch_size": LowBitOptimizer()}, r"Use `micro_batch_size=MicroBatching\(\)`"),
    *(
        ({"chunked_cross_entropy": wrong}, r"Use `chunked_cross_entropy=True`, `chunked_.*=512`")
        for wrong in ("yes", 0, -1, 1.5, NAN, [256], ChunkedCrossEntropy, LowBitOptimizer())
    ),
    *(({"attention": wrong}, r"Use one of 'sdpa'") for wrong in ("flash2", "", "SDPA")),
    *(
        ({"attention": wrong}, r'Use `attention="sdpa"`')
        for wrong in (1, True, False, ["sdpa"], AttentionKernel)
    ),
    *(
        ({"low_precision_weights": wrong}, r'Use `low_precision_weights="stochastic"`, `low_')
        for wrong in ("bf16", "", True, False, 1, ["kahan"], LowPrecisionWeights)
    ),
    (
        {"low_precision_weights": "kahan", "precision": "16-mixed"},
        r"Use `precision='bf16-mixed'`, or set `low_precision_weights=None`",
    ),
    *(
        ({"optimizer_in_backward": wrong}, r"Use `optimizer_in_backward=True`, `optimizer_in_")
        for wrong in ("yes", "", 0, 1, ["x"], OptimizerInBackward, torch.ones(2))
    ),
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


CONFLICTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"activation_checkpointing": 9}, {}, r'Use a number up to 4, or "all"'),
    ({"activation_checkpointing": "sqrt"}, {}, r'Use "all", which needs less memory'),
    ({"precision": "bf16-mixed"}, {"precision": "bf16-true"}, r"Remove one of the two"),
    (
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 3},
        r"or pass `accumulate_grad_batches=3` here too",
    ),
    ({"activation_checkpointing": 5}, {}, r'Use a number up to 4, or "all"'),
    ({"blocks": "Blok"}, {}, r"Did you mean `Block`.*or set `activation_checkpointing=None`"),
    (
        {"optimizer": LowBitOptimizer(keep_32bit=("no.*",))},
        {},
        r"a pattern .* such as `model\.head\.bias`",
    ),
    (
        {"optimizer": LowBitOptimizer(force_8bit=("no.*",))},
        {},
        r"a pattern .* such as `model\.head\.bias`",
    ),
    ({"attention": "sdpa"}, {}, r"Set `attention=None`"),
    ({"chunked_cross_entropy": True}, {}, r"Set `chunked_cross_entropy=None`"),
    ({"low_precision_weights": "kahan"}, {"precision": "bf16-true"}, r"Remove one of the two"),
    ({"precision": "64-true"}, {"precision": "bf16-mixed"}, r"Remove one of the two"),
]


@pytest.mark.parametrize(("arguments", "settings", "remedy"), CONFLICTS, ids=str)
def test_conflicts_are_refused_before_anything_changes(arguments, settings, remedy):
    lit = make_lit()
    before = snapshot(lit.model)
    callback = MemSaveCallback(**arguments)
    trainer = make_trainer(lightning.pytorch, callback, **settings)
    with pytest.raises(IncompatibleError, match=remedy):
        trainer.fit(lit)
    assert snapshot(lit.model) == before
    assert "configure_optimizers" not in vars(lit)


def test_all_conflicts_are_in_one_message():
    callback = MemSaveCallback(9, precision="bf16-mixed", accumulate_grad_batches=2)
    with pytest.raises(IncompatibleError, match=r"\(3 problems\)") as caught:
        fit(make_lit(), callback, precision="bf16-true", accumulate_grad_batches=3)
    assert len(caught.value.problems) == 3


def test_an_optimizer_that_has_stepped_is_refused_before_training():
    lit = make_lit()
    optimizer = torch.optim.AdamW(lit.parameters())
    lit.model(torch.randn(4, 64)).backward()
    optimizer.step()
    type(lit).configure_optimizers = lambda self: optimizer
    trainer = make_trainer(lightning.pytorch, MemSaveCallback(optimizer="8bit"))
    with pytest.raises(IncompatibleError, match="before the first step"):
        trainer.fit(lit)
