"""Every wrong argument and every conflict: a clear error with what to type instead."""

from typing import Any

import lightning.pytorch
import pytest
import torch

from lightning_memsave import (
    ActivationCheckpointing,
    GPUMemoryMonitor,
    LowBitOptimizer,
    MemSaveCallback,
)
from lightning_memsave.errors import ConfigurationError, IncompatibleError
from tests.callbacks.lit import fit, make_lit, make_trainer
from tests.helpers import snapshot

ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"activation_checkpointing": "some"}, r'Use "all", "nested", "selective"'),
    ({"activation_checkpointing": 0}, r"a number of blocks such as 6"),
    ({"activation_checkpointing": -3}, r"a number of blocks such as 6"),
    ({"activation_checkpointing": 1.5}, r"a share such as 0\.5"),
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
    ({"optimizer": "lion_8bit", "optimizer_kwargs": 3}, r"Write for example `optimizer_kwargs="),
    ({"optimizer": LowBitOptimizer}, r"Use `optimizer=LowBitOptimizer\(\)`"),
    ({"optimizer": ActivationCheckpointing()}, r"Use `optimizer=LowBitOptimizer\(\)`"),
    ({"optimizer": None, "keep_32bit": ["*"]}, r'or use `optimizer="8bit"`'),
    ({"optimizer": LowBitOptimizer(), "force_8bit": ["*"]}, r"LowBitOptimizer\(\.\.\.\)`"),
    ({"optimizer": "lion_8bit", "optimizer_kwargs": {"beta": 0.9}}, r"betas"),
    ({"optimizer": "8bit", "optimizer_kwargs": {"betas": (0.9, 0.9)}}, r"adamw_8bit|named"),
    ({"keep_32bit": "head"}, r"\[|\("),
    ({"keep_32bit": [3]}, r"pattern"),
    ({"precision": "fp16"}, r'Use "auto", `None` or one of 32-true'),
    ({"precision": 8}, r'Use "auto", `None` or one of 32-true'),
    ({"precision": True}, r'Use "auto", `None` or one of 32-true'),
    ({"accumulate_grad_batches": 0}, r"Use `accumulate_grad_batches=4`"),
    ({"accumulate_grad_batches": 2.0}, r"Use `accumulate_grad_batches=4`"),
    ({"accumulate_grad_batches": "auto"}, r"or `None` to leave it to the Trainer"),
    ({"accumulate_grad_batches": True}, r"Use `accumulate_grad_batches=4`"),
    ({"tf32": "high"}, r"Use one of `tf32=True`"),
    ({"tf32": 1}, r"Use one of `tf32=True`"),
    ({"exactness": "lossless"}, r"Use 'bitwise' or 'rounding' or 'approximate'"),
    ({"exactness": "bitwise", "optimizer": "8bit"}, r"or `optimizer=None`"),
    ({"exactness": "rounding", "precision": "bf16-mixed"}, r"Use `exactness='approximate'`"),
    ({"exactness": "bitwise", "tf32": True}, r"or `tf32=None`"),
    ({"monitor": "yes"}, r"Use `monitor=GPUMemoryMonitor\(every_n_steps=10\)`"),
    ({"monitor": GPUMemoryMonitor}, r"Use `monitor=GPUMemoryMonitor\(every_n_steps=10\)`"),
    ({"report": "memsave.json"}, r"Use one of `report=True`"),
]


@pytest.mark.parametrize(("arguments", "remedy"), ARGUMENTS, ids=lambda value: str(value)[:60])
def test_wrong_arguments_are_refused_with_the_remedy(arguments, remedy):
    with pytest.raises(ConfigurationError, match=remedy) as caught:
        MemSaveCallback(**arguments)
    first = str(caught.value).splitlines()[0]
    assert first.startswith("MemSaveCallback cannot be created")


def test_all_wrong_arguments_are_in_one_message():
    with pytest.raises(ConfigurationError, match=r"\(4 problems\)") as caught:
        MemSaveCallback("some", precision="fp16", accumulate_grad_batches=0, tf32="on")  # type: ignore[arg-type]
    for word in ("some", "fp16", "accumulate_grad_batches=0", "tf32='on'"):
        assert word in str(caught.value)


CONFLICTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"activation_checkpointing": 9}, {}, r'Use a number up to 4, or "all"'),
    ({"activation_checkpointing": "sqrt"}, {}, r'Use "all", which needs less memory'),
    ({"precision": "bf16-mixed"}, {"precision": "bf16-true"}, r"Remove one of the two"),
    (
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 3},
        r"or pass `accumulate_grad_batches=3` here too",
    ),
]


@pytest.mark.parametrize(("arguments", "settings", "remedy"), CONFLICTS, ids=str)
def test_conflicts_are_refused_before_anything_changes(arguments, settings, remedy):
    lit = make_lit()
    before = snapshot(lit.model)
    callback = MemSaveCallback(monitor=False, **arguments)
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
    trainer = make_trainer(lightning.pytorch, MemSaveCallback(optimizer="8bit", monitor=False))
    with pytest.raises(IncompatibleError, match="before the first step"):
        trainer.fit(lit)
