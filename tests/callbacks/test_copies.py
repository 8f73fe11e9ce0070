"""Copies of a module that users make in the middle of a fit: teachers, averages, snapshots."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memsave import ChunkedCrossEntropy, MicroBatching, Offloading
from lightning_memsave.errors import IncompatibleError
from tests.callbacks.lit import (
    LIGHTNING,
    Trace,
    assert_same,
    callback_with,
    fit,
    loader_of,
    make_lit,
    make_trainer,
    no_step,
    quiet,
)

WORDS = 512
BF16: dict[str, Any] = {"precision": "bf16-mixed"}
SETTINGS: dict[str, dict[str, Any]] = {
    "checkpointing": {"activation_checkpointing": "all"},
    "8bit": {"optimizer": "8bit"},
    "in_backward": {"optimizer_in_backward": True},
    "blocks": {"micro_batch_size": MicroBatching(1, of="blocks")},
    "chunked": {"chunked_cross_entropy": ChunkedCrossEntropy("re:.*head")},
    "parameters": {"offload": "parameters+activations"},
    "embeddings": {"offload": Offloading("embeddings", min_table_bytes=1)},
    "master": {"offload": "parameters", "low_precision_weights": "master", **BF16},
    "split": {"offload": "parameters", "low_precision_weights": "split", **BF16},
    "preset": {"preset": "offload"},
}


class Words(nn.Module):
    """Embeddings, blocks and a head, which all techniques change something in."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(32, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(ids)))
        loss: Tensor = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return loss


def words(index: int) -> Tensor:
    return torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(index))


def words_lit(**methods: Any) -> Any:
    step = {"training_step": lambda self, batch, batch_idx: self.model(batch)}
    batches = [words(index) for index in range(4)]
    loader = {"train_dataloader": lambda self: loader_of(batches), "validation_step": no_step}
    return make_lit(model=Words(), **(step | loader | methods))


def callback(settings: str) -> Any:
    return quiet(**({"preset": "off"} | SETTINGS[settings]))


def copied_in_a_fit(settings: str, when: str) -> tuple[Any, Any, Any]:
    """Give the module after the fit, a copy that was made in it, and what its weights were."""
    found: list[Any] = []

    def take(module: Any) -> None:
        if not found:
            found.extend([copy.deepcopy(module), copy.deepcopy(module.state_dict())])

    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        if when == "training_step" and batch_idx == 2:
            take(self)
        return self.model(batch)

    def on_train_start(self: Any, trainer: Any, pl_module: Any) -> None:
        if when == "on_train_start":
            take(pl_module)

    lit = words_lit(training_step=training_step)
    beside = callback_with(on_train_start=on_train_start)
    make_trainer(LIGHTNING, callback(settings), beside).fit(lit)
    return lit, *found


@pytest.mark.parametrize("when", ["on_train_start", "training_step"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_copy_made_in_a_fit_is_an_ordinary_module(settings, when):
    lit, copied, weights = copied_in_a_fit(settings, when)
    plain = words_lit()
    plain.load_state_dict(weights)
    pickled = pickle.dumps(copied.model)
    assert b"lightning_memsave" not in pickled
    with torch.no_grad():
        for param in lit.parameters():
            param.fill_(float("nan"))
    results = []
    for model in (plain.model, copied.model, pickle.loads(pickled)):
        loss = model(words(9))
        loss.backward()
        results.append([loss, *(param.grad for param in model.parameters())])
        model.zero_grad()
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))
    assert all(param.grad is None for param in lit.parameters())
    assert_same(fit(copied, callback(settings)), fit(plain, callback(settings)))


@pytest.mark.parametrize("settings", ["checkpointing", "8bit", "parameters"])
def test_a_copy_trains_with_the_callback_of_the_fit_it_was_made_in(settings):
    copies: list[Any] = []

    def on_train_batch_start(self: Any, trainer: Any, module: Any, *_: Any) -> None:
        copies.append(copy.deepcopy(module.model))

    chosen, teacher = callback(settings), words_lit()
    beside = callback_with(on_train_batch_start=on_train_batch_start)
    make_trainer(LIGHTNING, chosen, beside).fit(words_lit())
    teacher.model = copies[-1]
    trace = Trace(LIGHTNING)
    make_trainer(LIGHTNING, chosen, trace.callback).fit(teacher)
    assert len(trace.losses) == 4


def test_a_copy_of_weights_in_bfloat16_computes_outside_of_a_fit():
    """Its weights have two types, which layers without autocast do not take."""
    SETTINGS["bfloat16"] = {"low_precision_weights": "stochastic"} | BF16
    _, copied, _ = copied_in_a_fit("bfloat16", "on_train_start")
    with torch.autocast("cpu", torch.bfloat16):
        expected = copied.model(words(9))
    assert torch.equal(copied.model(words(9)), expected)
    with pytest.raises(IncompatibleError, match=r"Load the model in float32"):
        fit(copied, callback("bfloat16"))
    wide = copied.float()
    loss = wide.model(words(9))
    assert not torch.equal(loss, expected)
    fit(wide, callback("bfloat16"))
