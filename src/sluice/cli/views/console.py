"""Print reports: with rich at a terminal, as the same lines without it elsewhere.

Rich takes longer to import than ``sluice inspect`` takes to read a file. It is needed for colours and for folding to
the width of a terminal; files and pipes get neither.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from sluice.reports.document import Grid, Section, renderable
from sluice.reports.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["make_console", "print_sections"]

#: Columns if the output is not a terminal: lines of a file or a pipe are never folded.
_UNBOUNDED_COLUMNS = 100_000

#: Variables with which rich treats a pipe as a terminal.
_FORCING = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "JUPYTER_COLUMNS")


def make_console() -> Console:
    """Return the console of stdout."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _UNBOUNDED_COLUMNS
    return Console(markup=False, emoji=False, highlight=False, width=width)


def print_sections(sections: Iterable[Section]) -> None:
    """Print lines and tables to stdout."""
    console: Console | None = None if _plain_output() else make_console()
    for section in sections:
        if isinstance(section, Grid) and section.aligned:
            sys.stdout.writelines(f"{line}\n" for line in section.lines())
            sys.stdout.write("\n")
            continue
        lines = list(_lines(section)) if console is None else []
        # Rich knows how wide other characters are, and folds what is longer than any line.
        if console is None and all(line.isascii() and len(line) < _UNBOUNDED_COLUMNS for line in lines):
            sys.stdout.writelines(f"{line}\n" for line in _ruled(section, lines))
            continue
        console = console or make_console()
        console.print(renderable(section))


def _plain_output() -> bool:
    """Return whether stdout is a file or a pipe that can hold the line under the headers of a table."""
    stream = sys.stdout
    encodes_rule = (getattr(stream, "encoding", None) or "").lower().startswith("utf")
    return encodes_rule and not stream.isatty() and not any(name in os.environ for name in _FORCING)


def _lines(section: Section) -> Iterator[str]:
    """Yield a line, or the headers, rows and rest of a table, with columns as rich lays them out."""
    if not isinstance(section, Grid):
        yield printable(section)
        return
    headers = [header.removeprefix(">") for header in section.headers]
    rows = [headers, *([printable(cell) for cell in row] for row in section.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justify = [str.rjust if header.startswith(">") else str.ljust for header in section.headers]
    for row in rows:
        cells = (pad(cell, width) for pad, cell, width in zip(justify, row, widths, strict=True))
        yield f" {'   '.join(cells)} "
    yield from section.rest()


def _ruled(section: Section, lines: list[str]) -> list[str]:
    """Return the lines of a table with the rule and the empty lines that rich prints."""
    if not isinstance(section, Grid):
        return lines
    width, end = len(lines[0]), 1 + len(section.rows)
    blank, rule = " " * width, f" {'─' * (width - 2)} "
    return [blank, lines[0], rule, *lines[1:end], blank, *lines[end:]]
