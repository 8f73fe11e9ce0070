"""Tables of figures, and what rich shows as plain text."""

import io
from collections.abc import Collection

from rich.console import Console, RenderableType
from rich.table import Table

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


def figure_table(*columns: str, numbers: Collection[str] = ()) -> Table:
    """Make an empty table without borders.

    Args:
        columns: Headings.
        numbers: Those of them whose cells are aligned to the right and never broken.

    Returns:
        A table for a rich console.
    """
    table = Table(box=None, pad_edge=False)
    for name in columns:
        if name in numbers:
            table.add_column(name, justify="right", no_wrap=True)
        else:
            table.add_column(name, overflow="fold")
    return table
