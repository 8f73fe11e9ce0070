from collections import Counter
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memsave.errors import (
    ConfigurationError,
    ExactnessWarning,
    IncompatibleError,
    NoEffectWarning,
)
from lightning_memsave.techniques.activation_checkpointing import ActivationCheckpointing
from tests.cases import WIDTH, Block, Model, make_batch, make_model
from tests.helpers import assert_bitwise_equal, saved_bytes, snapshot, train

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
DECODER = SMALL | {"num_key_value_heads": 1, "attention_dropout": 0.1}
GPT2 = transformers.GPT2Config(
    vocab_size=64, n_embd=32, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=1
)
CONFIGS: dict[str, Any] = {
    "bert": transformers.BertConfig(**SMALL),
    "roberta": transformers.RobertaConfig(**SMALL),
    "distilbert": transformers.DistilBertConfig(
        vocab_size=64, dim=32, n_layers=3, n_heads=2, hidden_dim=64
    ),
    "gpt2": GPT2,
    "llama": transformers.LlamaConfig(**DECODER),
    "mistral": transformers.MistralConfig(**DECODER),
    "qwen2": transformers.Qwen2Config(**DECODER),
    "t5": transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2
    ),
    "vit": transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.1,
    ),
}
AUTO = {
    "t5": transformers.AutoModelForSeq2SeqLM,
    "vit": transformers.AutoModelForImageClassification,
    "bert": transformers.AutoModelForMaskedLM,
    "roberta": transformers.AutoModelForMaskedLM,
    "distilbert": transformers.AutoModelForMaskedLM,
}


class WithLoss(nn.Module):
    """A Hugging Face model that returns its loss."""

    def __init__(self, family: str, model: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        if family == "t5":
            CONFIGS[family].decoder_start_token_id = 0
        auto = AUTO.get(family, transformers.AutoModelForCausalLM)
        self.model = auto.from_config(CONFIGS[family]) if model is None else model
        self.family = family

    def forward(self, x: Tensor) -> Tensor:
        if self.family == "vit":
            pixels = x[:2, :16].reshape(2, 1, 4, 4).repeat(1, 3, 4, 4)
            return self.model(pixel_values=pixels, labels=torch.tensor([0, 1])).loss
        tokens = x[:2, :16].argsort() + 2
        return self.model(input_ids=tokens, labels=tokens).loss


@pytest.mark.parametrize("which", ["all", "selective", 2], ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_hugging_face_families_train_bitwise_equal(family, which):
    model = WithLoss(family)
    saving = train(model, make_batch, ActivationCheckpointing(which), steps=2)
    assert_bitwise_equal(train(model, make_batch, steps=2), saving)


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_saves_less_for_backward(family):
    model = WithLoss(family).train()
    batch = make_batch(0)
    parameters = sum(p.untyped_storage().nbytes() for p in model.parameters())
    plain = saved_bytes(lambda: model(batch))
    with ActivationCheckpointing().apply(model):
        saving = saved_bytes(lambda: model(batch))
    assert saving < 0.4 * plain
    assert plain > 0.5 * parameters


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("which", "products"),
    # Four per block: query, key and value in one, attention output, two of the MLP.
    [(None, 0), ("all", 3 * 4), ("selective", 0), (1, 4)],
)
def test_recomputes_the_matrix_products_that_it_should(which, products):
    model = make_model("transformer").train()

    def count() -> Counter[str]:
        torch.manual_seed(0)
        loss = model(make_batch(0))
        with CountOps() as ops:
            loss.backward()
        return ops.counts

    plain = count()
    if which is not None:
        ActivationCheckpointing(which).apply(model)
    assert count()["addmm"] - plain["addmm"] == products


def test_caches_are_not_filled_while_training_and_work_in_evaluation():
    model = WithLoss("gpt2").model
    tokens = torch.arange(2, 10).reshape(1, 8)
    with ActivationCheckpointing().apply(model):
        training = model.train()(tokens, use_cache=True)
        assert training.past_key_values.get_seq_length() == 0
        evaluated = model.eval()(tokens, use_cache=True)  # gradients are on, as for saliency maps
        assert evaluated.past_key_values.get_seq_length() == 8
        with torch.no_grad():
            generated = model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=1)
    with torch.no_grad():
        plain = model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=1)
    assert torch.equal(generated, plain)


def test_blocks_that_are_given_a_filled_cache_run_plainly():
    model = WithLoss("llama").model.train()
    tokens = torch.arange(2, 10).reshape(1, 8)

    def loss_and_gradient() -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        prefix = model.eval()(tokens).past_key_values
        model.train().zero_grad()
        loss = model(tokens, past_key_values=prefix, labels=tokens).loss
        loss.backward()
        return loss.detach(), model.model.embed_tokens.weight.grad.clone()

    plain = loss_and_gradient()
    with (
        ActivationCheckpointing().apply(model),
        pytest.warns(NoEffectWarning, match="activation_checkpointing=None"),
    ):
        saving = loss_and_gradient()
    assert torch.equal(plain[0], saving[0])
    assert torch.equal(plain[1], saving[1])


# peft reads a property that transformers has deprecated.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_trains_bitwise_equal_and_saves():
    base = WithLoss("llama").model
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    model = WithLoss("llama", peft.get_peft_model(base, config))
    saving = train(model, make_batch, ActivationCheckpointing())
    assert_bitwise_equal(train(model, make_batch), saving)
    assert saving.gradients[0].keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    plain = saved_bytes(lambda: model.train()(make_batch(0)))
    with ActivationCheckpointing().apply(model):
        assert saved_bytes(lambda: model(make_batch(0))) < 0.6 * plain


def test_shared_layers_of_albert_train_bitwise_equal():
    config = transformers.AlbertConfig(**SMALL, embedding_size=16)
    torch.manual_seed(1)
    model = WithLoss("bert", transformers.AlbertForMaskedLM(config))
    with pytest.warns(NoEffectWarning, match="blocks="):
        ActivationCheckpointing().apply(model)
    technique = ActivationCheckpointing(blocks="AlbertLayer")
    assert_bitwise_equal(train(model, make_batch), train(model, make_batch, technique))


class TestSqrt:
    @staticmethod
    def chain(length: int = 9) -> nn.Module:
        torch.manual_seed(1)
        layers = [
            layer
            for _ in range(length // 3)
            for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3))
        ]

        class Chain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.Sequential(*layers)

            def forward(self, x: Tensor) -> Tensor:
                return self.layers(x).square().mean()

        return Chain()

    def test_trains_bitwise_equal_with_batch_norm(self):
        model = self.chain()
        saving = train(model, make_batch, ActivationCheckpointing("sqrt"))
        assert_bitwise_equal(train(model, make_batch), saving)

    def test_keeps_the_inputs_of_sqrt_n_segments(self):
        model, batch = self.chain(), make_batch(0)
        handle = ActivationCheckpointing("sqrt").apply(model)
        assert handle.changes == ("layers",)
        plain = self.chain()
        assert saved_bytes(lambda: model(batch)) < 0.7 * saved_bytes(lambda: plain(batch))

    def test_is_refused_where_there_is_no_chain(self):
        with pytest.raises(IncompatibleError, match='Use "all", which needs less memory'):
            ActivationCheckpointing("sqrt").apply(make_model("dropout"))


def test_blocks_that_checkpoint_themselves_are_left_alone():
    model = WithLoss("bert").model
    model.activation_checkpointing_enable()
    with pytest.warns(NoEffectWarning, match="3 of 3 blocks checkpoint themselves already"):
        ActivationCheckpointing().apply(model)
    model.activation_checkpointing_disable()
    assert len(ActivationCheckpointing().apply(model).changes) == 3


def test_wrapped_blocks_are_left_alone():
    model = Model()
    for index in (0, 2):
        blocks = model.get_submodule("blocks")
        blocks.register_module(str(index), checkpoint_wrapper(blocks.get_submodule(str(index))))
    handle = ActivationCheckpointing(blocks=Block).apply(model)
    assert handle.changes == ("blocks.1", "blocks.3")
    assert handle.skipped == ("2 of 4 blocks checkpoint themselves already",)


def test_says_which_blocks_it_changed():
    handle = ActivationCheckpointing("every:2").apply(make_model("dropout"))
    assert handle.changes == ("blocks.0", "blocks.2")
    assert handle.summary == "2 of 4 blocks recomputed: 2 x Block"


@pytest.mark.parametrize(
    ("which", "count"), [("all", 4), (1, 1), (3, 3), (0.26, 2), (1.0, 4), ("every:3", 2)], ids=str
)
def test_which_chooses_the_number_of_blocks(which, count):
    changes = ActivationCheckpointing(which).apply(make_model("dropout")).changes
    assert len(changes) == count
    assert changes[0] == "blocks.0"


def test_refuses_more_blocks_than_there_are():
    with pytest.raises(IncompatibleError, match='Use a number up to 4, or "all"'):
        ActivationCheckpointing(5).apply(make_model("dropout"))


def test_selective_is_refused_where_a_layer_overwrites_what_it_keeps():
    model = make_model("dropout")
    model.blocks[1].dropout.inplace = True
    before = snapshot(model)
    with pytest.raises(IncompatibleError, match=r"blocks.1.dropout.*Set `inplace=False`"):
        ActivationCheckpointing("selective").apply(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("which", [0, -1, 0.0, 1.5, True, "none", "every:0", "every:x", None, []])
def test_refuses_what_says_nothing(which):
    with pytest.raises(ConfigurationError, match='Use "all"'):
        ActivationCheckpointing(which)


def test_frozen_blocks_without_gradients_add_no_work():
    model = make_model("dropout").requires_grad_(False).train()
    ActivationCheckpointing().apply(model)
    assert not model(make_batch(0)).requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled_first", [True, False])
def test_compiled_models_train_as_uncompiled_ones(is_compiled_first):
    torch.manual_seed(1)
    model = make_model("transformer").train()
    for block in model.blocks:
        block.dropout.p = block.dropout1.p = block.dropout2.p = block.self_attn.dropout = 0.0
    reference = model(make_batch(0))
    reference.backward()
    expected = model.head.weight.grad.clone()
    model.zero_grad()
    if is_compiled_first:
        compiled: Any = torch.compile(model, backend="aot_eager")
        ActivationCheckpointing().apply(compiled)
    else:
        ActivationCheckpointing().apply(model)
        compiled = torch.compile(model, backend="aot_eager")
    loss = compiled(make_batch(0))
    loss.backward()
    torch.testing.assert_close(loss, reference)
    torch.testing.assert_close(model.head.weight.grad, expected)


def test_gradients_of_gradients_work():
    model: Any = make_model("batch_norm").train().double()
    batch = make_batch(0).double()

    def penalty() -> Tensor:
        torch.manual_seed(0)
        first = torch.autograd.grad(model(batch), model.head.weight, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), model.head.bias)[0]

    plain = penalty()
    with ActivationCheckpointing().apply(model):
        assert torch.equal(penalty(), plain)


def test_a_second_backward_does_not_change_buffers_again():
    model = make_model("batch_norm").train()
    plain = make_model("batch_norm").train()
    ActivationCheckpointing().apply(model)
    for net in (model, plain):
        torch.manual_seed(0)
        loss = net(make_batch(0))
        loss.backward(retain_graph=True)
        loss.backward()
    for (name, mine), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs), name


class ActivatesInPlace(nn.Module):
    """Pre-activation with an in-place ReLU: the input is gone when the block is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_in_place = True

    def forward(self, x: Tensor, function: int = 0, block: int = 0, debug: bool = False) -> Tensor:
        assert (function, block, debug) == (1, 2, True)
        return self.linear(nn.functional.relu(x, inplace=self.is_in_place).add(1.0).sin())


class InPlaceModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ActivatesInPlace() for _ in range(3)])

    def run_blocks(self, x: Tensor) -> Tensor:
        x = self.head(x)
        for block in self.blocks:
            x = block(x, function=1, block=2, debug=True)
        return x


def test_blocks_that_change_their_input_in_place_train_bitwise_equal():
    torch.manual_seed(1)
    model = InPlaceModel()
    assert_bitwise_equal(
        train(model, make_batch), train(model, make_batch, ActivationCheckpointing())
    )


def test_a_block_that_begins_to_change_its_input_is_refused():
    model: Any = InPlaceModel().train()
    for block in model.blocks:
        block.is_in_place = False
    ActivationCheckpointing().apply(model)
    model(make_batch(0)).backward()
    model.blocks[1].is_in_place = True
    with pytest.raises(IncompatibleError, match=r"Write `x = x \+ y`"):
        model(make_batch(0))


class WarmsUp(Block):
    """Counts in a buffer from the third call on, as observers that are switched on late do."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        self.num_calls = 0

    def forward(self, x: Any, *, scale: Tensor | None = None) -> Any:
        if self.training and self.num_calls >= 2:
            self.calls.add_(1)
        return super().forward(x, scale=scale)


def test_buffers_that_begin_to_change_later_change_once():
    model: Any = make_model("dropout").train()
    model.blocks = nn.ModuleList([WarmsUp()])
    ActivationCheckpointing(blocks=WarmsUp).apply(model)
    for step in range(4):
        model.blocks[0].num_calls = step
        if step == 2:
            with pytest.warns(ExactnessWarning, match="Leave this block out with `blocks=`"):
                loss = model(make_batch(step))
        else:
            loss = model(make_batch(step))
        loss.backward()
    assert model.blocks[0].calls == 2


def test_a_cache_that_should_be_filled_by_now_is_refused():
    model = WithLoss("gpt2").model.train()
    tokens = torch.arange(2, 10).reshape(1, 8)
    with ActivationCheckpointing().apply(model):
        cache = model(tokens[:, :4]).past_key_values
        with pytest.raises(IncompatibleError, match="activation_checkpointing=None"):
            model(tokens[:, 4:], past_key_values=cache)


def test_torchscript_blocks_are_left_alone():
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        blocks = [torch.jit.script(nn.Sequential(nn.Linear(8, 8))) for _ in range(2)]
    model = nn.Sequential(*blocks)
    with pytest.warns(NoEffectWarning, match="2 of 2 blocks are TorchScript"):
        ActivationCheckpointing(blocks=torch.jit.ScriptModule).apply(model)


@pytest.mark.gpu
def test_dropout_draws_the_same_mask_for_keyword_arguments_on_a_gpu():
    class OnlyKeywords(Model):
        def run_blocks(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x=x, scale=torch.tensor(0.5))
            return x

    model = OnlyKeywords().cuda()

    def on_gpu(step: int) -> Tensor:
        return make_batch(step).cuda()

    assert_bitwise_equal(train(model, on_gpu), train(model, on_gpu, ActivationCheckpointing()))
