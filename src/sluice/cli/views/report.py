"""Output of a command: a report as lines and tables, folded to the width of a terminal, or as one JSON object."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

import click

from sluice.cli.options import Command, together
from sluice.reports.document import Grid, Report, Section, Strong, lines_of

__all__ = ["output_options", "print_sections", "show_report"]


def output_options(quiet: str = "Print nothing but errors.") -> Callable[[Command], Command]:
    """Return a decorator that adds ``--json`` and ``--quiet``."""
    return together(
        click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object."),
        click.option("--quiet", is_flag=True, help=quiet),
    )


def show_report(
    report: Report,
    *,
    as_json: bool,
    quiet: bool = False,
    more_json: Mapping[str, object] | None = None,
    more_sections: Iterable[Section] = (),
) -> None:
    """Print a report to stdout.

    Args:
        report: The report.
        as_json: Print it as one JSON object, even if ``quiet``.
        quiet: Print nothing else.
        more_json: Further keys of the JSON object.
        more_sections: Lines and tables after those of the report.
    """
    if as_json:
        click.echo(json.dumps({**report.to_json(), **(more_json or {})}))
    elif not quiet:
        print_sections(chain(report.sections(), more_sections))


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
