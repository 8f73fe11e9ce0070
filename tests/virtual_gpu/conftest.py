"""Tests in this folder need the virtual GPU: they count, change its memory, or run several.

All but those fits that a real GPU trains as well.
"""

from pathlib import Path

import pytest

from tests.virtual_gpu import counters

collect_ignore = ["startup"]  # it is imported before all else, and by itself


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before fixtures of modules run."""
    skip = pytest.mark.skip(reason="needs the virtual GPU: `make test-vgpu`")
    for item in items if not counters.is_on else ():
        is_here = Path(__file__).parent in item.path.parents
        if is_here and not item.get_closest_marker("real_gpu_too"):
            item.add_marker(skip)
