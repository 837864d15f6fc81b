"""Print reports with rich. Imported by a command only when it prints tables: rich takes 50 ms to import."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console

from sluice.reports.document import Grid, Section, renderable

__all__ = ["make_console", "print_sections"]

#: Columns if the output is not a terminal: lines of a file or a pipe are never folded.
_UNBOUNDED_COLUMNS = 100_000


def make_console() -> Console:
    """Return the console of stdout."""
    width = None if sys.stdout.isatty() else _UNBOUNDED_COLUMNS
    return Console(markup=False, emoji=False, highlight=False, width=width)


def print_sections(sections: Iterable[Section]) -> None:
    """Print lines and tables to stdout."""
    console = make_console()
    for section in sections:
        if isinstance(section, Grid) and section.aligned:
            sys.stdout.writelines(f"{line}\n" for line in section.lines())
            sys.stdout.write("\n")
        else:
            console.print(renderable(section))
