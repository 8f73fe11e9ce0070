"""Choose parameters by their names, and tell norms from other layers."""

import difflib
import fnmatch
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from lightning_memsave.errors import Problem

_OF_MATRICES = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, _ConvNd)


def matches(names: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalization layer, judged by its class name."""
    return "Norm" in type(module).__name__ and not isinstance(module, _OF_MATRICES)


def is_dtensor(param: Tensor) -> bool:
    # Without an import there is no instance; importing it needs a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(param, module.DTensor)


def is_shard_of_rows(param: Tensor) -> bool:
    """Return whether FSDP2 alone has sharded a parameter: rows, over one group of processes."""
    placements: Any = getattr(param, "placements", ()) if is_dtensor(param) else ()
    return len(placements) == 1 and placements[0].is_shard(0)


def unmatched_patterns(
    setting: str, patterns: Sequence[str], names: Sequence[str]
) -> list[Problem]:
    problems = []
    for pattern in patterns:
        if pattern == "*" or matches(names, (pattern,)):
            continue
        close = difflib.get_close_matches(pattern.strip("*"), names, n=1, cutoff=0)
        why = "it matches no parameter" if names else "the names are not known"
        fix = "Pass `module=`, the owner of the parameters."
        fix = f"Use a pattern over names such as `{close[0]}`." if close else fix
        problems.append(Problem(f"`{setting}` pattern {pattern!r}", why, fix))
    return problems


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
