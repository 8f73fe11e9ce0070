"""Buffers that a forward pass changes, put back while it is recomputed."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from lightning_memsave.errors import ExactnessWarning

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]

# Of each module: names of all its buffers, and of those that its forward changes.
_KNOWN: WeakKeyDictionary[nn.Module, tuple[tuple[str, ...], frozenset[str]]] = WeakKeyDictionary()


class ChangedBuffers:
    """Buffers as they were before the forward pass.

    Batch normalisation updates its running statistics in forward. The second run must not update
    them again, and a module that reads what it updates (spectral normalisation) must read the
    values of the first run. Which buffers change is learned in the first training forward, in which
    all are copied for its duration.

    Args:
        modules: The modules that will run.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        # Module, name, buffer, its version, and its copy if it is expected to change.
        self._before: list[tuple[nn.Module, str, Tensor, int, Tensor | None]] = []
        for module in modules:
            known = _KNOWN.get(module)
            names, changing = known or (_buffer_names(module), frozenset(_buffer_names(module)))
            for name in names:
                buffer = _buffer(module, name)
                if buffer is not None:
                    copy = buffer.clone() if name in changing else None
                    self._before.append((module, name, buffer, buffer._version, copy))

    @property
    def can_change(self) -> bool:
        """Whether there is any buffer at all."""
        return bool(self._before)

    def learn(self) -> None:
        """Find out, after the forward pass, what changed, and free the other copies."""
        changed = []
        for module, name, buffer, version, saved in self._before:
            now = _buffer(module, name)
            is_changed = now is not buffer or buffer._version != version
            # Kernels of normalisation layers change statistics without counting up the version.
            if saved is not None and (
                is_changed or module in _KNOWN or name in _statistics(module)
            ):
                changed.append((module, name, buffer, version, saved))
            elif is_changed and now is not None:
                _warn_of_late_change(module, name)
                changed.append((module, name, buffer, version, now.clone()))
        self._before = [*changed]
        for module in self._modules:
            names, before = _KNOWN.get(module, (_buffer_names(module), frozenset()))
            found = frozenset(name for owner, name, *_ in changed if owner is module)
            if module.training and (module not in _KNOWN or not found <= before):
                _KNOWN[module] = (names, before | found | _statistics(module))

    def contexts(self, inner: Callable[[], Contexts]) -> Contexts:
        """Give contexts for ``torch.utils.checkpoint``.

        Args:
            inner: The context function to go on with.

        Returns:
            A context for the forward pass and one for its recomputation.
        """
        in_forward, in_recomputation = inner()
        return in_forward, _PutBack(self, in_recomputation)

    def put_back(self) -> list[tuple[nn.Module, str, Tensor | None]]:
        """Give the modules their buffers of before.

        Returns:
            Module, name and buffer of now, to be restored by ``set_buffer``.
        """
        now = [(module, name, _buffer(module, name)) for module, name, *_ in self._before]
        for module, name, _, _, saved in self._before:
            assert saved is not None, "`learn` keeps copies only"
            set_buffer(module, name, saved.clone())
        return now


class _PutBack(contextlib.AbstractContextManager[None]):
    # Not a generator: with `retain_graph=True` it is entered once per backward pass.
    def __init__(
        self, buffers: ChangedBuffers, inner: contextlib.AbstractContextManager[Any]
    ) -> None:
        self._buffers, self._inner = buffers, inner
        self._now: list[tuple[nn.Module, str, Tensor | None]] = []

    def __enter__(self) -> None:
        self._now = self._buffers.put_back()
        self._inner.__enter__()

    def __exit__(self, *exc: Any) -> bool | None:
        try:
            return self._inner.__exit__(*exc)
        finally:
            for module, name, buffer in self._now:
                set_buffer(module, name, buffer)


def set_buffer(module: nn.Module, name: str, buffer: Tensor | None) -> None:
    """Put a buffer into a module or a module inside it.

    Args:
        module: The outer module.
        name: Dotted name of the buffer.
        buffer: The buffer.
    """
    path, _, leaf = name.rpartition(".")
    module.get_submodule(path)._buffers[leaf] = buffer


def _buffer(module: nn.Module, name: str) -> Tensor | None:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path)._buffers.get(leaf)


def _buffer_names(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, _ in module.named_buffers())


# Statistics of normalisation layers, which change or not as the layer is in training mode or not.
def _statistics(module: nn.Module) -> frozenset[str]:
    return frozenset(
        f"{path}.{name}".lstrip(".")
        for path, child in module.named_modules()
        if isinstance(child, nn.modules.batchnorm._NormBase)
        for name, _ in child.named_buffers()
    )


def _warn_of_late_change(module: nn.Module, name: str) -> None:
    warnings.warn(
        f"The buffer `{name}` of `{type(module).__name__}` was changed in forward for the first "
        "time. In this step its block is recomputed with the new value; from the next step on with "
        "the value of before. Leave this block out with `blocks=` if that matters.",
        ExactnessWarning,
        stacklevel=2,
    )
