"""Let modules be made on tensors without data."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_memsave.core.patching import PROCESS_WIDE
from lightning_memsave.planning.known_values import KnownValues


@contextlib.contextmanager
def buildable() -> Iterator[None]:
    """Let modules be made under a ``FakeTensorMode``, if there is one.

    Yields:
        Nothing.
    """
    modes = _get_current_dispatch_mode_stack()
    fake = next((mode for mode in modes if isinstance(mode, FakeTensorMode)), None)
    if fake is None:
        yield
        return
    # Other threads get what was replaced for real tensors, as they had it.
    with PROCESS_WIDE, contextlib.ExitStack() as stack:
        # A module that copies its layers would copy the mode with them, and two modes do not mix.
        stack.enter_context(_replaced(FakeTensorMode, "__deepcopy__", lambda mode, memo: mode))
        stack.enter_context(_replaced(Tensor, "__deepcopy__", _deepcopy_without_data))
        # Draws until no number lies outside, which never ends where there are no numbers.
        stack.enter_context(_replaced(nn.init, "_no_grad_trunc_normal_", _trunc_normal))
        if not any(isinstance(mode, KnownValues) for mode in modes):
            # Rates of dropout that are read from `torch.linspace`, for example.
            stack.enter_context(KnownValues(fake))
        yield


_MISSING: Any = object()
_deepcopy_tensor: Any = Tensor.__deepcopy__
_trunc_normal_of_numbers: Any = vars(nn.init)["_no_grad_trunc_normal_"]


def _trunc_normal(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if hasattr(tensor, "fake_mode"):
        return tensor
    return _trunc_normal_of_numbers(tensor, *args, **kwargs)


# torch's own asks where the data lies, and warns.
def _deepcopy_without_data(tensor: Any, memo: dict[int, Any]) -> Any:
    if not hasattr(tensor, "fake_mode") or not tensor.is_leaf:
        return _deepcopy_tensor(tensor, memo)
    if id(tensor) not in memo:
        copy = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, tensor.requires_grad)
        memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
