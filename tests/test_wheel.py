"""What a stranger gets: the wheel in an empty environment, with what it declares and no more."""

import ast
import importlib.metadata
import json
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.helpers import IN_CI

ROOT = Path(__file__).parents[1]
OPTIONAL = ("transformers", "bitsandbytes", "nvidia-ml-py")
FIT = """
import json, lightning_memsave, torch
from lightning.pytorch import LightningModule, Trainer
from lightning_memsave import MemSaveCallback

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer
        self.layers = torch.nn.Sequential(*(layer(64, 4, 128, batch_first=True) for _ in range(2)))

    def training_step(self, batch):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

callback = MemSaveCallback(preset="single_gpu")
trainer = Trainer(max_steps=2, accelerator="cpu", logger=False, callbacks=[callback])
trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(8, 16, 64), batch_size=4))
rows = {row.name: [row.status, *row.details] for row in callback.rows}
json.dump([rows, lightning_memsave.__file__], open("found.json", "w"))
"""


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, cwd=cwd
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, as building leaves files beside the sources."""
    if not IN_CI:
        pytest.importorskip("build")
        pytest.importorskip("twine")
    folder = tmp_path_factory.mktemp("wheel")
    package, dist = folder / "source" / "lightning_memsave", folder / "dist"
    shutil.copytree(ROOT / "lightning_memsave", package)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, package.parent)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, package.parent)
    assert len([*dist.iterdir()]) == 2
    run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())
    return next(dist.glob("*.whl"))


def declared(name="lightning-memsave", extras=("",)):
    """Distributions that one requires, all the way down."""
    found = {name}
    for line in importlib.metadata.requires(name) or ():
        one = Requirement(line)
        is_meant = one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras)
        if is_meant and one.name not in found:
            found |= declared(one.name, ("", *one.extras))
    return found


def make_environment(folder, wheel, without=()):
    """Make an environment with the wheel, and link what it requires to what is installed here."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--ignore-installed",
        wheel,
    )
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    here = Path(sysconfig.get_path("purelib"))
    (metadata,) = site.glob("*.dist-info")
    roots = [Requirement(line) for line in importlib.metadata.Distribution.at(metadata).requires]
    names = set().union(
        *(
            declared(root.name, ("", *root.extras))
            for root in roots
            if "extra ==" not in str(root.marker) and root.name not in without
        )
    )
    for name in names:
        files = importlib.metadata.distribution(name).files or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(here / top)
    return python


@pytest.mark.slow
@pytest.mark.parametrize("without", [(), OPTIONAL], ids=["whole", "without optional packages"])
def test_fits_from_the_wheel_in_an_empty_environment(wheel, without, tmp_path):
    python = make_environment(tmp_path / "environment", wheel, without)
    run(python, "-I", "-c", FIT, cwd=tmp_path)
    rows, file = json.loads((tmp_path / "found.json").read_text())
    assert Path(file).is_relative_to(tmp_path)
    assert rows["activation_checkpointing"][0] == "on"
    if without:
        assert rows["optimizer"][:2] == ["off", "bitsandbytes is not installed"]
    else:
        assert rows["optimizer"][0] == "on"
    memsave = python.with_name("memsave")
    environment = json.loads(run(memsave, "env", "--json", cwd=tmp_path))
    missing = {name for name in OPTIONAL if environment["packages"][name] is None}
    assert missing == set(without)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2Model"]}')
    command = [memsave, "predict", "config.json", "--batch", "1x8", "--task", "causal_lm"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if without else 0), done.stderr
    assert ("Run `pip install transformers`." in done.stderr) == bool(without)


def test_each_imported_package_is_declared():
    imported = set()
    for path in (ROOT / "lightning_memsave").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    others = imported - {*sys.stdlib_module_names, "lightning_memsave", "pytorch_lightning"}
    distributions = importlib.metadata.packages_distributions()
    names = {distributions[module][0].lower().replace("_", "-") for module in others}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["plot"]]
    required = {Requirement(line).name.replace("_", "-") for line in lines}
    assert names <= required
    assert required - names == {"nvidia-ml-py"}  # imported by its name only where it is needed
