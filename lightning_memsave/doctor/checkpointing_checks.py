"""Checks on activation checkpointing that the model does by itself."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from lightning_memsave.core.blocks import find_blocks
from lightning_memsave.doctor.check import LocatedProblem, Subject, problem_in
from lightning_memsave.doctor.source import (
    Method,
    is_in_package,
    is_library,
    is_self,
    keyword_of,
    own_attribute,
    reached_from,
)
from lightning_memsave.doctor.values import submodule_of

_CHECKPOINTS = (torch_checkpoint.checkpoint, torch_checkpoint.checkpoint_sequential)


@dataclass(frozen=True)
class _Use:
    """A call of ``torch.utils.checkpoint`` in the code of a module."""

    method: Method
    call: ast.Call
    is_on: bool | None
    targets: tuple[nn.Module, ...]


def find_repeated_checkpointing(subject: Subject) -> Iterator[LocatedProblem]:
    """Find reentrant checkpoints in blocks that `MemSaveCallback` checkpoints too."""
    # With `use_reentrant=False` torch recomputes a whole block once, and a part of it saves memory.
    which = subject.settings.get("activation_checkpointing")
    if not which:
        return
    blocks = find_blocks(subject.module, subject.settings.get("blocks"))
    inside = {id(m) for block in blocks for m in block.module.modules()}
    for module, use in _uses(subject.module):
        is_inside = id(module) in inside or any(id(m) in inside for m in use.targets)
        if use.is_on and is_inside and _is_reentrant(use.call):
            yield problem_in(
                use.method,
                use.call,
                f"`activation_checkpointing={which!r}` recomputes these blocks already; with "
                "reentrant checkpointing inside or around them they run three times per step "
                "instead of twice",
                "Remove this call, or pass `use_reentrant=False`.",
            )


# Without the argument torch warns, and is reentrant.
def _is_reentrant(call: ast.Call) -> bool:
    is_given = any(keyword.arg in ("use_reentrant", None) for keyword in call.keywords)
    return keyword_of(call, "use_reentrant") is True or not is_given


def find_lost_dropout_masks(subject: Subject) -> Iterator[LocatedProblem]:
    """Find checkpoints that draw other dropout masks in the recomputation."""
    for module, use in _uses(subject.module):
        has_dropout = any(_drops(m) for part in use.targets or (module,) for m in part.modules())
        if use.is_on and has_dropout and keyword_of(use.call, "preserve_rng_state") is False:
            yield problem_in(
                use.method,
                use.call,
                "dropout draws other masks when the block is recomputed in backward, so the "
                "gradients are wrong",
                "Remove `preserve_rng_state=False`.",
            )


def _drops(module: nn.Module) -> bool:
    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    return isinstance(module, dropouts) and module.p > 0


def find_repeated_statistics(subject: Subject) -> Iterator[LocatedProblem]:
    """Find checkpointed batch normalisation, whose statistics are updated twice."""
    for _, use in _uses(subject.module):
        norms = [m for target in use.targets for m in target.modules() if _has_statistics(m)]
        if use.is_on and norms:
            yield problem_in(
                use.method,
                use.call,
                f"`{type(norms[0]).__name__}` inside it updates its running statistics in the "
                "forward pass and again when the block is recomputed",
                "Remove this call, and set `MemSaveCallback(activation_checkpointing=...)`, which "
                "updates them once.",
            )


def _has_statistics(module: nn.Module) -> bool:
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return isinstance(module, norms) and module.track_running_stats


def _uses(model: nn.Module) -> Iterator[tuple[nn.Module, _Use]]:
    for module in model.modules():
        # What a package does is not the user's to change, unless it is the model itself.
        if not is_library(type(module)) and (module is model or not is_in_package(type(module))):
            yield from ((module, use) for use in _uses_in(module))


def _uses_in(module: nn.Module) -> Iterator[_Use]:
    modules: dict[str, nn.Module] | None = None
    for reached in reached_from(module, ("forward", "training_step")):
        method = reached.method
        for call, tests in _with_conditions(method.tree, ()):
            if method.resolve(call.func) not in _CHECKPOINTS:
                continue
            if modules is None:
                modules = dict(module.named_modules(remove_duplicate=False))
            is_on = _all_true([_truth(module, test, holds) for test, holds in tests])
            is_on = is_on if reached.in_each else None
            yield _Use(method, call, is_on, _targets(modules, method, call))


_Tests = tuple[tuple[ast.expr, bool], ...]


# Calls, each with the conditions under which it runs and whether they hold there.
def _with_conditions(node: ast.AST, tests: _Tests) -> Iterator[tuple[ast.Call, _Tests]]:
    if isinstance(node, ast.Call):
        yield node, tests
    for _, part in ast.iter_fields(node):
        inside = tests
        for child in part if isinstance(part, list) else [part]:
            if not isinstance(child, ast.AST):
                continue
            around = inside
            if isinstance(node, ast.If | ast.IfExp) and child is not node.test:
                is_body = child is node.body or (isinstance(part, list) and part is node.body)
                around = (*inside, (node.test, is_body))
            yield from _with_conditions(child, around)
            # After `if not self.is_checkpointed: return ...` the condition does not hold.
            if isinstance(child, ast.If) and isinstance(child.body[-1], ast.Return | ast.Raise):
                inside = (*inside, (child.test, False))


def _all_true(found: list[bool | None]) -> bool | None:
    if False in found:
        return False
    return None if None in found else True


# The value of a condition in training, as far as attributes of the module decide it.
def _truth(module: nn.Module, test: ast.expr, holds: bool) -> bool | None:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _truth(module, test.operand, not holds)
    if isinstance(test, ast.BoolOp):
        found = [_truth(module, value, holds) for value in test.values]
        if isinstance(test.op, ast.And) == holds:
            return _all_true(found)
        return True if True in found else None if None in found else False
    value = _known_value(module, test)
    return None if value is None else value == holds


def _known_value(module: nn.Module, test: ast.expr) -> bool | None:
    is_own = isinstance(test, ast.Attribute) and is_self(test.value)
    name = test.attr if isinstance(test, ast.Attribute) else ""
    if isinstance(test, ast.Call) and ast.unparse(test.func).endswith("is_grad_enabled"):
        return True
    if is_own and name == "training":
        return True
    value = vars(module).get(name) if is_own else None
    return bool(value) if isinstance(value, bool | int) else None


# `checkpoint(self.block, x)`, or `for block in self.blocks: checkpoint(block, x)`.
def _targets(
    modules: dict[str, nn.Module], method: Method, call: ast.Call
) -> tuple[nn.Module, ...]:
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Attribute):
        found = submodule_of(modules, first)
        return () if found is None else (found,)
    if not isinstance(first, ast.Name):
        return ()
    for loop in ast.walk(method.tree):
        is_loop = isinstance(loop, ast.For) and any(node is call for node in ast.walk(loop))
        targets = ast.walk(loop.target) if is_loop else ()  # type: ignore[attr-defined]
        if any(isinstance(t, ast.Name) and t.id == first.id for t in targets):
            owner = next(filter(None, map(own_attribute, ast.walk(loop.iter))), "")  # type: ignore[attr-defined]
            layers = modules.get(owner)
            return tuple(layers) if isinstance(layers, nn.ModuleList | nn.Sequential) else ()
    return ()
