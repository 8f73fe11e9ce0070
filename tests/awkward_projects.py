"""Lightning modules that do what techniques like least, as public projects do it.

Every project trains on the same batches of vectors. Sources are named where a public report is
the reason for a project.
"""

import copy
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cosine_similarity, cross_entropy, embedding, linear, mse_loss
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader
from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel

WIDTH, NUM_TOKENS, NUM_WORDS, BATCH_SIZE, NUM_BATCHES = 64, 6, 96, 8, 6


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(self.dropout(torch.relu(self.up(self.norm(x)))))
        return x + added


def _blocks(number: int = 3, make: Callable[[], nn.Module] = Block) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(number))


class _Base(pl.LightningModule):
    """What all projects share; each has a loss."""

    callbacks: tuple[Callable[[], pl.Callback], ...] = ()
    loss: Callable[[Any], Tensor]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        params = [param for param in self.parameters() if param.requires_grad]
        # Gradients that are nothing but rounding, as of the bias of a key, stay small.
        return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)

    # A resumed run has the dropout of one that went on: Lightning saves no random states.
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(self.global_step)

    @staticmethod
    def wrap(batch: dict[str, Tensor]) -> Any:
        return batch

    def loader(self, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        shape = (NUM_BATCHES, BATCH_SIZE, NUM_TOKENS)
        tokens = torch.randint(NUM_WORDS, shape, generator=generator)
        batches: Any = [self.wrap({"tokens": each}) for each in tokens]
        return DataLoader(batches, batch_size=None)


class Project(_Base):
    """Tokens, blocks, logits for the next token; subclasses change one thing each."""

    make_block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_WORDS, WIDTH)
        self.blocks = _blocks(make=type(self).make_block)
        self.head = nn.Linear(WIDTH, NUM_WORDS)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, x)

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.hidden(tokens)))

    def loss(self, batch: Any) -> Tensor:
        tokens = batch["tokens"]
        return cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class BoundedTable(Project):
    """Forward writes into the weight (pytorch/pytorch #26596)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_WORDS, WIDTH, max_norm=1.0)


class BoundedLinear(Block):
    """Replaces its weight in forward, as EEGNet does (braindecode/braindecode #680)."""

    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data = torch.renorm(self.up.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


class BoundedBlocks(Project):
    make_block = BoundedLinear


class _Codebook(Block):
    is_parameter = True

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randn(16, WIDTH)
        if self.is_parameter:
            self.codes: Tensor = nn.Parameter(codes, requires_grad=False)
        else:
            self.register_buffer("codes", codes)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        with torch.no_grad():
            nearest = torch.cdist(x.detach().flatten(0, -2), self.codes.to(x.dtype)).argmin(1)
            if self.training and not _is_recomputing():
                chosen = nearest.bincount(minlength=16)[:, None] > 0
                drawn = self.codes * 0.9
                self.codes.copy_(torch.where(chosen, drawn, self.codes))
        return x + self.codes[nearest].view_as(x).to(x.dtype) * 0.1


def _is_recomputing() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


class _BufferedCodebook(_Codebook):
    is_parameter = False


class Codebooks(Project):
    """Parameters that forward moves (maxjcohen/vqvae #1), after the blocks."""

    codebook: type[_Codebook] = _Codebook

    def __init__(self) -> None:
        super().__init__()
        self.codebook_layer = type(self).codebook()

    def hidden(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.codebook_layer(super().hidden(tokens)))


class BufferedCodebooks(Codebooks):
    codebook = _BufferedCodebook


class CodebooksInBlocks(Project):
    make_block = _Codebook


class _HiddenWrite(Block):
    """Writes by way of `data`, which torch does not count."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not _is_recomputing():
            self.down.weight.data.mul_(0.99)
        return super().forward(x)


class HiddenWrites(Project):
    make_block = _HiddenWrite


def _normed(make: Callable[[nn.Linear], nn.Module]) -> Callable[[], nn.Module]:
    def make_block() -> nn.Module:
        block = Block()
        make(block.up)
        return block

    return make_block


class SpectralNorm(Project):
    make_block = staticmethod(_normed(parametrizations.spectral_norm))


class OldSpectralNorm(Project):
    make_block = staticmethod(_normed(nn.utils.spectral_norm))


class WeightNorm(Project):
    make_block = staticmethod(_normed(parametrizations.weight_norm))


class Orthogonal(Project):
    make_block = staticmethod(_normed(parametrizations.orthogonal))


class AdaptiveWeight(Project):
    """Weighs two losses by gradients of the last weight, as VQGAN does (latent-diffusion #176)."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if not self.training:
            return loss
        other = self.head(self.table(batch["tokens"])).square().mean()
        weight = self.head.weight
        own = torch.autograd.grad(loss, weight, retain_graph=True)[0].norm()
        second = torch.autograd.grad(other, weight, retain_graph=True)[0].norm()
        return loss + other * (own / (second + 1e-4)).detach().clamp(0, 1)


class GradientInBlock(Project):
    """Takes the gradient of a weight inside of a block."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if not self.training:
            return loss
        weight = cast(Block, self.blocks[1]).down.weight
        (found,) = torch.autograd.grad(loss, weight, retain_graph=True)
        return loss * (1 + found.norm().detach().clamp(0, 1))


class GradientThenAnew(Project):
    """Takes the gradient of a weight, and computes the loss anew."""

    def loss(self, batch: Any) -> Tensor:
        if self.training:
            (found,) = torch.autograd.grad(super().loss(batch), self.head.weight)
            return super().loss(batch) * (1 + found.norm().clamp(0, 1))
        return super().loss(batch)


class GradientPenalty(Project):
    """Differentiates twice."""

    def loss(self, batch: Any) -> Tensor:
        tokens = batch["tokens"]
        if not self.training:
            return super().loss(batch)
        x = self.table(tokens[:, :-1])
        start = x
        for block in self.blocks:
            x = block(x)
        loss = cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())
        (found,) = torch.autograd.grad(loss, start, create_graph=True)
        return loss + found.square().sum()


class PerSampleGradients(Project):
    """Logs norms of gradients of samples (differential privacy, influence functions)."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weights = {name: param.detach() for name, param in self.head.named_parameters()}
        hidden = self.hidden(batch["tokens"]).mean(1)

        def one(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return cast(Tensor, functional_call(self.head, weights, (x,))).square().mean()

        norms = vmap(grad(one), in_dims=(None, 0))(weights, hidden.detach())
        return self.loss(batch) * (1 + 0.1 * norms["weight"].norm())


class PerSampleOfAll(Project):
    """Per-sample gradients of all weights, blocks included."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weights = {name: param.detach() for name, param in self.named_parameters()}

        def one(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
            logits = functional_call(self, weights, (tokens[None],))
            return cast(Tensor, logits).square().mean()

        norms = vmap(grad(one), in_dims=(None, 0), randomness="same")(weights, batch["tokens"])
        return self.loss(batch) * (1 + 0.1 * norms["head.weight"].norm().detach())


class Recurrent(Project):
    """A recurrent layer before the blocks."""

    layer: Any = nn.LSTM

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = type(self).layer(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.recurrent(self.table(tokens))[0]
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, x)


class RecurrentGRU(Recurrent):
    layer = nn.GRU


class RecurrentRNN(Recurrent):
    layer = nn.RNN


class _RecurrentBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.layer(x)[0])


class RecurrentBlocks(Project):
    make_block = _RecurrentBlock


class PackedRecurrent(Recurrent):
    def hidden(self, tokens: Tensor) -> Tensor:
        lengths = torch.arange(len(tokens)) % (tokens.shape[1] - 1) + 2
        packed: Any = pack_padded_sequence(
            self.table(tokens), lengths.clamp(max=tokens.shape[1]), True, enforce_sorted=False
        )
        x, _ = pad_packed_sequence(
            self.recurrent(packed)[0], batch_first=True, total_length=tokens.shape[1]
        )
        for block in self.blocks:
            x = block(x)
        return x


class StatefulRecurrent(Recurrent):
    """Keeps the hidden state for the next batch (Lightning #655)."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None

    def hidden(self, tokens: Tensor) -> Tensor:
        state = self.state if self.training else None
        x, state = self.recurrent(self.table(tokens), state)
        if self.training:
            self.state = tuple(each.detach() for each in state)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, x)


class ResetStates(StatefulRecurrent):
    """Begins anew with the first batch of an epoch, which looks as if it kept nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.state = None
        return super().training_step(batch, batch_idx)


@dataclass
class Box:
    """What a module keeps in an object of its own."""

    value: Tensor


class StepWrites(Project):
    """Writes state in the step, in ways that move no version counter, and trains with it."""

    scale: Tensor
    shift: Tensor
    sizes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.boxes = [Box(torch.ones(WIDTH))]
        self.gain = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        hidden = super().hidden(tokens) * self.scale * self.boxes[0].value * self.gain
        return hidden + self.shift

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.scale.data = self.scale * 0.9
        self.shift.detach().cpu().numpy()[0] += 1.0
        self.boxes[0].value.set_((self.boxes[0].value * 0.9).untyped_storage())
        self.gain = nn.Parameter(self.gain.detach() * 1.1, requires_grad=False)
        return super().training_step(batch, batch_idx)


class SizedInTheFirstStep(Project):
    """A buffer gets its size in the first step, as those of observers do."""

    smallest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("smallest", torch.empty(0))

    def hidden(self, tokens: Tensor) -> Tensor:
        hidden = super().hidden(tokens)
        if self.training:
            with torch.no_grad():
                if not self.smallest.numel():
                    self.smallest.resize_(WIDTH).zero_()
                self.smallest.copy_(torch.minimum(self.smallest, hidden.detach()[0, 0]))
            hidden = hidden.clamp(min=self.smallest - 1.0)
        return hidden


class LazyHead(Project):
    """A layer gets its size, and its weights, in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(NUM_WORDS)


class StepCounts(Project):
    """Averages its weights in the step, which the loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.head).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for mean, param in zip(self.average.parameters(), self.head.parameters(), strict=True):
                mean.lerp_(param, 0.01)
        return super().training_step(batch, batch_idx)


class CountsBackward(Project):
    """Clips gradients of each backward pass, and counts them."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def on_after_backward(self) -> None:
        self.passes += 1
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class HooksOnGradients(Project):
    """Clips the gradient of a weight in a hook of it."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class CalledTwice(Project):
    """Two views of a batch before backward (contrastive pairs, R-Drop)."""

    def loss(self, batch: Any) -> Tensor:
        tokens = batch["tokens"]
        one, other = self(tokens[:, :-1]), self(tokens[:, :-1].flip(0)).flip(0)
        loss = cross_entropy(one.flatten(0, 1), tokens[:, 1:].flatten())
        return loss + mse_loss(one, other)


class SharedBlock(Project):
    """One block, used several times (ALBERT)."""

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in (*self.blocks, *self.blocks, self.blocks[0]):
            x = block(x)
        return cast(Tensor, x)


class OtherOrder(Project):
    """Blocks run in another order each step, some not at all, or only the first."""

    def hidden(self, tokens: Tensor) -> Tensor:
        order = [(0, 1, 2), (2, 1, 0), (1,), (0, 2), (0,)]
        x = self.table(tokens)
        for index in order[self.global_step % len(order)]:
            x = self.blocks[index](x)
        return cast(Tensor, x)


class LayerDrop(Project):
    def __init__(self) -> None:
        super().__init__()
        self.skip = nn.Dropout(0.4)  # what draws otherwise for other parts is switched off there

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            if not self.training or torch.rand(()).item() >= self.skip.p:
                x = block(x)
        return cast(Tensor, x)


class EarlyExit(Project):
    """A head after each block; validation stops at the first that is sure (DeeBERT)."""

    def __init__(self) -> None:
        super().__init__()
        others = (nn.Linear(WIDTH, NUM_WORDS) for _ in self.blocks[1:])
        self.heads = nn.ModuleList([*others, self.head])

    def loss(self, batch: Any) -> Tensor:
        tokens, losses = batch["tokens"], []
        x = self.table(tokens[:, :-1])
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            logits = head(x)
            losses.append(cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
            if not self.training and logits.softmax(-1).amax(-1).mean() > 0.02:
                break
        return torch.stack(losses).mean()


class _Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_WORDS, WIDTH)
        self.blocks = _blocks()
        self.head = nn.Linear(WIDTH, NUM_WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(x))


class LossOutside(_Base):
    """The model gives logits, the Lightning module has the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _Logits()

    def loss(self, batch: Any) -> Tensor:
        tokens = batch["tokens"]
        logits = self.model(tokens[:, :-1])
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class LogitsUsedLater(LossOutside):
    """Validation keeps logits for the end of the epoch."""

    def on_validation_epoch_start(self) -> None:
        self.kept: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept.append(self.model(batch["tokens"]))

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", torch.stack(self.kept).square().mean())
        self.kept.clear()


class Generates(LossOutside):
    """Hugging Face's loss in training, `generate` in validation and at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=NUM_WORDS,
            n_positions=32,
            n_embd=WIDTH,
            n_layer=3,
            n_head=2,
            bos_token_id=0,
            eos_token_id=None,
            pad_token_id=0,
        )
        self.model: Any = GPT2LMHeadModel(config)

    def loss(self, batch: Any) -> Tensor:
        # A cache rounds otherwise, and checkpointed models have none in training.
        output = self.model(input_ids=batch["tokens"], labels=batch["tokens"], use_cache=False)
        return cast(Tensor, output.loss)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        made = self._generate(batch["tokens"])
        self.log("val_loss", self.loss(batch) + made.float().mean())

    def on_train_epoch_end(self) -> None:
        self.made = self._generate(torch.arange(4, device=self.device)[None])

    def _generate(self, tokens: Tensor) -> Tensor:
        mask = torch.ones_like(tokens)
        found = self.model.generate(
            tokens, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0
        )
        return cast(Tensor, found)


class _Samples(pl.Callback):
    """Shows what the model generates, in the middle of an epoch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.eval()
        self.made = pl_module._generate(torch.arange(4, device=pl_module.device)[None])
        pl_module.train()


class GeneratesInCallback(Generates):
    callbacks = (_Samples,)


class CalledByHooks(Project):
    """Calls the model at the ends of epochs, where no step is."""

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.log("sampled", self(torch.arange(6, device=self.device)[None]).mean())

    def on_validation_epoch_end(self) -> None:
        self.log("sampled_val", self(torch.arange(6, device=self.device)[None]).mean())


class Averaged(Project):
    callbacks = (lambda: StochasticWeightAveraging(1e-3, swa_epoch_start=1, annealing_epochs=1),)


class MovingAverage(Project):
    callbacks = (lambda: pl.callbacks.EMAWeightAveraging(decay=0.5),)


class MomentumTeacher(Project):
    """A teacher that follows the weights after each step, and whose output is a target."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(nn.Sequential(self.table, *self.blocks)).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        tokens = batch["tokens"]
        with torch.no_grad():
            target = self.teacher.eval()(tokens)
        return super().loss(batch) + mse_loss(self.hidden(tokens), target)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        student = nn.Sequential(self.table, *self.blocks)
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), student.parameters(), strict=True):
                own.lerp_(other.to(own.dtype), 0.1)


class Penalty(Project):
    """Adds a penalty on weights, and clips some between two steps (WGAN)."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + sum(p.abs().sum() for p in self.blocks.parameters()) * 1e-4

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for param in self.blocks[1].parameters():
                param.clamp_(-0.2, 0.2)


class FunctionalWeight(Project):
    """Uses weights without their modules."""

    def hidden(self, tokens: Tensor) -> Tensor:
        x = embedding(tokens, self.table.weight)
        for block in self.blocks:
            x = block(x)
        last = cast(Block, self.blocks[-1])
        return x + linear(torch.relu(linear(x, last.up.weight)), last.down.weight)


class MaskedGradient(Project):
    """Trains new words only, by a hook with a float32 mask."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.zeros(NUM_WORDS, 1)
        mask[-16:] = 1
        self.register_buffer("mask", mask)
        self.table.weight.register_hook(lambda found: found * self.mask)


class TwoOptimizers(Project):
    """Manual optimization, two optimizers of other frequencies, as a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judges = _blocks()
        self.judge = nn.Linear(WIDTH, 1)

    def judged(self, x: Tensor) -> Tensor:
        for block in self.judges:
            x = block(x)
        return cast(Tensor, self.judge(x))

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, second = cast(Any, self.optimizers())
        made = self.hidden(batch["tokens"])
        self.toggle_optimizer(first)
        loss = self.loss(batch) - self.judged(made).mean() * 0.1
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        if batch_idx % 2:
            self.toggle_optimizer(second)
            loss = self.judged(made.detach()).square().mean()
            self.manual_backward(loss)
            second.step()
            second.zero_grad()
            self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        own = [*self.table.parameters(), *self.blocks.parameters(), *self.head.parameters()]
        other = [*self.judges.parameters(), *self.judge.parameters()]
        return [torch.optim.AdamW(own, lr=1e-2), torch.optim.SGD(other, lr=1e-2, momentum=0.9)]


class Contrastive(Project):
    """A loss over the batch (SimCLR)."""

    def loss(self, batch: Any) -> Tensor:
        one = self.hidden(batch["tokens"]).mean(1)
        other = self.hidden(batch["tokens"].flip(1)).mean(1)
        scores = cosine_similarity(one[:, None], other[None], dim=-1) / 0.1
        return cross_entropy(scores, torch.arange(len(one), device=one.device))


class MemoryBank(Project):
    """A queue of earlier outputs (MoCo)."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(4 * BATCH_SIZE, WIDTH))

    def loss(self, batch: Any) -> Tensor:
        one = self.hidden(batch["tokens"]).mean(1)
        scores = one @ self.queue.T
        if self.training:
            self.queue = torch.cat([self.queue[len(one) :], one.detach().float()])
        return super().loss(batch) + scores.logsumexp(1).mean() * 0.1


class GrowingBuffer(Project):
    """Remembers every batch."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        # In a checkpoint its size would be another than that of the new module.
        self.register_buffer("seen", torch.zeros(0, WIDTH), persistent=False)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.training:
            mean = self.table(batch["tokens"]).mean(1).detach().float()
            loss = loss + mean.mean() * self.seen.sum(0).mean() * 1e-3
            self.seen = torch.cat([self.seen, mean])
        return loss


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = _blocks(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(-1)
        best, chosen = shares.max(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            places = (chosen == index).nonzero(as_tuple=True)
            y = y.index_put(places, (expert(x[places]) * best[places][:, None]).to(y.dtype))
        return x + y, shares.flatten(0, -2).mean(0).square().sum() * 4


class Mixture(Project):
    """A mixture of experts with an auxiliary loss."""

    make_block = _Experts

    def hidden(self, tokens: Tensor) -> Tensor:
        x, self.auxiliary = self.table(tokens), []
        for block in self.blocks:
            x, loss = block(x)
            self.auxiliary.append(loss)
        return cast(Tensor, x)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + torch.stack(self.auxiliary).sum() * 0.1


@dataclass
class Tokens:
    """A batch of tokens."""

    tokens: Tensor

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class NamedTokens(NamedTuple):
    """A batch of tokens."""

    tokens: Tensor


class DataclassBatches(Project):
    wrap = staticmethod(lambda batch: Tokens(**batch))


class NamedTupleBatches(Project):
    wrap = staticmethod(lambda batch: NamedTokens(**batch))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch._asdict())


class EncodedBatches(Project):
    wrap: Any = staticmethod(BatchEncoding)


class DetectionBatches(Project):
    """One dict per image, as Hugging Face's detection models take them."""

    wrap = staticmethod(
        lambda batch: {
            "tokens": batch["tokens"],
            "labels": [{"boxes": torch.ones(i % 3 + 1, 4)} for i in range(len(batch["tokens"]))],
        }
    )

    def loss(self, batch: Any) -> Tensor:
        sizes = torch.tensor([len(each["boxes"]) for each in batch["labels"]])
        logits = self(batch["tokens"]).mean((1, 2))
        return mse_loss(logits, sizes.to(logits.device, logits.dtype))


def _as_tensordict(batch: dict[str, Tensor]) -> Any:
    from tensordict import TensorDict

    return TensorDict(batch, batch_size=[len(batch["tokens"])])


class TensorDictBatches(Project):
    wrap = staticmethod(_as_tensordict)

    def loader(self, seed: int) -> Any:
        return DataLoader(super().loader(seed).dataset, batch_size=None, collate_fn=_unchanged)


def _unchanged(batch: Any) -> Any:
    return batch


def _as_graphs(batch: dict[str, Tensor]) -> Any:
    data: Any = importlib.import_module("torch_geometric.data")  # it has no types
    path = torch.stack([torch.arange(NUM_TOKENS - 1), torch.arange(1, NUM_TOKENS)])
    graphs = [data.Data(tokens=each, edge_index=path) for each in batch["tokens"]]
    return data.Batch.from_data_list(graphs)


class GraphBatches(TensorDictBatches):
    """Batches of PyG: nodes of all graphs in one tensor, and edges between them."""

    wrap = staticmethod(_as_graphs)

    def loss(self, batch: Any) -> Tensor:
        source, target = batch.edge_index
        x = self.table(batch.tokens)
        for block in self.blocks:
            x = block(x + torch.zeros_like(x).index_copy(0, target, x[source]))
        return cross_entropy(self.head(x[source]), batch.tokens[target])


class CombinedBatches(Project):
    """Two loaders at a time."""

    def loss(self, batch: Any) -> Tensor:
        if "one" not in batch:
            return super().loss(batch)
        return super().loss(batch["one"]) + super().loss(batch["two"])

    def loader(self, seed: int) -> Any:
        first, second = super().loader(seed), super().loader(seed + 10)
        return CombinedLoader({"one": first, "two": second}, mode="max_size_cycle")


class OptionalBatches(Project):
    """The second loader ends earlier: its part of a batch is then ``None`` (Lightning #17910)."""

    def loss(self, batch: Any) -> Tensor:
        if "one" not in batch:
            return super().loss(batch)
        parts = [part for part in (batch["one"], batch["two"]) if part is not None]
        return torch.stack([super(OptionalBatches, self).loss(part) for part in parts]).sum()

    def loader(self, seed: int) -> Any:
        first, second = super().loader(seed), super().loader(seed + 10)
        second = DataLoader(second.dataset[:3], batch_size=None)
        return CombinedLoader({"one": first, "two": second}, mode="max_size")


def all_projects() -> dict[str, type[Any]]:
    """List the projects by name."""
    importlib.import_module("tests.awkward_state")  # which has more of them
    return {each.__name__: each for each in _subclasses(_Base) if each.__name__[0] != "_"}


def _subclasses(base: type) -> Iterator[type]:
    each: type
    for each in base.__subclasses__():
        yield each
        yield from _subclasses(each)
