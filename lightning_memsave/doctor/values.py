"""Find the expressions of a step whose values are tensors of the device, with or without a graph.

Only what is certain is found: the outputs of the module's own submodules, what torch computes from
them, and the loss that ``training_step`` returns. Everything else is unknown.
"""

import ast
import enum
import types
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from lightning_memsave.doctor.source import Method, is_self, own_methods


class Kind(enum.IntEnum):
    """What is known of a value, or of what a container holds."""

    UNKNOWN = 0
    TENSOR = 1
    """A tensor on the device, without a graph."""
    GRAPH = 2
    """A tensor that autograd can differentiate: it holds on to its graph."""


Value: TypeAlias = Kind | tuple[Any, ...] | dict[str, Any]
"""The kind of a value; of a tuple or a dictionary, that of each item."""

_LOSS: dict[str, Any] = {"loss": Kind.GRAPH}
"""A loss, or a dictionary with one."""

_HOST_METHODS = frozenset(
    {
        *("item", "tolist", "numpy", "size", "dim", "numel", "stride", "backward", "keys"),
        *("data_ptr", "is_contiguous", "get_device", "element_size", "register_hook", "append"),
    }
)
_DETACHING = frozenset(
    {
        *("detach", "detach_", "argmax", "argmin", "argsort", "eq", "ne", "gt", "lt", "ge", "le"),
        *("isnan", "isfinite", "isinf", "long", "int", "bool", "round", "nonzero", "sign"),
        *("zeros_like", "ones_like", "rand_like", "randn_like", "full_like", "empty_like"),
    }
)
_WITH_INDICES = frozenset({"max", "min", "topk", "sort", "median", "mode", "kthvalue"})
_HOST_ATTRIBUTES = frozenset(
    {"shape", "dtype", "device", "ndim", "grad_fn", "requires_grad", "is_leaf", "is_cuda", "layout"}
)


def strongest(value: Value) -> Kind:
    """Return the strongest kind in a value."""
    if isinstance(value, tuple | dict):
        items = value if isinstance(value, tuple) else value.values()
        return max(map(strongest, items), default=Kind.UNKNOWN)
    return value


def _weaker(one: Value, other: Value) -> Value:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return tuple(map(_weaker, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: _weaker(one[name], other[name]) for name in one.keys() & other.keys()}
    if isinstance(one, tuple | dict) or isinstance(other, tuple | dict):
        return Kind.UNKNOWN
    return min(one, other)


def _weaker_than_graph(value: Value) -> Value:
    if isinstance(value, tuple):
        return tuple(map(_weaker_than_graph, value))
    if isinstance(value, dict):
        return {name: _weaker_than_graph(item) for name, item in value.items()}
    return min(value, Kind.TENSOR)


class StepValues:
    """The kinds of the expressions in a module's hooks and the methods that they call."""

    def __init__(self, module: nn.Module, hooks: Sequence[str], *, has_grad: bool) -> None:
        self.module = module
        self.methods = own_methods(module)
        self.modules = dict(module.named_modules(remove_duplicate=False))
        self._kinds: dict[ast.AST, Kind] = {}
        self._definitions: dict[ast.AST, ast.expr] = {}
        self._active: list[Method] = []
        for name in hooks:
            if name in self.methods:
                self._walk(self.methods[name], [], has_grad)

    def kind(self, node: ast.AST) -> Kind:
        """Return the kind of an expression."""
        return self._kinds.get(node, Kind.UNKNOWN)

    def definition(self, node: ast.expr) -> ast.expr:
        """Return the expression that a local name stands for; the node itself if it is another."""
        seen = 0
        while node in self._definitions and seen < len(self._definitions):
            node, seen = self._definitions[node], seen + 1
        return node

    def own_method(self, function: ast.expr) -> Method | None:
        """Return the user's own method that ``self(...)`` or ``self.method(...)`` calls."""
        if is_self(function):
            return self.methods.get("forward")
        is_own = isinstance(function, ast.Attribute) and is_self(function.value)
        return self.methods.get(function.attr) if is_own else None  # type: ignore[attr-defined]

    def note(self, node: ast.AST, value: Value) -> None:
        """Keep the kind of an expression; of several calls of its method, the strongest."""
        self._kinds[node] = max(self.kind(node), strongest(value))

    def define(self, node: ast.expr, expression: ast.expr) -> None:
        """Keep what a name stands for."""
        self._definitions[node] = expression

    def call(self, method: Method, arguments: Sequence[Value], has_grad: bool) -> Value:
        """Walk through a method that is called with these arguments, and return its result."""
        if method in self._active:  # it calls itself
            return Kind.UNKNOWN
        return self._walk(method, arguments, has_grad)

    def _walk(self, method: Method, arguments: Sequence[Value], has_grad: bool) -> Value:
        self._active.append(method)
        walk = _Walk(self, method, has_grad and not _is_without_grad(method))
        names = [a.arg for a in method.tree.args.args if a.arg != "self"]
        walk.names.update(zip(names, arguments, strict=False))
        walk.run(method.tree.body)
        self._active.pop()
        return walk.returned or Kind.UNKNOWN


def _is_without_grad(method: Method) -> bool:
    decorators = [d.func if isinstance(d, ast.Call) else d for d in method.tree.decorator_list]
    return any(
        isinstance(d, ast.Attribute) and d.attr in ("no_grad", "inference_mode") for d in decorators
    )


class _Walk(ast.NodeVisitor):
    """One pass through a method, in the order in which it runs; expressions give their value."""

    def __init__(self, values: StepValues, method: Method, has_grad: bool) -> None:
        self.values, self.method, self.has_grad = values, method, has_grad
        self.names: dict[str, Value] = {}
        self.expressions: dict[str, ast.expr] = {}
        self.returned: Value | None = None
        self.losses = _returned_losses(method) if has_grad else set()

    def run(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self.visit(statement)

    def visit(self, node: ast.AST) -> Value:
        found: Value | None = super().visit(node)
        value = Kind.UNKNOWN if found is None else found
        if isinstance(node, ast.Name) and node.id in self.expressions:
            self.values.define(node, self.expressions[node.id])
        if isinstance(node, ast.expr):
            self.values.note(node, value)
        return value

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.visit(node.value)
        for target in node.targets:
            self._assign(target, value, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign(node.target, self.visit(node.value), node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        name = node.target.id if isinstance(node.target, ast.Name) else ""
        before = self.names.get(name, Kind.UNKNOWN)
        self._assign(node.target, strongest((before, self.visit(node.value))), None)

    def visit_Return(self, node: ast.Return) -> None:
        value = Kind.UNKNOWN if node.value is None else self.visit(node.value)
        self.returned = value if self.returned is None else _weaker(self.returned, value)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._branches(node.body, node.orelse)

    def visit_For(self, node: ast.For) -> None:
        self._assign(node.target, strongest(self.visit(node.iter)), None)
        self._branches(node.body, [])

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._branches(node.body, [])

    def visit_Try(self, node: ast.Try) -> None:
        self._branches(node.body, [])
        self.run(node.finalbody)

    def visit_With(self, node: ast.With) -> None:
        before = self.has_grad
        for item in node.items:
            context = item.context_expr
            name = context.func if isinstance(context, ast.Call) else context
            word = name.attr if isinstance(name, ast.Attribute) else ""
            if word in ("no_grad", "inference_mode", "set_grad_enabled"):
                self.has_grad = False
            elif word == "enable_grad":
                self.has_grad = True
            self.visit(context)
        self.run(node.body)
        self.has_grad = before

    def _skip(self, node: ast.AST) -> None:
        """Leave out code that runs elsewhere, or in a scope of its own."""

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _skip  # noqa: N815
    visit_Lambda = visit_ListComp = visit_SetComp = visit_DictComp = _skip  # noqa: N815
    visit_GeneratorExp = _skip  # noqa: N815

    def visit_Name(self, node: ast.Name) -> Value:
        return self.names.get(node.id, Kind.UNKNOWN)

    def visit_Attribute(self, node: ast.Attribute) -> Value:
        kind = strongest(self.visit(node.value))
        if node.attr == "data":
            return min(kind, Kind.TENSOR)
        return Kind.UNKNOWN if node.attr in _HOST_ATTRIBUTES else kind

    def visit_Subscript(self, node: ast.Subscript) -> Value:
        found = self.visit(node.value)
        self.visit(node.slice)
        index = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(found, tuple) and isinstance(index, int) and index < len(found):
            item: Value = found[index]
            return item
        if isinstance(found, dict):
            return found.get(index, Kind.UNKNOWN) if isinstance(index, str) else Kind.UNKNOWN
        return strongest(found)

    def visit_BinOp(self, node: ast.BinOp) -> Value:
        return self._without_grad(strongest((self.visit(node.left), self.visit(node.right))))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Value:
        return self._without_grad(strongest(self.visit(node.operand)))

    def visit_Compare(self, node: ast.Compare) -> Value:
        found = strongest(tuple(map(self.visit, (node.left, *node.comparators))))
        is_python = any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops)
        return Kind.UNKNOWN if is_python else min(found, Kind.TENSOR)

    def visit_IfExp(self, node: ast.IfExp) -> Value:
        self.visit(node.test)
        return _weaker(self.visit(node.body), self.visit(node.orelse))

    def visit_Tuple(self, node: ast.Tuple) -> Value:
        return tuple(map(self.visit, node.elts))

    def visit_List(self, node: ast.List) -> Value:
        return strongest(tuple(map(self.visit, node.elts)))

    def visit_Dict(self, node: ast.Dict) -> Value:
        values = list(map(self.visit, node.values))
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(map(str, keys), values, strict=True))
        return strongest(tuple(values))

    def visit_Starred(self, node: ast.Starred) -> Value:
        return strongest(self.visit(node.value))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Value:
        found = self.visit(node.value)
        self._assign(node.target, found, node.value)
        return found

    def visit_Call(self, node: ast.Call) -> Value:
        return self._without_grad(self._call(node))

    def _assign(self, target: ast.expr, value: Value, expression: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            # What `training_step` returns has a graph, whoever computed it.
            if self._is_loss(target) and isinstance(expression, ast.Call | ast.BinOp):
                value = value if _reads_value(expression) or strongest(value) else _LOSS
            self.names[target.id] = value
            self.expressions.pop(target.id, None)
            if expression is not None:
                self.expressions[target.id] = expression
        elif isinstance(target, ast.Tuple | ast.List):
            is_known = isinstance(value, tuple) and len(value) == len(target.elts)
            items = value if isinstance(value, tuple) else ()
            for i, item in enumerate(target.elts):
                self._assign(item, items[i] if is_known else Kind.UNKNOWN, None)
                if isinstance(expression, ast.Call) and self._is_loss(item):
                    self._assign(item, _LOSS, None)

    def _is_loss(self, target: ast.expr) -> bool:
        return self.has_grad and isinstance(target, ast.Name) and target.id in self.losses

    # Only what both branches agree on is known afterwards.
    def _branches(self, *bodies: list[ast.stmt]) -> None:
        names, expressions = dict(self.names), dict(self.expressions)
        results = []
        for body in bodies:
            self.names, self.expressions = dict(names), dict(expressions)
            self.run(body)
            if not (body and isinstance(body[-1], ast.Return | ast.Raise | ast.Continue)):
                results.append((self.names, self.expressions))
        first, *others = results or [(names, expressions)]
        self.names, self.expressions = first
        for other_names, other_expressions in others:
            self.names = {
                name: _weaker(value, other_names[name])
                for name, value in self.names.items()
                if name in other_names
            }
            self.expressions = {
                name: expression
                for name, expression in self.expressions.items()
                if other_expressions.get(name) is expression
            }

    def _without_grad(self, value: Value) -> Value:
        return value if self.has_grad else _weaker_than_graph(value)

    def _call(self, node: ast.Call) -> Value:
        function = node.func
        given = [self.visit(argument) for argument in node.args]
        given += [self.visit(keyword.value) for keyword in node.keywords]
        strong = strongest(tuple(given))
        own = self.values.own_method(function)
        if own is not None:
            return self.values.call(own, given[: len(node.args)], self.has_grad)
        module = submodule_of(self.values.modules, function)
        if module is not None:
            return self._output(module, strong)
        found = self.method.resolve(function)
        if found is not None:
            return self._of_function(found, strong)
        if isinstance(function, ast.Call):  # `nn.CrossEntropyLoss()(logits, labels)`
            made = self.method.resolve(function.func)
            is_module = isinstance(made, type) and issubclass(made, nn.Module)
            return strong if is_module else Kind.UNKNOWN
        if isinstance(function, ast.Attribute):
            return self._of_method(node, function, strongest(self.visit(function.value)))
        return Kind.UNKNOWN

    def _output(self, module: nn.Module, strong: Kind) -> Kind:
        if any(cls.__module__.startswith("torchmetrics") for cls in type(module).__mro__):
            return Kind.UNKNOWN
        parameters = [*module.parameters()]
        if not parameters:
            return strong
        is_trained = any(parameter.requires_grad for parameter in parameters)
        return Kind.GRAPH if is_trained else max(strong, Kind.TENSOR)

    def _of_function(self, function: Any, strong: Kind) -> Value:
        module = getattr(function, "__module__", None) or ""
        is_torch = isinstance(
            function, types.BuiltinFunctionType | types.FunctionType
        ) and module.startswith(("torch", "torch.nn.functional"))
        # Functions that are written in C have no module.
        name = getattr(function, "__name__", "")
        is_torch |= isinstance(function, types.BuiltinFunctionType) and not module
        if function in (sum, dict, list) or (is_torch and name not in _DETACHING | _WITH_INDICES):
            return strong
        return min(strong, Kind.TENSOR) if is_torch and name in _DETACHING else Kind.UNKNOWN

    def _of_method(self, node: ast.Call, function: ast.Attribute, base: Kind) -> Value:
        name = function.attr
        if base == Kind.UNKNOWN or name in _HOST_METHODS:
            return Kind.UNKNOWN
        if name in _DETACHING:
            return min(base, Kind.TENSOR)
        if moves_to_host(node):
            return base if base == Kind.GRAPH else Kind.UNKNOWN
        if name in _WITH_INDICES and node.args:
            return (base, Kind.TENSOR)
        return base


def moves_to_host(call: ast.Call) -> bool:
    """Return whether a call is ``x.cpu()`` or ``x.to("cpu")``."""
    if not isinstance(call.func, ast.Attribute):
        return False
    first = call.args[0] if call.args else None
    is_cpu = isinstance(first, ast.Constant) and first.value == "cpu"
    return call.func.attr == "cpu" or (call.func.attr == "to" and is_cpu)


def submodule_of(modules: Mapping[str, nn.Module], node: ast.expr) -> nn.Module | None:
    """Return the module that an expression such as ``self.net.head`` names, if it is one."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return modules.get(".".join(names)) if is_self(node) and names else None


def _reads_value(expression: ast.expr) -> bool:
    is_call = isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute)
    return is_call and expression.func.attr in _HOST_METHODS | _DETACHING  # type: ignore[attr-defined]


# Names that `training_step` returns as the loss: `return loss`, `return {"loss": loss}`.
def _returned_losses(method: Method) -> set[str]:
    if method.name != "training_step":
        return set()
    found = set()
    for node in ast.walk(method.tree):
        value = node.value if isinstance(node, ast.Return) else None
        if isinstance(value, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in value.keys]
            value = value.values[keys.index("loss")] if "loss" in keys else None
        if isinstance(value, ast.Name):
            found.add(value.id)
    return found
