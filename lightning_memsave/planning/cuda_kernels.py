"""Let tensors without data take the memory on a CPU that they would take on CUDA."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.planning._cuda_attention import KERNELS, Attention
from lightning_memsave.planning._cuda_autocast import add_autocast
from lightning_memsave.planning._cuda_dispatch import Overrides
from lightning_memsave.planning._cuda_operators import (
    FloatStatistics,
    add_operators,
    add_scratch,
)
from lightning_memsave.planning._cuda_optimizers import foreach_optimizers

ASSUMPTIONS: tuple[str, ...] = (
    "Dropout keeps a mask of one byte for each element.",
    "Attention (`scaled_dot_product_attention`) runs torch's flash kernel in float16 and bfloat16 "
    "without mask, else its memory-efficient kernel, and plain matrix products where neither takes "
    "the arguments; cuDNN's kernel, which Hopper and Blackwell choose first, counts as flash where "
    "there is no mask, and does not copy one where there is.",
    "Autocast follows CUDA's lists: layer norm, softmax, powers, sums and losses in float32.",
    "Layer norm keeps its statistics in float32; RMS norm is one kernel.",
    "Optimizers and gradient clipping use the `foreach` implementation unless told otherwise.",
    "Backward of attention and of embeddings takes the scratch memory that torch 2.13 allocates.",
    "Not counted: scratch of reductions, and what libraries other than torch allocate.",
)


@contextlib.contextmanager
def cuda_kernels(
    attention: str | None = None, *, capability: tuple[int, int] = (8, 0)
) -> Iterator[None]:
    """Let fake CPU tensors take CUDA's paths, as far as memory is concerned.

    Changes what is kept for backward (dropout, attention, normalisation, what autocast casts) and
    what exists for a moment (optimizer, backward of attention and embeddings); see `ASSUMPTIONS`.
    Costs a few microseconds for each operator.

    Args:
        attention: The kernel of ``scaled_dot_product_attention`` to prefer: ``"flash"``,
            ``"efficient"`` or ``"math"``. Where it does not take the arguments, and for ``None``,
            torch's own choice for CUDA counts.
        capability: Compute capability of the device, for example ``(7, 5)`` for a T4, which has no
            flash kernel.

    Yields:
        Nothing; everything is as before afterwards, also after an exception.

    Raises:
        ConfigurationError: If ``attention`` or ``capability`` is none of these.
        MissingDependencyError: If torch is too old for it.

    Note:
        To be entered inside of ``FakeTensorMode``, before whatever counts memory. Replaces
        operators in torch's dispatcher for the whole process, for fake tensors only: other tensors
        take the paths that they always take.

    Example:
        >>> import torch
        >>> from torch._subclasses.fake_tensor import FakeTensorMode
        >>> from lightning_memsave.measure.live_tensors import LiveTensors
        >>> def kept_bytes():
        ...     x = torch.ones(1000, requires_grad=True)
        ...     with LiveTensors() as live:
        ...         y = torch.nn.functional.dropout(x, 0.1)
        ...         return live.breakdown.activation_bytes
        >>> with FakeTensorMode():
        ...     kept_bytes()
        8000
        >>> with FakeTensorMode(), cuda_kernels():
        ...     kept_bytes()
        5000
    """
    if attention is not None and attention not in KERNELS:
        raise ConfigurationError(
            f"`attention={attention!r}` is no attention kernel of CUDA. "
            f"Use one of {', '.join(map(repr, KERNELS))}, or `None` for torch's choice."
        )
    if capability < (5, 0):
        raise ConfigurationError(
            f"`capability={capability!r}` is no compute capability that torch supports: it must be "
            "at least (5, 0). Use for example `(8, 0)` for an A100."
        )
    with contextlib.ExitStack() as undo:
        _ATTENTION.append(Attention(attention, capability))
        undo.callback(_ATTENTION.pop)
        if len(_ATTENTION) == 1:
            overrides = Overrides()
            undo.callback(overrides.undo)
            overrides.add("scaled_dot_product_attention", "AutogradCPU", _attend)
            add_operators(overrides)
            add_autocast(overrides)
            add_scratch(overrides)
            undo.enter_context(foreach_optimizers())
        undo.enter_context(FloatStatistics())
        yield


# One for each context that is open, since they may stand in each other.
_ATTENTION: list[Attention] = []


def _attend(*args: Any, **kwargs: Any) -> Tensor:
    return _ATTENTION[-1](*args, **kwargs)


def module_assumptions(modules: Iterable[nn.Module], operators: Iterable[str]) -> tuple[str, ...]:
    """Say what is not known of the kernels that some modules have on CUDA, one line each.

    Args:
        modules: Of the model.
        operators: Those that its step has run, such as ``"aten.convolution"``.

    Returns:
        The lines; none where the model has no such modules.
    """
    lines = []
    if any("convolution" in operator for operator in operators):
        lines.append(
            "Not counted: cuDNN's workspaces of convolutions, which exist while one runs. They "
            "are from nothing to several GiB, and larger with `torch.backends.cudnn.benchmark`."
        )
    if any(isinstance(module, nn.RNNBase) for module in modules):
        lines.append(
            "Recurrent layers keep for backward what they keep on a CPU; cuDNN's reserve space has "
            "another layout, and may be 30 to 100 % larger or smaller. Its workspaces are not "
            "counted."
        )
    return tuple(lines)
