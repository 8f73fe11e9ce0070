"""The stable embedding is part of the model; weights must have been trained as they are used."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForMaskedLM, BertConfig, Gemma3TextConfig

from lightning_memsave import ConfigurationError, find_blocks
from lightning_memsave.modules.hugging_face import StableEmbedding
from lightning_memsave.modules.lightning_pytorch import CheckpointedTransformer
from tests.modules.tiny import CONFIGS, SIZES, batch_of, fit, make_lit, predict


def test_it_normalises_what_is_looked_up():
    embedding = StableEmbedding(nn.Embedding(9, 8, padding_idx=2))
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        embedding.norm.weight.uniform_()
        embedding.norm.bias.uniform_()
    found = nn.functional.embedding(tokens, embedding.weight)
    mean, variance = found.mean(-1, keepdim=True), found.var(-1, keepdim=True, unbiased=False)
    expected = (found - mean) / (variance + 1e-5).sqrt()
    expected = expected * embedding.norm.weight + embedding.norm.bias
    assert torch.allclose(embedding(tokens), expected, atol=1e-6)


def test_it_begins_as_in_the_paper():
    weight = StableEmbedding(nn.Embedding(500, 100, padding_idx=0)).weight.detach()
    bound = math.sqrt(6 / (500 + 100))
    assert weight[0].abs().max() == 0.0
    assert bound * 0.99 < weight.abs().max() <= bound
    assert weight[1:].var().item() == pytest.approx(bound**2 / 3, rel=0.05)


@pytest.mark.parametrize("name", CONFIGS)
def test_only_the_norm_is_added(name):
    plain, stable = make_lit(name), make_lit(name, stable_embedding=True)
    added = dict(stable.named_parameters()).keys() - dict(plain.named_parameters()).keys()
    assert {key.rpartition("norm.")[2] for key in added} == {"weight", "bias"}
    assert len(added) == 2
    assert plain.state_dict().keys() == stable.state_dict().keys() - added
    assert stable.model.get_input_embeddings().padding_idx == (
        plain.model.get_input_embeddings().padding_idx
    )
    assert len(find_blocks(stable)) == len(find_blocks(plain)) == 2


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2"])
def test_the_head_goes_on_sharing_the_weight(name):
    model = make_lit(name, stable_embedding=True).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_its_state_stays_32_bit():
    lit = make_lit("llama", stable_embedding=True, memsave={"report": False})
    trainer = fit(lit)[2]
    embedding = trainer.lightning_module.model.get_input_embeddings()
    for parameter in embedding.parameters():
        state = trainer.optimizers[0].state[parameter]
        assert {t.dtype for t in state.values() if torch.is_tensor(t)} == {torch.float32}
    mlp = trainer.lightning_module.model.model.layers[0].mlp.up_proj.weight
    tensors = trainer.optimizers[0].state[mlp].values()
    assert torch.uint8 in {t.dtype for t in tensors if torch.is_tensor(t)}


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(how):
    lit = make_lit(stable_embedding=True)
    other: Any = copy.deepcopy(lit) if how == "deepcopy" else pickle.loads(pickle.dumps(lit))
    assert torch.equal(predict(other), predict(lit))
    model = other.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


# --- weights from a folder ---


@pytest.fixture
def folders(tmp_path):
    """Weights that were trained without it and with it."""
    torch.manual_seed(1)
    AutoModelForMaskedLM.from_config(BertConfig(**SIZES)).save_pretrained(tmp_path / "plain")
    lit = make_lit(stable_embedding=True)
    with torch.no_grad():
        lit.model.get_input_embeddings().norm.weight.uniform_()
    lit.model.save_pretrained(tmp_path / "stable")
    return tmp_path, lit


def test_weights_with_it_are_loaded_with_it(folders):
    path, lit = folders
    loaded: Any = CheckpointedTransformer(path / "stable", stable_embedding=True)
    assert type(loaded.model) is type(lit.model)
    assert torch.equal(predict(loaded), predict(lit))
    pickle.dumps(loaded)
    assert loaded.hparams["stable_embedding"] is True


def test_weights_without_it_are_refused(folders):
    with pytest.raises(ConfigurationError, match="Use `stable_embedding=False`, or a config"):
        CheckpointedTransformer(folders[0] / "plain", stable_embedding=True)


def test_weights_with_it_are_not_loaded_without(folders):
    with pytest.raises(ConfigurationError, match="Use `stable_embedding=True`"):
        CheckpointedTransformer(folders[0] / "stable")


def test_a_model_that_has_it_keeps_it(folders):
    _, lit = folders
    again: Any = CheckpointedTransformer(lit.model)
    assert again.hparams["stable_embedding"] is True
    rebuilt: Any = CheckpointedTransformer(**again.hparams)
    rebuilt.load_state_dict(lit.state_dict())
    assert torch.equal(predict(rebuilt), predict(lit))
    assert torch.isfinite(lit.model(**batch_of(lit)).loss)


def test_a_model_that_has_not_got_it_is_refused():
    with pytest.raises(ConfigurationError, match="Use a config as `model`"):
        CheckpointedTransformer(make_lit().model, stable_embedding=True)


def test_an_embedding_that_does_more_is_refused():
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
    )
    with pytest.raises(ConfigurationError, match="does more than to look up vectors"):
        CheckpointedTransformer(config, task="causal_lm", stable_embedding=True)
