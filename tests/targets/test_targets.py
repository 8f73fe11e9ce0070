"""Models and batches as they are named in a shell, good and bad."""

import json
import pickle
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped] # it comes without types
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import BertConfig, GPT2Config, RobertaConfig, T5Config, ViTConfig

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.measure.parameters import parameter_table
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.targets.code import parse_arguments
from lightning_memsave.targets.find import load_target
from lightning_memsave.targets.target import (
    BatchSpec,
    Target,
    TensorSpec,
    make_batch_spec,
    read_batch,
)
from lightning_memsave.units import MIB
from tests.callbacks.lit import make_trainer
from tests.cli.shell import TINY_GPT2
from tests.helpers import ResidentGrowth


def shapes_of(target: Target) -> dict[str, tuple[Any, str]]:
    entries = parameter_table(target.parameter_source()).entries
    return {entry.name: (entry.shape, entry.dtype) for entry in entries if not entry.is_buffer}


def batch_of(target: Target, sizes: str) -> Any:
    return make_batch_spec(sizes, target).build()


TINY: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
CODE = """
    import torch
    from torch import nn
    import lightning.pytorch as pl

    class Net(nn.Module):
        def __init__(self, width: int = 8, depth: int = 1):
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

    class Lit(pl.LightningModule):
        def __init__(self, vocab: int, width: int = 8, net: nn.Module | None = None):
            super().__init__()
            self.save_hyperparameters(ignore=["net"])
            self.embedding = nn.Embedding(vocab, width)
            self.net = net

    class Data(pl.LightningDataModule):
        pass

    class Drawing(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            nn.init.trunc_normal_(self.encoder.layers[0].linear1.weight)
            self.rates = [x.item() for x in torch.linspace(0, 0.3, 3)]

    def make(width=4):
        return Net(width)

    def make_pair():
        return Net(), 1

    def needs_gpu():
        return Net().to("cuda")

    def fails():
        raise KeyError("width")

    def leaves():
        raise SystemExit(3)

    WIDTH = 3
    NET = Net()
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a module of its own, as the current one."""
    (tmp_path / "models.py").write_text(textwrap.dedent(CODE))
    monkeypatch.delitem(sys.modules, "models", raising=False)
    yield tmp_path
    sys.modules.pop("models", None)


def refused(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_target(*args, **kwargs)
    return str(caught.value)


def write_config(folder: Path, config: Any, **more: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config.to_dict() | more))
    return str(path)


class TestFactory:
    def test_a_class_by_module_or_by_file(self, project):
        for text in ("models:Net", "models.py:Net", str(project / "models.py") + ":Net"):
            target = load_target(text, arguments={"width": 3, "depth": 2})
            assert (target.kind, target.name, target.settings) == ("factory", text, None)
            assert type(target.build()).__name__ == "Net"
            assert shapes_of(target)["layers.1.weight"] == ((3, 3), "float32")

    def test_a_function(self, project):
        assert shapes_of(load_target("models:make")) == {
            "layers.0.weight": ((4, 4), "float32"),
            "layers.0.bias": ((4,), "float32"),
        }

    def test_each_build_is_a_new_module(self, project):
        target = load_target("models:Net")
        assert target.build() is not target.build()

    def test_the_path_of_imports_is_as_before(self, project):
        before = list(sys.path)
        load_target("models.py:Net").build()
        assert sys.path == before

    @pytest.mark.parametrize("make_mode", [FakeTensorMode, fake_tensors])
    def test_what_fake_tensors_cannot_do_by_themselves(self, project, make_mode):
        """Copied layers, truncated normals and rates that are read would raise, hang or be 1."""
        target = load_target("models:Drawing")
        with make_mode():
            made: Any = target.build()
        assert {type(p) for p in made.parameters()} == {FakeTensor}
        assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in made.parameters())
        assert len(set(made.parameters())) == 36
        assert made.rates == pytest.approx([0.0, 0.15, 0.3])
        assert not hasattr(FakeTensorMode, "__deepcopy__")

    def test_really_without_a_mode(self, project):
        made = load_target("models:Drawing").build()
        assert not any(isinstance(p, FakeTensor) for p in made.parameters())

    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ("models:Nett", ("has no `Nett`", "Write `models:Net`")),
            ("models:", ("does not exist", "Pass `module:Class`")),
            ("models.py:Nett", ("Write `models.py:Net`",)),
            ("models.py", ("does not name a model", "`models.py:Class`")),
            ("model.py:Net", ("does not exist", "Did you mean `models.py`?")),
            ("nowhere/models.py:Net", ("no folder `nowhere`",)),
            ("modls:Net", ("no module `modls`", "name the file")),
            ("models:WIDTH", ("is a `int`", "Name a class or a function")),
            ("models:NET", ("exists already", "Name its class")),
            ("models:Data", ("not an `nn.Module`", "Name the model's class")),
            ("models:Lit", ("'vocab'", "Add `--arg vocab=...`.")),
            ("models.Net", ("does not exist. Did you mean `models:Net`?",)),
            ("", ("name of the model is empty", "Pass `module:Class`")),
            ("https://example.org/config.json", ("does not exist",)),
        ],
    )
    def test_bad_names(self, project, text, parts):
        message = refused(text)
        assert all(part in message for part in parts), message

    def test_arguments_that_it_does_not_take(self, project):
        message = refused("models:Net", arguments={"widthx": 3})
        assert "'widthx'" in message
        assert "Its arguments are `width`, `depth`. Remove" in message

    @pytest.mark.parametrize(
        ("name", "parts"),
        [
            ("make_pair", ("returned tuple", "Return the module only")),
            ("fails", ("KeyError: 'width'", "models.py, line")),
            ("leaves", ("SystemExit",)),
            ("needs_gpu", ("requires a GPU", "models.py, line", "torch.cuda.is_available()")),
        ],
    )
    @pytest.mark.parametrize("is_fake", [False, True])
    def test_code_that_fails(self, project, name, parts, is_fake):
        target = load_target(f"models:{name}")
        with pytest.raises(ConfigurationError) as caught:
            _ = target.module_without_data if is_fake else target.build()
        assert all(part in str(caught.value) for part in parts), caught.value

    @pytest.mark.parametrize(
        ("line", "parts"),
        [
            ("raise ValueError('no data')", ("ValueError: no data", "bad.py, line 2")),
            ("x = torch.zeros(1).cuda()", ("requires a GPU", "is_available()", "line 2")),
            ("x = torch.zeros(1, device='cuda')", ("requires a GPU",)),
            ("torch.cuda.get_device_properties(0)", ("requires a GPU",)),
            ("import no_such_package", ("No module named 'no_such_package'",)),
            ("x = = 1", ("SyntaxError",)),
            ("exit(1)", ("SystemExit",)),
        ],
    )
    @pytest.mark.parametrize("text", ["bad.py:Net", "bad:Net"])
    def test_code_that_fails_at_import(self, tmp_path, monkeypatch, line, parts, text):
        (tmp_path / "bad.py").write_text(f"import torch\n{line}\n")
        monkeypatch.delitem(sys.modules, "bad", raising=False)
        message = refused(text)
        assert all(part in message for part in parts), message
        assert "_memsave_target_bad" not in sys.modules

    @pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
    def test_the_line_is_that_of_the_user_and_of_no_package(self, tmp_path, monkeypatch, folder):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "package_that_fails.py").write_text("def fail():\n    raise OSError\n")
        (tmp_path / "bad.py").write_text("import package_that_fails\n\npackage_that_fails.fail()\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
        monkeypatch.setattr(sys, "base_prefix", str(tmp_path))  # as `/usr`, with code in `/usr/src`
        message = refused("bad.py:Net")
        del sys.modules["package_that_fails"]
        assert f"{tmp_path / 'bad.py'}, line 3" in message
        assert "write `package.module:Class` instead of its path" in message

    def test_a_function_without_a_signature(self):
        with pytest.raises(ConfigurationError, match="`torch:relu` failed"):
            load_target("torch:relu").build()

    def test_arguments_of_other_kinds_are_refused(self, project):
        assert "Remove it." in refused("models:Net", task="masked_lm")
        assert "`model='x:Y'` does not apply to `models:Net`" in refused("models:Net", model="x:Y")


class TestHuggingFace:
    @pytest.mark.parametrize("as_folder", [False, True])
    def test_the_architecture_that_it_names(self, tmp_path, as_folder):
        path = write_config(tmp_path, BertConfig(**TINY), architectures=["BertForMaskedLM"])
        target = load_target(tmp_path if as_folder else path)
        assert target.kind == "hugging_face"
        assert type(target.build()).__name__ == "BertForMaskedLM"
        assert target.build().training
        assert "bert.embeddings.word_embeddings.weight" in shapes_of(target)
        assert "cls.predictions.decoder.weight" not in shapes_of(target)

    def test_a_task_and_changes(self, tmp_path):
        path = write_config(tmp_path, BertConfig(**TINY), torch_dtype="float16")
        changes = {"num_hidden_layers": 1, "num_labels": 7, "attn_implementation": "eager"}
        made: Any = load_target(path, task="sequence_classification", arguments=changes).build()
        assert type(made).__name__ == "BertForSequenceClassification"
        assert (len(made.bert.encoder.layer), made.config.num_labels) == (1, 7)
        assert made.config._attn_implementation == "eager"
        assert made.dtype is torch.float32

    def test_names_on_the_hub_are_marked(self):
        message = refused("hf:no-such-owner/no-such-model")
        assert "no-such-owner/no-such-model" in message
        assert "pass that file" in message

    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ("{", ("cannot be read as JSON", "save_pretrained")),
            ("[1]", ("no `model_type`", "`module:Class`")),
            ('{"hidden_size": 4}', ("no `model_type`",)),
            ('{"model_type": "brt"}', ("`model_type='brt'`", "`bert`")),
            ('{"model_type": "own_net", "auto_map": {}}', ("which is not run", "`module:Class`")),
            ('{"model_type": "bert"}', ("names no architecture", "`--task masked_lm`")),
            (
                '{"model_type": "bert", "architectures": ["OwnBert"]}',
                ("names OwnBert, which transformers does not have", "`--task masked_lm`"),
            ),
            ('{"model_type": "bert", "hidden_size": "many"}', ("Check that its values fit",)),
        ],
    )
    def test_bad_configs(self, tmp_path, text, parts):
        (tmp_path / "config.json").write_text(text)
        message = refused(tmp_path / "config.json")
        assert all(part in message for part in parts), message

    def test_values_that_do_not_go_together(self, tmp_path):
        config = BertConfig(**TINY | {"num_attention_heads": 2}).to_dict()
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config | {"num_attention_heads": 3}))
        with pytest.raises(ConfigurationError, match="Check its values"):
            load_target(path, task="masked_lm").build()

    @pytest.mark.parametrize(
        ("arguments", "part"),
        [
            ({"task": "maskedlm"}, "Did you mean `masked_lm`"),
            ({"task": "seq2seq_lm"}, "Use `masked_lm`"),
            ({"arguments": {"hiden_size": 4}}, "Did you mean `hidden_size`"),
            ({"arguments": {"zzz": 4}}, "Remove it"),
            ({"model": "x:Y"}, "Remove it"),
        ],
    )
    def test_bad_arguments(self, tmp_path, arguments, part):
        path = write_config(tmp_path, BertConfig(**TINY))
        assert part in refused(path, **arguments)

    def test_a_folder_without_a_config(self, tmp_path):
        assert "has no config.json" in refused(tmp_path)

    def test_a_path_that_is_nearly_right(self, tmp_path):
        write_config(tmp_path, BertConfig(**TINY))
        assert "Did you mean `config.json`?" in refused("conf.json")

    @pytest.mark.parametrize("name", ["data.csv", "notes"])
    def test_files_of_other_kinds(self, tmp_path, name):
        (tmp_path / name).write_text("a,b")
        assert "does not name a model" in refused(name)


def write_yaml(found: Any) -> str:
    Path("train.yaml").write_text(found if isinstance(found, str) else yaml.safe_dump(found))
    return "train.yaml"


MODEL = {"class_path": "models.Lit", "init_args": {"vocab": 10}}


class TestLightningConfig:
    def test_model_trainer_and_settings(self, project):
        target = load_target(
            write_yaml(
                {
                    "seed_everything": True,
                    "model": MODEL,
                    "data": {"class_path": "models.Data"},
                    "trainer": {
                        "precision": "bf16-mixed",
                        "accumulate_grad_batches": 4,
                        "gradient_clip_val": 1.0,
                        "callbacks": [
                            "lightning.pytorch.callbacks.RichProgressBar",
                            {
                                "class_path": "lightning_memsave.MemSaveCallback",
                                "init_args": {"optimizer": None},
                            },
                        ],
                        "logger": True,
                    },
                }
            )
        )
        assert target.kind == "lightning_cli"
        assert shapes_of(target) == {"embedding.weight": ((10, 8), "float32")}
        assert target.settings == {"optimizer": None}
        assert target.trainer_arguments == {
            "precision": "bf16-mixed",
            "accumulate_grad_batches": 4,
            "gradient_clip_val": 1.0,
        }
        assert target.notes == ("`data` is not used: the batch is the one that you describe",)

    def test_flags_of_memsave_and_a_subcommand(self, project):
        memsave = {"enabled": True, "activation_checkpointing": "all"}
        target = load_target(write_yaml({"fit": {"model": MODEL, "memsave": memsave}}))
        assert target.settings == {"activation_checkpointing": "all"}
        off = load_target(write_yaml({"model": MODEL, "memsave": {"enabled": False}}))
        assert off.settings is None

    def test_class_in_code(self, project):
        path = write_yaml({"model": {"vocab": 10}})
        assert "Name it too: `--model module:Class`" in refused(path)
        target = load_target(path, model="models:Lit", arguments={"width": 2})
        assert shapes_of(target) == {"embedding.weight": ((10, 2), "float32")}

    def test_nested_classes_and_changes(self, project):
        net = {"class_path": "models.Net", "init_args": {"width": 3}}
        model = {"class_path": "models.Lit", "init_args": {"vocab": 10, "net": net}}
        target = load_target(write_yaml({"model": model}), arguments={"vocab": 20})
        assert shapes_of(target)["embedding.weight"] == ((20, 8), "float32")
        assert shapes_of(target)["net.layers.0.weight"] == ((3, 3), "float32")

    def test_model_in_a_file_of_its_own(self, project):
        (project / "model.yaml").write_text(yaml.safe_dump(MODEL))
        assert shapes_of(load_target(write_yaml({"model": "model.yaml"})))

    def test_an_optimizer_in_the_file(self, project):
        text = (
            "model: {class_path: models.Lit, init_args: {vocab: 10}}\n"
            "optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1e-3}}\n"
        )
        made: Any = load_target(write_yaml(text)).build()
        optimizer = made.configure_optimizers()
        assert (type(optimizer), optimizer.defaults["lr"]) == (torch.optim.AdamW, 1e-3)
        for short in ("AdamW", {"class_path": "AdamW"}):
            made = load_target(write_yaml({"model": MODEL, "optimizer": short})).build()
            assert type(made.configure_optimizers()) is torch.optim.AdamW
        fixed = load_target(write_yaml({"model": MODEL, "optimizer": {"lr": 0.1}}))
        assert "`optimizer` names no class" in fixed.notes[0]

    def test_without_memory(self, project):
        target = load_target(write_yaml({"model": MODEL}), arguments={"vocab": 2**40})
        assert shapes_of(target)["embedding.weight"][0] == (2**40, 8)

    @pytest.mark.parametrize(
        ("found", "parts"),
        [
            ("model: [", ("cannot be read as YAML", "--print_config")),
            ("just text", ("is a str", "--print_config")),
            ("", ("is a NoneType",)),
            ({"trainer": {"precision": 16}}, ("has no `model`", "class_path: module.Class")),
            ({"model": 3}, ("has no `model`",)),
            ({"model": MODEL, "trainer": [1]}, ("`trainer` in `train.yaml` is a list",)),
            (
                {"model": {"class_path": "models.Lit"}},
                (
                    "cannot be constructed: 'models.Lit': the following arguments are "
                    "required: vocab.",
                ),
            ),
            ({"model": {"class_path": "models.Nope"}}, ("models.Nope",)),
            ({"model": {"class_path": "models.Data"}}, ("models.Data",)),
            (
                {"model": {"class_path": "models.Lit", "init_args": {"vocab": 1, "widthx": 2}}},
                ("widthx",),
            ),
        ],
    )
    def test_bad_files(self, project, found, parts):
        message = refused(write_yaml(found))
        assert all(part in message for part in parts), message


class TestCheckpoint:
    def test_of_lightning(self, project):
        lit: Any = load_target("models:Lit", arguments={"vocab": 10}).build()
        lit.hparams["_class_path"] = "models.Lit"
        trainer = make_trainer(max_epochs=0)
        trainer.strategy.connect(lit)
        trainer.save_checkpoint("last.ckpt")
        target = load_target("last.ckpt")
        assert (target.kind, target.can_build) == ("checkpoint", False)
        assert shapes_of(target) == {"embedding.weight": ((10, 8), "float32")}
        assert "it was a `models.Lit`" in target.notes[0]
        with pytest.raises(ConfigurationError, match="--model module:Class"):
            target.build()
        with_code = load_target("last.ckpt", model="models:Lit", arguments={"width": 2})
        assert shapes_of(with_code) == {"embedding.weight": ((10, 2), "float32")}

    def test_state_dict_with_a_tie_and_wrappers(self):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        net[1].weight = net[0].weight
        names = {f"module._orig_mod.{k}": v.bfloat16() for k, v in net.state_dict().items()}
        names["module._orig_mod.1.weight"] = names["module._orig_mod.0.weight"]
        torch.save({"model": names}, "net.pt")
        target = load_target("net.pt")
        assert shapes_of(target) == {
            "0.weight": ((4, 4), "bfloat16"),
            "0.bias": ((4,), "bfloat16"),
            "1.bias": ((4,), "bfloat16"),
        }
        assert {type(t) for t in target.tensors.values()} == {FakeTensor}

    def test_safetensors(self):
        save_file({"w": torch.zeros(3, 2, dtype=torch.float16)}, "model.safetensors")
        target = load_target("model.safetensors")
        assert shapes_of(target) == {"w": ((3, 2), "float16")}

    def test_code_in_it_is_not_run(self, tmp_path):
        marker = tmp_path / "ran"

        class Evil:
            def __reduce__(self):
                return (Path.touch, (marker,))

        torch.save({"state_dict": {"w": torch.zeros(1)}, "hyper_parameters": Evil()}, "evil.ckpt")
        message = refused("evil.ckpt")
        assert "was not loaded: it has an object" in message
        assert "torch.save(model.state_dict(), path)" in message
        assert "instead of the checkpoint: `module:Class`" in message
        Path("note.ckpt").write_text("hello")
        assert "cannot be read by torch: it is not a file of torch. Pass" in refused("note.ckpt")
        torch.save(nn.Linear(2, 2), "whole.pt")
        assert "`torch.nn.modules.linear.Linear`" in refused("whole.pt")
        assert not marker.exists()

    @pytest.mark.parametrize(
        ("content", "name"),
        [
            (b"nonsense", "a.pt"),
            (b"", "a.ckpt"),
            (pickle.dumps({"a": 1}), "a.bin"),
            (b"nonsense", "a.safetensors"),
        ],
    )
    def test_files_that_are_none(self, tmp_path, content, name):
        (tmp_path / name).write_bytes(content)
        assert re.search("cannot be read by|no tensors", refused(name))

    def test_without_tensors(self):
        torch.save({"state_dict": {}}, "a.pt")
        assert "no `state_dict` with tensors" in refused("a.pt")

    def test_missing(self):
        assert "`last.ckpt` does not exist" in refused("last.ckpt")

    def test_it_has_no_batch(self):
        torch.save({"w": torch.zeros(1)}, "a.pt")
        with pytest.raises(ConfigurationError, match="Describe each tensor"):
            make_batch_spec("8x512", load_target("a.pt"))


T5: dict[str, Any] = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1}
IMAGES = {k: v for k, v in TINY.items() if k not in ("vocab_size", "max_position_embeddings")}
TEXT: dict[str, Any] = {"input_ids": (2, 6), "attention_mask": (2, 6)}
# Config, task, what is changed, sizes in words -> shapes of the batch.
TASKS: list[Any] = [
    (RobertaConfig(**TINY), "masked_lm", {}, "2x6", TEXT | {"labels": (2, 6)}),
    (RobertaConfig(**TINY), "causal_lm", {}, "2x6", TEXT | {"labels": (2, 6)}),
    (RobertaConfig(**TINY), "token_classification", {}, "2x6", TEXT | {"labels": (2, 6)}),
    (
        RobertaConfig(**TINY),
        "question_answering",
        {"num_labels": 2},
        "2x6",
        TEXT | {"start_positions": (2,), "end_positions": (2,)},
    ),
    *(
        (BertConfig(**TINY), "sequence_classification", changes, "2x6", TEXT | {"labels": shape})
        for changes, shape in (
            ({"num_labels": 1}, (2,)),
            ({"num_labels": 3}, (2,)),
            ({"num_labels": 3, "problem_type": "multi_label_classification"}, (2, 3)),
        )
    ),
    (
        BertConfig(**TINY),
        "multiple_choice",
        {},
        "2x4x6",
        {"input_ids": (2, 4, 6), "attention_mask": (2, 4, 6), "labels": (2,)},
    ),
    *(
        (T5Config(**T5, num_heads=2), "seq2seq_lm", {"decoder_start_token_id": 0}, sizes, shapes)
        for sizes, shapes in (
            ("2x6", TEXT | {"labels": (2, 6)}),
            ("2x6x4", TEXT | {"labels": (2, 4)}),
        )
    ),
    *(
        (
            ViTConfig(**IMAGES, image_size=32, patch_size=8),
            "image_classification",
            {},
            sizes,
            {"pixel_values": (2, 3, 32, 32), "labels": (2,)},
        )
        for sizes in ("2x3x32x32", "2")
    ),
]


class TestBatchOfHuggingFace:
    @pytest.mark.parametrize(("config", "task", "changes", "sizes", "shapes"), TASKS)
    def test_trains(self, tmp_path, config, task, changes, sizes, shapes):  # noqa: PLR0917
        target = load_target(write_config(tmp_path, config), task=task, arguments=changes)
        batch = batch_of(target, sizes)
        assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == shapes
        assert "attention_mask" not in batch or batch["attention_mask"].all()
        target.build()(**batch).loss.backward()

    @pytest.mark.parametrize(
        ("config", "task", "sizes", "message"),
        [
            (T5Config(**T5, num_heads=2), "seq2seq_lm", "2x6", "--arg decoder_start_token_id=0"),
            (BertConfig(**TINY), "multiple_choice", "2x6", "`8x4x512`"),
            (
                ViTConfig(**IMAGES, image_size=32),
                "image_classification",
                "2x1x32x32",
                "`2x3x32x32`",
            ),
            (ViTConfig(**IMAGES), "image_classification", "2x32", "channels x height x width"),
        ],
    )
    def test_other_sizes_are_refused(self, tmp_path, config, task, sizes, message):
        target = load_target(write_config(tmp_path, config), task=task)
        with pytest.raises(ConfigurationError, match=message):
            batch_of(target, sizes)

    def test_a_model_inside_a_lightning_module(self, project):
        config = GPT2Config(**TINY_GPT2)
        target = load_target(
            "lightning_memsave:CheckpointedTransformer",
            arguments={"model": config.to_dict(), "task": "causal_lm"},
        )
        assert sorted(batch_of(target, "2x6")) == ["attention_mask", "input_ids", "labels"]

    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own
    def test_a_model_inside_a_wrapper_of_peft(self, project):
        code = """
            from peft import LoraConfig, get_peft_model
            from transformers import BertConfig, BertForMaskedLM

            def make(**sizes):
                model = BertForMaskedLM(BertConfig(**sizes))
                return get_peft_model(model, LoraConfig(target_modules=["query"]))
        """
        (project / "lora.py").write_text(textwrap.dedent(code))
        target = load_target("lora.py:make", arguments=TINY)
        assert batch_of(target, "2x6")["labels"].shape == (2, 6)

    def test_without_data(self, tmp_path):
        target = load_target(write_config(tmp_path, BertConfig(**TINY)), task="masked_lm")
        with FakeTensorMode():
            batch = batch_of(target, "2x6")
            assert {type(tensor) for tensor in batch.values()} == {FakeTensor}
        assert make_batch_spec("2x6", target).structure["input_ids"].upper_bound == 50
        assert _get_current_dispatch_mode_stack() == []

    @pytest.mark.parametrize(
        ("config", "limit"), [(BertConfig(**TINY), 40), (RobertaConfig(**TINY), 38)]
    )
    def test_more_tokens_than_positions(self, tmp_path, config, limit):
        target = load_target(write_config(tmp_path, config), task="masked_lm")
        target.build()(**batch_of(target, f"1x{limit}"))
        with pytest.raises(ConfigurationError, match=f"Use at most {limit} tokens"):
            make_batch_spec(f"2x{limit + 1}", target)

    def test_a_model_without_a_loss(self, tmp_path):
        path = write_config(tmp_path, BertConfig(**TINY), architectures=["BertModel"])
        with pytest.raises(ConfigurationError, match=r"Describe each tensor.*masked_lm"):
            batch_of(load_target(path), "2x6")

    def test_any_other_module_needs_names(self, project):
        with pytest.raises(ConfigurationError, match=r"Describe each tensor.*x=float32\[8"):
            make_batch_spec("8x512", load_target("models:Net"))


class TestBatchSpec:
    def test_named(self):
        spec = make_batch_spec("x=float32[2,3,4], y=int64[2]<10, mask=bool[2, 3], s=bf16[]")
        batch = spec.build()
        assert [(k, tuple(v.shape), v.dtype) for k, v in batch.items()] == [
            ("x", (2, 3, 4), torch.float32),
            ("y", (2,), torch.int64),
            ("mask", (2, 3), torch.bool),
            ("s", (), torch.bfloat16),
        ]
        assert str(spec) == "x=float32[2,3,4],y=int64[2]<10,mask=bool[2,3],s=bfloat16[]"

    @pytest.mark.parametrize(
        ("text", "kind"),
        [
            ("float32[2,3]", torch.Tensor),
            ("float32[2,3],int64[2]", tuple),
            ("float32[2,3],", tuple),
            ("x=float32[2x3]", dict),
        ],
    )
    def test_forms(self, text, kind):
        assert isinstance(make_batch_spec(text).build(), kind)

    def test_text_of_a_spec_reads_back(self):
        for text in ("float32[2,3]", "x=int64[2]<7", "float32[2],int64[2]", "float32[2],"):
            spec = make_batch_spec(text)
            assert make_batch_spec(str(spec)) == spec

    def test_a_function_returns_it(self, project):
        code = """
            import dataclasses
            import torch

            @dataclasses.dataclass
            class Pair:
                x: torch.Tensor
                y: torch.Tensor

            def pair():
                return Pair(torch.ones(2, 3), torch.zeros(2))

            def wrong(size):
                return size

            number = 3
        """
        (project / "batches.py").write_text(textwrap.dedent(code))
        for text in ("batches.py:pair", "batches:pair"):
            batch, said = read_batch(text)
            assert (said, batch.x.shape) == (text, (2, 3))
        # The model's code is not run a second time, which would make a second class.
        assert type(read_batch("batches.py:pair")[0]) is type(read_batch("batches.py:pair")[0])
        for text, part in (
            ("batches.py:wrong", "a function without arguments"),
            ("batches.py:number", "a function without arguments"),
            ("batches.py:none", "has no `none`"),
        ):
            with pytest.raises(ConfigurationError, match=part):
                read_batch(text)

    def test_bounds_hold_and_random_numbers_are_untouched(self):
        before = torch.get_rng_state()
        spec = BatchSpec((TensorSpec(torch.int64, (1000,), 7, 3), TensorSpec(torch.int64, (99,))))
        bounded, unbounded = spec.build()
        assert (bounded.min(), bounded.max()) == (3, 6)
        assert (unbounded.min(), unbounded.max()) == (0, 1)
        assert torch.equal(spec.build()[0], bounded)
        assert torch.equal(TensorSpec(torch.int64, (3,), 5, 4).build(), torch.full((3,), 4))
        assert torch.equal(torch.get_rng_state(), before)

    def test_nothing_is_allocated_under_a_fake_mode(self):
        spec = make_batch_spec("x=float32[1000000,100000],y=int64[1000000]<5,b=bool[4]")
        with FakeTensorMode():
            batch = spec.build()
        assert {type(tensor) for tensor in batch.values()} == {FakeTensor}

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("0x512", "whole number of at least 1"),
            ("-8x512", "whole number of at least 1"),
            ("8x512", "Describe each tensor"),
            ("8 by 512", "does not describe a tensor"),
            ("", "has no tensor"),
            ("x=", "does not describe a tensor"),
            ("x=float32[-2]", "whole number of at least 1"),
            ("x=float33[2]", "not a dtype of torch. Use for example"),
            ("x=float32[2],int64[2]", "with a name and without"),
            ("x=float32[2],x=int64[2]", "Use each name once"),
            ('{"x": "float32[2]"}', "describe each tensor"),
            ("(float32[2],)", "without names for a tuple"),
            ("8×512", 'Write "8x512"'),  # noqa: RUF001
            ("x=int64[2]<0", "Use a bound of at least 1"),
            ("x=float32[1000000000,1000000000]", "which no device can hold. Use smaller"),
        ],
    )
    def test_bad_batches(self, text, part):
        with pytest.raises(ConfigurationError) as caught:
            make_batch_spec(text)
        assert part in str(caught.value)

    def test_absurd_sizes_of_a_model(self, tmp_path):
        config = RobertaConfig(**TINY)
        target = load_target(write_config(tmp_path, config), task="masked_lm")
        with pytest.raises(ConfigurationError, match="which no device can hold"):
            make_batch_spec(f"{10**15}x6", target)


class TestArguments:
    def test_values_as_in_yaml(self):
        assert parse_arguments(["a=1", "b=x=y", "c=[1, 2]", "d=null", "e='1'", "f=1e-3"]) == {
            "a": 1,
            "b": "x=y",
            "c": [1, 2],
            "d": None,
            "e": "1",
            "f": 1e-3,
        }

    @pytest.mark.parametrize("pair", ["a", "=1", "1a=2", "a=[", "a b=1"])
    def test_bad_pairs(self, pair):
        with pytest.raises(ConfigurationError, match="Write `name=value`"):
            parse_arguments([pair])


@pytest.mark.slow
def test_large_models_take_no_memory(tmp_path):
    xl = GPT2Config(n_embd=1600, n_layer=48, n_head=25)
    path = write_config(tmp_path, xl, architectures=["GPT2LMHeadModel"])
    with ResidentGrowth() as growth:
        model = load_target(path).module_without_data
    assert sum(p.numel() for p in model.parameters()) == 1_557_611_200
    # The weights alone would be 5,942 MiB.
    assert growth.num_bytes < 400 * MIB
