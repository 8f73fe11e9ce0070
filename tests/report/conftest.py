"""What several tests of reports need."""

from collections.abc import Iterator

import pytest

from tests.helpers import IN_CI
from tests.report.chromium import EXECUTABLE, Chromium


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """One browser for all tests of this folder, each of which opens its own page."""
    if EXECUTABLE is None:
        leave_out = pytest.fail if IN_CI else pytest.skip
        leave_out("needs Chromium, and none is installed: apt-get install chromium")
    with Chromium(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium
