"""The worked example of CONTRIBUTING.md does what the page says."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "site", "results", "*.so")
TESTS = (
    "tests/techniques/test_contract.py::test_one_fit_keeps_every_promise",
    "tests/techniques/test_contract.py::test_trains_as_exactly_as_it_declares",
    "tests/techniques/test_contract.py::test_applying_twice_equals_once_or_is_refused",
    "tests/test_architecture.py::test_each_technique_has_a_case_a_page_and_a_changelog_line",
)


@pytest.mark.slow
def test_the_patch_adds_a_technique_that_keeps_the_contract(tmp_path):
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=NOT_COPIED)
    patch = ROOT / "examples" / "new_technique.patch"
    subprocess.run(["git", "apply", str(patch)], cwd=copy, check=True)
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for line in patch.read_text().splitlines():
        if line.startswith("+++ b/"):
            assert Path(line).name in page, "each file is a step of the page"
    chosen = "ForLoopUpdates or for_loop_updates"
    command = [sys.executable, "-m", "pytest", "-q", "--cases=all", "-k", chosen, *TESTS]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
