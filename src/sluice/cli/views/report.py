"""Output of a command: the report as text and tables, or as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import chain

import click

from sluice.reports.document import Report, Section

__all__ = ["show_report"]


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
        # Here, not above: rich takes 50 ms to import, and JSON does not need it.
        from sluice.cli.views.console import print_sections

        print_sections(chain(report.sections(), more_sections))
