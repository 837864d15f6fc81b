"""Print reports: folded to the width of a terminal, and in full lines to files and pipes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable

import click

from sluice.reports.document import Grid, Section, Strong, lines_of

__all__ = ["print_sections"]


def print_sections(sections: Iterable[Section]) -> None:
    """Print lines and tables to stdout, with an empty line around each table."""
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    after_table = False
    for section in sections:
        is_table = isinstance(section, Grid)
        if is_table or after_table:
            sys.stdout.write("\n")
        after_table = is_table
        for line in lines_of([section], width):
            sys.stdout.write(f"{click.style(line, bold=True) if terminal and isinstance(line, Strong) else line}\n")
