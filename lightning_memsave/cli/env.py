"""``memsave env``: versions, GPUs, and what each technique needs."""

import argparse
import importlib
import json
import logging
import platform
import warnings
from typing import Any

from lightning_memsave.core.versions import PACKAGES, installed_versions
from lightning_memsave.units import format_bytes

SUMMARY = "Show versions, GPUs, and whether each technique can be used."
EXAMPLES = """\
memsave env
memsave env --json > env.json"""

_MORE_PACKAGES = ("torchmetrics", "jsonargparse", "nvidia-ml-py", "nvidia-ml-py3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> None:
    environment = read_environment()
    print(json.dumps(environment, indent=2) if arguments.json else _as_text(environment))


def read_environment() -> dict[str, Any]:
    import torch

    packages = (*PACKAGES, *_MORE_PACKAGES)
    driver, reason = _driver()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": dict.fromkeys(packages) | installed_versions(packages),
        "cuda": torch.version.cuda,
        "driver": driver,
        "nvml": reason,
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "techniques": _techniques(),
    }


def _driver() -> tuple[str | None, str]:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError as error:
        return None, f"{error}. Run `pip install nvidia-ml-py`."
    # Catch everything: this command must work on machines where something is broken.
    try:
        nvml.nvmlInit()
        try:
            version: Any = nvml.nvmlSystemGetDriverVersion()
        finally:
            nvml.nvmlShutdown()
    except Exception as error:
        return None, f"{error}"
    return version.decode() if isinstance(version, bytes) else str(version), ""


def _gpu(index: int) -> dict[str, Any]:
    import torch

    from lightning_memsave.measure.nvml import read_nvml

    properties = torch.cuda.get_device_properties(index)
    reading = read_nvml(index)
    with torch.cuda.device(index):
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "total_bytes": properties.total_memory,
        "used_bytes": reading.used_bytes,
        "has_bfloat16": has_bfloat16,
        "nvml": reading.reason,
    }


def _techniques() -> list[dict[str, Any]]:
    from lightning_memsave.techniques.registry import techniques

    return [
        {
            "name": technique.name,
            "exactness": technique.exactness.value,
            "requires": {package: _why_missing(package) for package in technique.requires},
        }
        for technique in techniques()
    ]


def _why_missing(package: str) -> str:
    """Return why a package cannot be used; empty if it can. Being installed is not enough."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(package)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        logging.disable(logging.NOTSET)
    return ""


def _as_text(environment: dict[str, Any]) -> str:
    lines = [("python", environment["python"]), ("platform", environment["platform"])]
    for name, version in environment["packages"].items():
        lines.append((name, version or "not installed"))
    packages = environment["packages"]
    if packages["nvidia-ml-py"] and packages["nvidia-ml-py3"]:
        lines.append(("", "both install `pynvml.py`: run `pip uninstall nvidia-ml-py3`"))
    lines.append(("CUDA in torch", environment["cuda"] or "none: this is a CPU build of torch"))
    lines.append(("NVIDIA driver", environment["driver"] or f"unknown: {environment['nvml']}"))
    for index, gpu in enumerate(environment["gpus"]):
        lines.append((f"GPU {index}", _gpu_text(gpu)))
    if not environment["gpus"]:
        lines.append(("GPU", "torch finds none"))
    sections = [_aligned(lines), "", "Techniques"]
    rows = [(t["name"], _technique_text(t)) for t in environment["techniques"]]
    return "\n".join([*sections, _aligned([(f"  {name}", text) for name, text in rows])])


def _gpu_text(gpu: dict[str, Any]) -> str:
    used = "" if gpu["used_bytes"] is None else f", {format_bytes(gpu['used_bytes'])} in use"
    bfloat16 = "native" if gpu["has_bfloat16"] else "no"
    notes = f" ({gpu['nvml']})" if gpu["nvml"] else ""
    return (
        f"{gpu['name']}, {format_bytes(gpu['total_bytes'])}{used}, "
        f"compute capability {gpu['capability']}, bfloat16: {bfloat16}{notes}"
    )


def _technique_text(technique: dict[str, Any]) -> str:
    missing = {package: why for package, why in technique["requires"].items() if why}
    if missing:
        install = " ".join(missing)
        whys = "; ".join(missing.values())
        return f"cannot be used: {whys}. Run `pip install {install}`."
    needs = f" (needs {', '.join(technique['requires'])})" if technique["requires"] else ""
    return f"ready{needs}, {technique['exactness']}"


def _aligned(lines: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in lines)
