"""Names of modules and dtypes, what a terminal obeys in them, suggestions for misspelled ones."""

import difflib
import re
from collections.abc import Iterable

SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""torch's dtype names by those of safetensors headers."""

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
