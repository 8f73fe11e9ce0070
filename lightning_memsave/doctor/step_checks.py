"""Checks on the code of a training step: tensors that are kept, waits, and backward."""

import ast
import gc
from collections import deque
from collections.abc import Iterator

import torch
from torch import nn

from lightning_memsave.doctor.check import LocatedProblem, Subject, problem_in
from lightning_memsave.doctor.source import (
    STEP_HOOKS,
    Method,
    Reached,
    always_run,
    calls_in,
    is_method_call,
    keyword_of,
    own_attribute,
    own_methods,
    reached_from,
)
from lightning_memsave.doctor.values import Kind, StepValues, moves_to_host

_APPENDING = ("append", "appendleft", "extend", "insert")
_EMPTYING = ("clear", "pop", "popleft", "popitem", "remove")


def find_kept_graphs(subject: Subject) -> Iterator[LocatedProblem]:
    """Find values that stay attached to their graph after the step."""
    emptied = {name for reached in subject.step for name in _emptied_in(reached.method)}
    for method, node, owner in _stores(subject.module, subject.step, subject.values, Kind.GRAPH):
        if owner not in emptied:
            yield problem_in(
                method,
                node,
                "it keeps a value that is attached to its autograd graph, so the graph of each "
                "step stays in memory, with all tensors that backward has not freed",
                "Add `.detach()` to the value.",
            )


def find_growing_lists(subject: Subject) -> Iterator[LocatedProblem]:
    """Find lists of tensors that the module reads, but never empties."""
    methods = own_methods(subject.module).values()
    kept, read = set(), set()
    for method in methods:
        if method.name != "__init__":
            kept |= set(_emptied_in(method))
            read |= set(_read_in(method))
    stores = [
        *_stores(subject.module, subject.step, subject.values, Kind.TENSOR),
        *_stores(
            subject.module, subject.evaluation, subject.evaluation_values, Kind.TENSOR, Kind.GRAPH
        ),
    ]
    for method, node, owner in dict.fromkeys(stores):
        # What only other objects read may be emptied by them, as callbacks do.
        if isinstance(node, ast.Call) and owner in read - kept:
            yield problem_in(
                method,
                node,
                f"nothing in the class empties `self.{owner}`, so the tensors of all batches stay "
                "on the device until the end of the fit",
                f"Write `self.{owner}.clear()` at the end of the epoch hook that reads it.",
            )


# Method, statement and attribute of `self` of what keeps a value of these kinds.
def _stores(
    module: nn.Module, reached: list[Reached], values: StepValues, *kinds: Kind
) -> Iterator[tuple[Method, ast.AST, str]]:
    for one in reached:
        for node in ast.walk(one.method.tree):
            if is_method_call(node) and node.func.attr in _APPENDING:  # type: ignore[attr-defined]
                owner = own_attribute(node.func.value)  # type: ignore[attr-defined]
                is_kept = _is_list(module, owner) and bool(node.args)
                stored = node.args[-1] if node.args else node
            elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
                owner, stored, is_kept = own_attribute(node.target), node.value, True
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
                owner, stored = own_attribute(node.targets[0]), node.value
                # `self.total = self.total + loss`
                is_kept = any(own_attribute(part) == owner for part in ast.walk(stored))
            else:
                continue
            if owner and is_kept and values.kind(stored) in kinds:
                yield one.method, node, owner


# Modules and objects of other classes may detach what they are given.
def _is_list(module: nn.Module, name: str) -> bool:
    value = vars(module).get(name)
    if value is None:  # it is made in a later hook
        made = (node for m in own_methods(module).values() for node in ast.walk(m.tree))
        lists = (n for n in made if isinstance(n, ast.Assign) and isinstance(n.value, ast.List))
        return bool(name) and any(own_attribute(n.targets[0]) == name for n in lists)
    is_bounded = isinstance(value, deque) and value.maxlen is not None
    return isinstance(value, list | dict | deque) and not is_bounded


# Attributes of `self` that a method empties, replaces, deletes, or gives another name.
def _emptied_in(method: Method) -> Iterator[str]:
    for node in ast.walk(method.tree):
        if is_method_call(node) and node.func.attr in _EMPTYING:  # type: ignore[attr-defined]
            yield own_attribute(node.func.value)  # type: ignore[attr-defined]
        elif isinstance(node, ast.Delete):
            yield from map(own_attribute, node.targets)
        elif isinstance(node, ast.Assign):
            adds = isinstance(node.value, ast.BinOp)
            yield from () if adds else map(own_attribute, node.targets)
            yield own_attribute(node.value)
        elif isinstance(node, ast.For):
            yield from map(own_attribute, ast.walk(node.iter))


# A list is read where its name stands without `.append`.
def _read_in(method: Method) -> Iterator[str]:
    appended: set[int] = set()
    for call in calls_in(ast.walk(method.tree), *_APPENDING):
        appended |= {id(call.func), id(call.func.value)}  # type: ignore[attr-defined]
    for node in ast.walk(method.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield "" if id(node) in appended else own_attribute(node)


_WAITS = (
    "the CPU waits here in each step until the GPU has finished, so it cannot prepare the next "
    "kernels meanwhile"
)


def find_waits(subject: Subject) -> Iterator[LocatedProblem]:
    """Find values that each training step reads from the device."""
    if _trains_on_cpu(subject):
        return
    for method, node in _in_each_step(subject):
        if isinstance(node, ast.Call) and (fix := _why_it_waits(method, node, subject.values)):
            yield problem_in(method, node, _WAITS, fix)


def _why_it_waits(method: Method, call: ast.Call, values: StepValues) -> str:
    if is_method_call(call) and values.kind(call.func.value):  # type: ignore[attr-defined]
        name = call.func.attr  # type: ignore[attr-defined]
        if name in ("item", "tolist", "numpy"):
            return (
                "Pass the tensor itself to `self.log`, which reads it only when it is shown; to "
                f"keep it, write `.detach()` instead of `.{name}()`."
            )
        if moves_to_host(call):
            return "Keep the tensor on the device with `.detach()`, and move it once per epoch."
    function = method.resolve(call.func)
    parts = [part for argument in call.args for part in ast.walk(argument)]
    if function in (float, int, bool) and call.args and values.kind(call.args[0]):
        return "Pass the tensor itself to `self.log`; to keep it, write `.detach()`."
    shown = [p.value for p in parts if isinstance(p, ast.FormattedValue)] + call.args
    if function is print and any(values.kind(one) for one in shown):
        return "Write `self.log(..., prog_bar=True)`, or print only every 100th `batch_idx`."
    return ""


def find_cache_releases(subject: Subject) -> Iterator[LocatedProblem]:
    """Find steps that empty the allocator's cache or collect garbage each time."""
    if _trains_on_cpu(subject):
        return
    why = {
        torch.cuda.empty_cache: "it gives the cache back to the driver in each step, waits for the "
        "GPU, and the next step allocates it again",
        gc.collect: "it visits every Python object in each step, and frees nothing that the "
        "reference counts have not freed",
    }
    fix = {
        torch.cuda.empty_cache: "Remove it. Against fragmentation, set "
        "`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.",
        gc.collect: "Remove it, or call it once per epoch.",
    }
    for method, node in _in_each_step(subject):
        function = method.resolve(node.func) if isinstance(node, ast.Call) else None
        if function is not None and function in tuple(why):
            yield problem_in(method, node, why[function], fix[function])


def find_retained_graphs(subject: Subject) -> Iterator[LocatedProblem]:
    """Find a last backward pass of a step that keeps the graph."""
    calls = [
        (reached.method, call)
        for reached in subject.step
        for call in calls_in(ast.walk(reached.method.tree), "backward", "manual_backward")
    ]
    if len({method for method, _ in calls}) != 1:
        return  # which one is the last is not known
    method, last = max(calls, key=lambda found: (found[1].lineno, found[1].col_offset))
    is_own = method.name == "backward" or not subject.automatic_optimization
    in_loops = [n for n in ast.walk(method.tree) if isinstance(n, ast.For | ast.While)]
    is_repeated = any(last is node for loop in in_loops for node in ast.walk(loop))
    if is_own and not is_repeated and keyword_of(last, "retain_graph") is True:
        yield problem_in(
            method,
            last,
            "no other backward pass of the step follows, but all activations stay in memory until "
            "the step ends instead of being freed on the way",
            "Remove `retain_graph=True` from the last backward pass.",
        )


def find_gradient_cycles(subject: Subject) -> Iterator[LocatedProblem]:
    """Find ``backward(create_graph=True)``."""
    for reached in subject.step:
        for call in calls_in(ast.walk(reached.method.tree), "backward", "manual_backward"):
            if keyword_of(call, "create_graph") is True:
                yield problem_in(
                    reached.method,
                    call,
                    "each parameter and its gradient then refer to each other, so that neither the "
                    "gradients nor their graph are freed; torch warns of this leak",
                    "Use `torch.autograd.grad(loss, parameters, create_graph=True)`.",
                )


def find_kept_gradients(subject: Subject) -> Iterator[LocatedProblem]:
    """Find ``zero_grad(set_to_none=False)``."""
    for reached in subject.step:
        for call in calls_in(ast.walk(reached.method.tree), "zero_grad"):
            first = call.args[0] if call.args else None
            is_positional = isinstance(first, ast.Constant) and first.value is False
            if is_positional or keyword_of(call, "set_to_none") is False:
                yield problem_in(
                    reached.method,
                    call,
                    "it fills the gradients with zeros, so they use memory during the forward pass "
                    "of the next step",
                    "Write `zero_grad()`, which frees them.",
                )


def find_pinned_copies(subject: Subject) -> Iterator[LocatedProblem]:
    """Find steps that pin memory each time."""
    hooks = (*STEP_HOOKS, "on_before_batch_transfer", "transfer_batch_to_device")
    for reached in reached_from(subject.module, hooks):
        nodes = list(always_run(reached.method.tree.body)) if reached.in_each else []
        calls = {*calls_in(nodes, "pin_memory")}
        calls |= {
            n for n in nodes if isinstance(n, ast.Call) and keyword_of(n, "pin_memory") is True
        }
        for call in calls:
            yield problem_in(
                reached.method,
                call,
                "it copies to pinned host memory in each step, on the thread that launches the "
                "kernels",
                "Use `DataLoader(pin_memory=True)`, which does it in a thread of its own, or pin a "
                "buffer once and copy into it.",
            )


_HELPERS = ("optimizers", "toggle_optimizer", "untoggle_optimizer", "clip_gradients", "zip")


def find_missing_zero_grad(subject: Subject) -> Iterator[LocatedProblem]:
    """Find manual optimization that never sets gradients to zero."""
    if subject.automatic_optimization:
        return
    methods = [reached.method for reached in subject.step]
    nodes = [node for method in methods for node in ast.walk(method.tree)]
    everywhere = [m.tree for m in own_methods(subject.module).values()]
    sets_zero = any(_sets_zero(node) for tree in everywhere for node in ast.walk(tree))
    if sets_zero or not any(calls_in(nodes, "backward", "manual_backward")):
        return
    for method in methods:
        optimizers = {
            part.id
            for node in ast.walk(method.tree)
            if isinstance(node, ast.Assign | ast.AnnAssign)
            if node.value is not None and any(calls_in(ast.walk(node.value), "optimizers"))
            for part in ast.walk(node)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        }
        if any(_is_passed_on(node, optimizers) for node in ast.walk(method.tree)):
            return  # another function may do it
        for call in calls_in(ast.walk(method.tree), "step"):
            owner = call.func.value  # type: ignore[attr-defined]
            if isinstance(owner, ast.Name) and owner.id in optimizers:
                yield problem_in(
                    method,
                    call,
                    "`automatic_optimization=False`, and no step sets the gradients to zero: they "
                    "add up over all steps",
                    f"Write `{owner.id}.zero_grad()` before `self.manual_backward(loss)`.",
                )


def _sets_zero(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    is_assigned = node.attr == "grad" and isinstance(node.ctx, ast.Store)
    return is_assigned or node.attr in ("zero_grad", "optimizer_zero_grad", "zero_")


def _is_passed_on(node: ast.AST, names: set[str]) -> bool:
    if not isinstance(node, ast.Call):
        return False
    word = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    is_given = any(isinstance(one, ast.Name) and one.id in names for one in given)
    return is_given and word not in _HELPERS


def _trains_on_cpu(subject: Subject) -> bool:
    return subject.trainer_arguments.get("accelerator") == "cpu"


def _in_each_step(subject: Subject) -> Iterator[tuple[Method, ast.AST]]:
    for reached in subject.step:
        if reached.in_each:
            for node in always_run(reached.method.tree.body):
                yield reached.method, node
