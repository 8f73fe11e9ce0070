"""The structure that DESIGN describes, read from the source."""

import ast
import re
from pathlib import Path

import pytest

import lightning_memsave
from lightning_memsave.techniques import TECHNIQUES
from tests.cases import CASES

PACKAGE = Path(lightning_memsave.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))

# What each part may import of the package itself, beside its own files.
ALLOWED = {
    "errors": set(),
    "units": {"errors"},
    "core": {"errors", "units"},
    "techniques": {"errors", "units", "core"},
    "measure": {"errors", "units", "core"},
    "planning": {"errors", "units", "core", "techniques", "measure"},
    "host": {"errors", "units", "core"},
    "callbacks": {"errors", "units", "core", "techniques", "measure", "planning", "host"},
    "modules": {
        "errors",
        "units",
        "core",
        "techniques",
        "measure",
        "planning",
        "host",
        "callbacks",
    },
    "analysis": {
        "errors",
        "units",
        "core",
        "techniques",
        "measure",
        "planning",
        "host",
        "callbacks",
        "modules",
    },
    "cli": {
        "errors",
        "units",
        "core",
        "techniques",
        "measure",
        "planning",
        "callbacks",
        "analysis",
    },
    "__main__": {"cli"},
}
MAY_IMPORT_LIGHTNING = {"host", "callbacks", "modules", "analysis", "cli"}
ONLY_ON_FIRST_USE = {"bitsandbytes", "transformers", "pynvml", "peft"}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.fixture(scope="module")
def trees():
    return {path: ast.parse(path.read_text()) for path in FILES}


class TestEachFile:
    """Each test names all files that break its rule."""

    def test_imports_point_one_way(self, trees):
        wrong = {}
        for path, tree in trees.items():
            part = part_of(path)
            inside = {n for n in imported(tree) if n.startswith(PACKAGE.name)}
            parts = {n.split(".")[1] for n in inside if "." in n}
            if part != "__init__" and (upwards := parts - ALLOWED[part] - {part}):
                wrong[name_of(path)] = upwards
        assert wrong == {}

    def test_only_the_lightning_layer_imports_lightning(self, trees):
        wrong = {
            name_of(path)
            for path, tree in trees.items()
            if part_of(path) not in MAY_IMPORT_LIGHTNING
            and {n.split(".")[0] for n in imported(tree)} & {"lightning", "pytorch_lightning"}
        }
        assert wrong == set()

    def test_heavy_packages_are_imported_on_first_use(self, trees):
        wrong = {}
        for path, tree in trees.items():
            statements = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
            roots = {n.split(".")[0] for s in statements for n in imported(s)}
            if heavy := roots & ONLY_ON_FIRST_USE:
                wrong[name_of(path)] = heavy
        assert wrong == {}

    def test_is_short_enough_to_read(self):
        lengths = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
        assert {name: length for name, length in lengths.items() if length > 500} == {}

    def test_says_what_it_is_for(self, trees):
        assert [name_of(path) for path, tree in trees.items() if not ast.get_docstring(tree)] == []


def test_private_names_of_lightning_stay_in_host():
    private = re.compile(r"trainer\.(?:\w+\.)*_\w+")
    found = {
        f"{path.relative_to(PACKAGE)}: {match}"
        for path in FILES
        if part_of(path) != "host"
        for match in private.findall(path.read_text())
    }
    assert found == set()


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda t: t.name)
def test_each_technique_has_a_case_a_page_and_a_changelog_line(technique):
    assert technique.name in CASES
    pages = ROOT / "docs" / "techniques"
    assert (pages / f"{technique.name}.md").read_text().startswith(f"# {technique.name}\n")
    assert f"({technique.name}.md)" in (pages / "README.md").read_text()
    assert f"`{technique.__name__}`" in (ROOT / "CHANGELOG.md").read_text()
    assert technique.source
    assert technique.__doc__
    for section in ("Args:", "Raises:", "Note:", "Example:", "References:"):
        assert section in technique.__doc__
