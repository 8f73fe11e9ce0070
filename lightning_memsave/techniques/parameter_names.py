"""Choose parameters by their names, and tell norms from other layers."""

import fnmatch
from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.modules.conv import _ConvNd

from lightning_memsave.errors import Problem

_OF_MATRICES = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, _ConvNd)


def matches(names: Iterable[str], patterns: Sequence[str]) -> bool:
    """Return whether any of the names matches any of the shell patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalization layer, judged by its class name."""
    return "Norm" in type(module).__name__ and not isinstance(module, _OF_MATRICES)


def problems_of_patterns(setting: str, patterns: object) -> list[Problem]:
    """Check a setting of name patterns, such as ``keep_32bit``; return at most one problem."""
    if isinstance(patterns, str):
        return [
            Problem(
                f"`{setting}={patterns!r}`",
                "it must be a tuple of name patterns",
                f"Write `{setting}=({patterns!r},)`.",
            )
        ]
    if isinstance(patterns, Sequence) and all(isinstance(p, str) and p for p in patterns):
        return []
    fix = f'Write for example `{setting}=("*.lm_head.weight",)`.'
    return [Problem(f"`{setting}={patterns!r}`", "it must be a tuple of name patterns", fix)]
