"""Small models of many kinds, as projects have them, to compare predictions with real steps.

Those of `benchmarks.virtual_gpu`, with values logged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as torch's own code has it

from benchmarks.virtual_gpu import _architectures as of_benchmarks
from benchmarks.virtual_gpu._architectures import hugging_face, masked_lm_batch, numbers

VOCABULARY = 100
# 64 x 64 weights have 4,096 elements, so that their optimizer state can be 8-bit.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
CATEGORIES = (7, 1000, 50)


class Logging(pl.LightningModule):
    """Logs the loss."""

    def note(self, loss: Tensor) -> None:
        self.log("loss", loss, prog_bar=True)


class Lit(Logging, of_benchmarks.Lit):
    pass


class MaskedPositions(Logging, of_benchmarks.MaskedPositions):
    pass


class UNetLit(Logging, of_benchmarks.Segmentation):
    pass


class Diffusion(Logging, of_benchmarks.Diffusion):
    pass


class TransformerEncoder(Logging, of_benchmarks.TransformerEncoder):
    pass


class Lstm(Logging, of_benchmarks.Lstm):
    pass


class Gan(Logging, of_benchmarks.Gan):
    pass


class ImageLit(Logging, of_benchmarks.Images):
    """Metrics, too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)
        self.f1 = torchmetrics.F1Score("multiclass", num_classes=10, average="macro")

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, labels = batch
        logits = self.model(pictures)
        logits = getattr(logits, "logits", logits)
        self.accuracy(logits, labels)
        self.f1(logits.argmax(-1), labels)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict({"f1": self.f1, "largest": logits.max()}, on_step=True)
        return F.cross_entropy(logits, labels)


class Table(Logging, of_benchmarks.Table):
    """The batch has names of files in it, which are of no use in the step."""

    def loss(self, batch: Any) -> Tensor:
        rows, files, target = batch
        assert all(name.endswith(".csv") for name in files)
        return super().loss((rows, target["is_known"]))


def tokens() -> Tensor:
    return torch.randint(5, VOCABULARY, (4, 16), generator=numbers())


def masked() -> dict[str, Tensor]:
    return masked_lm_batch(tokens(), torch.tensor([[16], [12], [9], [14]]), 0.3)


def padded() -> dict[str, Tensor]:
    return of_benchmarks.padded_causal_lm(masked())


def causal_lm_batch() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "labels": tokens()}


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 32, 32, generator=numbers()), torch.arange(4)


def table_batch() -> tuple[Tensor, list[str], dict[str, Tensor]]:
    rows = of_benchmarks.table_rows(4, 6, CATEGORIES)
    is_known = torch.ones(4, 6, dtype=torch.bool)
    is_known[:, 4:] = False
    names = [f"account_{i}.csv" for i in range(4)]
    return rows, names, {"is_known": is_known, "column": rows[..., 1]}


@dataclass(frozen=True)
class Architecture:
    """A module to train, and a batch for it.

    Args:
        make: Makes the module.
        batch: Makes the batch.
        without: Settings that are refused for it, by name of the argument.
        trainer_arguments: Of the Trainer.
    """

    make: Callable[[], pl.LightningModule]
    batch: Callable[[], Any]
    without: tuple[str, ...] = ()
    trainer_arguments: tuple[tuple[str, Any], ...] = ()


_LLAMA = SIZES | {"num_key_value_heads": 2, "attention_dropout": 0.1}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}
_T5 = {"vocab_size": VOCABULARY, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2}
_T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}
_VIT = SIZES | {"image_size": 32, "patch_size": 8, "num_labels": 10}
_MIXTRAL = SIZES | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
_MIXTRAL |= {"output_router_logits": True}

_ADAPTED = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4}

ARCHITECTURES: dict[str, Architecture] = {
    "roberta": Architecture(lambda: Lit(hugging_face("Roberta", SIZES, "ForMaskedLM")), masked),
    "bert": Architecture(lambda: MaskedPositions(SIZES), masked),
    "gpt2": Architecture(lambda: Lit(hugging_face("GPT2", _GPT2, "LMHeadModel")), causal_lm_batch),
    "llama": Architecture(lambda: Lit(hugging_face("Llama", _LLAMA, "ForCausalLM")), padded),
    "t5": Architecture(lambda: Lit(hugging_face("T5", _T5, "ForConditionalGeneration")), padded),
    "vit": Architecture(
        lambda: ImageLit(hugging_face("ViT", _VIT, "ForImageClassification")),
        images,
        trainer_arguments=(("gradient_clip_val", 1.0),),
    ),
    "convolutions": Architecture(
        lambda: ImageLit(of_benchmarks.convolutions(32)),
        images,
        trainer_arguments=(("gradient_clip_val", 0.5),),
    ),
    "unet": Architecture(lambda: UNetLit(of_benchmarks.UNet(32, 4)), images),
    "transformer_encoder": Architecture(lambda: TransformerEncoder(VOCABULARY, 64, 4, 128), masked),
    "lstm": Architecture(lambda: Lstm(VOCABULARY, 64), masked),
    "gan": Architecture(
        lambda: Gan(16, 64, 3072),
        images,
        without=("micro_batch_size", "accumulate_grad_batches", "optimizer_in_backward", "preset"),
    ),
    "diffusion": Architecture(lambda: Diffusion(32, 4), images),
    "table": Architecture(lambda: Table((64, 2, 64), (128, 2, 128), CATEGORIES), table_batch),
    "lora": Architecture(
        lambda: Lit(of_benchmarks.lora(hugging_face("GPT2", _ADAPTED, "LMHeadModel"))),
        causal_lm_batch,
    ),
    "mixtral": Architecture(
        lambda: Lit(hugging_face("Mixtral", _MIXTRAL, "ForCausalLM")), causal_lm_batch
    ),
    "checkpointed_transformer": Architecture(
        lambda: of_benchmarks.checkpointed_transformer(SIZES), masked
    ),
}

SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "checkpointing": {"activation_checkpointing": "all"},
    "selective": {"activation_checkpointing": "selective"},
    "two_blocks": {"activation_checkpointing": 2},
    "8bit": {"optimizer": "8bit"},
    "micro_batches": {"micro_batch_size": 2},
    "bf16_mixed": {"precision": "bf16-mixed"},
    "bf16_true": {"precision": "bf16-true"},
    "accumulation": {"accumulate_grad_batches": 2},
    "no_logits": {"chunked_cross_entropy": True},
    "in_backward": {"optimizer_in_backward": True},
    "bf16_weights": {"precision": "bf16-mixed", "low_precision_weights": "stochastic"},
    "early_release": {"precision": "32-true"},
    "all": {
        "activation_checkpointing": "all",
        "optimizer": "8bit",
        "micro_batch_size": 2,
        "precision": "bf16-mixed",
        "accumulate_grad_batches": 2,
    },
    "single_gpu": {"preset": "single_gpu"},
}
