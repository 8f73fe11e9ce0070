"""Look at a step that is predicted: who updates the parameters, what attends to how many tokens."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

# Where the tokens are in what each of them takes.
_TOKEN_AXES = {"scaled_dot_product_attention": -2, "multi_head_attention_forward": 0}


@dataclass
class Observed:
    """What was seen.

    Args:
        optimizers: Names of their classes, in order.
        attended: From how many tokens attention was computed.
    """

    optimizers: list[str] = field(default_factory=list)
    attended: set[int] = field(default_factory=set)

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Look until the context is left.

        Yields:
            Nothing.
        """
        functional: Any = torch.nn.functional
        originals = {name: getattr(functional, name) for name in _TOKEN_AXES}
        hook = register_optimizer_step_pre_hook(self._note_optimizer)
        try:
            for name, original in originals.items():
                setattr(functional, name, self._noting(original, _TOKEN_AXES[name]))
            yield
        finally:
            hook.remove()
            for name, original in originals.items():
                setattr(functional, name, original)

    # Not a mode of torch: it would hold what every function takes until that function returns.
    def _noting(self, function: Callable[..., Any], axis: int) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(query: Any, *args: Any, **kwargs: Any) -> Any:
            # Without batch `multi_head_attention_forward` takes (tokens, features), too.
            if query.ndim >= 2 and query.shape[axis] > 1:
                self.attended.add(query.shape[axis])
            return function(query, *args, **kwargs)

        return noting

    def _note_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        name = type(optimizer).__name__
        if name not in self.optimizers:
            self.optimizers.append(name)
