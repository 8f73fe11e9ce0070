"""Training without logits: which heads, which models, how many bytes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_memsave import ChunkedCrossEntropy
from lightning_memsave.errors import ConfigurationError, IncompatibleError, NoEffectWarning
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.techniques.chunked_cross_entropy.deferred_logits import DeferredLogits
from tests.techniques.hugging_face import tiny

WIDTH, WORDS, LENGTH = 32, 1500, 64
SIZES: dict[str, Any] = {"vocab_size": WORDS, "num_hidden_layers": 2}


class Model(nn.Module):
    """A language model that gives its loss."""

    def __init__(self, *, tied: bool = True, padding: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=padding)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.body(self.embedding(input_ids)))
        return functional.cross_entropy(logits.float().view(-1, WORDS), labels.view(-1))


def gpt2() -> Any:
    return tiny("gpt2", vocab_size=WORDS, n_layer=2, loss_type="ForCausalLM")


def llama() -> Any:
    return tiny("llama", **SIZES)


def roberta() -> Any:
    return tiny("roberta", "RobertaForMaskedLM", **SIZES)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own": Model,
    "own, untied": lambda: Model(tied=False),
    "own, padding": lambda: Model(padding=3),
    "roberta": roberta,
    "bert": lambda: tiny("bert", "BertForMaskedLM", **SIZES),
    "gpt2": gpt2,
    "llama": llama,
    # It adds a vector to its logits, and embeds twice.
    "bart": lambda: tiny("bart", "BartForConditionalGeneration", vocab_size=WORDS),
}


def make_batch(*, labelled: float = 1.0) -> dict[str, Tensor]:
    ids = torch.randint(3, WORDS, (4, LENGTH))
    ids[:, -5:] = 3
    labels = ids.clone()
    labels[torch.rand(labels.shape) > labelled] = -100
    return {"input_ids": ids, "labels": labels}


def loss_of(output: Any) -> Tensor:
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def step(
    model: nn.Module, batch: dict[str, Tensor], autocast: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The loss and all gradients."""
    model.zero_grad()
    torch.manual_seed(5)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        loss = loss_of(model(**batch))
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


def assert_close(mine: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    """In the norm, beside that of all gradients: some of them are zero but for rounding."""
    assert mine.keys() == theirs.keys()
    total = torch.stack([t.double().norm() for n, t in theirs.items() if n != "loss"]).norm()
    for name, b in theirs.items():
        a, size = mine[name], b.abs() if name == "loss" else total
        assert a.dtype == b.dtype
        assert (a.double() - b.double()).norm() <= tolerance * size, name


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    made: nn.Module = MODELS[request.param]().train()
    return made


class TestTraining:
    @pytest.mark.parametrize(
        ("labelled", "dtype", "autocast", "tolerance"),
        [
            (1.0, torch.float32, None, 2e-6),
            (0.15, torch.float32, None, 2e-6),
            (1.0, torch.float32, torch.bfloat16, 1e-2),
            (0.15, torch.float32, torch.bfloat16, 1e-2),
            (0.5, torch.bfloat16, None, 2e-2),
        ],
    )
    def test_gradients_are_those_of_the_unmodified_model(  # noqa: PLR0917
        self, model, num_computed, labelled, dtype, autocast, tolerance
    ):
        model.to(dtype)
        batch = make_batch(labelled=labelled)
        theirs = step(copy.deepcopy(model), batch, autocast)
        with ChunkedCrossEntropy().apply(model) as handle:
            mine = step(model, batch, autocast)
        assert len(handle.changes) == 1
        assert num_computed == [0]
        assert_close(mine, theirs, tolerance)

    def test_validation(self, model, num_computed):
        model.eval()
        batch = make_batch(labelled=0.5)
        with torch.no_grad():
            theirs = loss_of(model(**batch))
            ChunkedCrossEntropy().apply(model)
            torch.testing.assert_close(loss_of(model(**batch)), theirs)
        assert num_computed == [0]

    def test_generation(self):
        model = gpt2().eval()
        ids = make_batch()["input_ids"][:, :5]
        settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        theirs = model.generate(ids, **settings)
        ChunkedCrossEntropy().apply(model)
        assert torch.equal(model.generate(ids, **settings), theirs)


class TestTiedEmbedding:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("labelled", [1.0, 0.15])
    @pytest.mark.parametrize("padding", [None, 3])
    def test_gradient_is_as_exact_as_the_ordinary_one(self, dtype, labelled, padding):
        model, batch = Model(padding=padding).to(dtype), make_batch(labelled=labelled)
        truth = step(copy.deepcopy(model).double(), batch)
        theirs = step(copy.deepcopy(model), batch)
        ChunkedCrossEntropy().apply(model)
        mine = step(model, batch)

        def error(found: dict[str, Tensor], name: str) -> float:
            return ((found[name].double() - truth[name]).norm() / truth[name].norm()).item()

        for name in theirs:
            allowed = 1.05 * error(theirs, name) + (1e-6 if dtype is torch.float32 else 1e-4)
            assert error(mine, name) <= allowed, name

    def test_there_is_one_of_it(self):
        """The ordinary loop holds gradients of head and embedding, and 12 copies of logits."""
        vocabulary = 200 * WIDTH
        model = nn.Module()
        model.embedding = nn.Embedding(vocabulary, WIDTH)
        model.head = nn.Linear(WIDTH, vocabulary, bias=False)
        model.head.weight = model.embedding.weight
        ids = torch.randint(0, vocabulary, (16, 8))
        unit = model.embedding.weight.numel() * 4
        ChunkedCrossEntropy().apply(model)
        with LiveTensors(model) as live:
            logits = model.head(model.embedding(ids))
            functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
            # Weight and gradient, and a chunk of at least 1 MiB.
            assert live.peak.total_bytes < 2 * unit + 1.3 * 2**20
        assert live.live_bytes < 2.1 * unit

    def test_head_without_the_embedding_in_its_graph(self):
        model: Any = ChunkedCrossEntropy().apply(Model()).target
        x = torch.randn(5, WIDTH)
        functional.cross_entropy(model.head(x), torch.arange(5)).backward()
        mine = model.head.weight.grad.clone()
        model.zero_grad()
        functional.cross_entropy(
            functional.linear(x, model.head.weight, model.head.bias), torch.arange(5)
        ).backward()
        torch.testing.assert_close(mine, model.head.weight.grad)

    def test_embedding_without_the_head_in_its_graph(self):
        model: Any = ChunkedCrossEntropy().apply(Model(padding=3)).target
        ids = make_batch()["input_ids"]
        model.embedding(ids).square().sum().backward()
        mine = model.embedding.weight.grad.clone()
        model.zero_grad()
        functional.embedding(ids, model.embedding.weight, 3).square().sum().backward()
        assert torch.equal(mine, model.embedding.weight.grad)

    @pytest.mark.parametrize("kind", ["two losses", "two embeddings", "loss on the embedding"])
    def test_several_uses(self, kind):
        model, batch = Model(), make_batch()
        ids, labels = batch["input_ids"], batch["labels"]

        def loss(m: Any) -> Tensor:
            total: Tensor = m(ids, labels)
            if kind == "two losses":
                return total + 2 * m(ids.flip(0), labels)
            if kind == "two embeddings":
                logits = m.head(m.body(m.embedding(ids) + m.embedding(ids.flip(0))))
                return total + functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return total + m.embedding(ids[:1]).square().sum()

        other = ChunkedCrossEntropy().apply(copy.deepcopy(model)).target
        for m in (other, model):
            loss(m).backward()
        assert_close(gradients_of(other), gradients_of(model), 2e-6)

    def test_gradients_of_some_tensors_only(self):
        model, batch = Model(), make_batch()
        other = ChunkedCrossEntropy().apply(copy.deepcopy(model)).target
        for choose in (lambda m: [m.head.weight], lambda m: [m.body[0].weight, m.head.bias]):
            mine, theirs = (torch.autograd.grad(m(**batch), choose(m)) for m in (other, model))
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b)

    def test_a_backward_pass_that_breaks_leaves_nothing(self):
        model, batch = Model(), make_batch()
        theirs = step(copy.deepcopy(model), batch)
        ChunkedCrossEntropy().apply(model)

        def fail(gradient: Tensor) -> None:
            raise RuntimeError("as if memory had run out")

        hook = model.body[0].weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="as if memory"):
            model(**batch).backward()
        hook.remove()
        assert_close(step(model, batch), theirs, 2e-6)

    @pytest.mark.parametrize("setting", ["max_norm", "sparse", "scale_grad_by_freq"])
    def test_special_embeddings_are_left_alone(self, setting):
        model = Model()
        setattr(model.embedding, setting, True)
        ChunkedCrossEntropy().apply(model)
        assert "forward" not in vars(model.embedding)


class TestMemory:
    @pytest.mark.parametrize("name", ["own", "roberta", "gpt2", "llama", "bart"])
    @pytest.mark.parametrize("autocast", [None, torch.bfloat16])
    def test_peak_holds_no_logits(self, name, autocast):
        """All of a step together is smaller than the copies of the logits before."""
        model, batch = MODELS[name](), make_batch(labelled=0.5)
        num_bytes = 4 * LENGTH * WORDS * 4

        def peak() -> int:
            with LiveTensors(model) as live:
                step(model, batch, autocast)
            return live.peak.total_bytes

        before = peak()
        model.zero_grad()
        ChunkedCrossEntropy(chunk_size=8).apply(model)
        assert before - peak() > 2.2 * num_bytes

    def test_validation_holds_no_logits(self):
        model, batch = ChunkedCrossEntropy(chunk_size=8).apply(Model()).target, make_batch()
        with torch.no_grad(), LiveTensors(model) as live:
            model(**batch)
        size = sum(p.numel() * 4 for p in model.parameters())
        assert live.peak.total_bytes < size + 0.3 * 4 * LENGTH * WORDS * 4


class TestApplying:
    def test_says_what_it_does(self):
        handle = ChunkedCrossEntropy().apply(roberta())
        assert handle.changes == ("lm_head.decoder",)
        assert handle.summary == (
            "no logits of `lm_head.decoder` where a cross-entropy follows, one gradient for it and "
            "`roberta.embeddings.word_embeddings`"
        )

    def test_twice_is_refused(self):
        model = ChunkedCrossEntropy().apply(Model()).target
        with pytest.raises(IncompatibleError, match=r"`head`.*Undo the first"):
            ChunkedCrossEntropy().apply(model)

    @pytest.mark.parametrize(
        "heads", ["head", "Linear", nn.Linear, "re:he.d", lambda name, _: name == "head", ("head",)]
    )
    def test_named_heads(self, heads):
        handle = ChunkedCrossEntropy(heads).apply(Model())
        assert "head" in handle.changes
        assert eval(repr(ChunkedCrossEntropy("head"))) == ChunkedCrossEntropy("head")

    @pytest.mark.filterwarnings("ignore:.chunked_cross_entropy. saves nothing")
    def test_any_linear_layer_may_be_named(self, num_computed):
        """What is no head gives ordinary tensors."""
        model, batch = Model(), make_batch()
        theirs = step(copy.deepcopy(model), batch)
        assert len(ChunkedCrossEntropy(nn.Linear).apply(model).changes) == 3
        assert_close(step(model, batch), theirs, 2e-6)
        assert num_computed == [2]

    def test_blocks_and_small_layers_are_no_heads(self):
        layers = [nn.TransformerEncoderLayer(32, 2, 4096, batch_first=True) for _ in range(2)]
        model = nn.Sequential(*layers, nn.Linear(32, 1000), nn.Linear(1000, 1000))
        with pytest.warns(NoEffectWarning, match=r'`ChunkedCrossEntropy\(heads="lm_head"\)`'):
            ChunkedCrossEntropy().apply(model)

    def test_nothing_of_that_name(self):
        with pytest.warns(NoEffectWarning, match=r"nothing in `Model` matches"):
            ChunkedCrossEntropy("lm_head").apply(Model())

    def test_other_kinds_of_heads(self):
        class Scaled(nn.Linear):
            def forward(self, input: Tensor) -> Tensor:
                return super().forward(input) * 2

        model = nn.Sequential(Scaled(WIDTH, WORDS), nn.LayerNorm(WORDS))
        with pytest.warns(NoEffectWarning, match="`Scaled` is not a plain `nn.Linear`"):
            ChunkedCrossEntropy().apply(model)
        with pytest.warns(NoEffectWarning, match="`LayerNorm` is not a plain"):
            ChunkedCrossEntropy(nn.LayerNorm).apply(model)

    def test_head_that_somebody_has_changed(self):
        model = Model()
        vars(model.head)["forward"] = torch.relu
        with pytest.warns(NoEffectWarning, match="its `forward` has been replaced"):
            ChunkedCrossEntropy().apply(model)

    @pytest.mark.parametrize("chunk_size", [0, -1, True, 1.5, "big", "auto"])
    def test_wrong_size(self, chunk_size):
        with pytest.raises(ConfigurationError, match=r"Use `None`, or for example 512"):
            ChunkedCrossEntropy(chunk_size=chunk_size)

    @pytest.mark.parametrize("heads", [(), 3, "", "re:("])
    def test_wrong_heads(self, heads):
        with pytest.raises(ConfigurationError, match=r'`heads=.* Pass a name such as "lm_head"'):
            ChunkedCrossEntropy(heads)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:`lora_bias=True`")
class TestAdapters:
    """LoRA on the head."""

    def make(self, **settings: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        config = {"target_modules": ["lm_head"], "r": 4, **settings}
        model = get_peft_model(llama(), LoraConfig(**config)).train()
        for name, param in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(param)
        return model

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"lora_dropout": 0.3},
            {"use_rslora": True, "target_modules": ["q_proj", "lm_head"]},
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_trains_the_same(self, num_computed, settings, dtype):
        model, batch = self.make(**settings).to(dtype), make_batch(labelled=0.5)
        theirs = step(copy.deepcopy(model), batch)
        ChunkedCrossEntropy().apply(model)
        assert_close(step(model, batch), theirs, 1e-5 if dtype is torch.float32 else 1e-2)
        assert num_computed == [0]

    @pytest.mark.filterwarnings("ignore:.chunked_cross_entropy. saves nothing")
    def test_logits_are_those_of_peft(self):
        model, ids = self.make(lora_dropout=0.3), make_batch()["input_ids"]
        other = ChunkedCrossEntropy().apply(copy.deepcopy(model)).target
        found = []
        for m in (other, model):
            torch.manual_seed(1)
            found.append(m(input_ids=ids).logits + 0)
        torch.testing.assert_close(found[0], found[1])
        model.eval()
        other.eval()
        with model.disable_adapter(), other.disable_adapter():
            a, b = other(input_ids=ids).logits, model(input_ids=ids).logits
        assert isinstance(a, DeferredLogits)
        assert torch.equal(a + 0, b)

    @pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}])
    def test_variants_are_left_alone(self, settings):
        with pytest.warns(NoEffectWarning, match="variant such as DoRA, or has a bias"):
            ChunkedCrossEntropy().apply(self.make(**settings))


@pytest.mark.parametrize("is_tied", [False, True])
def test_undo_leaves_no_marks_on_weights(is_tied):
    torch.manual_seed(0)
    embedding, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    if is_tied:
        head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    tokens = torch.arange(8).view(2, 4)
    with ChunkedCrossEntropy("1").apply(model):
        functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert [vars(param) for param in model.parameters()] == [{}] * (1 if is_tied else 2)
