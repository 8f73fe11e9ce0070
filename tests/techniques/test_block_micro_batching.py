"""Blocks on a few samples at a time: same training, memory of a few samples, weights once."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from lightning_memsave import ActivationCheckpointing, BlockMicroBatching, Offloading
from lightning_memsave.errors import ConfigurationError, IncompatibleError, NoEffectWarning
from lightning_memsave.measure.live_tensors import LiveTensors
from tests.cases import WIDTH, make_batch, make_model
from tests.helpers import (
    InAutocast,
    assert_bitwise_equal,
    assert_same,
    in_pairs,
    names_of_cache,
    train,
)
from tests.techniques.offloaded_loops import count_moves


def double(step: int) -> Tensor:
    return make_batch(step).double()


class Layers(nn.Module):
    """torch's own layers, with a mask of tokens and one of samples."""

    def __init__(self, dropout: float = 0.0, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        settings: dict[str, Any] = {"dim_feedforward": 64, "batch_first": True} | how
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(32, 2, dropout=dropout, **settings) for _ in range(3)]
        )

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        padding = torch.arange(length) >= torch.arange(length - len(x) + 1, length + 1)[:, None]
        for layer in self.layers:
            x = layer(x, src_mask=causal, src_key_padding_mask=padding)
        return x.square().mean()


def sequences(number: int = 6, length: int = 8) -> Tensor:
    return torch.randn(number, length, 32, generator=torch.Generator().manual_seed(number))


def gradients(model: nn.Module, batch: Tensor, seed: int = 0) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(model(batch), params)


def assert_close(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


class TestTraining:
    @pytest.mark.parametrize(
        ("kind", "size", "is_frozen"),
        in_pairs([None, "all", "nested", "selective"], [1, 4, 5, 6, 9], [False, True]),
    )
    def test_is_that_of_whole_batches(self, kind, size, is_frozen):
        model, batch = Layers().double(), sequences().double()
        for layer in model.layers[::2] if is_frozen else ():
            layer.requires_grad_(False)
        plain = gradients(model, batch)
        handles = [BlockMicroBatching(size).apply(model)]
        if kind:
            handles.append(ActivationCheckpointing(kind).apply(model))
        assert_close(plain, gradients(model, batch))
        for handle in handles:
            handle.undo()
        assert all(map(torch.equal, plain, gradients(model, batch)))

    @pytest.mark.parametrize("kind", [None, "all", "nested", "selective"])
    def test_masks_are_the_same_in_recomputation(self, kind):
        """And in each later step: the check in the first one draws and changes nothing."""
        model, batch = Layers(dropout=0.5), sequences()
        BlockMicroBatching(4).apply(model)
        first = gradients(model, batch)
        assert all(module.training for module in model.modules())
        if kind is not None:
            ActivationCheckpointing(kind).apply(model)
        assert all(map(torch.equal, first, gradients(model, batch)))

    def test_in_autocast(self):
        """The check must not fill the cache of weights with ones that have no graph."""
        model, batch = Layers(), sequences()
        plain = gradients(InAutocast(model), batch)
        BlockMicroBatching(4).apply(model)
        for a, b in zip(plain, gradients(InAutocast(model), batch), strict=True):
            assert (a - b).norm() < 2e-2 * a.norm()

    @pytest.mark.parametrize("what", ["parameters", "parameters+activations"])
    def test_offloading_moves_no_bit(self, what):
        model, offloading = make_model("dropout"), Offloading(what, min_bytes=1)
        chunked = [ActivationCheckpointing(), BlockMicroBatching(3)]
        assert_bitwise_equal(
            train(model, make_batch, chunked), train(model, make_batch, [*chunked, offloading])
        )

    @pytest.mark.parametrize("mode", [True, False])
    def test_without_a_graph(self, mode):
        model, batch = Layers().double().train(mode), sequences().double()
        with torch.no_grad():
            plain = model(batch)
            BlockMicroBatching(4).apply(model)
            assert torch.allclose(model(batch), plain, rtol=1e-12)

    def test_nested_inputs_and_outputs(self):
        class Pair(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

            def forward(self, inputs: Any, *, more: Any) -> Any:
                hidden = self.a(inputs["x"]) * more[0] + more[1]
                return {"x": hidden.tanh(), "others": (self.b(hidden), None, "name")}

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.pairs = nn.ModuleList([Pair(), Pair()])

            def forward(self, x: Tensor) -> Tensor:
                state = {"x": x}
                loss = x.new_zeros(())
                for pair in self.pairs:
                    state = pair(state, more=[torch.tensor(2.0), x.sum(-1, keepdim=True)])
                    loss = loss + state["others"][0].square().mean()
                return state["x"].mean() + loss

        model, batch = Model().double(), sequences().double()
        plain = gradients(model, batch)
        BlockMicroBatching(4).apply(model)
        ActivationCheckpointing().apply(model)
        assert_close(plain, gradients(model, batch))

    def test_copies_run_on_whole_batches(self):
        model = Layers()
        BlockMicroBatching(4).apply(model)
        seen: list[int] = []
        twin = copy.deepcopy(model)
        for each in (model, twin):
            each.layers[1].linear1.register_forward_hook(lambda _, x, __: seen.append(len(x[0])))
        gradients(twin, sequences())
        assert seen == [6]
        gradients(model, sequences())
        assert seen[-2:] == [4, 2]


class TestMemory:
    def test_of_a_block_is_that_of_micro_batches(self):
        """Beside what is as large as the batch, and gradients of the block, which wait there."""
        peaks, batch = {}, sequences(8, 64)
        for name in ("whole", "parts", "chunks"):
            model = Layers(dim_feedforward=1024)
            ActivationCheckpointing().apply(model)
            if name == "chunks":
                BlockMicroBatching(1).apply(model)
            parts = batch.split(1) if name == "parts" else [batch]
            gradients(model, parts[0])
            with LiveTensors(model) as counter:
                for part in parts:
                    (model(part) / len(parts)).backward()
            peaks[name] = counter.peak.activation_bytes + counter.peak.temporary_bytes
        own = sum(p.nbytes for p in model.layers[0].parameters())
        assert peaks["parts"] < peaks["chunks"] < peaks["parts"] + own + 2 * batch.nbytes
        assert peaks["chunks"] < 0.2 * peaks["whole"]

    def test_evaluation_needs_less(self):
        peaks = []
        for size in (None, 1):
            model = Layers(dim_feedforward=1024)  # torch has another kernel for `eval`
            if size:
                BlockMicroBatching(size).apply(model)
            with torch.no_grad(), LiveTensors(model) as counter:
                model(sequences(8, 64))
            peaks.append(counter.peak.total_bytes - counter.peak.parameter_bytes)
        assert peaks[1] < 0.4 * peaks[0]

    def test_weights_come_once_however_many_parts_there_are(self, monkeypatch):
        calls = count_moves(monkeypatch)
        seen = []
        for size in (16, 2):
            model = make_model("still")
            ActivationCheckpointing().apply(model)
            BlockMicroBatching(size).apply(model)
            Offloading("parameters").apply(model)
            model(make_batch(0)).backward()
            calls.clear()
            model(make_batch(0)).backward()
            seen.append(dict(calls))
        # Four blocks each way, but the last stays in between; the rest is there and is unchanged.
        assert seen == 2 * [{"to_device": 7, "receive": len([*model.parameters()])}]

    def test_an_input_goes_to_the_host_once(self):
        host = []
        for size in (6, 1):
            model = Layers()
            ActivationCheckpointing().apply(model)
            BlockMicroBatching(size).apply(model)
            Offloading("activations", min_bytes=1).apply(model)
            with LiveTensors(model) as counter:
                gradients(model, sequences())
            host.append(counter.peak.host_bytes)
        assert host[0] == host[1] > 0


class Batched(nn.Module):
    """A model of one kind of block."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Mixing(nn.Module):
    """A linear layer, and something that parts of a batch would change."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.kind = kind
        self.outputs: list[Tensor] = []
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        y = self.second(self.first(x).relu())
        if self.kind == "buffer":
            self.seen += 1
        if self.kind == "weight":
            with torch.no_grad():
                self.first.weight.mul_(0.9)
        if self.kind == "hidden write":
            self.first.weight.data.mul_(0.9)
        if self.kind == "other weight":
            self.first.weight.data = self.first.weight.data * 0.9
        if self.kind == "attribute":
            self.auxiliary = y.mean()
        if self.kind == "list":
            self.outputs.append(y)
        if self.kind == "in place":
            x.add_(1)
        outputs = {
            "mean": lambda: y - y.mean(0),
            "number": lambda: y / len(y),
            "scalar": lambda: {"y": y, "loss": y.mean()},
            "dimension": lambda: y.transpose(0, 1),
            "float": lambda: {"y": y, "loss": float(y.mean())},
            "fails": lambda: y + torch.zeros(6, 1, 1),
        }
        return outputs.get(self.kind, lambda: y)()


REASONS = {
    "mean": "depends on the others in the batch",
    "number": "depends on how many there are",
    "buffer": "it changes `seen`",
    "weight": "it changes `first.weight`",
    "hidden write": "it changes `first.weight`",
    "other weight": "it replaces `first.weight`",
    "attribute": "it keeps what it computes in `auxiliary`",
    "list": "it keeps what it computes in `outputs`",
    "scalar": r"it returns a tensor of shape \(\) for two samples",
    "dimension": r"it returns a tensor of shape \(8, 2, 32\) for two samples",
    "float": "it returns a `float`",
    "in place": "it changes its arguments",
    "fails": "with its first two samples it raises RuntimeError",
}


class TestCheck:
    @pytest.mark.parametrize("kind", REASONS)
    def test_blocks_that_mix_samples_are_refused(self, kind):
        model = Batched(lambda: Mixing(kind))
        BlockMicroBatching(4, blocks=Mixing).apply(model)
        before = copy.deepcopy(model.state_dict())
        state, batch = torch.get_rng_state(), sequences()
        fix = (
            r'MicroBatching\(4, of="blocks"\)` with `blocks.0`, a `Mixing`: .*`micro_batch_size=4`'
        )
        with pytest.raises(IncompatibleError, match=f"{REASONS[kind]}") as refusal:
            model(batch)
        assert refusal.match(fix)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(batch, sequences())
        block = model.blocks[0]
        assert block.seen == 0
        assert not block.outputs
        assert not hasattr(block, "auxiliary")
        assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())

    @pytest.mark.parametrize("kind", ["batch_norm", "spectral_norm"])
    def test_normalisation_over_the_batch_is_refused(self, kind):
        model = make_model(kind)
        before = copy.deepcopy(model.state_dict())
        BlockMicroBatching(4).apply(model)
        with pytest.raises(IncompatibleError, match=r"statistics of the whole|changes `\S*_u`"):
            model(make_batch(0))
        assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
        model.eval()
        model(make_batch(0))

    def test_time_first_is_refused(self):
        model = Layers(batch_first=False)
        model.forward = lambda x: model.layers[0](x).mean()  # type: ignore[method-assign]
        BlockMicroBatching(4).apply(model)
        with pytest.raises(IncompatibleError, match="need `batch_first=True`"):
            model(sequences())

    @pytest.mark.parametrize("number", [8, 6])
    def test_a_mask_of_as_many_tokens_as_samples(self, number):
        """Refused at first; as it was before, where that is known."""
        model, batch = Layers().double(), sequences(8, 8).double()
        plain = gradients(model, batch)
        BlockMicroBatching(4).apply(model)
        if number == 6:
            gradients(model, sequences(6, 8).double())
            assert_close(plain, gradients(model, batch))
        else:
            with pytest.raises(IncompatibleError, match="raises"):
                gradients(model, batch)

    def test_a_small_batch_is_neither_split_nor_checked(self):
        model = Batched(lambda: Mixing("mean"))
        BlockMicroBatching(6, blocks=Mixing).apply(model)
        assert model(sequences()).isfinite()

    def test_compiled_and_repeated_use_are_refused(self):
        model = Layers()
        model.layers[1].compile(backend="eager")
        with pytest.raises(IncompatibleError, match=r"`layers.1`: it is compiled"):
            BlockMicroBatching(4).apply(model)
        model = Layers()
        BlockMicroBatching(4).apply(model)
        with pytest.raises(IncompatibleError, match=r"Call `handle\.undo\(\)`"):
            BlockMicroBatching(2).apply(model)

    @pytest.mark.parametrize("argument", names_of_cache())
    @pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
    def test_a_cache_is_not_split(self, argument):
        from transformers import DynamicCache, GPT2Config, GPT2Model

        model = GPT2Model(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=8)).double()
        BlockMicroBatching(2).apply(model)
        cache = DynamicCache(config=model.config)
        tokens = torch.randint(8, (4, 5))
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
            model.eval()(tokens, **{argument: cache})
        assert cache.get_seq_length() == 5
        with pytest.warns(NoEffectWarning, match="key-value cache"):
            model.train()(tokens, **{argument: DynamicCache(config=model.config)})

    def test_what_a_transform_runs_for_each_sample_is_not_split(self):
        """It would be split in its own dimension; the error ended the process."""
        layers = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        model = nn.Sequential(*layers).double()
        batch = torch.randn(4, 8, dtype=torch.float64)

        def slopes() -> list[Tensor]:
            found = vmap(grad(lambda x: model(x).sum()))(batch)
            return [*torch.autograd.grad(found.square().sum(), [*model.parameters()])]

        plain = slopes()
        BlockMicroBatching(2).apply(model)
        with pytest.warns(NoEffectWarning, match=r"`torch.func` hides the batch"):
            assert_same(slopes(), plain)

    def test_nothing_to_do(self):
        with pytest.warns(NoEffectWarning, match="no repeated block was found in `Linear`"):
            BlockMicroBatching(2).apply(nn.Linear(WIDTH, WIDTH))

    @pytest.mark.parametrize("size", [0, -1, 1.5, True, "auto"])
    def test_bad_sizes(self, size):
        with pytest.raises(ConfigurationError, match=f"`size={size!r}` is not"):
            BlockMicroBatching(size)
