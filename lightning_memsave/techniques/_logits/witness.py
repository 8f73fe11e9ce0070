"""Notice that a tensor is not what it was when a product of it was put off."""

import torch
from torch import Tensor

_NUM_NUMBERS = 64


class Witness:
    """What a tensor was like.

    Args:
        tensor: Is not held.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._version = _version_of(tensor)
        self._storage = tensor.untyped_storage()._cdata
        self._numbers = _some_numbers(tensor)

    def is_true_of(self, tensor: Tensor, *, may_wait: bool) -> bool:
        """Say whether the tensor is as it was.

        Args:
            tensor: The same tensor.
            may_wait: Whether to look at some of its numbers too, for which a GPU must be waited
                for. Without, changes through ``.data`` and in inference mode are not seen.

        Returns:
            False if it has changed.
        """
        if _version_of(tensor) != self._version:
            return False
        if tensor.untyped_storage()._cdata != self._storage:
            return False
        # Numbers that are no numbers are what they were too.
        return not may_wait or torch.allclose(
            _some_numbers(tensor), self._numbers, rtol=0.0, atol=0.0, equal_nan=True
        )


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


# An odd step, so that with an even width not all of them are of one column.
@torch.no_grad()
def _some_numbers(tensor: Tensor) -> Tensor:
    step = tensor.numel() // _NUM_NUMBERS | 1
    if tensor.is_contiguous():
        return tensor.view(-1)[::step].clone()
    # Not `flatten`, which would copy all of it.
    places = torch.arange(0, tensor.numel(), step, device=tensor.device)
    return tensor[torch.unravel_index(places, tensor.shape)]
