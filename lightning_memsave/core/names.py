"""Names of modules, what a terminal obeys in them, suggestions for misspelled ones."""

import difflib
import re
from collections.abc import Iterable

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
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


def without_controls(text: str) -> str:
    r"""Escape what a terminal would obey in a name from a file.

    Example:
        >>> print(without_controls("red: \x1b[31m"))
        red: \x1b[31m
    """
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
