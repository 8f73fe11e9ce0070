"""What rich would show, as plain text."""

import io

from rich.console import Console, RenderableType

_WIDTH = 110


def as_plain_text(*shown: RenderableType) -> str:
    """Write what rich would show without colours.

    Args:
        shown: Tables, texts and groups of them.

    Returns:
        Lines of at most 110 characters, without spaces at their ends.
    """
    console = Console(
        file=io.StringIO(), width=_WIDTH, color_system=None, highlight=False, markup=False
    )
    with console.capture() as captured:
        for part in shown:
            console.print(part)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())
