"""Small models of many kinds, as projects have them, to compare predictions with real steps."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as torch's own code has it

VOCABULARY = 100
# 64 x 64 weights have 4,096 elements, so that their optimizer state can be 8-bit.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


class Lit(pl.LightningModule):
    """A module of a project: its own step, its own optimizer, values logged."""

    def __init__(self, model: nn.Module, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.model = model
        self.make_optimizer = optimizer

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


def _numbers(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(num_samples: int = 4, num_tokens: int = 16) -> Tensor:
    return torch.randint(5, VOCABULARY, (num_samples, num_tokens), generator=_numbers())


def masked_lm_batch() -> dict[str, Tensor]:
    """Rows of different lengths, of which some tokens are to be found again."""
    ids = tokens()
    mask = (torch.arange(16) < torch.tensor([[16], [12], [9], [14]])).long()
    is_asked = (torch.rand(ids.shape, generator=_numbers(1)) < 0.3) & mask.bool()
    return {
        "input_ids": ids.masked_fill(mask == 0, 1),
        "attention_mask": mask,
        "labels": ids.masked_fill(~is_asked, -100),
    }


def causal_lm_batch() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "labels": tokens()}


def padded_causal_lm_batch() -> dict[str, Tensor]:
    batch = masked_lm_batch()
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 32, 32, generator=_numbers()), torch.arange(4)


def hugging_face(name: str, config: dict[str, Any], head: str) -> Lit:
    import transformers

    make = getattr(transformers, f"{name}Config")
    return Lit(getattr(transformers, f"{name}{head}")(make(**config)))


class MaskedPositions(Lit):
    """The head sees only those positions that have a label: as many as the batch has."""

    def __init__(self) -> None:
        import transformers

        super().__init__(transformers.BertModel(transformers.BertConfig(**SIZES)))
        self.head = nn.Linear(64, VOCABULARY)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        hidden = self.model(batch["input_ids"], batch["attention_mask"])[0]
        logits = self.head(hidden[labels != -100])
        return F.cross_entropy(logits, labels[labels != -100])


class ImageLit(Lit):
    """Tuple batches, metrics, a schedule of the learning rate."""

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

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=100)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)), inplace=True)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        *(ConvBlock(32) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


class UNet(nn.Module):
    """Half the size twice, double it twice, and what was there before put beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU())
        self.down2 = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.SiLU())
        self.middle = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(2)))
        self.up2 = nn.ConvTranspose2d(128, 32, 2, stride=2)
        self.up1 = nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.avg_pool2d(first, 2))
        if time is not None:
            second = second + time[:, None, None, None]
        up = self.up2(torch.cat([self.middle(second), second], dim=1))
        return self.up1(torch.cat([up, first], dim=1))


class UNetLit(Lit):
    """Each pixel has a class."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, labels = batch
        return F.cross_entropy(self.model(pictures), labels[:, None, None].expand(-1, 32, 32) % 3)


class Diffusion(Lit):
    """Steps of noise are drawn at random, and a second model is an average of the first."""

    alphas: Tensor

    def __init__(self) -> None:
        super().__init__(UNet(), functools.partial(torch.optim.Adam, lr=1e-4))
        alphas = torch.linspace(0.999, 0.9, 50).cumprod(0)
        self.register_buffer("alphas", alphas)
        self.average = torch.optim.swa_utils.AveragedModel(self.model, use_buffers=True)
        self.average.requires_grad_(False)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, _ = batch
        time = torch.randint(0, len(self.alphas), (len(pictures),), device=self.device)
        noise = torch.randn_like(pictures)
        alpha = self.alphas[time][:, None, None, None]
        noisy = alpha.sqrt() * pictures + (1 - alpha).sqrt() * noise
        return F.mse_loss(self.model(noisy, time / len(self.alphas)), noise)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.average.update_parameters(self.model)


class TransformerEncoder(Lit):
    """torch's own layers, and SGD with momentum."""

    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        super().__init__(encoder, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))
        self.embedding = nn.Embedding(VOCABULARY, 64, padding_idx=1)
        self.head = nn.Linear(64, VOCABULARY)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        is_padding = batch["attention_mask"] == 0
        hidden = self.model(self.embedding(batch["input_ids"]), src_key_padding_mask=is_padding)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten())


class Lstm(Lit):
    """Two layers in both directions."""

    def __init__(self) -> None:
        super().__init__(nn.LSTM(64, 64, 2, batch_first=True, bidirectional=True, dropout=0.1))
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.head = nn.Linear(128, 5)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        output, _ = self.model(self.embedding(batch["input_ids"]))
        return F.cross_entropy(self.head(output[:, -1]), batch["input_ids"][:, 0] % 5)


class Gan(pl.LightningModule):
    """Two optimizers, which the module steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3072))
        self.discriminator = nn.Sequential(nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        of_generator, of_discriminator = optimizers
        real = batch[0].flatten(1)
        fake = self.generator(torch.randn(len(real), 16))

        self.toggle_optimizer(of_generator)
        loss = F.softplus(-self.discriminator(fake)).mean()
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()
        self.untoggle_optimizer(of_generator)

        loss = F.softplus(-self.discriminator(real)).mean()
        loss = loss + F.softplus(self.discriminator(fake.detach())).mean()
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(of_discriminator, 1.0, "norm")
        of_discriminator.step()
        self.log("loss", loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-4),
            torch.optim.RMSprop(self.discriminator.parameters(), lr=1e-4),
        ]


class Table(Lit):
    """Columns of categories with a table each, then a transformer over the rows of an account.

    The batch has names of files in it, which are of no use in the step.
    """

    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(64, 2, 64, batch_first=True, dropout=0.0)
        rows = nn.TransformerEncoderLayer(128, 2, 128, batch_first=True, dropout=0.0)
        super().__init__(
            nn.ModuleDict(
                {
                    "columns": nn.ModuleList([nn.Embedding(n, 64) for n in (7, 1000, 50)]),
                    "of_row": nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
                    "squeeze": nn.Linear(3 * 64, 128),
                    "of_account": nn.TransformerEncoder(rows, 2, enable_nested_tensor=False),
                    "head": nn.Linear(128, 1000),
                }
            )
        )

    def loss(self, batch: tuple[Tensor, list[str], dict[str, Tensor]]) -> Tensor:
        rows, files, target = batch  # (B, R, C)
        assert all(name.endswith(".csv") for name in files)
        parts = self.model
        cells = torch.stack([table(rows[..., i]) for i, table in enumerate(parts["columns"])], -2)
        seen = parts["of_row"](cells.flatten(0, 1)).flatten(1)  # (B*R, C*H)
        hidden = parts["of_account"](parts["squeeze"](seen).unflatten(0, rows.shape[:2]))
        is_known = target["is_known"]
        return F.cross_entropy(parts["head"](hidden)[is_known], target["column"][is_known])


def table_batch() -> tuple[Tensor, list[str], dict[str, Tensor]]:
    rows = torch.stack([torch.randint(0, n, (4, 6), generator=_numbers(n)) for n in (7, 1000, 50)])
    is_known = torch.ones(4, 6, dtype=torch.bool)
    is_known[:, 4:] = False
    names = [f"account_{i}.csv" for i in range(4)]
    return rows.permute(1, 2, 0), names, {"is_known": is_known, "column": rows[1]}


def lora() -> Lit:
    import peft
    import transformers

    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=3, n_head=4)
    adapters = peft.LoraConfig(r=64, target_modules=["c_attn"], fan_in_fan_out=True)
    return Lit(peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapters))


def checkpointed_transformer() -> pl.LightningModule:
    import transformers

    from lightning_memsave import CheckpointedTransformer

    # The test brings its own callback with the settings to compare.
    config = transformers.BertConfig(**SIZES)
    return CheckpointedTransformer(config, task="masked_lm", memsave=None, max_steps=100)


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

ARCHITECTURES: dict[str, Architecture] = {
    "roberta": Architecture(lambda: hugging_face("Roberta", SIZES, "ForMaskedLM"), masked_lm_batch),
    "bert": Architecture(MaskedPositions, masked_lm_batch),
    "gpt2": Architecture(lambda: hugging_face("GPT2", _GPT2, "LMHeadModel"), causal_lm_batch),
    "llama": Architecture(
        lambda: hugging_face("Llama", _LLAMA, "ForCausalLM"), padded_causal_lm_batch
    ),
    "t5": Architecture(
        lambda: hugging_face("T5", _T5, "ForConditionalGeneration"), padded_causal_lm_batch
    ),
    "vit": Architecture(
        lambda: ImageLit(hugging_face("ViT", _VIT, "ForImageClassification").model),
        images,
        trainer_arguments=(("gradient_clip_val", 1.0),),
    ),
    "convolutions": Architecture(
        lambda: ImageLit(convolutions()), images, trainer_arguments=(("gradient_clip_val", 0.5),)
    ),
    "unet": Architecture(lambda: UNetLit(UNet()), images),
    "transformer_encoder": Architecture(TransformerEncoder, masked_lm_batch),
    "lstm": Architecture(Lstm, masked_lm_batch),
    "gan": Architecture(
        Gan,
        images,
        without=("micro_batch_size", "accumulate_grad_batches", "optimizer_in_backward", "preset"),
    ),
    "diffusion": Architecture(Diffusion, images),
    "table": Architecture(Table, table_batch),
    "lora": Architecture(lora, causal_lm_batch),
    "mixtral": Architecture(
        lambda: hugging_face("Mixtral", _MIXTRAL, "ForCausalLM"), causal_lm_batch
    ),
    "checkpointed_transformer": Architecture(checkpointed_transformer, masked_lm_batch),
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
