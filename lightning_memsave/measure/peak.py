"""Measure the peak memory of a block of code."""

from collections.abc import Iterable
from types import TracebackType
from typing import Self

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.measure.storages import device_of


class PeakMemory:
    """The peak of allocated memory while a block of code runs.

    On CUDA it is read from torch's allocator, whose peak is reset at the beginning of the block. On
    other devices live tensors are counted, which makes the block slower, and gives the peak by
    category, too.

    Args:
        module: The module that runs. Not needed on CUDA; elsewhere its parameters, buffers and
            gradients are counted in addition to everything that the block allocates.
        optimizers: Optimizers whose state is counted likewise.
        device: The device; ``None`` for that of the first parameter, and without a module CUDA if
            available.

    Note:
        On CUDA the peak is too small if other code of this process resets it inside the block.

    Example:
        >>> model = nn.Linear(100, 10, bias=False)
        >>> with PeakMemory(model) as peak:
        ...     model(torch.ones(5, 100)).sum().backward()
        >>> peak.breakdown.parameter_bytes, peak.reserved_bytes
        (4000, None)
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        optimizers: Iterable[Optimizer] = (),
        device: torch.device | str | None = None,
    ) -> None:
        self.device = _default_device(module) if device is None else torch.device(device)
        self._live: LiveTensors | None = None
        if self.device.type != "cuda":
            self._live = LiveTensors(module, optimizers, self.device)
        self._allocated_bytes: int | None = None
        self._reserved_bytes: int | None = None

    @property
    def allocated_bytes(self) -> int:
        """Peak of allocated bytes: so far inside the block, of the whole block afterwards."""
        if self._live is not None:
            return self._live.peak.total_bytes
        if self._allocated_bytes is not None:
            return self._allocated_bytes
        return torch.cuda.max_memory_allocated(self.device)

    @property
    def reserved_bytes(self) -> int | None:
        """Peak of bytes that torch's allocator reserved; ``None`` on other devices than CUDA."""
        if self._live is not None:
            return None
        if self._reserved_bytes is not None:
            return self._reserved_bytes
        return torch.cuda.max_memory_reserved(self.device)

    @property
    def breakdown(self) -> MemoryBreakdown | None:
        """The peak by category; ``None`` on CUDA, whose allocator does not know categories."""
        return None if self._live is None else self._live.peak

    def track_input(self, batch: object) -> None:
        """Count the tensors of a batch as input.

        Args:
            batch: Tensors in any nesting of sequences, mappings and dataclasses.
        """
        if self._live is not None:
            self._live.track_input(batch)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        else:
            self._allocated_bytes = self._reserved_bytes = None
            torch.cuda.reset_peak_memory_stats(self.device)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.__exit__(exc_type, exc, traceback)
        else:
            self._allocated_bytes, self._reserved_bytes = self.allocated_bytes, self.reserved_bytes


def _default_device(module: nn.Module | None) -> torch.device:
    has_parameters = module is not None and next(module.parameters(), None) is not None
    if not has_parameters and torch.cuda.is_available():
        return torch.device("cuda")
    return device_of(module)
