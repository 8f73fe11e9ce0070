"""Versions of what a run depends on."""

import importlib.metadata
import platform
from collections.abc import Iterable

PACKAGES = (
    "lightning-memsave",
    "torch",
    "lightning",
    "pytorch-lightning",
    "transformers",
    "bitsandbytes",
)


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **installed_versions(PACKAGES)}


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
