"""Names of modules, and suggestions for misspelled names."""

import difflib
import re
from collections.abc import Iterable

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def block_template(name: str) -> str:
    """Replace block numbers in a module name by ``*``.

    Example:
        >>> block_template("h.3.mlp"), block_template("conv1")
        ('h.*.mlp', 'conv1')
    """
    return _NUMBER.sub("*", name)


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "", cutoff: float = 0.6) -> str:
    """Suggest similar known names.

    Example:
        >>> did_you_mean("berd", ["bert", "gpt2"])
        'Did you mean `bert`? '
    """
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=cutoff)
    return f"Did you mean {' or '.join(f'`{prefix}{n}`' for n in near)}? " if near else ""
