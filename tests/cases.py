"""Models and techniques as data: the contract suite runs every technique on every model."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memsave.core.technique import Technique
from lightning_memsave.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_memsave.techniques.attention_kernel.technique import AttentionKernel
from lightning_memsave.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.low_precision_weights.technique import LowPrecisionWeights
from lightning_memsave.techniques.micro_batching.in_blocks import BlockMicroBatching
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.techniques.named_optimizer.technique import NamedOptimizer
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.optimizer_in_backward.technique import OptimizerInBackward
from tests.helpers import MakeOptimizer, adamw, seed_torch
from tests.virtual_gpu import counters

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where models and batches are: on the GPU, real or virtual, where the tests run on one."""
ON_A_REAL_GPU = DEVICE == "cuda" and not counters.is_on
"""There the kernels of the host, which offloading updates with, round otherwise than those of the
device."""


def fused(make: MakeOptimizer, *techniques: Technique[Any]) -> MakeOptimizer:
    """On CUDA offloading updates weights as the CPU's fused kernels round."""
    is_meant = DEVICE == "cuda" and any(isinstance(each, Offloading) for each in techniques)
    return FUSED[make] if is_meant else make


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """AdamW's `eps` is zero in float16, so that its weights become NaN there."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=1e-3, **options)


FUSED: dict[MakeOptimizer, MakeOptimizer] = {
    make: functools.partial(make, fused=True) for make in (adamw, sgd)
}
ON_CUDA_TOO = [pytest.mark.gpu] if DEVICE == "cuda" else []
"""Marks of files all of whose tests then are tests of CUDA."""
WIDTH = 64  # 64 x 64 weights have 4,096 elements, so that their optimizer state can be 8-bit


class Block(nn.Module):
    """A residual block that can be awkward: a norm, keyword arguments, tuple or dict outputs."""

    def __init__(self, norm: nn.Module, kind: str = "tensor") -> None:
        super().__init__()
        self.norm, self.kind = norm, kind
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Any, *, scale: Tensor | None = None) -> Any:
        x = x["x"] if self.kind == "dict" else x
        hidden = torch.nn.functional.gelu(self.up(self.norm(x)))
        y = x + self.down(self.dropout(hidden)) * (1.0 if scale is None else scale)
        if self.kind == "tuple":
            return y, hidden.mean()
        return {"x": y} if self.kind == "dict" else y


class Model(nn.Module):
    """Blocks, a head and a loss; subclasses change one thing each."""

    kind = "tensor"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(self.make_norm(), self.kind) for _ in range(4)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def make_norm(self) -> nn.Module:
        return nn.LayerNorm(WIDTH)

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=torch.tensor(0.5))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run_blocks(x)).square().mean()


class BatchNormModel(Model):
    def make_norm(self) -> nn.Module:
        return nn.BatchNorm1d(WIDTH, momentum=None)


class SpectralNormModel(Model):
    """Each forward pass reads and changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.utils.parametrizations.spectral_norm(block.get_submodule("up"))


class TupleModel(Model):
    kind = "tuple"

    def run_blocks(self, x: Tensor) -> Tensor:
        auxiliary: Any = 0.0
        for block in self.blocks:
            x, part = block(x)
            auxiliary = auxiliary + part
        return x + auxiliary


class DictModel(Model):
    kind = "dict"

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block({"x": x})["x"]
        return x


class FrozenModel(Model):
    """A frozen block whose input has no gradient, one whose input has, trained ones around it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False).eval()


class MutatingModel(Model):
    """Blocks that change what they are given: a dictionary, a list, an object."""

    def run_blocks(self, x: Tensor) -> Tensor:
        state = State(x)
        for block in self.blocks:
            state = block({"x": 1.0}, state=state, log=[], out=x.new_zeros(x.shape))
        return state.x

    def __init__(self) -> None:
        super().__init__()
        blocks = [MutatingBlock() for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)


class State:
    """What graph networks hand from layer to layer."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class MutatingBlock(nn.Module):
    """Its second run would see what its first run left."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(nn.LayerNorm(WIDTH))

    def forward(self, flags: Any, *, state: Any, log: Any, out: Any) -> Any:
        flags["x"] = flags["x"] + 1.0
        log.append(flags["x"])
        out = out + self.inner(state.x) * sum(log) * 0.1
        state.x = state.x + out * flags["x"]
        return state


class NewTensorsBlock(Block):
    """It makes tensors of the default dtype, on the default device, in its forward pass."""

    def forward(self, x: Any, *, scale: Tensor | None = None) -> Any:
        noise = torch.rand(WIDTH) + torch.full((WIDTH,), 0.25) + torch.tensor(1 / 3)
        noise = noise.to(x.device)
        y = super().forward(x * noise.sin(), scale=scale)
        return y + (noise * y.mean()).cos()


class NewTensorsModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([NewTensorsBlock(self.make_norm()) for _ in range(3)])


class TwiceModel(Model):
    """Every block is used twice."""

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(super().run_blocks(x))


class TiedModel(Model):
    """A language model whose head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        # With numbers of size 1 a token's own logit would be so large that the loss is zero.
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.argmax(-1, keepdim=True).expand(-1, 4)
        logits = self.head(self.run_blocks(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class ClassifierModel(Model):
    """Tokens, and a head with weights and a bias of its own, most of whose labels are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.argsort(-1)[:, :8]
        labels = tokens.masked_fill(tokens % 2 == 0, -100)
        labels[:, 0] = tokens[:, 0]  # one in each sample
        logits = self.head(self.run_blocks(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.view(-1, 4 * WIDTH), labels.view(-1))


class EagerBertModel(Model):
    """A model of Hugging Face on eager attention."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        nn.Module.__init__(self)
        config: Any = BertConfig(
            hidden_size=WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=WIDTH,
            vocab_size=16,
            max_position_embeddings=16,
            hidden_dropout_prob=0.5,
            # Kernels draw the masks of scores each in its own way.
            attention_probs_dropout_prob=0.0,
        )
        config._attn_implementation = "eager"
        self.bert, self.head = BertModel(config, add_pooling_layer=False), nn.Linear(WIDTH, WIDTH)

    def run_blocks(self, x: Tensor) -> Tensor:
        x = torch.stack([x, x.roll(1, -1)], dim=1)
        hidden: Tensor = self.bert(inputs_embeds=x).last_hidden_state
        return hidden


class TransformerModel(Model):
    """torch's own encoder layers, which do not return at all what ours return."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, dropout=0.5, batch_first=True)
            for _ in range(3)
        ]
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, WIDTH)

    def run_blocks(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=None)
        return x


class StillModel(Model):
    """Without random numbers, which are others for parts of a batch."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.dropout = nn.Identity()


class UnrepeatedModel(Model):
    """No block at all."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def run_blocks(self, x: Tensor) -> Tensor:
        return self.first(x).relu()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": Model,
    "batch_norm": BatchNormModel,
    "spectral_norm": SpectralNormModel,
    "tuple_output": TupleModel,
    "dict_input": DictModel,
    "frozen": FrozenModel,
    "mutating": MutatingModel,
    "new_tensors": NewTensorsModel,
    "used_twice": TwiceModel,
    "tied": TiedModel,
    "classifier": ClassifierModel,
    "eager_bert": EagerBertModel,
    "transformer": TransformerModel,
    "unrepeated": UnrepeatedModel,
}


SPECIAL_MODELS: dict[str, Callable[[], nn.Module]] = {"still": StillModel}
"""Those of a single technique."""

# Their loss for a sample does not depend on the other samples of the batch.
INDEPENDENT_OF_THE_BATCH = (
    "dropout",
    "dict_input",
    "frozen",
    "mutating",
    "used_twice",
    "tied",
    "unrepeated",
)
REFUSED_IN_PARTS = ("spectral_norm", "tuple_output", "new_tensors", "classifier", "transformer")
"""Their loss is no mean over what is in the batch, or depends on what the last part has left."""


def make_model(name: str) -> nn.Module:
    seed_torch(1)
    return (MODELS | SPECIAL_MODELS)[name]().to(DEVICE)


def make_batch(step: int) -> Tensor:
    """A batch of 16 vectors, the same for the same step."""
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).to(DEVICE)


@dataclass(frozen=True)
class Case:
    """How the contract suite uses a technique.

    ``variants``: settings to hold to the contract; ``only_on``: the models on which it has
    something to do; ``needs_blocks``: it has nothing to do on a model without blocks;
    ``loss_factor``: bound on the final loss over the unmodified one, for
    techniques that are approximate.
    """

    variants: tuple[Technique[Any], ...]
    needs_blocks: bool = False
    only_on: tuple[str, ...] = tuple(MODELS)
    loss_factor: float = 1.0


CASES: dict[str, Case] = {
    MicroBatching.name: Case(
        variants=(MicroBatching(6), MicroBatching("halve")),
        only_on=tuple(name for name in MODELS if name not in REFUSED_IN_PARTS),
    ),
    AttentionKernel.name: Case(variants=(AttentionKernel(),), only_on=("eager_bert",)),
    ChunkedCrossEntropy.name: Case(
        # 64 classes are too few for it to find such heads by itself.
        variants=(ChunkedCrossEntropy(heads="Linear"), ChunkedCrossEntropy(heads="head")),
        only_on=("tied", "classifier"),
    ),
    ActivationCheckpointing.name: Case(
        variants=(
            ActivationCheckpointing(),
            ActivationCheckpointing("nested"),
            ActivationCheckpointing("selective"),
            ActivationCheckpointing(2),
            ActivationCheckpointing("50%"),
            ActivationCheckpointing("every:2"),
        ),
        needs_blocks=True,
    ),
    BlockMicroBatching.name: Case(variants=(BlockMicroBatching(6),), only_on=("still",)),
    LowBitOptimizer.name: Case(
        variants=(LowBitOptimizer(), LowBitOptimizer(keep_32bit=("head.*",))),
        loss_factor=1.05,
    ),
    NamedOptimizer.name: Case(
        variants=(NamedOptimizer("adamw_bf16_state"),),  # the others are not AdamW
        loss_factor=1.05,
    ),
    Offloading.name: Case(
        variants=(
            Offloading(),
            Offloading("parameters+activations", min_bytes=1),
            Offloading("parameters", resident="50%"),
        )
    ),
    LowPrecisionWeights.name: Case(
        variants=(
            LowPrecisionWeights(),
            LowPrecisionWeights("kahan"),
            LowPrecisionWeights(keep_fp32=("head.*",)),
        ),
        loss_factor=1.05,
    ),
    OptimizerInBackward.name: Case(
        variants=(OptimizerInBackward(), OptimizerInBackward(clip_norm=1e9)),
    ),
}
