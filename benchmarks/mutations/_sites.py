"""Every place of the product where somebody waits for something, found in the source."""

import ast
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

TECHNIQUES = "lightning_memsave/techniques"
FILES = (
    "host_memory.py",
    "offloading/*.py",
    "optimizer_in_backward/held_gradients.py",
    "chunked_cross_entropy/kernel.py",
    "low_bit_optimizer/bitsandbytes_optimizers.py",
)
# An identifier with one of these words waits, lets somebody wait later, or is what one waits for.
_WORDS = {"wait", "finish", "synchronize", "landing", "result", "record", "queue", "finalize"}
_NAMES = {
    *("_let_go", "let_go", "_let_all_go", "_end_leaving", "bring_up_to_date", "begin_update"),
    *("_forget_error",),
}
_NO_WAITS = {"nothing_to_wait_for", "set_result", "_count_landing"}
_COPIES = {"to_device", "send_to_host"}
_NOTHING = "(lambda *_, **__: None)"
_DONE = "(lambda *_, **__: __import__('torch').cuda.Event(blocking=True))"  # it is of nothing
_IN_PLACE_OF = {
    "record_event": _DONE,
    "_record": _DONE,
    "landing": "(lambda *_, **__: lambda: None)",
    "stream": "(lambda *_, **__: __import__('contextlib').nullcontext())",
}


@dataclass(frozen=True)
class Site:
    """A place in the source, and what is there instead when nobody waits.

    Args:
        file: Relative to the repository.
        function: Qualified name of the function around it.
        text: The line, or the expression.
        number: Among those of the same text in this function.
        line: Number of its first line.
        start: Offset in the file, in bytes.
        end: Its end.
        replacement: What stands there instead.
    """

    file: str
    function: str
    text: str
    number: int
    line: int
    start: int
    end: int
    replacement: str

    @property
    def name(self) -> str:
        """What it is called in the table."""
        again = f" ({self.number + 1})" if self.number else ""
        return f"{Path(self.file).stem}: {self.function}: `{self.text}`{again}"

    def mutate(self, source: bytes) -> bytes:
        """Return the source without it."""
        return source[: self.start] + self.replacement.encode() + source[self.end :]


# Memory that has to stay until a copy of it is done: text that is there exactly once.
HOLDS = (
    ("offloading/copies", "append((source, event))", "append((source.new_empty(0), event))"),
    ("offloading/activations", "sources), sources, place))", "sources), [], place))"),
    ("optimizer_in_backward/held_gradients", "_Transfer(grads)", "_Transfer([])"),
)


def find_sites(root: Path) -> list[Site]:
    """Find all places, in the order of the files.

    Args:
        root: The repository.

    Returns:
        The places.

    Raises:
        ValueError: If what holds memory is not there exactly once.
    """
    found: list[Site] = []
    for pattern in FILES:
        for path in sorted((root / TECHNIQUES).glob(pattern)):
            found += _Finder(str(path.relative_to(root)), path.read_bytes()).find()
    for name, text, replacement in HOLDS:
        file = f"{TECHNIQUES}/{name}.py"
        source = (root / file).read_bytes()
        if source.count(text.encode()) != 1:
            raise ValueError(f"{text!r} is there {source.count(text.encode())} times in {file}")
        start = source.index(text.encode())
        end = start + len(text.encode())
        line = source[:start].count(b"\n") + 1
        found.append(Site(file, "hold", text, 0, line, start, end, replacement))
    return found


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: bytes) -> None:
        self._file, self._source = file, source
        self._tree = ast.parse(source)
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._functions: list[str] = []
        self._own = {node.name for node in self._tree.body if isinstance(node, ast.FunctionDef)}
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._found: list[Site] = []

    def find(self) -> list[Site]:
        self.visit(self._tree)
        return self._found

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node)

    def _inside(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self._functions.append(node.name)
        for child in node.body:
            self.visit(child)
        self._functions.pop()

    def visit_Call(self, node: ast.Call) -> None:
        name = _name_of(node.func)
        if _is_wait(name) or ast.unparse(node.func) == "torch.cuda.stream":
            self._add(node.func, ast.unparse(node), _IN_PLACE_OF.get(name, _NOTHING))
        elif isinstance(node.func, ast.Call) and _name_of(node.func.func) in _COPIES:
            # A copy, and a wait for it.
            self._add(node, ast.unparse(node), ast.unparse(node.func))
        else:
            self.visit(node.func)
        if name == "queue":
            return
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self._visit_given(argument)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self._visit_given(node.value)

    # Functions that somebody else will call.
    def _visit_given(self, node: ast.expr) -> None:
        is_method = isinstance(node, ast.Attribute)
        is_function = isinstance(node, ast.Name) and node.id in self._own
        if (is_method or is_function) and _is_wait(_name_of(node)):
            self._add(node, ast.unparse(node), _NOTHING)
        else:
            self.visit(node)

    def _add(self, node: ast.expr, text: str, replacement: str) -> None:
        function = ".".join(self._functions)
        number = self._numbers[function, text]
        self._numbers[function, text] += 1
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        end = self._lines[node.end_lineno - 1] + node.end_col_offset
        line = node.lineno
        self._found.append(Site(self._file, function, text, number, line, start, end, replacement))


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_wait(name: str) -> bool:
    is_named = name in _NAMES or not _WORDS.isdisjoint(re.split("_+", name))
    return is_named and name not in _NO_WAITS
