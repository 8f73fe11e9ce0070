"""The structure that DESIGN describes, read from the source; each rule is seen to break."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lightning_memsave
from lightning_memsave.techniques.registry import TECHNIQUES
from tests.cases import CASES

PACKAGE = Path(lightning_memsave.__file__).parent
ROOT = PACKAGE.parent

# A room may import from those before it, and from none beside it.
ROOMS = (
    {"errors"},
    {"units"},
    {"core"},
    {"techniques", "measure", "trainer"},
    {"prediction"},
    {"explain", "targets"},
    {"planning", "report"},
    {"callbacks"},
    {"analysis", "modules"},
    {"cli"},
    {"__main__"},
)
MAY_IMPORT_LIGHTNING = {"trainer", "modules", "cli"}
ONLY_ON_FIRST_USE = {"bitsandbytes", "transformers", "pynvml", "peft"}
MAX_LINES = 500

Sources = Mapping[str, str]
"""The text of each file, by the name of its module without the package: ``"core.memory"``."""


def package_sources() -> dict[str, str]:
    sources = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        sources[".".join(parts).removesuffix("__init__").rstrip(".")] = path.read_text()
    return sources


SOURCES = package_sources()


def imports_of(tree: ast.AST, sources: Sources) -> Iterator[tuple[str, str]]:
    """Give (module, name) of what a file imports from the package; the name is empty for all."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
            module = (node.module or "").removeprefix(PACKAGE.name).lstrip(".")
            for alias in node.names:
                inner = f"{module}.{alias.name}".lstrip(".")
                yield (inner, "") if inner in sources else (module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith(f"{PACKAGE.name}."):
                    yield alias.name.removeprefix(f"{PACKAGE.name}."), ""


def graph_of(sources: Sources) -> dict[str, set[str]]:
    return {
        module: {other for other, _ in imports_of(ast.parse(text), sources) if other} - {module}
        for module, text in sources.items()
        if module
    }


def room_of(module: str) -> str:
    return module.partition(".")[0]


def floor_of(module: str) -> int:
    return next(i for i, rooms in enumerate(ROOMS) if room_of(module) in rooms)


def packages_in(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def imports_upwards(sources: Sources) -> set[tuple[str, str]]:
    return {
        (module, other)
        for module, others in graph_of(sources).items()
        for other in others
        if room_of(module) != room_of(other) and floor_of(other) >= floor_of(module)
    }


def circle(sources: Sources) -> list[str]:
    try:
        TopologicalSorter(graph_of(sources)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def imports_lightning(sources: Sources) -> set[str]:
    return {
        module
        for module, text in sources.items()
        if module
        and room_of(module) not in MAY_IMPORT_LIGHTNING
        and packages_in(ast.parse(text)) & {"lightning", "pytorch_lightning"}
    }


def imports_heavy(sources: Sources) -> set[str]:
    found = set()
    for module, text in sources.items():
        at_top = [n for n in ast.parse(text).body if isinstance(n, ast.Import | ast.ImportFrom)]
        if packages_in(ast.Module([*at_top], [])) & ONLY_ON_FIRST_USE:
            found.add(module)
    return found


def too_long(sources: Sources) -> set[str]:
    return {m for m, text in sources.items() if len(text.splitlines()) > MAX_LINES}


def without_purpose(sources: Sources) -> set[str]:
    return {m for m, text in sources.items() if not ast.get_docstring(ast.parse(text))}


def private_with_one_importer(sources: Sources) -> set[str]:
    graph = graph_of(sources)
    return {
        module
        for module in graph
        if module.rpartition(".")[2].startswith("_")
        and module != "__main__"
        and sum(module in others for others in graph.values()) < 2
    }


def private_names_of_others(sources: Sources) -> set[tuple[str, str]]:
    found = set()
    for module, text in sources.items():
        folder = module.rpartition(".")[0]
        for other, name in imports_of(ast.parse(text), sources):
            parts = [part for part in (*other.split("."), name) if part.startswith("_")]
            if parts and other.rpartition(".")[0] != folder and other != folder:
                found.add((module, f"{other}.{name}".rstrip(".")))
    return found


def test_imports_point_one_way():
    assert imports_upwards(SOURCES) == set()
    assert imports_upwards({"core.a": "from lightning_memsave.callbacks.b import c"}) == {
        ("core.a", "callbacks.b")
    }
    assert imports_upwards({"explain.a": "import lightning_memsave.targets.b"}) == {
        ("explain.a", "targets.b")
    }


def test_no_files_import_each_other():
    assert circle(SOURCES) == []
    two = {"core.a": "from lightning_memsave.core import b", "core.b": "import lightning_memsave"}
    assert circle(two) == []
    assert circle({**two, "core.b": "from lightning_memsave.core.a import c"})


def test_only_rooms_at_a_trainer_import_lightning():
    assert imports_lightning(SOURCES) == set()
    assert imports_lightning({"core.a": "def f():\n    import lightning.pytorch"}) == {"core.a"}


def test_heavy_packages_are_imported_on_first_use():
    assert imports_heavy(SOURCES) == set()
    assert imports_heavy({"core.a": "from transformers.utils import x"}) == {"core.a"}


def test_files_are_short_enough_to_read():
    assert too_long(SOURCES) == set()
    assert too_long({"core.a": "\n" * (MAX_LINES + 1)}) == {"core.a"}


def test_files_say_what_they_are_for():
    assert without_purpose(SOURCES) == set()
    assert without_purpose({"core.a": "x = 1"}) == {"core.a"}


def test_private_modules_serve_more_than_one():
    assert private_with_one_importer(SOURCES) == set()
    broken = {"core._a": "", "core.b": "from lightning_memsave.core._a import c"}
    assert private_with_one_importer(broken) == {"core._a"}


def test_private_names_stay_in_their_folder():
    assert private_names_of_others(SOURCES) == set()
    broken = {"core.a": "", "measure.b": "from lightning_memsave.core.a import _c"}
    assert private_names_of_others(broken) == {("measure.b", "core.a._c")}


def private_names_of_lightning(sources: Sources) -> set[tuple[str, str]]:
    found = set()
    for module, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                chain = ast.unparse(node)
                if chain.startswith("trainer.") and not node.attr.startswith("__"):
                    found.add((module, chain))
    return {(module, chain) for module, chain in found if room_of(module) != "trainer"}


def test_private_names_of_lightning_stay_in_their_room():
    assert private_names_of_lightning(SOURCES) == set()
    broken = {"callbacks.a": "trainer.fit_loop._data_source"}
    assert private_names_of_lightning(broken) == {("callbacks.a", "trainer.fit_loop._data_source")}


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
