"""The transformer in both packages: to use as it is, to subclass, to save and to load."""

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForMaskedLM, BertConfig

import lightning_memsave
from lightning_memsave import (
    ActivationCheckpointing,
    IncompatibleError,
    LowBitOptimizer,
    MemSaveCallback,
)
from lightning_memsave.modules import lightning_pytorch
from tests.callbacks.lit import PACKAGES, assert_same, fit, make_trainer, without_dropout
from tests.modules.tiny import (
    CONFIGS,
    ONLY_CHECKPOINTING,
    SIZES,
    VARIANTS,
    Regression,
    batch_of,
    loader,
    make_lit,
    predict,
)

CheckpointedTransformer = lightning_pytorch.CheckpointedTransformer
# Not every fit here has data to validate on.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
QUIET = {"report": False, "predict": False}


def make_hugging_face(name: str) -> nn.Module:
    """What a user would write without this package."""
    config, task = CONFIGS[name]
    auto = {
        "masked_lm": "AutoModelForMaskedLM",
        "causal_lm": "AutoModelForCausalLM",
        "sequence_classification": "AutoModelForSequenceClassification",
    }
    import transformers

    torch.manual_seed(1)
    model: nn.Module = getattr(transformers, auto[task]).from_config(copy.deepcopy(config))
    return model


def test_the_top_level_name_is_the_one_for_lightning():
    assert lightning_memsave.CheckpointedTransformer is VARIANTS["lightning"]


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", CONFIGS)
def test_trains_bit_for_bit_as_without_memsave(name, package):
    plain = make_lit(name, package, memsave=None)
    saving = make_lit(name, package, memsave=ONLY_CHECKPOINTING)
    before = fit(plain, package=PACKAGES[package], max_epochs=2)
    after = fit(saving, package=PACKAGES[package], max_epochs=2)
    assert_same(before, after)
    assert len(before[0]) == 8
    assert before[2].callback_metrics.keys() == after[2].callback_metrics.keys()
    for key, value in before[2].callback_metrics.items():
        assert torch.equal(value, after[2].callback_metrics[key]), key


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
@pytest.mark.parametrize("name", CONFIGS)
def test_is_the_model_and_the_loss_of_hugging_face(name):
    lit, expected = make_lit(name), make_hugging_face(name)
    assert type(lit.model) is type(expected)
    assert all(map(torch.equal, lit.model.state_dict().values(), expected.state_dict().values()))
    batch = batch_of(lit)
    torch.manual_seed(5)
    loss = lit.training_step(batch, 0)
    torch.manual_seed(5)
    assert torch.equal(loss, expected.train()(**batch).loss)


def test_the_callback_of_the_trainer_wins():
    lit = make_lit(memsave=ONLY_CHECKPOINTING)
    own = MemSaveCallback(None, optimizer=None, report=False, predict=False)
    trainer = fit(lit, own)[2]
    assert [c for c in trainer.callbacks if isinstance(c, MemSaveCallback)] == [own]


def test_fit_then_validate_then_fit_again():
    lit, data = make_lit(memsave=ONLY_CHECKPOINTING), loader("masked_lm")
    trainer = make_trainer(max_epochs=1)
    trainer.fit(lit, data, data)
    [fitted] = [c for c in trainer.callbacks if isinstance(c, MemSaveCallback)]
    after_fit = {k: v for k, v in trainer.callback_metrics.items() if k.startswith("val")}
    assert trainer.validate(lit, data, verbose=False) == [
        {k: pytest.approx(v.item()) for k, v in after_fit.items()}
    ]
    [tested] = trainer.test(lit, data, verbose=False)
    assert tested["test_loss"] == pytest.approx(after_fit["val_loss"].item())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(lit, data, data)
    assert [c for c in trainer.callbacks if isinstance(c, MemSaveCallback)] == [fitted]


# --- what it is made from ---


@pytest.mark.parametrize("kind", ["config", "dict", "folder", "path", "model"])
def test_takes_what_transformers_gives(kind, tmp_path):
    trained: Any = make_hugging_face("bert")
    trained.save_pretrained(tmp_path)
    config = trained.config
    source = {
        "config": config,
        "dict": config.to_dict(),
        "folder": str(tmp_path),
        "path": tmp_path,
        "model": trained,
    }[kind]
    if kind in ("config", "dict"):
        torch.manual_seed(1)
        lit = CheckpointedTransformer(source, task="masked_lm")
    else:
        lit = CheckpointedTransformer(source)
    assert lit.task == "masked_lm"
    assert all(map(torch.equal, lit.model.state_dict().values(), trained.state_dict().values()))
    assert all(module.training for module in lit.modules())


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertForMaskedLM", "masked_lm"),
        ("BertLMHeadModel", "causal_lm"),
        ("BertForSequenceClassification", "sequence_classification"),
    ],
)
def test_the_task_is_inferred_from_the_architecture(architecture, task):
    config = BertConfig(**SIZES, architectures=[architecture])
    assert CheckpointedTransformer(config).task == task


def test_a_task_that_is_given_wins_over_the_architecture():
    config = BertConfig(**SIZES, architectures=["BertForMaskedLM"])
    lit = CheckpointedTransformer(config, task="sequence_classification", num_labels=5)
    assert lit.model.config.num_labels == 5
    assert config.num_labels == 2  # the user's own config is as before


def test_half_precision_weights_become_float32(tmp_path):
    AutoModelForMaskedLM.from_config(BertConfig(**SIZES)).bfloat16().save_pretrained(tmp_path)
    for source in (tmp_path, BertConfig(**SIZES, dtype=torch.bfloat16)):
        lit = CheckpointedTransformer(source, task="masked_lm")
        assert {p.dtype for p in lit.parameters()} == {torch.float32}


# --- subclasses ---


class Own(CheckpointedTransformer):
    """A module of a user: other network, other loss, arguments of its own."""

    def __init__(self, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.model = Regression()
        self.scale = scale

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.scale * self.model(batch).square().mean()
        self.log("loss", loss)
        return loss


def vectors() -> Any:
    samples: Any = torch.randn(8, 5, 16)
    return DataLoader(samples, batch_size=4)


def test_a_subclass_trains_as_without_memsave():
    data = vectors()
    results = []
    for memsave in (None, ONLY_CHECKPOINTING):
        torch.manual_seed(1)
        lit = Own(scale=2.0, memsave=memsave, learning_rate=0.1)
        trainer = make_trainer(max_epochs=2)
        torch.manual_seed(2)
        trainer.fit(lit, data)
        results.append((trainer.callback_metrics["loss"].item(), lit.state_dict()))
        assert trainer.optimizers[0].param_groups[0]["initial_lr"] == 0.1
    assert_same(*results)
    [callback] = [c for c in trainer.callbacks if isinstance(c, MemSaveCallback)]
    [row] = [row for row in callback.rows if row.name == "activation_checkpointing"]
    assert row.details == ("3 of 3 blocks recomputed: 3 x TransformerEncoderLayer",)


def test_a_subclass_is_loaded_with_its_own_arguments():
    lit = Own(scale=2.0, learning_rate=0.1, memsave=ONLY_CHECKPOINTING)
    assert lit.hparams["scale"] == 2.0
    assert lit.hparams["learning_rate"] == 0.1
    assert "model" not in lit.hparams
    trainer = make_trainer(max_epochs=1)
    trainer.fit(lit, vectors())
    trainer.save_checkpoint("own.ckpt")
    loaded = Own.load_from_checkpoint("own.ckpt", weights_only=True)
    assert (loaded.scale, loaded.learning_rate) == (2.0, 0.1)
    assert all(map(torch.equal, loaded.state_dict().values(), lit.state_dict().values()))


class OnHuggingFace(CheckpointedTransformer):
    """A subclass that passes the model on and names arguments, one of them ours."""

    def __init__(self, extra: int, model: Any) -> None:
        super().__init__(model, task="masked_lm", memsave=None)
        self.save_hyperparameters("extra", "model")
        self.extra = extra


def test_saving_hyperparameters_of_a_subclass_keeps_the_config_plain():
    lit = OnHuggingFace(3, CONFIGS["bert"][0])
    assert lit.hparams["extra"] == 3
    assert type(lit.hparams["model"]) is dict
    assert type(lit.hparams_initial["model"]) is dict


def test_a_subclass_may_take_arrays():
    """Lightning compares arguments with `==` when it is given a dictionary to save."""

    class Weighted(CheckpointedTransformer):
        def __init__(self, weights: Any) -> None:
            super().__init__(CONFIGS["bert"][0], task="masked_lm", memsave=None)
            self.save_hyperparameters(ignore="weights")

    hparams = Weighted(np.ones(3)).hparams
    assert hparams["task"] == "masked_lm"
    assert "weights" not in hparams


def test_hyperparameters_can_be_ignored():
    class Ignoring(CheckpointedTransformer):
        def __init__(self, secret: str, **kwargs: Any) -> None:
            super().__init__(CONFIGS["bert"][0], task="masked_lm", **kwargs)
            self.save_hyperparameters(ignore=["secret", "memsave"])

    assert {"secret", "memsave"}.isdisjoint(Ignoring("x").hparams)
    assert "model" in Ignoring("x").hparams


def test_a_network_of_hugging_face_in_a_subclass_uses_our_steps():
    class Set(CheckpointedTransformer):
        def __init__(self) -> None:
            super().__init__(task="masked_lm", memsave=ONLY_CHECKPOINTING)
            self.model = make_hugging_face("bert")

        def train_dataloader(self) -> Any:
            return loader("masked_lm")

        val_dataloader = train_dataloader

    trainer = fit(Set())[2]
    assert {"train_loss", "val_perplexity", "val_accuracy"} <= trainer.callback_metrics.keys()


def test_without_a_model_the_steps_say_so():
    lit = CheckpointedTransformer(task="masked_lm")
    with pytest.raises(IncompatibleError, match=r"set `self\.model` after"):
        lit.training_step(batch_of(lit), 0)


@pytest.mark.parametrize("batch", [{"input_ids": torch.ones(1, 2)}, [torch.ones(1, 2)]], ids=type)
def test_a_batch_without_labels_is_refused(batch):
    with pytest.raises(IncompatibleError, match="DataCollatorForLanguageModeling"):
        make_lit().training_step(batch, 0)


# --- checkpoints and copies ---


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_gives_the_same_predictions(name, package):
    lit = make_lit(name, package, memsave={**ONLY_CHECKPOINTING, **QUIET})
    trainer = make_trainer(PACKAGES[package], max_epochs=1)
    trainer.fit(lit, loader(lit.task))
    trainer.save_checkpoint("tiny.ckpt")
    loaded = VARIANTS[package].load_from_checkpoint("tiny.ckpt", weights_only=True)
    assert torch.equal(predict(loaded), predict(lit))
    assert loaded.hparams == lit.hparams
    assert loaded.memsave == lit.memsave
    other: Any = {"memsave": None, "learning_rate": 0.5}
    plain = VARIANTS[package].load_from_checkpoint("tiny.ckpt", weights_only=True, **other)
    assert plain.configure_callbacks() == []
    assert plain.learning_rate == 0.5
    assert make_hugging_face(name).state_dict().keys() == plain.model.state_dict().keys()


def test_weights_of_a_folder_are_not_looked_for_again(tmp_path):
    folder = tmp_path / "weights"
    AutoModelForMaskedLM.from_config(BertConfig(**SIZES)).save_pretrained(folder)
    lit = CheckpointedTransformer(folder, memsave=None)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(lit, loader("masked_lm"))
    trainer.save_checkpoint("tiny.ckpt")
    folder.rename(tmp_path / "elsewhere")
    loaded = CheckpointedTransformer.load_from_checkpoint("tiny.ckpt", weights_only=True)
    assert torch.equal(predict(loaded), predict(lit))
    assert str(folder) not in str(loaded.hparams)


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped():
    lit = make_lit(memsave=ONLY_CHECKPOINTING, max_steps=8)
    whole, data = fit(lit, max_epochs=2)[1], loader("masked_lm")
    first = copy.deepcopy(lit)
    trainer = make_trainer(max_epochs=1)
    torch.manual_seed(2)
    trainer.fit(first, data, data)
    trainer.save_checkpoint("half.ckpt")
    state = torch.get_rng_state()
    second = make_lit(memsave=ONLY_CHECKPOINTING, max_steps=8)
    torch.set_rng_state(state)
    make_trainer(max_epochs=2, num_sanity_val_steps=0).fit(
        second, data, data, ckpt_path="half.ckpt", weights_only=True
    )
    assert all(torch.equal(value, whole[name]) for name, value in second.state_dict().items())


def test_technique_objects_are_used_and_not_saved():
    lit = make_lit(
        memsave={
            "activation_checkpointing": ActivationCheckpointing(1),
            "optimizer": LowBitOptimizer("lion_8bit"),
            "report": False,
        }
    )
    [callback] = lit.configure_callbacks()
    assert callback.arguments["activation_checkpointing"] == ActivationCheckpointing(1)
    assert lit.hparams.memsave == {"report": False}


def test_loggers_get_the_hyperparameters(tmp_path):
    logger = CSVLogger(tmp_path)
    fit(make_lit(memsave=ONLY_CHECKPOINTING), logger=logger, log_every_n_steps=1)
    logged = (tmp_path / "lightning_logs" / "version_0" / "hparams.yaml").read_text()
    assert "model_type: bert" in logged
    assert "python/" not in logged


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_independent_and_equal(how, package):
    lit = make_lit("gpt2", package, memsave=ONLY_CHECKPOINTING)
    fitted = fit(lit, package=PACKAGES[package])
    [callback] = lit.configure_callbacks()
    if how == "deepcopy":
        other = copy.deepcopy(lit)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(lit))
    else:
        buffer = io.BytesIO()
        torch.save(lit, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert type(other) is type(lit)
    assert torch.equal(predict(other), predict(lit))
    assert other.configure_callbacks()[0] is not callback
    again = fit(other, package=PACKAGES[package])
    assert_same(fitted[:2], again[:2])
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    assert not torch.equal(predict(other), predict(lit))


# --- the command line ---


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:lightning.pytorch.cli")
def test_the_stock_cli_takes_it(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])
    config = '{"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2}'
    flags = {
        "model": config,
        "task": "masked_lm",
        "warmup": "3",
        "betas": "[0.8, 0.9]",
        "lr_schedule": "cosine",
        "memsave.activation_checkpointing": "2",
        "memsave.optimizer": "null",
    }
    cli = LightningCLI(
        CheckpointedTransformer,
        args=[
            "--trainer.accelerator=cpu",
            "--trainer.logger=false",
            *(f"--model.{name}={value}" for name, value in flags.items()),
        ],
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
    )
    lit: Any = cli.model
    assert lit.model.config.hidden_size == 8
    assert (lit.warmup, lit.lr_schedule, lit.betas) == (3, "cosine", (0.8, 0.9))
    assert lit.memsave == {"activation_checkpointing": 2, "optimizer": None}
    assert lit.hparams["model"]["hidden_size"] == 8
    assert "_instantiator" not in lit.hparams


@pytest.mark.parametrize("name", CONFIGS)
def test_micro_batches_give_the_training_and_the_values_of_the_whole_batch(name):
    results = []
    for size in (None, 3):
        memsave = ONLY_CHECKPOINTING | {"micro_batch_size": size}
        lit = make_lit(name, memsave=memsave, learning_rate=1e-3)
        without_dropout(lit)  # other micro-batches draw other masks
        losses, state, trainer = fit(lit.double(), precision=None)
        results.append((losses, state, trainer.callback_metrics))
    (losses, state, metrics), (other_losses, other_state, other_metrics) = results
    assert losses == pytest.approx(other_losses, rel=1e-6)
    assert metrics.keys() == other_metrics.keys()
    for key, value in metrics.items():
        assert value.item() == pytest.approx(other_metrics[key].item(), rel=1e-5), key
    for key, value in state.items():
        # Adam turns rounding of small gradients into steps; all of them move by up to 4e-3.
        assert torch.allclose(value, other_state[key], atol=1e-5), key
