"""The structure that DESIGN describes, read from the source; each rule is seen to break."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import lightning_memsave
from lightning_memsave.core.blocks import Block
from lightning_memsave.core.technique import Handle
from lightning_memsave.techniques.registry import entries, techniques
from lightning_memsave.trainer.private_names import COMMANDS, NAMES
from tests.cases import CASES

PACKAGE = Path(lightning_memsave.__file__).parent
ROOT = PACKAGE.parent

# A room may import from those before it, and from none beside it.
ROOMS = (
    {"errors"},
    {"units"},
    {"core"},
    {"blocks"},
    {"techniques", "measure", "trainer"},
    {"prediction"},
    {"doctor", "explain", "oom", "targets"},
    {"planning"},
    {"report"},
    {"callbacks"},
    {"api", "modules"},
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
OTHER_SOURCES = {m: text for m, text in SOURCES.items() if m != "trainer.private_names"}


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


def between_techniques(sources: Sources) -> set[tuple[str, str]]:
    """Imports of one technique's folder from another's; what they share is beside the folders."""
    folders = {m.rpartition(".")[0] for m in sources if m.startswith("techniques.")} - {
        "techniques"
    }
    return {
        (module, other)
        for module, others in graph_of(sources).items()
        for other in others
        if (own := module.rpartition(".")[0]) in folders
        and (theirs := other.rpartition(".")[0]) in folders
        and own != theirs
    }


def changes_steps(sources: Sources) -> set[str]:
    """Files that replace the step of an optimizer or hook into it."""
    pattern = re.compile(r"patch_method\([^)]*\b(step|zero_grad)\b|register_step_p")
    return {module for module, text in sources.items() if pattern.search(text)}


def imports_lightning(sources: Sources) -> set[str]:
    return {
        module
        for module, text in sources.items()
        if module
        and room_of(module) not in MAY_IMPORT_LIGHTNING
        and packages_in(ast.parse(text)) & {"lightning", "pytorch_lightning"}
    }


# Remedies whose offer depends on more than whether they are on.
MAY_LIST_ARGUMENTS = {"planning.candidates"}
ARGUMENTS = {entry.argument for entry in entries()}


def lists_of_arguments(sources: Sources) -> dict[str, list[str]]:
    """Give, by file, collections that name three arguments of the registry and more."""
    found: dict[str, list[str]] = {}
    for module, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            named: list[ast.expr | None] = []
            if isinstance(node, ast.Dict):
                named = list(node.keys)
            elif isinstance(node, ast.List | ast.Tuple | ast.Set):
                named = list(node.elts)
            names = [n.value for n in named if isinstance(n, ast.Constant) and n.value in ARGUMENTS]
            if len(names) >= 3:
                found.setdefault(module, []).extend(map(str, names))
    return found


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


def public_names() -> set[tuple[str, str]]:
    """Module and name of what users import, of its base classes, and of what it returns."""
    found: list[Any] = [getattr(lightning_memsave, name) for name in lightning_memsave.__all__]
    found += [inspect.signature(one).return_annotation for one in found if inspect.isfunction(one)]
    found += [Block, Handle]
    found += [base for one in found if inspect.isclass(one) for base in inspect.getmro(one)]
    return {(one.__module__, one.__qualname__) for one in found if hasattr(one, "__qualname__")}


def documented(sources: Sources, *, is_public: bool) -> dict[str, str]:
    """Docstrings of functions and classes by name, of those that users call or of all others."""
    public, found = public_names(), {}

    def visit(module: str, node: ast.AST, path: tuple[str, ...], is_own: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.ClassDef):
                visit(module, child, path, is_own)
                continue
            names = (*path, child.name)
            known = (f"{PACKAGE.name}.{module}", ".".join(names)) in public
            is_method = is_own and isinstance(node, ast.ClassDef)
            own = known or (is_method and not child.name.startswith("_"))
            if own is is_public:
                found[f"{module}.{'.'.join(names)}"] = ast.get_docstring(child) or ""
            visit(module, child, names, own)

    for module, text in sources.items():
        visit(module, ast.parse(text), (), False)
    return found


def with_sections(sources: Sources) -> set[str]:
    """Name what explains arguments, results and errors to nobody who imports it."""
    sections = re.compile(r"^(Args|Returns|Raises|Yields):$", re.MULTILINE)
    found = documented(sources, is_public=False)
    return {name for name, text in found.items() if sections.search(text)}


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


RULES: list[tuple[Any, dict[str, str], set[Any]]] = [
    (
        imports_upwards,
        {
            "core.a": "from lightning_memsave.callbacks.b import c",
            "explain.a": "import lightning_memsave.targets.b",
        },
        {("core.a", "callbacks.b"), ("explain.a", "targets.b")},
    ),
    (
        between_techniques,
        {
            "techniques.a.b": "from lightning_memsave.techniques.c import d",
            "techniques.c.d": "",
            "techniques.e": "",
        },
        {("techniques.a.b", "techniques.c.d")},
    ),
    (imports_lightning, {"core.a": "def f():\n    import lightning.pytorch"}, {"core.a"}),
    (imports_heavy, {"core.a": "from transformers.utils import x"}, {"core.a"}),
    (too_long, {"core.a": "\n" * (MAX_LINES + 1)}, {"core.a"}),
    (without_purpose, {"core.a": "x = 1"}, {"core.a"}),
    (
        private_with_one_importer,
        {"core._a": "", "core.b": "from lightning_memsave.core._a import c"},
        {"core._a"},
    ),
    (
        private_names_of_others,
        {"core.a": "", "measure.b": "from lightning_memsave.core.a import _c"},
        {("measure.b", "core.a._c")},
    ),
]


@pytest.mark.parametrize(
    ("offenders", "broken", "found"), RULES, ids=[r[0].__name__ for r in RULES]
)
def test_a_rule_holds_and_is_seen_to_break(offenders, broken, found):
    assert offenders(SOURCES) == set()
    assert offenders(broken) == found


def test_no_files_import_each_other():
    assert circle(SOURCES) == []
    two = {"core.a": "from lightning_memsave.core import b", "core.b": "import lightning_memsave"}
    assert circle(two) == []
    assert circle({**two, "core.b": "from lightning_memsave.core.a import c"})


def test_one_file_owns_the_steps_of_optimizers():
    # The former only looks on, to tell phases of a step apart.
    assert changes_steps(SOURCES) == {"measure.live_tensors", "techniques.optimizer_step"}
    assert changes_steps({"core.a": "patch_method(optimizer, step)"}) == {"core.a"}
    assert changes_steps({"core.a": "optimizer.register_step_pre_hook(f)"}) == {"core.a"}


def output_of(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_the_callback_comes_without_what_predicts_plans_and_explains():
    code = "import sys, lightning_memsave.callbacks.memsave; print(*sys.modules)"
    names = output_of(code).split()
    rooms = {name.split(".")[1] for name in names if name.startswith(f"{PACKAGE.name}.")}
    assert "techniques" in rooms
    assert not rooms & {"prediction", "planning", "explain", "oom", "report", "targets", "api"}


OFF_FIT = """
import lightning.pytorch as pl, sys, torch
from lightning_memsave import MemSaveCallback

class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def fit(callback):
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", max_steps=4, callbacks=[callback], **off)
    trainer.fit(Lit(), torch.utils.data.DataLoader(torch.ones(8, 4)))

callbacks = [MemSaveCallback(preset="off", predict=False, report=False) for _ in "12"]
fit(callbacks[0])
files = set()
sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))
fit(callbacks[1])
sys.setprofile(None)
print(*(file for file in files if "lightning_memsave" in file), sep=",")
"""


@pytest.mark.slow
def test_a_callback_with_everything_off_runs_few_files():
    files = output_of(OFF_FIT).strip().splitlines()[-1].split(",")
    assert any(file.endswith("callbacks/memsave.py") for file in files)
    assert len(files) <= 15, files


def test_only_what_users_call_explains_arguments():
    assert with_sections(SOURCES) == set()
    text = 'def f(a):\n    """Do it.\n\n    Args:\n        a: One.\n    """'
    assert with_sections({"core.a": text}) == {"core.a.f"}
    assert with_sections({"core.blocks": text.replace("def f(", "def find_blocks(")}) == set()


def test_what_users_call_has_docstrings():
    found = documented(SOURCES, is_public=True)
    missing = {n for n, text in found.items() if not text and "._" not in n}
    assert missing == {"modules.lightning_pytorch.CheckpointedTransformer"}  # the mixin's


def test_what_users_call_explains_what_it_returns():
    found = documented(SOURCES, is_public=True)
    for name in ("api.plan_memory", "core.technique.Technique.apply"):
        assert "Returns:" in found[name], "the walk finds what users call"
    for name in lightning_memsave.__all__:
        one = getattr(lightning_memsave, name)
        if inspect.isfunction(one):
            text = inspect.getdoc(one) or ""
            assert all(f"    {each}:" in text for each in inspect.signature(one).parameters), name
            assert "Returns:" in text, name


# Documented by Python in spite of their underscore, or a mark of FSDP1 that only it sets.
NOT_CHECKED = {"_fields", "_replace", "_getframe", "_fsdp_flattened", "_exit"}
# What the folder of a technique, or a room, uses for one argument only; the others for all.
ARGUMENT_OF_ROOM = {"prediction": "predict"} | dict.fromkeys(
    ("cli", "doctor", "explain", "modules", "oom", "report", "targets"), COMMANDS
)
ARGUMENT_OF_FOLDER = {
    technique.__module__.removeprefix(f"{PACKAGE.name}.").rpartition(".")[0]: technique.argument
    for technique in reversed(techniques())
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def names_made_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if is_self(node.value) else []


def private_names_used_in(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Give (name, whether it is one of ``self``)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr, is_self(node.value)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", "") or ""
            if not module.startswith(PACKAGE.name):
                parts = ".".join([module, *(alias.name for alias in node.names)]).split(".")
                yield from ((part, False) for part in parts if part != "_thread")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"getattr", "hasattr"}:
            yield from ((str(a.value), False) for a in node.args if isinstance(a, ast.Constant))


def foreign_private_names(sources: Sources) -> set[tuple[str, str]]:
    """Find what no file of the same folder makes; of ``self`` a base class may have made it."""
    trees = {module: ast.parse(text) for module, text in sources.items()}
    made: dict[str, set[str]] = {}
    for module, tree in trees.items():
        made.setdefault(module.rpartition(".")[0], set()).update(names_made_in(tree))
    everywhere = set().union(*made.values())
    return {
        (module, name)
        for module, tree in trees.items()
        for name, is_own in private_names_used_in(tree)
        if is_private(name)
        if name not in (everywhere if is_own else made[module.rpartition(".")[0]])
    }


def arguments_of(uses: Collection[tuple[str, str]]) -> dict[str, str]:
    """Give the only argument that needs a private name; empty for more than one."""
    users: dict[str, set[str]] = {}
    for module, name in uses:
        folder = ARGUMENT_OF_FOLDER.get(module.rpartition(".")[0], "")
        users.setdefault(name, set()).add(ARGUMENT_OF_ROOM.get(room_of(module), folder))
    found = {name: own - {COMMANDS} or own for name, own in users.items()}
    return {name: own.pop() if len(own) == 1 else "" for name, own in found.items()}


def test_private_names_of_others_are_checked_at_setup():
    listed = {(name, row.argument) for row in NAMES for name in row.names.split()}
    used = arguments_of(foreign_private_names(SOURCES)).items()
    covered = listed | {(name, argument) for name, argument in used if (name, "") in listed}
    assert {pair for pair in used - covered if pair[0] not in NOT_CHECKED} == set()
    gone = {name for name, _ in listed if not any(name in text for text in OTHER_SOURCES.values())}
    assert gone == set()


def test_the_search_finds_private_names_and_who_needs_them():
    broken = {
        "core.a": "from torch._x import y\nz._w\nself._base\ngetattr(z, '_v')",
        "core.b": "class A:\n  def f(self):\n    self._base = self._mine = 1\nb._mine",
    }
    assert foreign_private_names(broken) == {("core.a", n) for n in ("_x", "_w", "_v")}
    offloading, targets = ("techniques.offloading.a", "_x"), ("targets.a", "_x")
    assert arguments_of({targets}) == {"_x": COMMANDS}
    assert arguments_of({targets, offloading}) == {"_x": "offload"}
    assert arguments_of({offloading, ("techniques.attention_kernel.a", "_x")}) == {"_x": ""}
    assert arguments_of({offloading, ("core.a", "_x")}) == {"_x": ""}


@pytest.mark.parametrize("technique", techniques(), ids=lambda t: t.name)
def test_each_technique_has_a_case_a_page_and_a_changelog_line(technique):
    assert technique.name in CASES
    pages = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}
    overview = pages["techniques.md"]
    (row,) = re.findall(rf"^\| \[{technique.name}\]\((.*?)(?:#{technique.name})?\)", overview, re.M)
    heading = "# Offloading" if technique.name == "offloading" else f"## {technique.name}"
    assert heading in (pages[row] if row else overview).splitlines()
    assert f"`{technique.__name__}`" in (ROOT / "CHANGELOG.md").read_text()
    assert technique.__doc__
    for section in ("Args:", "Raises:", "Note:", "Example:", "References:"):
        assert section in technique.__doc__


def test_arguments_are_listed_in_the_registry_alone():
    assert set(lists_of_arguments(SOURCES)) == MAY_LIST_ARGUMENTS
    broken = {"callbacks.new": "NAMES = ('optimizer', 'precision', 'attention')"}
    assert lists_of_arguments(broken) == {"callbacks.new": ["optimizer", "precision", "attention"]}
