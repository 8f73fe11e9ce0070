"""Awkward modules whose state torch does not count, and what public projects do between steps.

Each has its public sources; `tests.awkward_projects` lists them with the others.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.ao.quantization import (
    FusedMovingAvgObsFakeQuantize,
    MovingAveragePerChannelMinMaxObserver,
)
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader

from tests.awkward_projects import WIDTH, Block, LossOutside, Project

# --- state that blocks write in their own forward pass ---


class _DataCodebook(Block):
    """Moving averages of a codebook, written through `data`."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            flat = x.detach().flatten(0, -2).to(self.codes.dtype)
            nearest = torch.cdist(flat, self.codes).argmin(1)
        x = x * (1 + 0.3 * self.codes[nearest].tanh().view_as(x)).to(x.dtype)
        if self.training:
            counts = nearest.bincount(minlength=16).clamp(min=1)[:, None]
            sums = torch.zeros_like(self.codes).index_add(0, nearest, flat)
            self.codes.data.copy_(0.8 * self.codes + 0.2 * sums / counts)
        return super().forward(x)


class DataCodebooks(Project):
    """EnCodec and vector-quantize-pytorch #40, #57."""

    make_block = _DataCodebook


class _Scaled(Block):
    """Scales by a number that it changes."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x * self.scale().to(x.dtype))
        if self.training:
            with torch.no_grad():
                self.change(x.detach().float().std())
        return y

    def scale(self) -> Tensor:
        raise NotImplementedError

    def change(self, new: Tensor) -> None:
        raise NotImplementedError


class _TensorScaled(_Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.running = torch.ones(())

    def scale(self) -> Tensor:
        return self.running.clone()

    def change(self, new: Tensor) -> None:
        self.running.lerp_(new.to(self.running), 0.1)


class TensorAttributes(Project):
    make_block = _TensorScaled


class _ReplacedScaled(_TensorScaled):
    def change(self, new: Tensor) -> None:
        self.running = 0.9 * self.running + 0.1 * new


class ReplacedAttributes(Project):
    make_block = _ReplacedScaled


class _ListScaled(_Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.seen = [torch.ones(())]

    def scale(self) -> Tensor:
        return torch.stack(self.seen).mean()

    def change(self, new: Tensor) -> None:
        self.seen.append(new.cpu())


class ListAttributes(Project):
    make_block = _ListScaled


class _NumberScaled(_Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.number = 1.0

    def scale(self) -> Tensor:
        return torch.tensor(self.number)

    def change(self, new: Tensor) -> None:
        self.number *= 0.95


class NumberAttributes(Project):
    make_block = _NumberScaled


class _FrozenScaled(_Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.running = nn.Parameter(torch.ones(()), requires_grad=False)

    def scale(self) -> Tensor:
        return self.running.clone()

    def change(self, new: Tensor) -> None:
        self.running.lerp_(new.to(self.running), 0.1)


class FrozenParameters(Project):
    make_block = _FrozenScaled


class _Observed(Block):
    """Quantisation-aware training: fused operators change buffers, which get their size first."""

    def __init__(self) -> None:
        super().__init__()
        self.observe = FusedMovingAvgObsFakeQuantize(
            quant_min=0, quant_max=255, dtype=torch.quint8, qscheme=torch.per_tensor_affine
        )
        self.weights = FusedMovingAvgObsFakeQuantize(
            MovingAveragePerChannelMinMaxObserver,
            quant_min=-128,
            quant_max=127,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weights(self.up.weight.float())
        hidden = nn.functional.linear(self.norm(x).float(), weight, self.up.bias.float())
        added = self.down(self.dropout(torch.relu(hidden)).to(self.down.weight.dtype))
        return cast(Tensor, x + self.observe(added.float()).to(x.dtype))


class Observers(Project):
    """torch.ao.quantization in blocks."""

    make_block = _Observed


class _Renormalised(Block):
    """Reads the running statistics of its own norm."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        batch_norm: Any = self.batch_norm
        mean, variance = batch_norm.running_mean, batch_norm.running_var
        with torch.no_grad():
            ratio = (flat.float().var(0) / variance).sqrt().clamp(0.5, 2)
            shift = ((flat.float().mean(0) - mean) / variance.sqrt()).clamp(-1, 1)
        corrected = batch_norm(flat) * ratio.to(x.dtype) + shift.to(x.dtype)
        return x + super().forward(corrected.view_as(x))


class Renormalised(Project):
    """Batch renormalisation (m2lines/Samudra #572, chainer #7255)."""

    make_block = _Renormalised


# --- state of a step ---


class _Resized(Block):
    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        # In a checkpoint its size would be another than that of the new module.
        self.register_buffer("offset", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.offset.numel() == 0:
            self.offset.resize_(WIDTH).copy_(x.detach().flatten(0, -2).mean(0))
        return super().forward(x - self.offset.to(x.dtype))


class ResizedBuffers(Project):
    """Buffers of blocks get their size in the first step."""

    make_block = _Resized


class ResizedBuffer(Project):
    """A buffer outside of blocks gets its size in the first step."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(0), persistent=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = super().hidden(tokens)
        if self.offset.numel() == 0:
            self.offset.resize_(WIDTH).copy_(x.detach().flatten(0, -2).mean(0))
        return x - self.offset.to(x.dtype)


class ResetRecurrent(Project):
    """Keeps a hidden state, and resets it in the first batch of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.state: Any = None

    def hidden(self, tokens: Tensor) -> Tensor:
        x, state = self.recurrent(self.table(tokens), self.state if self.training else None)
        if self.training:
            self.state = state.detach()
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.state = None
        return super().training_step(batch, batch_idx)


# --- parameters and modules ---


class AssignedInSetup(Project):
    """Parameters are replaced after callbacks were set up (loading to the meta device)."""

    def setup(self, stage: str) -> None:
        state = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        self.load_state_dict(state, assign=True)


class ScriptedHead(Project):
    """A scripted submodule (Lightning #6481, ai2cm/ace #539)."""

    def __init__(self) -> None:
        super().__init__()
        self.head: Any = torch.jit.script(self.head)


class ScriptedBlocks(Project):
    """Scripted submodules of blocks."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            cast(Any, block).up = torch.jit.script(cast(Any, block).up)


# --- optimizers of others ---


class _Sharpness(torch.optim.Optimizer):
    """Climbs to the sharpest place near, and steps from here with the gradient of there."""

    def __init__(
        self, params: Iterable[Any], base: type[torch.optim.Optimizer], **own: Any
    ) -> None:
        super().__init__(params, {"rho": 0.05, **own})
        self.base = base(self.param_groups, **own)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([cast(Tensor, p.grad).norm() for p in params]).norm()
        for param in params:
            self.state[param]["here"] = param.data.clone()
            param.add_(cast(Tensor, param.grad) * (0.05 / (norm + 1e-12)).to(param.dtype))
        torch.enable_grad()(closure)()
        for param in params:
            param.data = self.state[param]["here"]
        self.base.step()
        return loss


class Sharpness(Project):
    """SAM around a base optimizer: its closure is called twice (davda54/sam #8, #31)."""

    def configure_optimizers(self) -> Any:
        return _Sharpness(self.parameters(), torch.optim.SGD, lr=1e-2, momentum=0.9)


class _ScheduleFree(torch.optim.Optimizer):
    """Evaluates at an average, and trains between it and the iterate."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _switch(self, *, to_train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != to_train:
                group["train_mode"] = to_train
                for param in group["params"]:
                    if "z" in self.state[param]:
                        weight = 0.1 if to_train else 1 - 1 / 0.9
                        param.lerp_(end=self.state[param]["z"], weight=weight)

    def train(self) -> None:
        self._switch(to_train=True)

    def eval(self) -> None:
        self._switch(to_train=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "z" not in state:
                    state["z"] = param.clone()
                grad = param.grad
                param.lerp_(end=state["z"], weight=1 / group["k"])
                param.add_(grad, alpha=group["lr"] * (0.9 * (1 - 1 / group["k"]) - 1))
                state["z"].sub_(grad, alpha=group["lr"])
        return loss


class ScheduleFree(Project):
    """Modes of the optimizer, which mix weights with its state (Lightning #20441, nequip #529)."""

    def configure_optimizers(self) -> Any:
        return _ScheduleFree(self.parameters(), lr=1e-2)

    def _set_mode(self, name: str) -> None:
        getattr(cast(Any, self.optimizers(use_pl_optimizer=False)), name)()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._set_mode("train")

    def on_validation_epoch_start(self) -> None:
        self._set_mode("eval")

    def on_validation_epoch_end(self) -> None:
        self._set_mode("train")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._set_mode("eval")


class EditedState(Project):
    """Edits the state of Adam (sparse_autoencoder #115, gaussian-splatting #108)."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = cast(Any, self.optimizers(use_pl_optimizer=False)).state
        for param in self.blocks.parameters():
            state[param]["exp_avg"][:4] = 0
            state[param]["exp_avg_sq"][:4] *= 0.5


# --- gradients after a step ---


class _ReadsGradients(Project):
    """Weighs the next loss by the norm of the last gradients."""

    norm = 0.0

    def read(self) -> None:
        norms = [param.grad.norm() for param in self.parameters() if param.grad is not None]
        self.norm = torch.stack(norms).norm().item() if norms else 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + min(self.norm, 2.0))


class GradientsAfterBatch(_ReadsGradients):
    """Lightning #3396, #5238."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.read()


class GradientsAfterStep(_ReadsGradients):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.read()


class GradientsBeforeZero(_ReadsGradients):
    """Lightning #21589; AdaLoRA of peft."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.read()


class _GradientNorms(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.read()


class GradientsInCallback(_ReadsGradients):
    callbacks = (_GradientNorms,)


# --- batches and losses ---


class MissingBatches(Project):
    """The second of two batches is `None` in later steps (Lightning #17910, #21893)."""

    def loss(self, batch: Any) -> Tensor:
        if "one" not in batch:
            return super().loss(batch)
        loss = super().loss(batch["one"])
        return loss if batch["two"] is None else loss + super().loss(batch["two"])

    def loader(self, seed: int) -> Any:
        second = super().loader(seed + 10).dataset[:3]
        loaders = {"one": super().loader(seed), "two": DataLoader(second, batch_size=None)}
        return CombinedLoader(loaders, mode="max_size")


class Teacher(LossOutside):
    """Targets of a teacher without gradients, beside losses of the same batch."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [copy.deepcopy(self.model).requires_grad_(False)]  # not saved

    def loss(self, batch: Any) -> Tensor:
        tokens = batch["tokens"]
        teacher = self.teacher[0].to(tokens.device)
        with torch.no_grad():
            soft = teacher(tokens[:, :-1])
        logits = self.model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss + mse_loss(logits.softmax(-1), soft.softmax(-1))


class SelfTeacher(LossOutside):
    """Targets of the model itself without gradients."""

    def loss(self, batch: Any) -> Tensor:
        tokens = batch["tokens"]
        with torch.no_grad():
            soft = self.model(tokens[:, :-1])
        target = soft.softmax(-1)
        logits = self.model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss + mse_loss(logits.softmax(-1), target)


# --- averages and what is read beside a step ---


class _SwapsAverages(pl.Callback):
    """Evaluates averages, as EMA callbacks do, through `data`."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.averages = [p.detach().clone().float() for p in pl_module.parameters()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for average, param in zip(self.averages, pl_module.parameters(), strict=True):
            average.lerp_(param.detach().float(), 0.3)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = [p.detach().clone() for p in pl_module.parameters()]
        self._copy(self.averages, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._copy(self.kept, pl_module)

    def _copy(self, values: list[Tensor], pl_module: Any) -> None:
        for value, param in zip(values, pl_module.parameters(), strict=True):
            param.data.copy_(value)


class SwapsAverages(Project):
    """NVIDIA-NeMo/Speech #4764, fadel/pytorch_ema #12, Lightning #10914."""

    callbacks: tuple[Callable[[], pl.Callback], ...] = (_SwapsAverages,)
