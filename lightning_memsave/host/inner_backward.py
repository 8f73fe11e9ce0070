"""Backward passes inside of ``training_step``, found by what they leave."""

from collections.abc import Iterable

from torch import Tensor, nn


class GradientMarks:
    """What the gradients are at one moment, to see later whether anybody has added to them.

    Nothing is computed and nothing copied: a sum in place counts a tensor's version up, and any
    other one makes another tensor.

    Args:
        parameters: Of a model.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._marks = [(p, p.grad, _version(p.grad)) for p in parameters]

    def have_changed(self) -> bool:
        """Compare with what the gradients are now.

        Returns:
            True if one of them is another one, or has other values.
        """
        return any(p.grad is not grad or _version(grad) != seen for p, grad, seen in self._marks)


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else grad._version
