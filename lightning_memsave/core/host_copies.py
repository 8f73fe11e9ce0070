"""Tensors that a technique keeps on the host, told apart from those of the device."""

import contextlib
from collections.abc import Iterator

_num_contexts = 0


@contextlib.contextmanager
def host_copies() -> Iterator[None]:
    """Make tensors that count as host memory, also where the device itself is the CPU.

    What is counted on a CPU stands for what a GPU would hold. A copy that would leave the GPU must
    not count there.
    """
    global _num_contexts  # noqa: PLW0603 - asked by each operator that is counted
    _num_contexts += 1
    try:
        yield
    finally:
        _num_contexts -= 1


def is_host_copy() -> bool:
    """Say whether what is made now counts as host memory.

    Returns:
        True inside `host_copies`.
    """
    return _num_contexts > 0
