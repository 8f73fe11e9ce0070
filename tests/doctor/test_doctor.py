"""Each check reports its trap, and nothing that is none."""

import ast
import functools
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import (
    CheckpointedTransformer,
    MemSaveCallback,
    check_training,
)
from lightning_memsave.doctor.checks import Subject
from lightning_memsave.doctor.training import CHECKS, run_checks
from lightning_memsave.targets.find import load_target
from tests.cases import MODELS
from tests.doctor import trap_models
from tests.doctor.trap_models import Lit
from tests.doctor.traps import CLIPPED, TRAPS, Project

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")


def check(project: Project) -> Any:
    return check_training(
        project.make,
        settings=project.settings,
        trainer_arguments=project.trainer_arguments,
        environment=project.environment,
    )


def cases(with_trap: bool) -> list[Any]:
    return [
        pytest.param(name, project, id=f"{name}-{i}")
        for name, pair in TRAPS.items()
        for i, project in enumerate(pair[0 if with_trap else 1])
    ]


def test_each_check_has_a_trap():
    assert list(TRAPS) == list(CHECKS)
    assert all(all(pair) for name, pair in TRAPS.items() if name != "broken_packages")


@pytest.mark.parametrize(("name", "project"), cases(with_trap=True))
def test_reports_the_trap_alone(name: str, project: Project) -> None:
    found = check(project)
    assert {problem.check for problem in found.problems} == {name}, found
    assert found.notes == ()
    assert all(problem.fix.endswith((".", "?")) for problem in found.problems)


@pytest.mark.parametrize(("name", "project"), cases(with_trap=False))
def test_does_not_report_what_is_nearly_a_trap(name: str, project: Project) -> None:
    found = check(project)
    assert found.problems == (), found
    assert found.notes == ()


@pytest.mark.parametrize("preset", ["off", "classic", "bitwise", "single_gpu"])
def test_models_of_the_contract_have_no_problem(preset: str) -> None:
    for name, make in MODELS.items():
        assert check_training(make, settings={"preset": preset}, environment={}).problems == (), (
            name
        )


@pytest.mark.parametrize(
    ("name", "model"),
    [
        (f"{EXAMPLES}/_sorting.py:Sorter", None),
        (f"{EXAMPLES}/demo.py:PassageClassifier", None),
        (f"{EXAMPLES}/tensor_parallel.py:Lit", None),
        (f"{EXAMPLES}/cli/train.py:ByteModel", None),
        (f"{EXAMPLES}/cli/config.yaml", f"{EXAMPLES}/cli/train.py:ByteModel"),
    ],
)
def test_examples_have_no_problem(name: str, model: str | None) -> None:
    target = load_target(name, model=model)
    found = check_training(target, environment={})
    assert found.problems == (), found
    assert check_training(target, settings=MemSaveCallback(), environment={}).problems == ()


def test_the_example_of_offloading_has_no_problem() -> None:
    example: Any = runpy.run_path(str(EXAMPLES / "offloading.py"))
    make = functools.partial(example["LanguageModel"], **example["SMALL"])
    settings = example["SETTINGS"]
    assert check_training(make, settings=settings, environment={}).problems == ()


def test_examples_with_our_own_module_have_no_problem() -> None:
    make = functools.partial(CheckpointedTransformer, trap_models.gpt2().config, task="causal_lm")
    assert check_training(make, environment={}).problems == ()


def test_all_classes_of_the_examples_are_tested() -> None:
    bases = ("LightningModule", "CheckpointedTransformer")
    classes = {
        node.name
        for path in EXAMPLES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        if any(ast.unparse(base).endswith(bases) for base in node.bases)
    }
    assert classes == {"Sorter", "PassageClassifier", "ByteModel", "LanguageModel", "Lit"}


def test_embeddings_that_the_user_keeps_in_32_bits() -> None:
    import bitsandbytes

    manager = vars(bitsandbytes.optim)["GlobalOptimManager"].get_instance()
    make = functools.partial(trap_models.BitsAndBytes, trap_models.tied)
    with mock.patch.object(manager, "module_weight_config_triple", []) as chosen:
        assert len(check_training(make, environment={}).problems) == 1
        chosen.append((nn.Embedding(2, 2), "weight", {"optim_bits": 32}))
        assert check_training(make, environment={}).problems == ()


def test_packages_that_break_each_other() -> None:
    both = {"nvidia-ml-py": "13.0", "nvidia-ml-py3": "7.352.0"}
    (found,) = run_checks(Subject(nn.Linear(1, 1), versions=both))
    assert found.check == "broken_packages"
    assert "pip uninstall nvidia-ml-py3" in found.fix
    assert run_checks(Subject(nn.Linear(1, 1), versions={"nvidia-ml-py": "13.0"})) == []


def test_clipping_is_allowed_where_lightning_allows_it() -> None:
    """Lightning#21435 is fixed on its main branch."""
    module = trap_models.Fused()
    optimizers, arguments = [module.configure_optimizers()], CLIPPED
    for version, names in {"2.6.6": ["refused_clipping"], "2.6.7": [], "2.7.0rc1": []}.items():
        versions = {"lightning": version}
        subject = Subject(module, "bf16-mixed", arguments, {}, optimizers, versions=versions)
        assert [problem.check for problem in run_checks(subject)] == names
        subject = Subject(module, "16-mixed", arguments, {}, optimizers, versions=versions)
        assert [problem.check for problem in run_checks(subject)] == ["refused_clipping"]


def fit(module: nn.Module, **arguments: Any) -> None:
    """Train two steps, so that a claim of the doctor is seen to be true."""
    data = TensorDataset(torch.randn(8, 8), torch.randint(4, (8,)))
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_steps=2, accelerator="cpu", **quiet, **arguments)
    trainer.fit(module, DataLoader(data, 4))  # type: ignore[arg-type]


class TestClaims:
    """What the doctor says of a trap happens."""

    def test_lightning_refuses_clipping(self) -> None:
        fit(trap_models.Fused(), precision="bf16-mixed")
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            fit(trap_models.Fused(), **CLIPPED)

    @pytest.mark.parametrize(
        "text",
        ["max_split_size_mb:10", "garbage_collection_threshold:80", "expandable_segments:true"],
    )
    def test_torch_refuses_the_setting(self, text: str) -> None:
        code = f"import torch; torch._C._accelerator_setAllocatorSettings({text!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        assert done.returncode != 0


def test_the_page_lists_the_checks() -> None:
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.MULTILINE)
    texts = {name: (inspect.getdoc(find) or "").rstrip(".") for name, find in CHECKS.items()}
    assert rows == [(name, text[0].lower() + text[1:]) for name, text in texts.items()]
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"[{len(CHECKS)} known traps](" in readme


def test_a_fit_that_needs_data_is_a_note() -> None:
    class NeedsData(trap_models.Normalised):
        def setup(self, stage: str) -> None:
            datamodule: Any = vars(self.trainer)["datamodule"]
            self.num_classes = datamodule.num_classes

    found = check_training(NeedsData, settings={"micro_batch_size": 2}, environment={})
    assert "batch_statistics" in [problem.check for problem in found.problems]
    assert "a fit could not be started without data" in found.notes[0]
    assert "AttributeError" in found.notes[0]


def test_data_is_not_prepared() -> None:
    class Downloads(Lit):
        def prepare_data(self) -> None:
            raise OSError("no network")

    assert check_training(Downloads, environment={}).notes == ()


def test_a_plain_module_and_one_with_an_attribute_like_our_wrapper() -> None:
    class Outer(trap_models.Normalised):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = self.net

    class Wrapped(trap_models.Normalised):
        pass

    for cls in (Outer, Wrapped):
        found = check_training(cls, settings={"micro_batch_size": 2}, environment={})
        assert (found.model, len(found.problems)) == (cls.__name__, 1)
    assert check_training(nn.Linear(2, 2), environment={}).model == "Linear"


def test_modules_of_the_other_package() -> None:
    class Other(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def training_step(self, batch: Any) -> Any:
            return self.layer(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, fused=True)

    found = check_training(Other, trainer_arguments=CLIPPED, environment={})
    assert [problem.check for problem in found.problems] == ["refused_clipping"]
    assert found.notes == ()


def test_code_without_source_is_looked_at() -> None:
    names: dict[str, Any] = {"ExactMetric": trap_models.ExactMetric}
    exec("class Typed(ExactMetric):\n    def training_step(self, b, i): self.net(b)", names)
    assert check_training(trap_models.ExactMetric, environment={}).problems
    assert check_training(names["Typed"], environment={}).problems == ()


def test_prints_and_converts_to_json() -> None:
    found = check_training(trap_models.ExactMetric, environment={})
    assert str(found).startswith("ExactMetric: 1 problem\n\ngrowing_metric\n  `train_metric`, a")
    (problem,) = found.to_dict()["problems"]
    assert list(problem) == ["what", "why", "fix", "check"]
    assert str(check_training(Lit, environment={})) == "Lit: no problem found"


def test_neither_the_module_nor_its_state_changes() -> None:
    module = Lit()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    check_training(module, settings=MemSaveCallback(preset="single_gpu"), environment={})
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not list(module.net._forward_hooks)
    assert "forward" not in vars(module)
