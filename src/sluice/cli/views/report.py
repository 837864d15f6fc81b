"""Output of a command: a report as lines and tables, or as one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

import click

from sluice.cli.options import Command, together
from sluice.reports.document import Grid, Report, Section, lines_of, rich_sections

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
    """Print lines and tables to stdout; at a terminal with rich, else with an empty line around each table."""
    if sys.stdout.isatty():
        from rich.console import Console, Group  # here, not above: output to a file or pipe does without

        Console(highlight=False).print(Group(*rich_sections(sections)))
        return
    after_table = False
    for section in sections:
        is_table = isinstance(section, Grid)
        if is_table or after_table:
            sys.stdout.write("\n")
        after_table = is_table
        sys.stdout.writelines(f"{line}\n" for line in lines_of([section]))
