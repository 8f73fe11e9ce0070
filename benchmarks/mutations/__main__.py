"""Remove each wait, and look for a test that fails: `python -m benchmarks.mutations`.

Places are found in the source, so that the list is never older than it. Each one is removed in a
copy of the tree, where first the test runs that failed last time, by the result file; if there is
none any more, all those that run its line, until the first failure. What survives is equivalent,
with the reason in `_equivalent.py`, or a missing test.
"""

import argparse
import compileall
import contextlib
import json
import os
import py_compile
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from coverage import CoverageData

from benchmarks._common import RESULTS, markdown_table, write_results
from benchmarks.mutations._equivalent import EQUIVALENT
from benchmarks.mutations._sites import Site, find_sites

ROOT = RESULTS.parents[1]
NAME = "mutations"
LIMIT_S = 1800  # for tests that hang without a wait; a busy machine is far below it
_FOLDER = "tests/techniques"
TESTS = [
    f"{_FOLDER}/test_{name}.py"
    for name in (
        *("offloading_races", "offloading", "offloading_complaints", "host_table"),
        *(
            "offloading_host",
            "offloaded_activations_limits",
            "offloaded_updates_in_backward",
            "in_backward_limits",
            "low_bit_step",
        ),
    )
]
GPU_TESTS = [f"{_FOLDER}/test_offloading_complaints.py"]
_OPTIONS = ["-q", "--tb=no", "-p", "no:cacheprovider", "-m", "not gpu and not exhaustive"]


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
        # Compiled files that are valid for the bytes of a source, not for its time and size.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(Path(folder, "lightning_memsave"), quiet=2, invalidation_mode=mode)
        yield Path(folder)


def failures(tree: Path, arguments: Sequence[str], limit_s: float = LIMIT_S) -> list[str]:
    """Run pytest in a fork of this process, which has imported torch already.

    Args:
        tree: Where.
        arguments: Files, ids or options.
        limit_s: Time after which it is stopped, which is a failure, too.

    Returns:
        The tests that fail.

    Raises:
        RuntimeError: If pytest itself cannot run them.
    """
    exit_code, text = _run_pytest(tree, arguments, limit_s)
    if exit_code is None:
        return [f"stopped after {limit_s:.0f} s"]
    failed = _failures_in(text)
    if exit_code and not failed:
        raise RuntimeError(f"no tests ran: {text[-2000:]}")
    return failed


def _run_pytest(
    tree: Path, arguments: Sequence[str], limit_s: float = LIMIT_S
) -> tuple[int | None, str]:
    output = tree / "output.txt"
    process = get_context("fork").Process(target=_run_here, args=(tree, output, arguments))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        process.join()
        return None, ""
    return process.exitcode, output.read_text("utf-8")


def _failures_in(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return [line.split(" ", 1)[1].split(" - ")[0] for line in lines]


def failures_on_gpu(tree: Path, command: Sequence[str]) -> list[str]:
    """Run tests that need a GPU.

    Args:
        tree: Where.
        command: What runs Python beside one.

    Returns:
        The tests that fail.
    """
    options = ["-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-m", "gpu"]
    done = subprocess.run(
        [*command, *options, *GPU_TESTS], cwd=tree, capture_output=True, text=True, check=False
    )
    return _failures_in(done.stdout)


def _run_here(tree: Path, output: Path, arguments: Sequence[str]) -> None:
    os.chdir(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    with output.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        code = int(pytest.main([*_OPTIONS, *arguments]))
        file.flush()
    os._exit(code)


def find_tests(tree: Path, sites: Sequence[Site]) -> list[tuple[Site, list[str]]]:
    """Run all tests, and note which ones run which line.

    Args:
        tree: Where.
        sites: What will be removed.

    Returns:
        Each place, and its tests that pass, in the order in which they ran.
    """
    options = ["--cov=lightning_memsave", "--cov-context=test", "--cov-report="]
    failed = failures(tree, [*options, *TESTS], limit_s=3600)
    print(f"without a mutation, beside coverage, fail: {failed}", flush=True)
    data = CoverageData(str(tree / ".coverage"))
    data.read()
    found = []
    for site in sites:
        contexts = data.contexts_by_lineno(str((tree / site.file).resolve())).get(site.line, [])
        names = {context.removesuffix("|run") for context in contexts if context.endswith("|run")}
        names -= {*failed}
        tests = sorted(names, key=lambda name: TESTS.index(name.partition("::")[0]))
        found.append((site, tests))
    return found


def run(
    sites: Sequence[Site], known: dict[str, str], gpu: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Remove one after the other.

    Args:
        sites: What to remove.
        known: The test that failed last time, by name.
        gpu: What runs Python beside a GPU, for lines that no other test runs.

    Returns:
        For each one its place, the test that failed, and a reason why it is equivalent.
    """
    found: dict[str, str] = {}
    with copied_tree() as tree:
        chosen = {known[site.name] for site in sites if site.name in known}
        chosen &= {*_run_pytest(tree, ["--collect-only", *TESTS])[1].splitlines()}
        if chosen:
            chosen -= {*failures(tree, sorted(chosen), limit_s=3600)}
        for site in sites:
            if (test := known.get(site.name)) in chosen:
                with removed(tree, site):
                    found[site.name] = _first_failure(tree, [test or ""])
                print(f"{site.name}: {found[site.name] or f'no longer {test}'}", flush=True)
        others = [site for site in sites if not found.get(site.name)]
        for site, tests in find_tests(tree, others) if others else ():
            with removed(tree, site):
                found[site.name] = _first_failure(tree, tests, gpu)
            said = found[site.name] or EQUIVALENT.get(site.name, "SURVIVES")
            print(f"{site.name}: {said} ({len(tests)} tests)", flush=True)
    return [
        {
            "name": site.name,
            "killed_by": found[site.name],
            "equivalent": "" if found[site.name] else EQUIVALENT.get(site.name, ""),
        }
        for site in sites
    ]


@contextmanager
def removed(tree: Path, site: Site) -> Iterator[None]:
    """Remove something inside."""
    path, source = tree / site.file, (tree / site.file).read_bytes()
    path.write_bytes(site.mutate(source))
    try:
        yield
    finally:
        path.write_bytes(source)


def _first_failure(tree: Path, tests: Sequence[str], gpu: Sequence[str] = ()) -> str:
    if tests:
        return next(iter(failures(tree, ["-x", *tests])), "")
    return next(iter(failures_on_gpu(tree, gpu)), "") if gpu else ""


def _former(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / f"{NAME}.json"
    found = json.loads(path.read_text("utf-8"))["mutations"] if path.is_file() else []
    return {each["name"]: each for each in found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line.

    Args:
        arguments: Those after the name; ``None`` for what was typed.

    Returns:
        1 if any mutation survives without a reason.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="parts of names; others stay as they were found")
    parser.add_argument("--list", action="store_true", help="only list the places")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--gpu", type=shlex.split, default=[], help="runs Python beside a GPU, also a virtual one"
    )
    options = parser.parse_args(arguments)
    sites = find_sites(ROOT)
    names = [site.name for site in sites]
    if unknown := EQUIVALENT.keys() - {*names}:
        raise ValueError(f"equivalent, but not there: {sorted(unknown)}")
    chosen = [site for site in sites if any(part in site.name for part in options.only or [""])]
    if options.list:
        print("\n".join(site.name for site in chosen))
        return 0
    torch.set_num_threads(1)
    former = _former(options.results)
    likely = {n: each["killed_by"] or each.get("expected", "") for n, each in former.items()}
    known = {name: test for name, test in likely.items() if "::" in test}
    former |= {each["name"]: each for each in run(chosen, known, options.gpu)}
    found = [former[name] for name in names if name in former]
    if len(found) == len(names):
        # Not what was typed: others may be from an earlier run, and the GPU is of one machine.
        said = {"command": "python -m benchmarks.mutations --gpu PYTHON"}
        text = make_text(found)
        write_results(NAME, {"mutations": found}, text, folder=options.results, put_together=said)
    return int(any(not each["killed_by"] and not each["equivalent"] for each in found))


def make_text(found: Sequence[dict[str, Any]]) -> str:
    """Lay out the result.

    Args:
        found: As `run` gives it.

    Returns:
        A sentence and a table.
    """
    states = Counter(map(_state, found))
    rows = [[each["name"].replace("|", "\\|"), _said(each).replace("|", "\\|")] for each in found]
    return (
        f"Of {len(found)} waits, each removed alone, {states['fail']} make a test fail, "
        f"{states['equivalent']} change nothing that can be seen, and {states['survive']} "
        f"survive. Not run: {states['not run']}.\n\n"
        + markdown_table(["removed", "test that fails"], rows)
    )


def _state(found: dict[str, Any]) -> str:
    if found["killed_by"]:
        return "fail"
    if found["equivalent"]:
        return "equivalent"
    return "not run" if found.get("expected") else "survive"


def _said(found: dict[str, Any]) -> str:
    if found["killed_by"]:
        name = found["killed_by"].removeprefix(f"{_FOLDER}/")
        return f"`{name}`" if "::" in name else str(name)
    if expected := found.get("expected"):
        return f"not run; expected: `{expected.removeprefix(f'{_FOLDER}/')}`"
    return f"equivalent: {found['equivalent']}" if found["equivalent"] else "**none**"


if __name__ == "__main__":
    sys.exit(main())
