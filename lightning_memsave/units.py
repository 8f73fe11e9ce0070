"""Format and parse sizes in bytes; 1 GiB is 2**30 bytes."""

import re

from lightning_memsave.errors import ConfigurationError

KIB = 2**10
MIB = 2**20
GIB = 2**30

_UNITS = {"B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B|B)\s*", re.IGNORECASE)


def format_bytes(num_bytes: int) -> str:
    """Format a number of bytes with two digits in the largest binary unit.

    Example:
        >>> format_bytes(1_610_612_736), format_bytes(-2048), format_bytes(12)
        ('1.50 GiB', '-2.00 KiB', '12 B')
    """
    for size, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def parse_bytes(text: str) -> int:
    """Parse a size with a unit.

    Example:
        >>> parse_bytes("12GiB"), parse_bytes("1.5 kb")
        (12884901888, 1500)
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            f"{text!r} is not a size: it must be a number with a unit. "
            'Write for example "12GiB" or "800MiB".'
        )
    return round(float(match[1]) * _UNITS[match[2].upper()])
