"""The implementations that torch's optimizers choose on CUDA."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _foreach_utils

_CHOICE = "_default_to_fused_or_foreach"

Choice = Callable[..., tuple[bool, bool]]


@contextlib.contextmanager
def foreach_optimizers() -> Iterator[None]:
    """Let optimizers and gradient clipping treat fake tensors like tensors on CUDA.

    By default they then work on all parameters at once, which takes temporaries of the size of all
    parameters; the loop that is the default on a CPU takes those of one parameter.

    Yields:
        Nothing; everything is as before afterwards.
    """
    types: list[type[Tensor]] = _foreach_utils._foreach_supported_types
    with contextlib.ExitStack() as undo:
        for name, module in list(sys.modules.items()):
            choice = getattr(module, _CHOICE, None) if name.startswith("torch.optim.") else None
            if choice is not None:  # each module has imported it under this name
                setattr(module, _CHOICE, _like_cuda(choice))
                undo.callback(setattr, module, _CHOICE, choice)
        types.append(FakeTensor)
        undo.callback(types.remove, FakeTensor)
        yield


def _like_cuda(choice: Choice) -> Choice:
    def choose(
        params: list[Tensor | None], differentiable: bool, use_fused: bool = False
    ) -> tuple[bool, bool]:
        if differentiable or not all(p is None or isinstance(p, FakeTensor) for p in params):
            return choice(params, differentiable, use_fused)
        is_fused = use_fused and all(p is None or p.is_floating_point() for p in params)
        return is_fused, not is_fused

    return choose
