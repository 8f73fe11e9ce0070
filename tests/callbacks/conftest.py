"""The two packages that Lightning comes in."""

from typing import Any

import pytest

from tests.callbacks.lit import PACKAGES


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> Any:
    return PACKAGES[request.param]
