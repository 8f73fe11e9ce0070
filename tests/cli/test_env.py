import importlib
import importlib.metadata
import json
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from lightning_memsave.cli import env
from lightning_memsave.cli.main import main
from lightning_memsave.techniques.registry import techniques


def test_text(capsys):
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for package in ("torch", "bitsandbytes"):
        version = importlib.metadata.version(package)
        assert any(line.split() == [package, version] for line in lines)
    shown = lines[lines.index("Techniques") + 1 :]
    assert [line.split()[0] for line in shown] == [t.name for t in techniques()]
    low_bit = next(line for line in shown if "low_bit_optimizer" in line)
    assert low_bit.endswith("ready (needs bitsandbytes), approximate")


def test_json(capsys):
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["torch"] == importlib.metadata.version("torch")
    assert found["cuda"] == torch.version.cuda
    assert len(found["gpus"]) == torch.cuda.device_count()
    by_name = {technique["name"]: technique for technique in found["techniques"]}
    assert by_name["low_bit_optimizer"]["requires"] == {"bitsandbytes": ""}
    assert by_name["activation_checkpointing"]["requires"] == {}


def test_a_package_that_cannot_be_imported_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert main(["env"]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if "low_bit_optimizer" in x)
    assert "cannot be used: ModuleNotFoundError: " in line
    assert line.endswith("Run `pip install bitsandbytes`.")


def test_a_package_that_breaks_on_import_does_not_break_the_command(monkeypatch):
    def fail(name: str) -> ModuleType:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fail)
    assert env._why_missing("bitsandbytes").startswith("OSError: libcudart.so.12")


def test_packages_that_are_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(
        env, "PACKAGES", ("torch", "nvidia-ml-py", "nvidia-ml-py3", "no-such-package")
    )
    main(["env"])
    assert "no-such-package  not installed" in capsys.readouterr().out


def test_two_packages_with_the_same_module(monkeypatch, capsys):
    monkeypatch.setattr(env, "installed_versions", lambda names: dict.fromkeys(names, "1.0"))
    main(["env"])
    assert "both install `pynvml.py`: run `pip uninstall nvidia-ml-py3`" in capsys.readouterr().out


@pytest.mark.parametrize("version", ["570.86.10", b"570.86.10"])
def test_driver(version, monkeypatch, capsys):
    nvml = mock.Mock()
    nvml.nvmlSystemGetDriverVersion.return_value = version
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    main(["env"])
    assert "NVIDIA driver      570.86.10" in capsys.readouterr().out
    assert nvml.nvmlInit.call_count == nvml.nvmlShutdown.call_count == 1


def test_without_nvml_the_reason_is_said(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    main(["env"])
    out = capsys.readouterr().out
    assert "NVIDIA driver      unknown: " in out
    assert "Run `pip install nvidia-ml-py`." in out


def test_gpus(monkeypatch, capsys):
    """A machine that is not here: what torch says of a GPU, in words."""
    properties = SimpleNamespace(name="NVIDIA T4", major=7, minor=5, total_memory=15 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    monkeypatch.setitem(sys.modules, "pynvml", None)
    main(["env"])
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("GPU 0"))
    assert "NVIDIA T4, 15.00 GiB, compute capability 7.5, bfloat16: no (NVML is not avail" in line


@pytest.mark.gpu
def test_a_real_gpu(capsys):
    main(["env", "--json"])
    gpu = json.loads(capsys.readouterr().out)["gpus"][0]
    assert gpu["name"] == torch.cuda.get_device_name(0)
    assert gpu["has_bfloat16"] == torch.cuda.is_bf16_supported(including_emulation=False)
