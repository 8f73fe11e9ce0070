"""Let a block find its state of forward again when it is recomputed, and change it once."""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_memsave.blocks.snapshot import (
    Reachable,
    Snapshot,
    Values,
    fingerprints,
    has_values,
    host_copies_of,
    is_without_values,
)
from lightning_memsave.core.patching import own, set_own
from lightning_memsave.core.saved_state import RandomState, nbytes_of
from lightning_memsave.errors import ExactnessWarning, IncompatibleError, Problem
from lightning_memsave.techniques.activation_checkpointing.selective import Contexts
from lightning_memsave.techniques.residences import residence_with

_STATE = "_memsave_block_state"  # on the first of the modules that are recomputed together
_SMALL_BYTES = 2**14  # tensors up to this size, other than own parameters, are kept in each pass
_NUM_WATCHED = 3


def forget_state(module: nn.Module) -> None:
    """Forget what was learned of a block, or of the layers of a chain."""
    for owner in (module, *module.children()):
        vars(owner).pop(_STATE, None)


def begin_pass(modules: Sequence[nn.Module]) -> "BlockPass | None":
    """Begin a forward pass of modules that are recomputed together.

    Returns ``None`` if it makes weights or buffers of lazy layers, which it can do only once.
    """
    state: BlockState | None = own(modules[0], _STATE)
    if state is None or state.is_lazy or state.roots != [*map(id, modules)]:
        state = BlockState(modules)
        set_own(modules[0], _STATE, state)
    return None if state.is_lazy else BlockPass(state)


class BlockState:
    """State of a block that its passes change, learned by looking at values in some of them.

    Bindings, containers and small tensors are kept in every pass. Parameters and large tensors are
    kept where a watched pass has found that forward changes them. The first passes are watched, and
    then those whose number is a power of two.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.roots = [*map(id, modules)]
        self.title = f"a block of class `{type(modules[0]).__name__}`"
        self._modules = modules
        self._num_passes = 0
        self._also_kept: set[int] = set()
        self._of_settings: set[int] = set()
        self._known: dict[int, Reachable] = {}
        self.changing: set[str] = set()
        """Names of parameters and large tensors that forward changes."""
        self.rewritten: set[str] = set()
        """Names of those to which forward writes the values that they have."""
        self.read: set[int] = set()
        """Ids of large tensors of other modules that forward uses."""
        self.draws = False
        """Forward draws random numbers of Python or NumPy."""
        self._find_modules()

    def _find_modules(self) -> None:
        # Of a chain, whose layers are recomputed together, names begin with the number of a layer.
        prefixes = ["" if len(self._modules) == 1 else f"{i}." for i in range(len(self._modules))]
        named = {
            id(m): (f"{prefix}{n}".rstrip("."), m)
            for prefix, root in zip(prefixes, self._modules, strict=True)
            for n, m in root.named_modules()
        }
        self.modules = [m for _, m in named.values()]
        self._found_here = frozenset(named)
        self.params = [p for m in self.modules for p in m._parameters.values() if p is not None]
        """All of them; below those whose values can be compared."""
        self.own = frozenset(map(id, self.params))
        self.parameters = {
            f"{path}.{name}".lstrip("."): param
            for path, module in named.values()
            for name, param in module._parameters.items()
            if param is not None and _is_comparable(param)
        }
        tensors = (t for m in self.modules for t in (*m._parameters.values(), *m._buffers.values()))
        self.is_lazy = any(
            isinstance(t, UninitializedBuffer | UninitializedParameter) for t in tensors
        )
        # Layers of torch without buffers or submodules change nothing of their own.
        self._owners = [
            (n, m)
            for key, (n, m) in named.items()
            if key in self._also_kept
            or not type(m).__module__.startswith("torch.")
            or m._buffers
            or m._modules
        ]
        owners = {id(m) for _, m in self._owners}
        self._others = [(n, m) for key, (n, m) in named.items() if key not in owners]

    def is_next_watched(self) -> bool:
        """Count a pass, and return whether it is watched."""
        self._num_passes += 1
        number = self._num_passes
        return number <= _NUM_WATCHED or number & (number - 1) == 0

    def found(self, *, of_all: bool) -> list[Reachable]:
        """Find the state of modules that may have some, or of all modules."""
        changed = [key for key, each in self._known.items() if each.has_other_names()]
        if of_all or any(self._known[key].has_other_structure() for key in changed):
            self._find_modules()
        for key in changed:
            del self._known[key]
        found = []
        for path, module in self._owners:
            key = id(module)
            is_shallow = not of_all and key in self._of_settings and key not in self._also_kept
            each = self._known.get(key)
            if each is None or (of_all and key in self._of_settings):
                each = Reachable(module, path, is_shallow=is_shallow, elsewhere=self._found_here)
                if each.is_of_settings:
                    self._of_settings.add(key)
                if not each.is_deep:  # its tensors must not live longer than the user lets them
                    self._known[key] = each
            found.append(each)
        return found + [Reachable(m, path) for path, m in self._others if of_all]

    def learn_names(self, found: Sequence[Reachable]) -> None:
        """Keep the names of these in each pass."""
        for each in found:
            self._also_kept.add(id(each.owner))
            self._known.pop(id(each.owner), None)


class BlockPass:
    """State of a block as a forward pass found it, for the recomputation of this pass."""

    def __init__(self, state: BlockState) -> None:
        self._state = state
        is_watched = state.is_next_watched()
        found = state.found(of_all=is_watched)
        named = {n: t for each in found for n, t in each.tensors.items() if has_values(t)}
        small = {n: t for n, t in named.items() if id(t) not in state.own and _is_small(t)}
        large = {n: t for n, t in named.items() if n not in small and _is_comparable(t)}
        large.update(state.parameters)
        others: set[str] = set()
        if held := tuple(prefix for each in found for prefix in each.held):
            others = {n for n, t in large.items() if n.startswith(held) and id(t) not in state.own}
        self._reads = _Reads(large[n] for n in others) if is_watched and others else None
        if self._reads is None:
            large = {n: t for n, t in large.items() if n not in others or id(t) in state.read}
        kept = {n: large.pop(n) for n in state.changing & large.keys()}
        distinct = {id(t): t for t in (*small.values(), *kept.values())}
        self._snapshot = Snapshot(found, distinct.values())
        self._modes = [m.training for m in state.modules]
        self._trained = [p.requires_grad for p in state.params]
        self._random = RandomState(set()) if is_watched or state.draws else None
        self._watch = _Watch(large) if is_watched else _Counters(large, state.title)

    def leave(self) -> None:
        """End the forward pass: learn what it has changed."""
        if self._reads is not None and isinstance(self._watch, _Watch):
            self._state.read |= self._reads.found
            self._watch.forget(self._reads.ids - self._state.read)
        changed = self._watch.changed(self._state.rewritten)
        self._state.changing |= changed.keys()
        self._snapshot.add(changed.values())
        if self._random is not None and not self._state.draws:
            self._state.draws = self._random.has_changed_beside_torch()
            self._random = self._random if self._state.draws else None

    def contexts(self, inner: Contexts) -> Contexts:
        """Return contexts for forward and recomputation, around inner ones."""
        forward = inner[0] if self._reads is None else _within(self._reads, inner[0])
        return forward, _AsInForward(self, inner[1])

    def restore(self) -> Callable[[], None]:
        """Restore the state, and return a function that gives the block the present one again."""
        self._refuse_changes()
        self._state.learn_names(self._snapshot.changed())
        random = None if self._random is None else RandomState(set())
        counted = (*self._state.parameters.values(), *self._snapshot.counted_tensors())
        versions = [t._version for t in counted]
        modes = [m.training for m in self._state.modules]
        trained = [p.requires_grad for p in self._state.params]
        now = self._snapshot.replaced()
        self._set_flags(self._modes, self._trained)
        if self._random is not None:
            self._random.restore()

        def undo() -> None:
            now.restore()
            # The values are those from before: for autograd nothing has been written.
            if [t._version for t in counted] != versions:
                torch._C._autograd._unsafe_set_version_counter(counted, tuple(versions))
            self._set_flags(modes, trained)
            if random is not None:
                random.restore()

        return undo

    def _set_flags(self, modes: list[bool], trained: list[bool]) -> None:
        modules, params = self._state.modules, self._state.params
        if modes != [m.training for m in modules] and len(modes) == len(modules):
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
        if trained != [p.requires_grad for p in params] and len(trained) == len(params):
            for param, is_trained in zip(params, trained, strict=True):
                param.requires_grad = is_trained

    def _refuse_changes(self) -> None:
        names = self._watch.changed_since()
        if names:
            problem = Problem(
                f"`{names[0]}` of {self._state.title}",
                "it was changed between the forward pass of the block and its backward pass, which "
                "recomputes the block, and only what forward itself changes is kept",
                "Change it after backward, such as in `on_train_batch_end`, exclude these blocks "
                "with `blocks=`, or set `activation_checkpointing=None`.",
            )
            raise IncompatibleError("activation_checkpointing", [problem])


class _Watch:
    """Parameters and large tensors whose values are compared before and after a forward pass."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._versions = {n: t._version for n, t in tensors.items()}
        self._fake = {n: (t, t.data) for n, t in tensors.items() if is_without_values(t)}
        self._tensors = {n: (t, t.data) for n, t in tensors.items() if n not in self._fake}
        self._before = fingerprints(t for t, _ in self._tensors.values())
        self._copies = [*host_copies_of(t for t, _ in self._tensors.values())]

    def forget(self, ids: Container[int]) -> None:
        """Compare tensors with these ids no longer."""
        is_left = [id(tensor) not in ids for tensor, _ in self._tensors.values()]
        self._before = [*itertools.compress(self._before, is_left)]
        self._copies = [*itertools.compress(self._copies, is_left)]
        for each in (self._fake, self._tensors):
            for name in [name for name, (tensor, _) in each.items() if id(tensor) in ids]:
                del each[name]

    def changed(self, rewritten: set[str]) -> dict[str, Values]:
        """Return the values from before, by name, of tensors that have others now."""
        changed = {
            name: Values(tensor, alias, torch.empty_like(alias))
            for name, (tensor, alias) in self._fake.items()
            if tensor._version != self._versions[name]
        }
        after = fingerprints(t for t, _ in self._tensors.values())
        pairs = zip(self._tensors.items(), self._copies, self._before, after, strict=True)
        for (name, (tensor, alias)), copy, old, new in pairs:
            if old != new:
                changed[name] = Values(tensor, alias, copy.to(alias.device))
            elif tensor._version != self._versions[name]:
                rewritten.add(name)
        self._before = after
        self._fake, self._copies = {}, []
        # The snapshot keeps changed tensors: a later change by others is undone, not refused.
        self.forget({id(values.tensor) for values in changed.values()})
        return changed

    def changed_since(self) -> list[str]:
        """Return the names of tensors that have other values than after the forward pass."""
        now = fingerprints(t for t, _ in self._tensors.values())
        return [
            n for n, old, new in zip(self._tensors, self._before, now, strict=True) if old != new
        ]


class _Counters:
    """The same tensors in other passes: changes that torch counts are noticed."""

    def __init__(self, tensors: Mapping[str, Tensor], title: str) -> None:
        self._tensors, self._title = {**tensors}, title
        self._before = self._versions()

    def _versions(self) -> list[int]:
        return [t._version for t in self._tensors.values()]

    def changed(self, rewritten: set[str]) -> dict[str, Values]:
        """Warn of tensors that have changed, and return the values that they have now."""
        names = [name for name in self.changed_since() if name not in rewritten]
        changed = {name: Values(self._tensors.pop(name)) for name in names}
        self._before = self._versions()
        if changed:
            warnings.warn(
                f"`{next(iter(changed))}` of {self._title} was changed in forward for the first "
                "time. In this step its block is recomputed with the new value; from the next step "
                "on, with the value from before forward. Exclude this block with `blocks=` if that "
                "matters.",
                ExactnessWarning,
                stacklevel=2,
            )
        return changed

    def changed_since(self) -> list[str]:
        """Return the names of tensors that have changed since the last look."""
        now = self._versions()
        if now == self._before:
            return []
        pairs = zip(self._tensors, self._before, now, strict=True)
        return [name for name, old, new in pairs if old != new]


class _Reads(TorchFunctionMode):
    """Notes which of the given tensors forward passes to functions of torch."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.ids, self.found = {id(tensor) for tensor in tensors}, set[int]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.found |= self.ids & {id(leaf) for leaf in tree_leaves((args, kwargs))}
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def _within(
    outer: contextlib.AbstractContextManager[Any], inner: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    with outer, inner:
        yield


class _AsInForward(contextlib.AbstractContextManager[None]):
    # A class: with `retain_graph=True` it is entered once per backward pass.
    def __init__(self, state: BlockPass, inner: contextlib.AbstractContextManager[Any]) -> None:
        self._pass, self._inner = state, inner
        self._undo: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        self._undo = self._pass.restore()
        self._inner.__enter__()

    def __exit__(self, *exc: Any) -> bool | None:
        try:
            return self._inner.__exit__(*exc)
        finally:
            self._undo()


def _is_small(tensor: Tensor) -> bool:
    is_offloaded = isinstance(tensor, nn.Parameter) and residence_with(tensor) is not None
    return nbytes_of(tensor) <= _SMALL_BYTES and not is_offloaded


# Weights that are offloaded come and go; tensors of `torch.inference_mode` have no version.
def _is_comparable(tensor: Tensor) -> bool:
    return has_values(tensor) and not tensor.is_inference() and residence_with(tensor) is None
