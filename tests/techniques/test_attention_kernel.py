"""Attention of Hugging Face models in a fused kernel."""

import copy
import pickle
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from lightning_memsave import ActivationCheckpointing, AttentionKernel, PeakMemory
from lightning_memsave.errors import (
    ConfigurationError,
    IncompatibleError,
    MemsaveWarning,
    NoEffectWarning,
)
from lightning_memsave.prediction.cuda.kernels import cuda_kernels
from lightning_memsave.prediction.fake.tensors import fake_tensors
from tests.helpers import snapshot
from tests.techniques.hugging_face import tiny

EAGER: dict[str, Any] = {"attn_implementation": "eager"}
SIZES: dict[str, Any] = EAGER | {"num_hidden_layers": 2, "num_attention_heads": 4}
BERT: dict[str, Any] = SIZES | {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 300,
}


def bert(**settings: Any) -> Any:
    return tiny("bert", "BertForMaskedLM", **(BERT | settings))


def gpt2() -> Any:
    rates: dict[str, Any] = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return tiny("gpt2", **EAGER, use_cache=False, n_layer=2, n_head=4, **rates)


def llama() -> Any:
    return tiny("llama", use_cache=False, num_key_value_heads=2, **SIZES)


MODELS = {
    "bert": bert,
    "roberta": lambda: tiny("roberta", "RobertaForMaskedLM", **BERT),
    "gpt2": gpt2,
    "llama": llama,
    "vit": lambda: tiny("vit", "ViTForImageClassification", **SIZES, image_size=16, patch_size=4),
}


def words(num_tokens=12):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 50, (3, num_tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, num_tokens // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def batch_for(name):
    if name == "vit":
        generator = torch.Generator().manual_seed(3)
        pixels = torch.randn(3, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1, 1])}
    return words()


def loss_and_gradients(model, batch):
    model.train().zero_grad()
    dtype = next(model.parameters()).dtype
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def errors(found, truth):
    return [(x.double() - y).norm().item() for x, y in zip(found, truth, strict=True)]


@pytest.mark.parametrize("name", MODELS)
def test_errs_no_more_than_eager_attention(name):
    model, batch = MODELS[name](), batch_for(name)
    truth = loss_and_gradients(copy.deepcopy(model).double(), batch)
    eager = errors(loss_and_gradients(model, batch), truth)
    with AttentionKernel().apply(model):
        fused = errors(loss_and_gradients(model, batch), truth)
    scale = [t.norm().item() for t in truth]
    for ours, theirs, size in zip(fused, eager, scale, strict=True):
        assert ours <= 2 * theirs + 1e-6 * max(size, 1e-2)


def peak_bytes(model, batch):
    with PeakMemory(model) as peak:
        model(**batch).loss.backward()
    model.zero_grad()
    return peak.allocated_bytes


SCORES = 3 * 4 * 256 * 256 * 4  # batch x heads x tokens x tokens in float32


def test_on_cuda_dropout_keeps_nothing_either():
    """On a CPU sdpa takes plain matrix products where there is dropout."""
    model = bert(attention_probs_dropout_prob=0.1).train()
    with fake_tensors() as fake, cuda_kernels():
        model, batch = fake.copy_module(model), fake.copy_batch(words(num_tokens=256))
        eager = peak_bytes(model, batch)
        with AttentionKernel().apply(model):
            fused = peak_bytes(model, batch)
    assert eager - fused >= 4.5 * SCORES


def test_undo_leaves_what_the_user_has_set_since():
    model = bert()
    handle = AttentionKernel().apply(model)
    model.set_attn_implementation("flex_attention")
    handle.undo()
    assert model.config._attn_implementation == "flex_attention"


def test_copies_are_on_their_own():
    model, batch = bert(), words()
    with AttentionKernel().apply(model):
        expected = loss_and_gradients(model, batch)
        copied = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
    assert model.config._attn_implementation == "eager"
    for other in (copied, loaded):
        assert other.config._attn_implementation == "sdpa"
        assert all(map(torch.equal, loss_and_gradients(other, batch), expected))


def test_scores_are_not_saved():
    model, ids = bert(), torch.zeros(1, 300, dtype=torch.long)

    def step_bytes() -> int:
        with PeakMemory(model) as peak:
            model(ids).logits.sum().backward()
        model.zero_grad()
        return peak.allocated_bytes

    before = step_bytes()
    with AttentionKernel().apply(model):
        assert before - step_bytes() >= 4 * 2 * 4 * 300**2


# peft asks models for a property that transformers has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_works_on_models_inside_of_others_and_under_peft():
    config = peft.LoraConfig(r=2, target_modules=["query", "value"])
    adapted = peft.get_peft_model(bert(), config)
    module = nn.ModuleDict({"first": gpt2(), "second": nn.Sequential(nn.Linear(2, 2), adapted)})
    batch = words()
    eager = [t.clone() for t in loss_and_gradients(adapted, batch)]
    with AttentionKernel().apply(module) as handle:
        assert handle.changes == (
            "`GPT2LMHeadModel` at `first`: eager -> sdpa",
            "`BertForMaskedLM` at `second.1.base_model.model`: eager -> sdpa",
        )
        fused = loss_and_gradients(adapted, batch)
    assert max(errors(fused, [t.double() for t in eager])) < 1e-6
    assert adapted.base_model.model.config._attn_implementation == "eager"


def test_sub_models_have_kernels_of_their_own():
    model = tiny("clip", "CLIPModel")
    model.set_attn_implementation("eager")
    model.vision_model.set_attn_implementation("sdpa")
    handle = AttentionKernel().apply(model)
    assert [line.rpartition(": ")[2] for line in handle.changes] == ["eager -> sdpa"] * 2
    assert len(handle.skipped) == 1
    assert "its attention is `sdpa` already" in handle.skipped[0]
    assert model.config.text_config._attn_implementation == "sdpa"
    handle.undo()
    assert model.config._attn_implementation == "eager"
    assert model.config.text_config._attn_implementation == "eager"
    assert model.config.vision_config._attn_implementation == "sdpa"


def test_encoder_and_decoder_with_configurations_of_their_own():
    model = tiny("t5", "T5ForConditionalGeneration", **EAGER, dropout_rate=0.0).double()
    batch = words()
    eager = [t.clone() for t in loss_and_gradients(model, batch)]
    handle = AttentionKernel().apply(model)
    assert len(handle.changes) == 3 or handle.skipped
    assert max(errors(loss_and_gradients(model, batch), eager)) < 1e-10
    handle.undo()
    for part in (model, model.encoder, model.decoder):
        assert part.config._attn_implementation == "eager"


UNCHANGED = {
    "not supported": (
        lambda: tiny("gemma2", **EAGER),
        "Gemma2ForCausalLM does not support.*scaled_dot_product",
    ),
    "chosen when it is built": (
        lambda: tiny("falcon", **EAGER),
        "attention of `FalconForCausalLM` cannot be changed",
    ),
    "returns attention weights": (lambda: bert(output_attentions=True), "output_attentions=True"),
    "in float32": (lambda: tiny("gpt2", **EAGER, reorder_and_upcast_attn=True), "reorder_and_"),
    "another fused kernel": (
        lambda: with_kernel("flex_attention"),
        "its attention is `flex_attention`, not `eager`",
    ),
    "no Hugging Face": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16),
        "`TransformerEncoderLayer` contains no Hugging Face model",
    ),
}


def with_kernel(name):
    model = bert()
    model.set_attn_implementation(name)
    return model


@pytest.mark.parametrize("name", UNCHANGED)
def test_leaves_alone_what_it_cannot_or_need_not_change(name):
    make, match = UNCHANGED[name]
    model = make()
    before = snapshot(model)
    with pytest.warns(NoEffectWarning, match=match):
        assert AttentionKernel().apply(model).changes == ()
    assert snapshot(model) == before


@pytest.mark.parametrize("inner", [False, True])
def test_goes_back_when_attention_weights_are_asked_for(inner):
    model, ids = bert(), words()["input_ids"]
    expected = bert()
    expected.load_state_dict(model.state_dict())
    handle = AttentionKernel().apply(model)
    called = (lambda m: m.bert) if inner else (lambda m: m)
    with pytest.warns(NoEffectWarning, match="Remove `.*`, or set `attention=None`"):
        output = called(model)(ids, output_attentions=True)
    theirs = called(expected)(ids, output_attentions=True)
    assert all(map(torch.equal, output.attentions, theirs.attentions))
    called(model)(ids, output_attentions=True)  # warns no more
    handle.undo()
    assert model.config._attn_implementation == "eager"


def test_going_back_works_with_checkpointing():
    model, batch = bert().train(), words()
    with ActivationCheckpointing().apply(model), AttentionKernel().apply(model):
        with pytest.warns(NoEffectWarning):
            loss = model(**batch, output_attentions=True).loss
        loss.backward()


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("spda", "Did you mean 'sdpa'"),
        ("flash_attention", "Did you mean 'flash_attention_"),
        ("eager", "Use `None`"),
        ("paged|eager", "is not an attention kernel"),
        (2, "Use one of 'sdpa'"),
        (None, "Use one of 'sdpa'"),
    ],
)
def test_refuses_unknown_kernels(kernel, message):
    with pytest.raises(ConfigurationError, match=message):
        AttentionKernel(kernel)


@pytest.mark.parametrize("kernel", ["flash_attention_2", "kernels-community/flash-attn2"])
def test_says_which_package_is_missing(kernel):
    model = bert()
    before = snapshot(model)
    with pytest.raises(IncompatibleError, match="installed") as error:
        AttentionKernel(kernel).apply(model)
    assert 'attention="sdpa"' in str(error.value)
    assert len(error.value.problems) == 1
    assert snapshot(model) == before
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("Bert", "attention_probs_dropout_prob"),
        ("Llama", "attention_dropout"),
        ("T5", "dropout_rate"),
    ],
)
def test_flex_attention_is_refused_with_dropout(name, setting):
    config = getattr(transformers, f"{name}Config")(**EAGER, **{setting: 0.25})
    if hasattr(config, "decoder_start_token_id"):
        config.decoder_start_token_id = 0
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    problems = AttentionKernel("flex_attention").check(model)
    assert [problem.why for problem in problems] == [
        f"it does not support dropout, and `{name}Config.{setting}=0.25`"
    ]
    assert f"`{setting}=0.0`" in problems[0].fix
    assert AttentionKernel("sdpa").check(model) == []


def test_takes_kernels_that_the_user_has_registered(monkeypatch):
    attention = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(type(attention)._global_mapping, "mine", attention["sdpa"])
    model = bert()
    model.set_attn_implementation("sdpa")
    with AttentionKernel("mine").apply(model) as handle:
        assert handle.changes == ("`BertForMaskedLM`: sdpa -> mine",)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kernel", ["sdpa", "flash_attention_2"])
def test_is_predicted_to_the_byte(kernel):
    model, batch = bert().train(), words(num_tokens=64)
    with AttentionKernel().apply(model):
        measured = peak_bytes(model, batch)
    with fake_tensors() as fake:
        copied, inputs = fake.copy_module(model), fake.copy_batch(batch)
        with AttentionKernel(kernel).apply(copied) as handle:
            assert handle.changes == ("`BertForMaskedLM`: eager -> sdpa",)
            assert peak_bytes(copied, inputs) == measured


class TestPaddingOnTheLeft:
    """Eager attention and kernels differ in the one label that is predicted from padding."""

    def batch(self):
        ids = words()["input_ids"]
        mask = torch.ones_like(ids)
        mask[1, :4] = 0
        labels = ids.masked_fill(mask == 0, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def losses(self, batch):
        torch.manual_seed(0)
        # Not in float64, of which eager attention takes the softmax in float32: not a number.
        model = llama()
        eager = model(**batch).loss.item()
        with AttentionKernel().apply(model):
            return eager, model(**batch).loss.item()

    def test_is_warned_about_once(self, recwarn):
        model, batch = llama(), self.batch()
        with AttentionKernel().apply(model):
            for _ in range(2):
                model(**batch)
        (warning,) = recwarn
        assert warning.category is MemsaveWarning
        assert "not masked to -100, or pad on the right" in str(warning.message)

    def test_matters_for_one_label_alone(self):
        batch = self.batch()
        with pytest.warns(MemsaveWarning, match="`LlamaForCausalLM`"):
            eager, fused = self.losses(batch)
        assert abs(eager - fused) > 2e-5
        batch["labels"][1, 4] = -100
        eager, fused = self.losses(batch)
        assert abs(eager - fused) < 2e-6

    def test_is_not_looked_at_without_data(self):
        with fake_tensors() as fake:
            model, batch = fake.copy_module(llama()), fake.copy_batch(self.batch())
            with AttentionKernel().apply(model):
                model(**batch).loss.backward()
