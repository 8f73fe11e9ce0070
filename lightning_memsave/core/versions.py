"""What a run depends on: versions, and packages that not every user has."""

import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterable

from lightning_memsave.errors import MissingDependencyError

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


def require_transformers(what: str) -> None:
    """Raise the error for what needs transformers, where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingDependencyError(
            f"{what} needs transformers, which is not installed. Run `pip install transformers`."
        )
