"""Memory that runs out where a test wants it to."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."


class OutOfMemoryAt(TorchDispatchMode):
    """Raises at chosen operators, counted while it is armed.

    ``places``: numbers of the operators that fail, from 0; afterwards counting goes on.
    """

    def __init__(self, *places: int) -> None:
        super().__init__()
        self.places = set(places)
        self.num_ops = 0
        self.starts: list[int] = []  # for the test to note where something began
        self.is_armed = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        self.is_armed = True
        try:
            yield
        finally:
            self.is_armed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_armed:
            place, self.num_ops = self.num_ops, self.num_ops + 1
            if place in self.places:
                raise torch.OutOfMemoryError(MESSAGE)
        return func(*args, **(kwargs or {}))
