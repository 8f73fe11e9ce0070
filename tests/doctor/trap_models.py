"""Models with traps, in their layers or optimizers, and others that look nearly like them."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as in users' projects
from torchmetrics import AUROC
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration


class Lit(pl.LightningModule):
    """A project without traps, on which the others build."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._shared_step(batch)
        self.log("loss", loss)
        return loss

    def _shared_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def gpt2(**changes: Any) -> GPT2LMHeadModel:
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40}
    return GPT2LMHeadModel(GPT2Config(**sizes | changes, bos_token_id=0, eos_token_id=0))


class Manual(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self._shared_step(batch))
        optimizer.step()


class Normalised(Lit):
    def __init__(self, norm: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(8)) -> None:
        super().__init__()
        self.net.insert(0, norm())


class ExactMetric(Lit):
    """A metric of the training steps that keeps all predictions, and another one of validation."""

    def __init__(self, metric: Callable[[], Any] = lambda: AUROC(task="binary")) -> None:
        super().__init__()
        self.train_metric, self.val_metric = metric(), AUROC(task="binary")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._shared_step(batch)
        self.train_metric.update(self(batch[0])[:, 0].detach(), batch[1])
        self.log("metric", self.train_metric)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_metric(self(batch[0])[:, 0], batch[1])


class MetricInHelper(ExactMetric):
    """The step is decorated, and what it calls updates the metric in a function of its own."""

    @torch.enable_grad()
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._measure(batch)
        return self._shared_step(batch)

    def _measure(self, batch: Any) -> None:
        def update() -> None:
            self.train_metric.update(self(batch[0])[:, 0].detach(), batch[1])

        update()


class BitsAndBytes(Lit):
    """Its own 8-bit optimizer."""

    def __init__(self, model: Callable[[], nn.Module], optimizer: str = "AdamW8bit") -> None:
        super().__init__()
        self.net, self.optimizer = model(), optimizer  # type: ignore[assignment]

    def configure_optimizers(self) -> Any:
        import bitsandbytes

        return getattr(bitsandbytes.optim, self.optimizer)(self.parameters())


class HeadOnly(BitsAndBytes):
    def configure_optimizers(self) -> Any:
        import bitsandbytes

        self.head, optim = nn.Linear(128, 128), vars(bitsandbytes.optim)
        return optim["AdamW8bit"](self.head.parameters())


def wide() -> nn.Module:
    return nn.Linear(128, 128)


def tied() -> nn.Module:
    return gpt2(vocab_size=500)


class Tied(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net = tied()  # type: ignore[assignment]


class Fused(Lit):
    def __init__(self, is_fused: bool = True, model: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.is_fused, self.model = is_fused, model()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=self.is_fused)


def made_for_bfloat16() -> nn.Module:
    return gpt2(dtype="bfloat16")


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
