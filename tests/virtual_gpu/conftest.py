"""Tests in this folder need the virtual GPU: they count, change its memory, or run several.

All but those fits that a real GPU trains as well.
"""

import pytest

from tests.virtual_gpu import counters

collect_ignore = ["startup"]  # it is imported before all else, and by itself


@pytest.fixture(autouse=True)
def on_the_virtual_gpu(request: pytest.FixtureRequest) -> None:
    if not counters.is_on and not request.node.get_closest_marker("real_gpu_too"):
        pytest.skip("needs the virtual GPU: `make test-vgpu`")
