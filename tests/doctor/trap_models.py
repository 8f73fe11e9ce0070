"""Models with traps, in their blocks, outputs or optimizers, and others that look like them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import AUROC
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from tests.doctor.trap_steps import Lit


def gpt2(**changes: Any) -> GPT2LMHeadModel:
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40}
    return GPT2LMHeadModel(GPT2Config(**sizes | changes, bos_token_id=0, eos_token_id=0))


class CheckpointedBlock(nn.Module):
    """It checkpoints its inside if it is told to."""

    def __init__(self, is_checkpointed: bool = True) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Any:
        if not (self.is_checkpointed and self.training):
            return self.inside(x)
        return checkpoint(self.inside, x, use_reentrant=True)  # trap


class Blocks(Lit):
    def __init__(self, is_checkpointed: bool = True) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[CheckpointedBlock(is_checkpointed) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.blocks(x))


class CheckpointedIfEither(CheckpointedBlock):
    def forward(self, x: Tensor) -> Any:
        if self.is_checkpointed or self.inside is None:
            return checkpoint(self.inside, x, use_reentrant=True)  # trap
        return self.inside(x)


class NotReentrant(CheckpointedBlock):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inside, x, use_reentrant=False)


class NotReentrantBlocks(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[NotReentrant() for _ in range(3)])


class Either(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[CheckpointedIfEither() for _ in range(3)])


class CheckpointedStem(Blocks):
    """What checkpoints itself is none of the blocks."""

    def __init__(self) -> None:
        super().__init__(False)
        self.net.insert(0, CheckpointedIfEither())


class CheckpointedLayers(Lit):
    """The module around the layers checkpoints them."""

    def __init__(self, layer: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), layer(), nn.ReLU()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)  # trap
        return self.net(x)


class ReentrantLayers(CheckpointedLayers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)  # trap
        return self.net(x)


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
