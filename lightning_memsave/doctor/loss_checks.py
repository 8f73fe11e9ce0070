"""Checks on the code of the loss: softmax and copies of logits."""

import ast
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from lightning_memsave.doctor.check import LocatedProblem, Subject, problem_in
from lightning_memsave.doctor.source import Method, is_method_call
from lightning_memsave.doctor.values import submodule_of
from lightning_memsave.techniques.chunked_cross_entropy.heads import find_heads

WIDE = 10_000
"""Logits of so many classes are among the largest tensors of a step."""

_SOFTMAX = (functional.softmax, torch.softmax)
_LOG_SOFTMAX = (functional.log_softmax, torch.log_softmax)
_VIEWS = frozenset(
    {
        *("view", "reshape", "flatten", "transpose", "permute", "contiguous", "squeeze"),
        *("unsqueeze", "movedim", "swapaxes", "view_as", "unflatten"),
    }
)


def find_double_softmax(subject: Subject) -> Iterator[LocatedProblem]:
    """Find softmax before a cross-entropy, which applies softmax itself."""
    for method, logits in _logits(subject):
        for place, part in _operations(subject, method, logits):
            if _is_softmax(subject, place, part):
                yield problem_in(
                    place,
                    part,
                    "`cross_entropy` applies softmax itself: gradients become too small, and one "
                    "more copy of the logits is kept for backward",
                    "Pass the logits to `cross_entropy`, without softmax.",
                )


def find_copied_logits(subject: Subject) -> Iterator[LocatedProblem]:
    """Find copies of wide logits that a loss does not need."""
    if not _is_wide(subject.module):
        return
    is_low = not subject.precision.startswith(("32", "64"))
    is_chunked = bool(subject.settings.get("chunked_cross_entropy"))
    for method, logits in _logits(subject):
        for place, part in _operations(subject, method, logits):
            if place.resolve(part.func) in _LOG_SOFTMAX or _called(part) == "log_softmax":
                yield problem_in(
                    place,
                    part,
                    "`cross_entropy` applies it itself: one more copy of the logits, of more than "
                    f"{WIDE:,} classes, is kept for backward, and `chunked_cross_entropy` has no "
                    "effect",
                    "Pass the logits to `cross_entropy`, without `log_softmax`.",
                )
            elif is_low and not is_chunked and _is_to_float32(place, part):
                yield problem_in(
                    place,
                    part,
                    f"in `precision={subject.precision!r}` it makes a float32 copy of logits of "
                    f"more than {WIDE:,} classes",
                    "Set `MemSaveCallback(chunked_cross_entropy=True)`, which computes the loss in "
                    "float32 without a copy.",
                )


def _is_wide(model: nn.Module) -> bool:
    return any(getattr(h.module, "out_features", 0) > WIDE for h in find_heads(model, None)[0])


# First arguments of each cross-entropy in a training step.
def _logits(subject: Subject) -> Iterator[tuple[Method, ast.expr]]:
    for reached in subject.step:
        for node in ast.walk(reached.method.tree):
            if isinstance(node, ast.Call) and _is_cross_entropy(subject, reached.method, node):
                named = [keyword.value for keyword in node.keywords if keyword.arg == "input"]
                yield from ((reached.method, one) for one in [*node.args, *named][:1])


def _is_cross_entropy(subject: Subject, method: Method, call: ast.Call) -> bool:
    if method.resolve(call.func) is functional.cross_entropy:
        return True
    if isinstance(call.func, ast.Call):  # `nn.CrossEntropyLoss()(logits, labels)`
        return method.resolve(call.func.func) is nn.CrossEntropyLoss
    return type(submodule_of(subject.values.modules, call.func)) is nn.CrossEntropyLoss


# The calls that an expression goes through, the last one first, as far as they are known.
def _operations(
    subject: Subject, method: Method, start: ast.expr
) -> Iterator[tuple[Method, ast.Call]]:
    node: ast.expr | None = start
    entered = {method}
    while node is not None:
        node = subject.values.definition(node)
        if isinstance(node, ast.Subscript | ast.Attribute) and _is_part(node):
            node = node.value
            continue
        if not isinstance(node, ast.Call):
            return
        yield method, node
        own = subject.values.own_method(node.func)
        if own is not None and own not in entered:
            method, node = own, _only_result(own)
            entered.add(own)
        else:
            node = _operand(method, node)


def _is_part(node: ast.Subscript | ast.Attribute) -> bool:
    return isinstance(node, ast.Subscript) or node.attr in ("mT", "T")


def _operand(method: Method, call: ast.Call) -> ast.expr | None:
    is_view = is_method_call(call) and _called(call) in _VIEWS
    if is_view or _is_to_float32(method, call):
        return call.func.value  # type: ignore[attr-defined,no-any-return]
    is_log = method.resolve(call.func) in _LOG_SOFTMAX
    return call.args[0] if is_log and call.args else None


def _only_result(method: Method) -> ast.expr | None:
    returned = [node.value for node in ast.walk(method.tree) if isinstance(node, ast.Return)]
    return returned[0] if len(returned) == 1 else None


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def _is_softmax(subject: Subject, method: Method, node: ast.Call) -> bool:
    module = submodule_of(subject.values.modules, node.func)
    if isinstance(module, nn.Sequential) and len(module):
        module = module[-1]
    if isinstance(module, nn.Softmax) or method.resolve(node.func) in _SOFTMAX:
        return True
    return _called(node) == "softmax" and subject.values.kind(node) > 0


def _is_to_float32(method: Method, node: ast.Call) -> bool:
    is_to = _called(node) == "to" and any(method.resolve(a) is torch.float32 for a in node.args)
    return (_called(node) == "float" and not node.args) or is_to
