"""Submodules on a few tokens at a time: same training, memory of a tile, attention left whole."""

import copy
import warnings
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from lightning_memsave import ActivationCheckpointing, Exactness, Offloading
from lightning_memsave.errors import ConfigurationError, NoEffectWarning
from lightning_memsave.measure.live_tensors import LiveTensors
from tests.helpers import InAutocast
from tests.techniques.hugging_face import tiny
from tests.techniques.offloaded_loops import count_moves

WIDTH = 32


class FeedForward(nn.Module):
    """Two layers, gated, with dropout, and something that tiles would change."""

    def __init__(self, kind: str = "plain", dropout: float = 0.0) -> None:
        super().__init__()
        self.kind = kind
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.down, self.dropout = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)
        self.outputs: list[Tensor] = []
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))
        if kind == "convolution":
            self.mix: nn.Module = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        if kind == "recurrence":
            self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        if kind == "batch_norm":
            self.mix = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.down(self.dropout(nn.functional.silu(self.gate(x)) * self.up(x)))
        if self.kind == "buffer":
            self.seen += 1
        if self.kind == "attribute":
            self.auxiliary = y
        if self.kind == "switch":
            self.is_second = not getattr(self, "is_second", True)
        if self.kind == "list":
            self.outputs.append(y)
        outputs = {
            "mean": lambda: y - y.mean(1, keepdim=True),
            "sum of each": lambda: y + y.sum(-1).softmax(-1)[..., None],
            "order": lambda: y.cumsum(1),
            "place": lambda: y * torch.arange(y.shape[1])[:, None],
            "attention": lambda: nn.functional.scaled_dot_product_attention(x, x, y),
            "scores": lambda: (x @ x.mT).softmax(-1) @ y,
            "convolution": lambda: self.mix(y.mT).mT,
            "recurrence": lambda: self.mix(y)[0],
            "batch_norm": lambda: self.mix(y.mT).mT,
            "view": lambda: (
                y.view(len(y), WIDTH, -1).cos().view_as(y) + y.view(len(y), -1, 1)[:, :1]
            ),
            "gradient": lambda: MixedGradient.apply(y),
            "value": lambda: y * float(y.detach().abs().max()),
            "tuple": lambda: (y, y.detach()),
        }
        return outputs.get(self.kind, lambda: y)()


class MixedGradient(torch.autograd.Function):
    """As of a loss for the balance of experts, which is added in backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + gradients[0].mean(1, keepdim=True)


class Block(nn.Module):
    def __init__(self, kind: str = "plain", dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward(kind, dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.feed_forward(self.norm(x))
        return x + (y[0] + y[1] if isinstance(y, tuple) else y)


class Model(nn.Module):
    def __init__(self, kind: str = "plain", dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(kind, dropout) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def sequences(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 24)), WIDTH, generator=torch.Generator().manual_seed(3))


def gradients(model: nn.Module, batch: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    params = [p for p in model.parameters() if p.requires_grad]
    found: Any = torch.autograd.grad(model(batch), params, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def tiled(model: nn.Module, tile: int = 12) -> list[int]:
    """Recompute in tiles; give a list of how many tokens the layers get."""
    handle = ActivationCheckpointing("tiled", tile=tile, blocks=Block).apply(model)
    assert handle.summary.endswith(
        f"on {tile} tokens at a time, if they compute each position by itself: "
        "2 x FeedForward, 2 x LayerNorm"
    )
    lengths: list[int] = []
    for block in model.blocks:
        inner = block.feed_forward.gate.forward

        def forward(x: Tensor, inner: Any = inner) -> Tensor:
            lengths.append(x.shape[:-1].numel())
            return inner(x)

        block.feed_forward.gate.forward = forward
    return lengths


def assert_close(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 24), (1, 24), (40,), (2, 3, 20), (24, 2)], ids=str)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_training_is_that_of_whole_sequences(shape, is_frozen):
    model, batch = Model().double(), sequences(*shape).double()
    model.blocks[0].requires_grad_(not is_frozen)
    plain = gradients(model, batch)
    lengths = tiled(model)
    assert_close(plain, gradients(model, batch))
    lengths.clear()
    gradients(model, batch)
    longest, tokens = max(shape), batch[..., 0].numel()
    others = tokens // longest
    size = 12 // others
    assert {*lengths} == {size * others, (longest % size or size) * others}


def test_one_tile_moves_no_bit():
    model, batch = Model(dropout=0.5), sequences()
    plain = gradients(model, batch)
    lengths = tiled(model, tile=48)
    assert all(map(torch.equal, plain, gradients(model, batch)))
    assert {*lengths} == {48}


def test_masks_of_tiles_are_drawn_one_after_the_other():
    """As without recomputation, if each part is called with tiles by hand; the proof draws none."""
    model, by_hand, batch = Model(dropout=0.5), Model(dropout=0.5), sequences(1, 24)
    for block in by_hand.blocks:
        for part in (block.norm, block.feed_forward):
            whole = part.forward

            def forward(x: Tensor, whole: Any = whole) -> Tensor:
                return torch.cat([whole(few) for few in x.split(10, 1)], 1)

            part.forward = forward
    tiled(model, tile=10)
    for _ in range(2):
        assert all(map(torch.equal, gradients(by_hand, batch), gradients(model, batch)))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "phi", "gemma2"])
def test_hugging_face_models(family):
    model, tokens = tiny(family).double().train(), torch.arange(48).reshape(2, 24) % 60 + 2
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0

    def loss(batch: Tensor) -> Tensor:
        return model(input_ids=batch, labels=batch).loss

    wrapped = nn.Module()
    wrapped.model, wrapped.forward = model, loss
    plain = gradients(wrapped, tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)
        ActivationCheckpointing("tiled", tile=10).apply(model)
        found = gradients(wrapped, tokens)
    for a, b in zip(plain, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


class OfTorch(nn.Module):
    """Layers whose feed-forward layers are in no module of their own, but in a method."""

    def __init__(self, layer: Any, dropout: float = 0.0, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        how: dict[str, Any] = {"dropout": dropout, "batch_first": True, **settings}
        self.blocks = nn.ModuleList([layer(WIDTH, 4, 16 * WIDTH, **how) for _ in range(2)])
        self.is_decoder = layer is nn.TransformerDecoderLayer

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = block(y, x) if self.is_decoder else block(y)
        return y.square().mean()


LAYERS = [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_layers_of_torch(layer, norm_first):
    model = OfTorch(layer, norm_first=norm_first).double()
    batch, plain = sequences().double(), gradients(model, sequences().double())
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)
        handle = ActivationCheckpointing("tiled", tile=12).apply(model)
        assert f"2 x {layer.__name__}._ff_block" in handle.summary
        assert_close(plain, gradients(model, batch))
    peaks = {}
    for which in ("nested", "tiled"):
        tile: dict[str, Any] = {"tile": 32} if which == "tiled" else {}
        model = OfTorch(layer)
        ActivationCheckpointing(which, **tile).apply(model)
        gradients(model, sequences(1, 1024))
        with LiveTensors(model) as counter:
            gradients(model, sequences(1, 1024))
        peaks[which] = counter.peak.activation_bytes + counter.peak.temporary_bytes
    row = sequences(1, 1024).nbytes
    # Three rows as wide as the hidden layer are as much as 48 of the input; attention stays whole.
    assert peaks["nested"] > 48 * row
    assert peaks["tiled"] < 16 * row


@pytest.mark.parametrize("layer", LAYERS)
def test_masks_of_layers_of_torch_are_drawn_tile_by_tile(layer):
    model, by_hand, batch = OfTorch(layer, 0.5), OfTorch(layer, 0.5), sequences(1, 24)
    for block in by_hand.blocks:
        norms = [child for child in block.children() if isinstance(child, nn.LayerNorm)]
        for owner, name in [(block, "_ff_block"), *((norm, "forward") for norm in norms)]:
            whole = getattr(owner, name)

            def in_tiles(x: Tensor, whole: Any = whole) -> Tensor:
                return torch.cat([whole(few) for few in x.split(10, 1)], 1)

            setattr(owner, name, in_tiles)
    ActivationCheckpointing("tiled", tile=10).apply(model)
    for _ in range(2):
        assert all(map(torch.equal, gradients(by_hand, batch), gradients(model, batch)))


# peft reads a property that transformers has deprecated.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_inside():
    config = peft.LoraConfig(r=4, target_modules=["up", "down"])
    model: Any = peft.get_peft_model(Model().double(), config)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param)
    batch, base = sequences().double(), model.base_model.model
    plain = gradients(base, batch)
    assert len(plain) == 2 * 2 * 2
    lengths = tiled(base)
    assert_close(plain, gradients(base, batch))
    assert 12 in lengths


def test_in_autocast_each_error_is_about_that_of_whole_sequences():
    model, batch = Model(), sequences(1, 512)
    exact = gradients(copy.deepcopy(model).double(), batch.double())
    in_autocast = InAutocast(model)
    plain = gradients(in_autocast, batch)
    tiled(model, tile=64)
    found = gradients(in_autocast, batch)
    for truth, one, other in zip(exact, plain, found, strict=True):
        assert (other - truth).norm() < 1.5 * (one - truth).norm()


REASONS = {
    "mean": "computes `mean`",
    "sum of each": "computes `_softmax`",
    "order": "computes `cumsum`",
    "place": "computes something else for a few positions alone",
    "attention": "computes `(transpose|unsqueeze|_scaled_dot_product)",  # by the version of torch
    "scores": "computes `transpose`",
    "convolution": "computes `transpose`",
    "recurrence": "computes `transpose`",
    "batch_norm": "computes `transpose`",
    "view": "computes `view`",
    "gradient": "computes something else for a few positions alone",
    "value": "computes `max`",
    "buffer": "changes a tensor that it keeps",
    "attribute": "keeps something of what it computes",
    "switch": "keeps something of what it computes",
    "list": "keeps something of what it computes",
    "tuple": "returns a `tuple`, not a tensor",
}


@pytest.mark.parametrize("kind", REASONS)
def test_what_mixes_positions_runs_whole_and_is_named(kind):
    model, batch = Model(kind), sequences()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(False)  # it alone is in tiles, whose gradients are not rounded
    plain = gradients(model, batch)
    parts: list[Any] = [block.feed_forward for block in model.blocks]
    seen = [float(part.seen) for part in parts]
    outputs = [len(part.outputs) for part in parts]
    tiled(model)
    why = rf"no submodule .* by itself: `FeedForward` {REASONS[kind]}[^,]*\.$"
    with pytest.warns(NoEffectWarning, match=why):
        found = gradients(model, batch)
    for a, b in zip(plain, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    # Of two passes, not of the proof.
    assert [float(part.seen) for part in parts] == [2 * each for each in seen]
    assert [len(part.outputs) for part in parts] == [2 * each for each in outputs]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        gradients(model, batch)


def test_experts_run_whole():
    model, tokens = tiny("mixtral").train(), torch.arange(48).reshape(2, 24) % 60 + 2

    def losses() -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(0)
        found = model(input_ids=tokens, labels=tokens, output_router_logits=True)
        return found.aux_loss, [*torch.autograd.grad(found.loss, model.lm_head.weight)]

    plain = losses()
    ActivationCheckpointing("tiled", tile=12).apply(model)
    with pytest.warns(NoEffectWarning, match="`MixtralSparseMoeBlock` "):
        found = losses()
    torch.testing.assert_close(plain, found)


def test_hooks_see_whole_sequences():
    """Those of a submodule are called around its tiles; with one inside of it, it is whole."""
    for is_inside in (False, True):
        model, batch, seen = Model(), sequences(1, 24), list[int]()
        for block in model.blocks:
            part = block.feed_forward
            hooked = part.down if is_inside else part
            hooked.register_forward_hook(lambda _, x, __, seen=seen: seen.append(x[0].shape[1]))
        lengths = tiled(model)
        if is_inside:
            with pytest.warns(NoEffectWarning, match="`FeedForward` has hooks inside"):
                gradients(model, batch)
        else:
            gradients(model, batch)
            assert 12 in lengths
        assert {*seen} == {24}


def test_copies_and_evaluation_are_whole():
    model, batch = Model(), sequences(1, 24)
    lengths = tiled(model)
    with torch.no_grad():
        model(batch)
    assert {*lengths} == {24}
    twin = copy.deepcopy(model)
    for block in twin.blocks:
        vars(block.feed_forward.gate).pop("forward", None)
    gradients(twin, batch)
    assert {*lengths} == {24}
    gradients(model, batch)
    assert {*lengths} > {24, 12}


def test_undo():
    model, batch = Model(), sequences()
    before = [dict(vars(module)) for module in model.modules()]
    with ActivationCheckpointing("tiled", tile=12, blocks=Block).apply(model):
        gradients(model, batch)
    assert before == [dict(vars(module)) for module in model.modules()]


class TestMemory:
    def test_of_a_submodule_is_that_of_a_tile(self):
        """One sequence: of the feed-forward part nothing remains but tiles."""
        peaks, batch = {}, sequences(1, 1024)
        for which in ("all", "nested", "tiled"):
            model, tile = Model(), {"tile": 32} if which == "tiled" else {}
            ActivationCheckpointing(which, blocks=Block, **tile).apply(model)
            gradients(model, batch)
            with LiveTensors(model) as counter:
                gradients(model, batch)
            peaks[which] = counter.peak.activation_bytes + counter.peak.temporary_bytes
        row = batch.nbytes
        # Four rows as wide as the hidden layer, gated, are as much as sixteen of the input.
        assert peaks["nested"] > 20 * row
        assert peaks["tiled"] < 8 * row

    def test_weights_come_once_however_many_tiles_there_are(self, monkeypatch):
        calls = count_moves(monkeypatch)
        seen = []
        for which, tile in (("nested", {}), ("tiled", {"tile": 6})):
            model, batch = Model(), sequences(1, 24)
            ActivationCheckpointing(which, blocks=Block, **tile).apply(model)
            Offloading("parameters", blocks=Block).apply(model)
            model(batch).backward()
            calls.clear()
            model(batch).backward()
            seen.append(dict(calls))
        assert seen[0] == seen[1]
        assert seen[0]["receive"] == len([*model.parameters()])

    def test_offloading_moves_no_bit(self):
        found = []
        for what in (None, "parameters", "parameters+activations"):
            model, batch = Model(dropout=0.5), sequences(1, 24)
            ActivationCheckpointing("tiled", tile=6, blocks=Block).apply(model)
            if what:
                Offloading(what, min_bytes=1, blocks=Block).apply(model)
            for _ in range(2):
                torch.manual_seed(0)
                model.zero_grad()
                model(batch).backward()
            found.append([p.grad.clone() for p in model.parameters()])
        assert all(map(torch.equal, found[0], found[1]))
        assert all(map(torch.equal, found[0], found[2]))


def test_exactness_and_bad_values():
    assert ActivationCheckpointing("tiled:2,full:4").exactness is Exactness.ROUNDING
    assert ActivationCheckpointing("nested").exactness is Exactness.BITWISE
    for tile in (0, -1, 1.5, True, "auto"):
        with pytest.raises(ConfigurationError, match=r"must be at least 1.*tile=4096"):
            ActivationCheckpointing("tiled", tile=tile)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r'`Act.*\("tiled", tile=8\)`, or remove `tile`'):
        ActivationCheckpointing("all", tile=8)
