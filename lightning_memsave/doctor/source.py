"""The user's own methods of a module, as syntax trees with their files and lines."""

import ast
import functools
import inspect
import linecache
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import nn

from lightning_memsave.core.files import is_installed

_LIBRARIES = frozenset(
    {
        *("lightning", "pytorch_lightning", "lightning_fabric", "lightning_memsave"),
        *("torch", "torchvision", "torchaudio", "torchmetrics"),
        *("transformers", "accelerate", "peft", "diffusers", "bitsandbytes", "builtins"),
    }
)
STEP_HOOKS = (
    *("training_step", "on_train_batch_start", "on_train_batch_end"),
    *("on_before_backward", "backward", "on_after_backward", "on_before_zero_grad"),
    *("on_before_optimizer_step", "optimizer_step", "optimizer_zero_grad"),
    *("configure_gradient_clipping", "lr_scheduler_step"),
)
"""Hooks that run in each training step."""
EVALUATION_HOOKS = (
    *("validation_step", "on_validation_batch_start", "on_validation_batch_end"),
    *("test_step", "on_test_batch_start", "on_test_batch_end"),
)
"""Hooks that run for each batch of validation and test, without autograd."""


@dataclass(frozen=True, eq=False)
class Method:
    """A method that the user wrote."""

    name: str
    function: types.FunctionType
    tree: ast.FunctionDef
    file: str

    def resolve(self, node: ast.expr) -> Any:
        """Look up a dotted name in the globals of the method; ``None`` if there is none."""
        if isinstance(node, ast.Name):
            if node.id in self._local_names:
                return None
            builtins = self.function.__globals__.get("__builtins__", {})
            names = builtins if isinstance(builtins, dict) else vars(builtins)
            return self.function.__globals__.get(node.id, names.get(node.id))
        if isinstance(node, ast.Attribute):
            owner = self.resolve(node.value)
            # Attributes of other objects may be properties, which run code.
            is_static = isinstance(owner, types.ModuleType | type)
            return getattr(owner, node.attr, None) if is_static else None
        return None

    @functools.cached_property
    def _local_names(self) -> frozenset[str]:
        stored = (n for n in ast.walk(self.tree) if isinstance(n, ast.Name))
        names = {n.id for n in stored if isinstance(n.ctx, ast.Store)}
        return frozenset(names | {a.arg for a in ast.walk(self.tree) if isinstance(a, ast.arg)})


def own_methods(module: nn.Module) -> dict[str, Method]:
    """Find the methods of a module that no library defines, by name."""
    cls: Any = type(module)
    return _methods_of(cls)


@functools.lru_cache(maxsize=256)
def _methods_of(cls: Any) -> dict[str, Method]:
    found: dict[str, Method] = {}
    seen: set[str] = set()
    for base in cls.__mro__:
        for name, value in vars(base).items():
            if name not in seen and not is_library(base):
                method = _method(name, value)
                found |= {} if method is None else {name: method}
            seen.add(name)
    return found


def is_library(cls: type) -> bool:
    """Return whether a class belongs to torch, Lightning or another library that is not checked."""
    return cls.__module__.partition(".")[0] in _LIBRARIES


def is_in_package(cls: type) -> bool:
    """Return whether the code of a class is in an installed package."""
    return is_installed(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")


def _method(name: str, value: Any) -> Method | None:
    function = inspect.unwrap(getattr(value, "__func__", value))
    if not isinstance(function, types.FunctionType):
        return None
    file = function.__code__.co_filename
    for node in _functions_in(file, "".join(linecache.getlines(file))):
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        if node.name == function.__name__ and first == function.__code__.co_firstlineno:
            return Method(name, function, node, file)
    return None


@functools.lru_cache(maxsize=64)
def _functions_in(file: str, text: str) -> tuple[ast.FunctionDef, ...]:
    try:
        tree = ast.parse(text, file)
    except SyntaxError:  # the file has changed since it was imported
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@dataclass(frozen=True)
class Reached:
    """A method that hooks call."""

    method: Method
    in_each: bool


def reached_from(module: nn.Module, hooks: Sequence[str]) -> list[Reached]:
    """Follow the calls of a module's hooks to its own methods."""
    methods = own_methods(module)
    found: dict[str, bool] = {}
    waiting = [(name, True) for name in hooks if name in methods]
    while waiting:
        name, in_each = waiting.pop(0)
        if name in found and found[name] >= in_each:
            continue
        found[name] = in_each
        tree = methods[name].tree
        always = set(map(id, always_run(tree.body)))
        for node in ast.walk(tree):
            called = _own_call(node)
            if called in methods and called != name:
                waiting.append((called, in_each and id(node) in always))
    return [Reached(methods[name], in_each) for name, in_each in found.items()]


def _own_call(node: ast.AST) -> str:
    if isinstance(node, ast.Call) and is_self(node.func):
        return "forward"
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.attr if is_method and is_self(node.func.value) else ""  # type: ignore[attr-defined]


def is_self(node: ast.AST) -> bool:
    """Return whether a node is the name ``self``."""
    return isinstance(node, ast.Name) and node.id == "self"


def own_attribute(node: ast.AST) -> str:
    """Return the attribute of ``self`` in an expression: ``"x"`` of ``self.x[0].y``; or empty."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute) and is_self(node.value):
            return node.attr
        node = node.value
    return ""


def calls_in(nodes: Iterable[ast.AST], *names: str) -> Iterator[ast.Call]:
    """Give calls of methods with one of these names, such as ``x.backward()``."""
    for node in nodes:
        if is_method_call(node) and node.func.attr in names:  # type: ignore[attr-defined]
            yield node


def is_method_call(node: ast.AST) -> TypeGuard[ast.Call]:
    """Return whether a node calls an attribute of something."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)


def keyword_of(call: ast.Call, name: str) -> Any:
    """Return the literal value of a keyword argument; ``None`` if it is absent or computed."""
    for keyword in call.keywords:
        if keyword.arg == name and isinstance(keyword.value, ast.Constant):
            return keyword.value.value
    return None


def always_run(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Give the nodes of a function body that run in each call, under no condition."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for expression in _own_expressions(statement):
            yield from _always_evaluated(expression)
        if isinstance(statement, ast.For | ast.With):
            yield from always_run(statement.body)
        elif isinstance(statement, ast.Try):
            yield from always_run(statement.body)
            yield from always_run(statement.finalbody)
        if _may_leave(statement):
            return


# Of a compound statement only its head: the test, the iterable, the context.
def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.withitem):
            yield child.context_expr
        elif isinstance(child, ast.expr):
            yield child


def _always_evaluated(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    inside: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.Lambda):
        inside = ()
    elif isinstance(node, ast.IfExp):
        inside = (node.test,)
    elif isinstance(node, ast.BoolOp):
        inside = node.values[:1]
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        inside = (node.generators[0].iter,)
    for child in inside:
        yield from _always_evaluated(child)


def _may_leave(statement: ast.stmt) -> bool:
    leaves: tuple[type[ast.stmt], ...] = (ast.Return, ast.Raise)
    if not isinstance(statement, ast.For | ast.While):  # a loop may end early, and goes on here
        leaves = (*leaves, ast.Continue, ast.Break)
    return any(isinstance(node, leaves) for node in ast.walk(statement))
