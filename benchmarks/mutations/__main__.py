"""Remove each wait, and look for a test that fails: `python -m benchmarks.mutations`.

Places are found in the source, so that the list is never older than it. Each one is removed in a
copy of the tree, where the tests of that file run until the first failure: first the one that
failed last time, by the result file. What survives is equivalent, with the reason below, or a
missing test.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, markdown_table, write_results
from benchmarks.mutations._equivalent import EQUIVALENT
from benchmarks.mutations._sites import Site, find_sites

ROOT = RESULTS.parents[1]
NAME = "mutations"
LIMIT_S = 240
_TESTS = "tests/techniques"
_RACES = (f"{_TESTS}/test_offloading_races.py",)
_TABLES = (*_RACES, f"{_TESTS}/test_host_table.py")
_WEIGHTS = (*_RACES, f"{_TESTS}/test_offloading.py", f"{_TESTS}/test_offloading_complaints.py")
TESTS = {
    "copies": _RACES,
    "stashes": (*_RACES, f"{_TESTS}/test_offloaded_activations_limits.py"),
    "activations": (*_RACES, f"{_TESTS}/test_offloaded_activations_limits.py"),
    "host_table": _TABLES,
    "row_updates": _TABLES,
    "updates_in_backward": (*_RACES, f"{_TESTS}/test_offloaded_updates_in_backward.py"),
    "held_gradients": (*_RACES, f"{_TESTS}/test_in_backward_limits.py"),
    "kernel": (*_RACES, f"{_TESTS}/test_linear_cross_entropy.py"),
}


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Copy what git knows of, and give its folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    with tempfile.TemporaryDirectory(prefix="mutations_") as folder:
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, target)
        yield Path(folder)


def failing_test(tree: Path, tests: Sequence[str], limit_s: float = LIMIT_S) -> str:
    """Run tests until one fails.

    Args:
        tree: Where.
        tests: Files or ids.
        limit_s: Time after which they count as failed.

    Returns:
        The test that failed, empty if all pass.

    Raises:
        RuntimeError: If pytest itself cannot run them.
    """
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-m", "not gpu and not exhaustive"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=tree,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    if done.returncode == 0:
        return ""
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" ", 1)[1].split(" - ")[0]
    raise RuntimeError(f"no tests ran: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def run(sites: Sequence[Site], known: dict[str, str]) -> list[dict[str, Any]]:
    """Remove one after the other.

    Args:
        sites: What to remove.
        known: The test that failed last time, by name.

    Returns:
        For each one its place, the test that failed, and a reason why it is equivalent.

    Raises:
        RuntimeError: If tests fail without a mutation.
    """
    found = []
    with copied_tree() as tree:
        for tests in sorted({tests_of(site) for site in sites}):
            if failed := failing_test(tree, tests):
                raise RuntimeError(f"fails as it is: {failed}")
        for site in sites:
            path, source = tree / site.file, (tree / site.file).read_bytes()
            path.write_bytes(site.mutate(source))
            try:
                killer = _killer(tree, site, known.get(site.name, ""))
            finally:
                path.write_bytes(source)
            reason = "" if killer else EQUIVALENT.get(site.name, "")
            found.append({"name": site.name, "killed_by": killer, "equivalent": reason})
            print(f"{site.name}: {killer or reason or 'SURVIVES'}", flush=True)
    return found


def tests_of(site: Site) -> tuple[str, ...]:
    """Return the files of the tests of a place."""
    return TESTS.get(Path(site.file).stem, _WEIGHTS)


def _killer(tree: Path, site: Site, last: str) -> str:
    name = last.partition("[")[0]
    if name and (tree / name.partition("::")[0]).is_file():
        try:
            if killer := failing_test(tree, [name]):
                return killer
        except RuntimeError:
            pass  # the test has another name by now
    return failing_test(tree, tests_of(site))


def _known(folder: Path) -> dict[str, str]:
    path = folder / f"{NAME}.json"
    if not path.is_file():
        return {}
    found = json.loads(path.read_text("utf-8"))["mutations"]
    return {each["name"]: each["killed_by"] for each in found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line.

    Args:
        arguments: Those after the name; ``None`` for what was typed.

    Returns:
        1 if any mutation survives without a reason.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="part of the names of some places")
    parser.add_argument("--list", action="store_true", help="only list the places")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    sites = find_sites(ROOT)
    names = [site.name for site in sites]
    if unknown := EQUIVALENT.keys() - {*names}:
        raise ValueError(f"equivalent, but not there: {sorted(unknown)}")
    sites = [site for site in sites if options.only in site.name]
    if options.list:
        print("\n".join(site.name for site in sites))
        return 0
    found = run(sites, _known(RESULTS))
    survivors = [each for each in found if not each["killed_by"] and not each["equivalent"]]
    if not options.only:
        write_results(NAME, {"mutations": found}, make_text(found), folder=options.results)
    return 1 if survivors else 0


def make_text(found: Sequence[dict[str, Any]]) -> str:
    """Lay out the result.

    Args:
        found: As `run` gives it.

    Returns:
        A sentence and a table.
    """
    states = Counter(
        "fail" if each["killed_by"] else "equivalent" if each["equivalent"] else "survive"
        for each in found
    )
    rows = [[each["name"].replace("|", "\\|"), _said(each).replace("|", "\\|")] for each in found]
    return (
        f"Of {len(found)} waits, each removed alone, {states['fail']} make a test fail, "
        f"{states['equivalent']} change nothing that can be seen, and {states['survive']} "
        "survive.\n\n" + markdown_table(["removed", "test that fails"], rows)
    )


def _said(found: dict[str, Any]) -> str:
    if found["killed_by"]:
        name = found["killed_by"].removeprefix(f"{_TESTS}/")
        return f"`{name}`" if "::" in name else str(name)
    return f"equivalent: {found['equivalent']}" if found["equivalent"] else "**none**"


if __name__ == "__main__":
    sys.exit(main())
