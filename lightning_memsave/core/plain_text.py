"""Make tables, and render rich output as plain text."""

import io
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from lightning_memsave.core.names import without_controls

_WIDTH = 110


@dataclass(frozen=True)
class _WithoutControls:
    shown: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self.shown, options):
            yield Segment(text if control else without_controls(text), style, control)


def as_plain_text(*shown: RenderableType) -> str:
    """Render rich objects as plain text."""
    console = Console(
        file=io.StringIO(), width=_WIDTH, color_system=None, highlight=False, markup=False
    )
    with console.capture() as captured:
        for part in shown:
            console.print(part)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def print_to(console: Console, plain: str, *shown: RenderableType) -> None:
    """Print in colour to a terminal; to a file or pipe a text, whose lines rich would wrap."""
    if console.is_terminal:
        console.print(*map(_WithoutControls, shown), sep="\n")
    else:
        console.file.write(f"{without_controls(plain)}\n")
        console.file.flush()


def figure_table(*columns: str, numbers: Collection[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        if name in numbers:
            table.add_column(name, justify="right", no_wrap=True)
        else:
            table.add_column(name, overflow="fold")
    return table


def wrapped(text: str, *, width: int = 98, first: str = "", indent: str = "") -> str:
    """Break a text into lines between words; Python reads a call on several lines as well."""
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
