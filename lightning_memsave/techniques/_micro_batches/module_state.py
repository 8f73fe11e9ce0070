"""Undo what training steps that must leave no trace change in a module."""

import contextlib
import random
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave.core.batches import leaves_of
from lightning_memsave.techniques._micro_batches.training_state import RandomState

_BATCH_NORM = nn.modules.batchnorm._BatchNorm


class ModuleState:
    """Attributes of modules, the contents of their containers, and random states.

    Tensors are copied only before something writes to them: see `save_before_write`.
    """

    def __init__(self, module: nn.Module, batch: Any) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._saved: dict[int, torch.UntypedStorage] = {}
        self._seen: set[int] = set()
        self._visit(module)
        for _, leaf in leaves_of(batch):
            self._visit(leaf)
        self._random = RandomState({p.device for p in module.parameters() if p.is_cuda})

    def owns(self, tensor: Tensor) -> bool:
        """Say whether the module or the batch held this tensor before."""
        return _key_of(tensor) in self._storages

    def save_before_write(self, tensor: Tensor) -> None:
        """Copy the values of a tensor that is about to change."""
        key = _key_of(tensor)
        if key in self._storages and key not in self._saved:
            self._saved[key] = self._storages[key].clone()

    def has_changed(self) -> bool:
        """Say whether something was written to, or put in or out of a container."""
        return bool(self._saved) or not all(_is_same(*pair) for pair in self._containers)

    def restore(self) -> None:
        """Put everything back."""
        for key, values in self._saved.items():
            self._storages[key].copy_(values)
        self._saved.clear()
        for container, contents in reversed(self._containers):
            if not _is_same(container, contents):
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(
                    contents
                )
        self.restore_random()

    def restore_random(self) -> None:
        """Put random states back."""
        for generator, state in self._generators:
            _set_generator(generator, state)
        self._random.restore()

    def _visit(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            # Sharded strategies exchange parameters in forward passes, and know which to put back.
            self._seen.add(id(value._parameters))
            for parameter in value._parameters.values():
                self._visit(parameter)
            value = vars(value)
        if isinstance(value, Tensor):
            key = _key_of(value)
            if key is not None:
                self._storages[key] = value.untyped_storage()
        elif isinstance(value, list | dict | set | deque | tuple):
            if id(value) in self._seen:
                return
            self._seen.add(id(value))
            if not isinstance(value, tuple):
                self._containers.append((value, value.copy()))
            for item in list(value.values() if isinstance(value, dict) else value):
                self._visit(item)
        elif (state := _generator_state(value)) is not None:
            self._generators.append((value, state))


@contextlib.contextmanager
def batch_norm_on_running_statistics(module: nn.Module) -> Iterator[None]:
    """Let batch normalisation compute each sample by itself."""
    norms = [m for m in module.modules() if isinstance(m, _BATCH_NORM) and m.training]
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 products in float32, and nothing compiled."""
    precision, in_cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    # Only a program that compiles has it, and another batch size would compile once more.
    dynamo = "torch._dynamo" in sys.modules
    try:
        with torch.compiler.set_stance("force_eager") if dynamo else contextlib.nullcontext():
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = in_cudnn
        # Of what a mode has computed in float32 where autocast asked for less.
        torch.clear_autocast_cache()


def _key_of(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have none
        return None


def _is_same(container: Any, contents: Any) -> bool:
    if len(container) != len(contents):
        return False
    if isinstance(container, set):
        return bool(container == contents)
    pairs = (
        zip([*container, *container.values()], [*contents, *contents.values()], strict=True)
        if isinstance(container, dict)
        else zip(container, contents, strict=True)
    )
    return all(now is before for now, before in pairs)


def _generator_state(value: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    return None


def _set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
