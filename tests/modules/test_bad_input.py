"""Wrong arguments are refused at construction, all at once, with what to type instead."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, T5Config, ViTConfig

from lightning_memsave import CheckpointedTransformer, ConfigurationError
from tests.modules.tiny import CONFIGS, SIZES, VARIANTS

CONFIG = CONFIGS["bert"][0]


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"learning_rate": 0.0}, "learning_rate=5e-5"),
        ({"learning_rate": "fast"}, "learning_rate=5e-5"),
        ({"learning_rate": float("nan")}, "learning_rate=5e-5"),
        ({"weight_decay": -0.1}, "weight_decay=0.01"),
        ({"betas": (0.9,)}, r"betas=\(0.9, 0.999\)"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 0.999\)"),
        ({"betas": 0.9}, r"betas=\(0.9, 0.999\)"),
        ({"eps": 0}, "eps=1e-8"),
        ({"lr_schedule": "exponential"}, "'linear' or 'cosine' or 'constant'"),
        ({"lr_schedule": ["linear"]}, "'linear' or 'cosine' or 'constant'"),
        ({"warmup": 1.5}, "warmup=0.1"),
        ({"warmup": -1}, "warmup=0.1"),
        ({"warmup": True}, "warmup=0.1"),
        ({"max_steps": 0}, "`None` for that of the Trainer"),
        ({"max_steps": 2.5}, "`None` for that of the Trainer"),
        ({"num_labels": 1}, "at least 2.* regression in transformers: subclass"),
        ({"task": "translation"}, "'masked_lm' or 'causal_lm'"),
        ({"memsave": "all"}, r'memsave=\{"optimizer": None\}'),
        ({"memsave": {"optimiser": None}}, r"`optimiser` is not an argument.*`optimizer`"),
        ({"memsave": {"optimizer": "7bit"}}, "8bit"),
        ({"memsave": {"activation_checkpointing": -1}}, '"every:2"'),
    ],
)
@pytest.mark.parametrize("package", VARIANTS)
def test_wrong_values(settings, remedy, package):
    with pytest.raises(ConfigurationError, match=remedy):
        VARIANTS[package](CONFIG, **{"task": "masked_lm"} | settings)


@pytest.mark.parametrize(
    ("model", "settings", "remedy"),
    [
        (3, {}, "`int`.*dictionary such as"),
        (nn.Linear(2, 2), {}, r"`Linear`.*set `self\.model`"),
        ("/no/such/folder", {}, "'/no/such/folder' cannot be loaded.*local folder"),
        ({"hidden_size": 8}, {}, r"no `model_type`.*config\.to_dict"),
        ({"model_type": "nonsense"}, {}, "Unrecognized model identifier"),
        ({"model_type": "bert", "hidden_size": "wide"}, {}, "hidden_size"),
        (BertConfig(), {}, 'names no architecture.*`task="masked_lm"` or `task="causal_lm"`'),
        (BertConfig(architectures=["BertModel"]), {}, r"\['BertModel'\].*`task=\"masked_lm\"`"),
        (ViTConfig(), {}, r"Subclass and set `self\.model`"),
        (T5Config(), {"task": "masked_lm"}, "no such model for `T5Config`"),
        (BertConfig(), {"task": "sequence_classification", "num_labels": 1}, "at least 2"),
        (
            BertConfig(problem_type="regression", num_labels=3),  # type: ignore[call-arg]
            {"task": "sequence_classification"},
            r"`num_labels=3` with `problem_type='regression'`.*own `training_step`",
        ),
        (None, {"num_labels": 3}, "Remove it, or pass `model`"),
    ],
    ids=str,
)
def test_wrong_models(model, settings, remedy):
    with pytest.raises(ConfigurationError, match=f"(?s){remedy}"):
        CheckpointedTransformer(model, **settings)


def test_a_folder_without_weights_is_refused(tmp_path):
    CONFIG.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="cannot be loaded as `BertForMaskedLM`"):
        CheckpointedTransformer(tmp_path, task="masked_lm")


def test_a_model_of_another_class_is_refused():
    class Changed(BertForMaskedLM):
        pass

    with pytest.raises(ConfigurationError, match=r"`Changed`.*subclass and set `self\.model`"):
        CheckpointedTransformer(Changed(BertConfig(**SIZES)), task="masked_lm")
    with pytest.raises(ConfigurationError, match="remove `num_labels`"):
        CheckpointedTransformer(BertForMaskedLM(BertConfig(**SIZES)), num_labels=4)


def test_all_problems_come_at_once():
    with pytest.raises(ConfigurationError, match="5 problems") as caught:
        VARIANTS["lightning"](
            7, learning_rate=0, warmup=-1, lr_schedule="x", memsave={"optimizer": "7bit"}
        )
    for name in ("`model`", "`learning_rate=0`", "`warmup=-1`", "`lr_schedule='x'`", "`memsave`"):
        assert name in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_subclass_is_named_in_the_message():
    class Mine(CheckpointedTransformer):
        pass

    with pytest.raises(ConfigurationError, match="Mine cannot be created"):
        Mine(eps=-1)


def test_nothing_is_built_when_an_argument_is_wrong(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "__init__", None)  # any module would fail at once
    with pytest.raises(ConfigurationError, match="eps"):
        CheckpointedTransformer(CONFIG, task="masked_lm", eps=-1)
