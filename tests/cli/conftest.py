"""The folder that commands run in."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.shell import write_project


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A project as users have them, as the current folder; its code is forgotten afterwards."""
    write_project(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n == "net" or n.startswith("_memsave_target_")]:
        del sys.modules[name]
