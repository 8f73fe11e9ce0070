"""Tests in this folder need the virtual GPU: they count, change its memory, or run several."""

import pytest

from tests.virtual_gpu import counters

collect_ignore = ["startup"]  # it is imported before all else, and by itself


@pytest.fixture(autouse=True)
def on_the_virtual_gpu() -> None:
    if not counters.is_on:
        pytest.skip("needs the virtual GPU: `make test-vgpu`")
