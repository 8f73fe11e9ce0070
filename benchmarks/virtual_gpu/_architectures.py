"""Sixteen kinds of model at realistic width and a few blocks, to compare predictions with fits.

The tests have the same ones, smaller.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as torch's own code has it

_VOCABULARY = 32_000
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
_LLAMA = _SIZES | {"intermediate_size": 2048, "num_key_value_heads": 4}
_T5 = {"vocab_size": _VOCABULARY, "d_model": 768, "d_ff": 3072, "d_kv": 64, "num_heads": 12}
_T5 |= {"num_layers": 2, "decoder_start_token_id": 0, "pad_token_id": 0}


class Lit(pl.LightningModule):
    """A module of a project: its own step and its own optimizer."""

    def __init__(self, model: nn.Module, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.model = model
        self.make_optimizer = optimizer

    def loss(self, batch: Any) -> Tensor:
        """Compute the loss of a batch."""
        return self.model(**batch).loss  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Compute the loss of a batch."""
        loss = self.loss(batch)
        self.note(loss)
        return loss

    def note(self, loss: Tensor) -> None:
        """Do nothing; who wants to log the loss does it here."""

    def configure_optimizers(self) -> Any:
        """Make the optimizer."""
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


class MaskedPositions(Lit):
    """The head sees only those positions that have a label: as many as the batch has."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__(transformers.BertModel(transformers.BertConfig(**sizes)))
        self.head = nn.Linear(sizes["hidden_size"], sizes["vocab_size"])

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        hidden = self.model(batch["input_ids"], batch["attention_mask"])[0]
        logits = self.head(hidden[labels != -100])
        return F.cross_entropy(logits, labels[labels != -100])


class Images(Lit):
    """Tuple batches, clipping, a schedule of the learning rate."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, labels = batch
        logits = self.model(pictures)
        return F.cross_entropy(getattr(logits, "logits", logits), labels)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=100)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)), inplace=True)


def convolutions(width: int) -> nn.Module:
    """Three blocks on half the size."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        *(ConvBlock(width) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )


class UNet(nn.Module):
    """Half the size twice, double it twice, and what was there before put beside it."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()

        def down(channels: int, width: int) -> nn.Module:
            conv = nn.Conv2d(channels, width, 3, padding=1)
            return nn.Sequential(conv, nn.GroupNorm(groups, width), nn.SiLU())

        self.down1, self.down2 = down(3, width), down(width, 2 * width)
        middle = (nn.Conv2d(2 * width, 2 * width, 3, padding=1) for _ in range(2))
        self.middle = nn.Sequential(*middle)
        self.up2 = nn.ConvTranspose2d(4 * width, width, 2, stride=2)
        self.up1 = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.avg_pool2d(first, 2))
        if time is not None:
            second = second + time[:, None, None, None]
        up = self.up2(torch.cat([self.middle(second), second], dim=1))
        return self.up1(torch.cat([up, first], dim=1))  # type: ignore[no-any-return]


class Segmentation(Lit):
    """Each pixel has a class."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, labels = batch
        size = pictures.shape[-2:]
        return F.cross_entropy(self.model(pictures), labels[:, None, None].expand(-1, *size) % 3)


class Diffusion(Lit):
    """Steps of noise are drawn at random, and a second model is an average of the first."""

    alphas: Tensor

    def __init__(self, *sizes: int) -> None:
        super().__init__(UNet(*sizes), functools.partial(torch.optim.Adam, lr=1e-4))
        self.register_buffer("alphas", torch.linspace(0.999, 0.9, 50).cumprod(0))
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

    def __init__(self, vocabulary: int, width: int, num_heads: int, inner: int) -> None:
        layer = nn.TransformerEncoderLayer(width, num_heads, inner, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        super().__init__(encoder, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=1)
        self.head = nn.Linear(width, vocabulary)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        is_padding = batch["attention_mask"] == 0
        hidden = self.model(self.embedding(batch["input_ids"]), src_key_padding_mask=is_padding)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten())


class Lstm(Lit):
    """Two layers in both directions."""

    def __init__(self, vocabulary: int, width: int) -> None:
        how: Any = {"batch_first": True, "bidirectional": True, "dropout": 0.1}
        super().__init__(nn.LSTM(width, width, 2, **how))
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(2 * width, 5)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        output, _ = self.model(self.embedding(batch["input_ids"]))
        return F.cross_entropy(self.head(output[:, -1]), batch["input_ids"][:, 0] % 5)


class Gan(pl.LightningModule):
    """Two optimizers, which the module steps itself."""

    def __init__(self, num_drawn: int, width: int, num_pixels: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.num_drawn = num_drawn
        drawn, pixels = nn.Linear(num_drawn, width), nn.Linear(width, num_pixels)
        self.generator = nn.Sequential(drawn, nn.ReLU(), pixels)
        seen, guess = nn.Linear(num_pixels, width), nn.Linear(width, 1)
        self.discriminator = nn.Sequential(seen, nn.ReLU(), guess)

    def note(self, loss: Tensor) -> None:
        """Do nothing; who wants to log the loss does it here."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        of_generator, of_discriminator = optimizers
        real = batch[0].flatten(1)
        fake = self.generator(torch.randn(len(real), self.num_drawn, device=self.device))
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
        self.note(loss)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-4),
            torch.optim.RMSprop(self.discriminator.parameters(), lr=1e-4),
        ]


class Table(Lit):
    """Columns of categories with a table each, then a transformer over the rows of an account."""

    def __init__(
        self,
        of_cells: tuple[int, int, int],
        of_rows: tuple[int, int, int],
        categories: tuple[int, ...],
    ) -> None:
        cells, rows = (
            nn.TransformerEncoderLayer(*sizes, batch_first=True, dropout=0.0)
            for sizes in (of_cells, of_rows)
        )
        width, row_width = of_cells[0], of_rows[0]
        super().__init__(
            nn.ModuleDict(
                {
                    "columns": nn.ModuleList([nn.Embedding(n, width) for n in categories]),
                    "of_row": nn.TransformerEncoder(cells, 1, enable_nested_tensor=False),
                    "squeeze": nn.Linear(len(categories) * width, row_width),
                    "of_account": nn.TransformerEncoder(rows, 2, enable_nested_tensor=False),
                    "head": nn.Linear(row_width, categories[1]),
                }
            )
        )

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        rows, is_known = batch  # (B, R, C)
        parts: Any = self.model
        cells = torch.stack([table(rows[..., i]) for i, table in enumerate(parts["columns"])], -2)
        seen = parts["of_row"](cells.flatten(0, 1)).flatten(1)  # (B*R, C*H)
        hidden = parts["of_account"](parts["squeeze"](seen).unflatten(0, rows.shape[:2]))
        return F.cross_entropy(parts["head"](hidden)[is_known], rows[..., 1][is_known])


def hugging_face(name: str, config: dict[str, Any], head: str) -> Any:
    """A model of transformers."""
    make = getattr(transformers, f"{name}Config")
    return getattr(transformers, f"{name}{head}")(make(**config))


def lora(model: nn.Module) -> Any:
    """Adapters around GPT-2."""
    import peft  # noqa: PLC0415 - not everywhere

    adapters = peft.LoraConfig(r=64, target_modules=["c_attn"], fan_in_fan_out=True)
    return peft.get_peft_model(model, adapters)


def checkpointed_transformer(sizes: dict[str, Any]) -> pl.LightningModule:
    """BERT in our own module; who fits it brings the callback."""
    from lightning_memsave import CheckpointedTransformer  # noqa: PLC0415

    config = transformers.BertConfig(**sizes)
    return CheckpointedTransformer(config, task="masked_lm", memsave=None, max_steps=100)


def numbers(seed: int = 0) -> torch.Generator:
    """Random numbers from a seed."""
    return torch.Generator().manual_seed(seed)


def masked_lm_batch(ids: Tensor, lengths: Tensor, share: float) -> dict[str, Tensor]:
    """Rows of different lengths, of which some tokens are to be found again."""
    mask = (torch.arange(ids.shape[1]) < lengths).long()
    is_asked = (torch.rand(ids.shape, generator=numbers(1)) < share) & mask.bool()
    return {
        "input_ids": ids.masked_fill(mask == 0, 1),
        "attention_mask": mask,
        "labels": ids.masked_fill(~is_asked, -100),
    }


def padded_causal_lm(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows of different lengths, each token of which is to be found."""
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def table_rows(num_accounts: int, num_rows: int, categories: tuple[int, ...]) -> Tensor:
    """Categories of a row in each place of the last dimension."""
    shape = (num_accounts, num_rows)
    return torch.stack([torch.randint(0, n, shape, generator=numbers(n)) for n in categories], -1)


def _tokens(num_samples: int, num_tokens: int) -> Tensor:
    shape = (num_samples, num_tokens)
    return torch.randint(5, _VOCABULARY, shape, generator=numbers())


def _masked_lm_batch() -> dict[str, Tensor]:
    lengths = torch.randint(64, 129, (32, 1), generator=numbers(2))
    return masked_lm_batch(_tokens(32, 128), lengths, 0.15)


def _causal_lm_batch() -> dict[str, Tensor]:
    return {"input_ids": _tokens(8, 512), "labels": _tokens(8, 512)}


def _pictures(num_samples: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num_samples, 3, size, size), torch.arange(num_samples) % 10


def _table_batch() -> tuple[Tensor, Tensor]:
    is_known = torch.ones(64, 32, dtype=torch.bool)
    is_known[:, 24:] = False
    return table_rows(64, 32, _CATEGORIES), is_known


@dataclass(frozen=True)
class Architecture:
    """A module to train, and a batch for it.

    Args:
        make: Makes the module.
        batch: Makes the batch.
        trainer_arguments: Of the Trainer.
        missing: What the virtual GPU lacks for it.
    """

    make: Callable[[], pl.LightningModule]
    batch: Callable[[], Any]
    trainer_arguments: tuple[tuple[str, Any], ...] = ()
    missing: str = ""


_MIXTRAL = _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}
_MIXTRAL |= {"num_hidden_layers": 2, "output_router_logits": True}
_CLIPPED = (("gradient_clip_val", 1.0),)

_CATEGORIES = (7, 30_000, 500)
_GPT2 = {"vocab_size": _VOCABULARY, "n_layer": 3}
_VIT: dict[str, Any] = {"num_hidden_layers": 3, "num_labels": 10}

ARCHITECTURES: dict[str, Architecture] = {
    "roberta": Architecture(
        lambda: Lit(hugging_face("Roberta", _SIZES, "ForMaskedLM")), _masked_lm_batch
    ),
    "bert": Architecture(lambda: MaskedPositions(_SIZES), _masked_lm_batch),
    "gpt2": Architecture(lambda: Lit(hugging_face("GPT2", _GPT2, "LMHeadModel")), _causal_lm_batch),
    "llama": Architecture(
        lambda: Lit(hugging_face("Llama", _LLAMA, "ForCausalLM")), _causal_lm_batch
    ),
    "t5": Architecture(
        lambda: Lit(hugging_face("T5", _T5, "ForConditionalGeneration")),
        lambda: padded_causal_lm(_masked_lm_batch()),
    ),
    "vit": Architecture(
        lambda: Images(hugging_face("ViT", _VIT, "ForImageClassification")),
        lambda: _pictures(32, 224),
        _CLIPPED,
    ),
    "convolutions": Architecture(
        lambda: Images(convolutions(128)), lambda: _pictures(32, 64), _CLIPPED
    ),
    "unet": Architecture(lambda: Segmentation(UNet(128, 8)), lambda: _pictures(16, 64)),
    "transformer_encoder": Architecture(
        lambda: TransformerEncoder(_VOCABULARY, 768, 12, 3072), _masked_lm_batch
    ),
    "lstm": Architecture(
        lambda: Lstm(_VOCABULARY, 512), _masked_lm_batch, missing="recurrent layers need cuDNN"
    ),
    "gan": Architecture(lambda: Gan(128, 2048, 12_288), lambda: _pictures(64, 64)),
    "diffusion": Architecture(lambda: Diffusion(128, 8), lambda: _pictures(16, 64)),
    "table": Architecture(
        lambda: Table((256, 4, 1024), (768, 12, 3072), _CATEGORIES), _table_batch
    ),
    "lora": Architecture(
        lambda: Lit(lora(hugging_face("GPT2", _GPT2, "LMHeadModel"))), _causal_lm_batch
    ),
    "mixtral": Architecture(
        lambda: Lit(hugging_face("Mixtral", _MIXTRAL, "ForCausalLM")), _causal_lm_batch
    ),
    "checkpointed_transformer": Architecture(
        lambda: checkpointed_transformer(_SIZES), _masked_lm_batch
    ),
}
