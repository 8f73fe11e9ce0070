"""Find an optimizer that is named in a shell."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from lightning_memsave.errors import ConfigurationError


def find_optimizer(name: str | None, pairs: Sequence[str] = ()) -> Callable[..., Any] | None:
    """Import what makes an optimizer, and try it on one number.

    Args:
        name: ``torch.optim.SGD``, ``SGD``, ``module:function`` or ``file.py:function``.
        pairs: Its arguments, each ``name=value``.

    Returns:
        A function of the parameters; ``None`` without a name.

    Raises:
        ConfigurationError: If it does not exist, or makes no optimizer of these arguments.
    """
    import torch

    from lightning_memsave.analysis._targets_building import explained
    from lightning_memsave.analysis.targets import parse_arguments

    if name is None:
        if pairs:
            raise ConfigurationError(
                f"--optimizer-arg {pairs[0]} is for an optimizer that is named. Add --optimizer."
            )
        return None
    arguments = parse_arguments(pairs)
    factory = functools.partial(_find(name), **arguments)
    with explained(f"Making the optimizer `{name}`", "Check its arguments: --optimizer-arg."):
        made = factory([torch.nn.Parameter(torch.zeros(1))])
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigurationError(
            f"`{name}` made a {type(made).__name__}, which is no optimizer. Name a class such as "
            "torch.optim.AdamW, or a function of the parameters that returns an optimizer."
        )
    return factory


def _find(name: str) -> Callable[..., Any]:
    from lightning_memsave.analysis._targets_building import explained, importable
    from lightning_memsave.analysis._targets_code import find_factory

    where, _, attribute = name.rpartition(":" if ":" in name else ".")
    if where.endswith(".py"):
        return find_factory(name)
    where = where or "torch.optim"
    with importable(), explained(f"Importing `{where}`", _fix(name)):
        module = importlib.import_module(where)
    found: Any = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigurationError(f"`{where}` has no optimizer `{attribute}`. {_fix(name)}")
    result: Callable[..., Any] = found
    return result


def _fix(name: str) -> str:
    if "bit" in name:
        return f"For low-bit optimizers write --set optimizer={name}."
    return "Write for example torch.optim.AdamW, or module:function."
