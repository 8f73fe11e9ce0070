"""A head on the host in a Trainer: its loss runs over tiles of its weight."""

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memsave import (
    ChunkedCrossEntropy,
    LowBitOptimizer,
    LowPrecisionWeights,
    MemSaveCallback,
    MicroBatching,
    Offloading,
    predict_memory,
)
from tests.callbacks.lit import (
    LIGHTNING,
    Trace,
    assert_same,
    fit,
    make_lit,
    make_trainer,
    model_step,
    peak_of,
    quiet,
    rows_of,
)
from tests.cases import WIDTH, Model
from tests.helpers import assert_same as assert_same_nested

pytestmark = pytest.mark.usefixtures("no_prediction")

CHUNKED = ChunkedCrossEntropy(heads="model.head")


class SpeakerModel(Model):
    """A loss of each token, whose gradients are computed in backward wherever the head is.

    All classes are one tile, as many as are computed at once without tiles.
    """

    num_classes = 2 * WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, self.num_classes)

    def logits_of(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.run_blocks(self.embedding(tokens)))
        return logits

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.argsort(-1)[:, :8]
        logits = self.logits_of(tokens).flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens.flatten(), reduction="none").mean()


def lit_of(model: nn.Module) -> Any:
    """Its validation uses the logits."""

    def validate(self: Any, batch: Tensor, batch_idx: int) -> None:
        logits = self.model.logits_of(batch.argsort(-1)[:, :8])
        self.log("entropy", torch.distributions.Categorical(logits=logits).entropy().mean())
        self.log("choice", logits.argmax(-1).float().mean())

    return make_lit(model=model, validation_step=validate)


def only(what: str | None, **settings: Any) -> MemSaveCallback:
    offload = None if what is None else Offloading(what, min_bytes=1, min_table_bytes=4)
    beside = {"preset": "off", "chunked_cross_entropy": CHUNKED}
    return quiet(**(beside | {"offload": offload} | settings))


BF16: dict[str, Any] = {"precision": "bf16-mixed"}
BY_VALUE: dict[str, Any] = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
ACCUMULATED: dict[str, Any] = {"accumulate_grad_batches": 2}
TABLES = ("*embedding*", "*head*")
SPLIT = BF16 | {"low_precision_weights": LowPrecisionWeights("split", keep_fp32=TABLES)}
EIGHT_BITS = LowBitOptimizer(force_8bit=("*",))
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "bf16": (BF16, {}),
    "master": (BF16 | {"low_precision_weights": "master"}, {}),
    "split": (SPLIT, {}),
    "split in backward": (SPLIT | {"optimizer_in_backward": True}, {}),
    "in backward": ({"optimizer_in_backward": True}, {}),
    "in backward, clipped": ({"optimizer_in_backward": True}, BY_VALUE),
    "in backward, accumulated": ({"optimizer_in_backward": True}, ACCUMULATED),
    "8-bit": ({"optimizer": EIGHT_BITS}, {}),
    "8-bit in backward": ({"optimizer": EIGHT_BITS, "optimizer_in_backward": True}, {}),
    "clipped": ({}, {"gradient_clip_val": 0.1}),
    "accumulated": ({}, ACCUMULATED),
    "checkpointing": ({"activation_checkpointing": "all"}, {}),
}
"""Settings of the callback and of the Trainer."""


@pytest.mark.filterwarnings("ignore:.*chunked_cross_entropy. saves nothing")
@pytest.mark.parametrize("what", ["embeddings", "parameters+activations+embeddings"])
@pytest.mark.parametrize("name", BESIDE)
def test_trains_and_validates_with_the_same_bits_beside(name, what):
    settings, trainer = BESIDE[name]
    plain: Any = settings
    if name == "master":  # the bits of autocast
        plain = settings | {"low_precision_weights": None}
    if "low_precision_weights" in settings:
        what = what if "parameters" in what else f"parameters+{what}"
    without = only("parameters" if "split" in name else None, **plain)
    saving, lit = only(what, **settings), lit_of(SpeakerModel())
    how = trainer | {"max_epochs": 2, "val_check_interval": 2}
    one, other = fit(lit, without, **how), fit(lit, saving, **how)
    assert_same(one, other)
    metrics = [each[2].callback_metrics for each in (one, other)]
    assert metrics[0].keys() >= {"entropy", "choice"}
    assert metrics[0] == metrics[1]
    details = rows_of(saving)["offload"].details
    assert any("2 embeddings on the host" in each for each in details)


class TestCheckpoints:
    @pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
    @pytest.mark.filterwarnings("ignore:.*chunked_cross_entropy. saves nothing")
    @pytest.mark.parametrize(
        ("begins_with", "resumes_with"),
        [("embeddings", None), (None, "parameters+embeddings"), ("embeddings", "embeddings")],
    )
    def test_are_those_of_a_plain_run(self, tmp_path, begins_with, resumes_with):
        lit, runs = lit_of(SpeakerModel()), []
        for number, places in enumerate([(None, None), (begins_with, resumes_with)]):
            path, found = tmp_path / f"{number}.ckpt", list[Any]()
            for epoch, what in enumerate(places, start=1):
                own, trace = copy.deepcopy(lit), Trace(LIGHTNING)
                trainer = make_trainer(LIGHTNING, only(what), trace.callback, max_epochs=epoch)
                torch.manual_seed(epoch)
                trainer.fit(own, ckpt_path=None if epoch == 1 else path)
                trainer.save_checkpoint(path)
                found.append((trace.losses, own.state_dict()))
            runs.append((found, torch.load(path, weights_only=True)))
        (plain, one), (saving, other) = runs
        for expected, own in zip(plain, saving, strict=True):
            assert_same(expected, own)
        for key in ("state_dict", "optimizer_states"):
            assert_same_nested(one[key], other[key])


class LargerModel(SpeakerModel):
    """Of several tiles."""

    num_classes = 16 * WIDTH


@pytest.mark.parametrize("settings", [{}, BF16, {"optimizer_in_backward": True}], ids=str)
def test_memory_is_predicted_to_the_byte(settings):
    lit, peaks = make_lit(model=LargerModel(), training_step=model_step), []
    for what in ("parameters", "parameters+embeddings"):
        callback = only(what, predict=60, micro_batch_size=MicroBatching("halve"), **settings)
        fit(lit, callback)
        assert callback.prediction is not None
        assert callback.prediction.peak_bytes == peak_of(callback)
        peaks.append(callback.prediction.peak_bytes)
    # The weight; its gradient too, or what is computed beside it.
    assert peaks[1] < peaks[0] - LargerModel().head.weight.nbytes


@pytest.mark.slow
def test_llama_8b_needs_less_than_three_gib():
    """Of tensors; with the head on the device it was 4.65."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    tokens = torch.zeros(2, 2048, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    found = predict_memory(lambda: LlamaForCausalLM(config), batch, settings={"preset": "offload"})
    assert found.peak_bytes <= 3 * 2**30
    assert found.num_parameters == 8_030_261_248


def with_fused_loss(model: nn.Module) -> nn.Module:
    """Multiply with the head's weight in the model's `forward`, as Liger's functions do."""

    def forward(self: Any, x: Tensor) -> Tensor:
        tokens = x.argsort(-1)[:, :8]
        hidden = self.run_blocks(self.embedding(tokens)).flatten(0, 1)
        logits = nn.functional.linear(hidden, self.head.weight, self.head.bias)
        return nn.functional.cross_entropy(logits, tokens.flatten())

    forward.__module__ = "liger_kernel.transformers.model.llama"
    model.forward = MethodType(forward, model)
    return model


class FusedLinearLoss(nn.Module):
    """A submodule, as `LigerFusedLinearCrossEntropyLoss` is."""

    def forward(self, weight: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(nn.functional.linear(hidden, weight), tokens)

    forward.__module__ = "liger_kernel.transformers.fused_linear_cross_entropy"


class WithLossModule(SpeakerModel):
    def __init__(self) -> None:
        super().__init__()
        self.loss = FusedLinearLoss()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.argsort(-1)[:, :8]
        hidden = self.run_blocks(self.embedding(tokens)).flatten(0, 1)
        loss: Tensor = self.loss(self.head.weight, hidden, tokens.flatten())
        return loss + 0 * self.head.bias.sum()


@pytest.mark.filterwarnings("ignore:.*chunked_cross_entropy. saves nothing")
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("make", [lambda: with_fused_loss(SpeakerModel()), WithLossModule])
def test_a_head_that_a_fused_loss_reads_stays_on_the_device(make, accelerator):
    """On CUDA it was an error of two devices."""
    saving, lit = only("parameters+activations+embeddings"), lit_of(make())
    how: dict[str, Any] = {"accelerator": accelerator, "limit_val_batches": 0}
    plain, found = fit(lit, only(None), **how), fit(lit, saving, **how)
    assert plain[0][0] == found[0][0]
    if accelerator == "cpu":  # where updates round as the device's
        assert_same(plain, found)
    details = rows_of(saving)["offload"].details
    assert any("1 embeddings on the host" in each for each in details)
    why = "a head as all other weights: `model.head`: the fused loss of Liger in"
    assert any(why in each for each in details)
